"""Odd files: each is read as what it says, or answered with one line and without half of a cache."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpora import DOCUMENTS, build, texts
from tokenizers import Tokenizer, models

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig

Make = Callable[..., DataConfig]
ROW = b'{"text": "the quick brown fox"}\n'
ROWS = ROW * 40
TEXT = "über die Füchse, grün und müde\n" * 40
CYRILLIC = "съешь же ещё этих мягких булок\n" * 40
WIDE = [f"utf-{bits}-{order}" for bits in (16, 32) for order in ("le", "be")]

REFUSED: dict[str, tuple[bytes, str]] = {
    # name of the file -> what it holds, what the line says
    "nested.jsonl": (b"[" * 200_000, "cannot be read .*depth"),
    "latin.jsonl": (ROWS + b'{"text": "caf\xe9"}\n', r"cannot be read \(UnicodeDecodeError"),
    "end.jsonl": (ROWS + b"{{{", "cannot be read .*row 40"),
    "numbers.jsonl": (ROWS + b'{"text": 3}\n', "row 41: column 'text' holds int"),
    "repeated.jsonl": (ROWS + b'{"text": "a", "text": null}\n', "specified twice in row 40"),
    "scalars.jsonl": (b'1\n"a"\n', "cannot be read"),
    "names.jsonl": (
        json.dumps({"k" * 999: 1, "\n\x1b[31m": 2}).encode(),
        r"no column 'text'; data\.columns must be of k{60}, '\\n\\x1b\[31m'$",
    ),
    "late.jsonl": (b'{"body": "a"}\n' * 20, r"no column 'text'; data\.columns must be of body$"),
    "half_characters.jsonl": (b'{"text": "a \\ud800"}\n' * 40, "surrogate"),
    "no_gzip.json.gz": (ROWS, r"cannot be read \(BadGzipFile"),
    "half.json.gz": (gzip.compress(ROWS)[:-12], r"cannot be read \(EOFError"),
    "half.txt.gz": (gzip.compress(ROWS)[:-12], r"cannot be read \(EOFError"),
    "footer.parquet": (b"PAR1\xff\xff\xff\x7fPAR1", r"cannot be read \(ArrowInvalid"),
    "empty.jsonl": (b"", "holds no train text"),
    "nulls.jsonl": (b'{"text": null}\n' * 40, "holds no train text"),
    "one.txt": (b"a", "holds no train text"),
    "wide.jsonl": (ROWS.decode().encode("utf-16"), "cannot be read"),
    "latin.txt.gz": (gzip.compress(TEXT.encode("latin-1")), r"is not UTF-8 text \(invalid start byte at byte 0\)"),
    "mark.txt": (b"\xef\xbb\xbfcaf\xe9 ", r"is not UTF-8 text \(invalid continuation byte at byte 6\)"),
    "cut.txt": (TEXT.encode()[:-2] + b"\xc3", "is not UTF-8 text"),
}
NO_TEXT = [
    *(text.encode(encoding) for text in (TEXT, CYRILLIC, "fox " * 40) for encoding in ("utf-16", "utf-32", *WIDE)),
    b"fox " * 2**15 + ("fox " * 2**15).encode("utf-16-le"),
    *(compress(TEXT.encode()) for compress in (gzip.compress, bz2.compress, lzma.compress)),
    b"PK\x03\x04\x14\0",
    b"%PDF-1.4\n\x01\xe9\0",
]
REFUSED |= {f"{number}.txt": (content, "is not UTF-8 text") for number, content in enumerate(NO_TEXT)}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, config: Make, tmp_path: Path, cache_dir: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        build(config(path=str(tmp_path / name)))
    assert "\n" not in str(caught.value) and name in str(caught.value) and len(str(caught.value)) < 500
    assert not list(cache_dir.glob("*"))


def test_parquet_columns(config: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for column in (pa.array(DOCUMENTS, pa.large_string()), pa.array(DOCUMENTS).dictionary_encode()):
        pq.write_table(pa.table({"text": column}), file)
        assert len(texts(build(config(path=str(file)))[0], "train")) == 38
    for column, message in ((pa.array([b"a"] * 40), "holds bytes"), (pa.array([], pa.string()), "cannot be read")):
        pq.write_table(pa.table({"text": column}), file)
        with pytest.raises(UserError, match=message):
            build(config(path=str(file)))


def test_a_tokenizer_that_cannot_be_used(config: Make, corpus_file: Path, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="missing")).save(str(tmp_path / "t.json"))
    for path, message in (("/dev/zero", "there is no tokenizer"), (tmp_path / "t.json", "cannot encode the text")):
        with pytest.raises(UserError, match=rf"data\.tokenizer=.*: {message}"):
            build(config(path=str(corpus_file), tokenizer=str(path)))
