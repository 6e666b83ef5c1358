"""Odd files: each is read as what it says, or answered with one line, in seconds and without half of a cache."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpora import DOCUMENTS, build, texts
from tokenizers import Tokenizer, models

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import corpora, rows

Make = Callable[..., DataConfig]
ROW = b'{"text": "the quick brown fox"}\n'
ROWS = ROW * 40
PARQUET = b"PAR1\xff\xff\xff\x7fPAR1"

REFUSED: dict[str, tuple[bytes, str]] = {
    # name of the file -> what it holds, what the line says
    "nested.jsonl": (b"[" * 200_000, "is nested too deeply"),
    "nested_value.jsonl": (ROW + b'{"text":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "row 2 is nested too deeply"),
    "latin.jsonl": (ROWS + b'{"text": "caf\xe9"}\n', r"row 41 is not UTF-8 \(invalid continuation byte at byte 13\)"),
    "utf16.jsonl": (ROWS.decode().encode("utf-16"), "row 1 is UTF-16"),
    "packed.jsonl": (gzip.compress(ROWS), "packed.jsonl: is compressed by gzip"),
    "nul.jsonl": (b"\0" * 5000, "row 1 is not JSON"),
    "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", "row 1 is not JSON"),
    "end.jsonl": (ROWS + b"{{{", "row 41 is not JSON"),
    "numbers.jsonl": (ROWS + b'{"text": 3}\n', "row 41: column 'text' holds int"),
    "nan.jsonl": (b'{"text": NaN}\n', "row 1: column 'text' holds float"),
    "scalars.jsonl": (b'1\n"a"\n', "row 1 is no object with columns"),
    "columns.json": (json.dumps({"text": ["a b"] * 9}).encode(), "row 1: column 'text' holds list"),
    "names.jsonl": (
        json.dumps({"k" * 999: 1, "\n\x1b[31m": 2}).encode(),
        r"no column 'text'; data\.text_column must be one of k{60}, '\\n\\x1b\[31m'$",
    ),
    "late.jsonl": (b'{"body": "a"}\n' * 2000, r"no column 'text'; data\.text_column must be one of body$"),
    "no_gzip.json.gz": (ROWS, r"cannot be read \(BadGzipFile"),
    "half.json.gz": (gzip.compress(ROWS)[:-12], r"cannot be read \(EOFError"),
    "checksum.json.gz": (gzip.compress(ROWS)[:-8] + b"\0" * 8, r"cannot be read \(BadGzipFile"),
    "tail.json.gz": (gzip.compress(ROWS) + b"garbage", r"cannot be read \(BadGzipFile"),
    "footer.parquet": (PARQUET, r"cannot be read \(ArrowInvalid"),
    "empty.jsonl": (b"", "holds no train text"),
    "blank.jsonl": (b" " * 5000, "holds no train text"),
    "nulls.jsonl": (b'{"text": null}\n' * 40, "holds no train text"),
    "one.txt": (b"a", "holds no train text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, config: Make, tmp_path: Path, cache_dir: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    begun = time.monotonic()
    with pytest.raises(UserError, match=message) as caught:
        build(config(path=str(tmp_path / name)))
    assert time.monotonic() - begun < 40
    assert "\n" not in str(caught.value) and name in str(caught.value) and len(str(caught.value)) < 500
    assert not list(cache_dir.glob("*"))


def test_parquet_columns(config: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for column in (pa.array(DOCUMENTS, pa.large_string()), pa.array(DOCUMENTS).dictionary_encode()):
        pq.write_table(pa.table({"text": column}), file)
        assert len(texts(build(config(path=str(file)))[0], "train")) == 38
    for column, message in ((pa.array([b"a"] * 40), "holds bytes"), (pa.array([], pa.string()), "holds no train text")):
        pq.write_table(pa.table({"text": column}), file)
        with pytest.raises(UserError, match=message):
            build(config(path=str(file)))


READ: dict[str, bytes] = {
    "mark.jsonl": b"\xef\xbb\xbf" + ROWS,
    "windows.jsonl": ROWS.replace(b"\n", b"\r\n"),
    "indented.json": json.dumps([json.loads(ROW)] * 40, indent=1).encode(),
    "one_after_the_other.json": (json.dumps(json.loads(ROW), indent=1) + "\n").encode() * 40,
    "no_last_newline.jsonl": ROWS[:-1],
    "without_the_column.jsonl": (ROW + b'{"other": 1}\n') * 40,
    "twice.jsonl": b'{"text": 1, "text": "the quick brown fox"}\n' * 40,
    "members.json.gz": gzip.compress(ROW * 20) + gzip.compress(ROW * 20),
}


@pytest.mark.parametrize("name", READ)
def test_read_as_what_it_says(name: str, config: Make, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(READ[name])
    corpus = corpora.open_corpus(config(path=str(tmp_path / name)))
    assert [example.answer for example in corpus.read("train")] == ["the quick brown fox"] * 38


def test_half_characters_are_replaced(config: Make, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a \\ud800 b \\ud83d\\ude00"}\n' * 40)
    assert set(texts(build(config(path=str(tmp_path)))[0], "train")) == {"a \ufffd b \U0001f600"}


# ---- sizes ----


def test_a_bomb_of_one_line_is_not_unpacked_whole(config: Make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 10_000)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(ROW + b" " * 10**7))
    with pytest.raises(UserError, match=r"a\.json\.gz: row 2 has more than 10000 bytes"):
        build(config(path=str(tmp_path)))


def test_what_is_held_whole_is_bounded(config: Make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_WHOLE", 10_000)
    monkeypatch.setattr(corpora, "LARGEST_WHOLE", 10_000)
    (tmp_path / "a.json").write_bytes(b"[\n" + b" " * 20_000 + b"]")
    with pytest.raises(UserError, match=r"a\.json: JSON of more than 10000 bytes must have a row a line"):
        build(config(path=str(tmp_path / "a.json")))
    (tmp_path / "a.txt").write_bytes(b"a " * 10_000)
    with pytest.raises(UserError, match=r"a\.txt: a document of 20000 bytes; split it"):
        build(config(path=str(tmp_path / "a.txt")))


# ---- places ----


def test_names_that_are_no_utf8(config: Make, tmp_path: Path) -> None:
    for name in (b"train\xff.txt", b"train\n2.txt", b"left\xff\x1b[31m.txt"):
        (tmp_path / os.fsdecode(name)).write_text("\n".join(DOCUMENTS))
    corpus, said = build(config(path=str(tmp_path)))
    assert len(texts(corpus, "train")) == 2 and all(line.isprintable() for line in said)


# ---- tokenizers ----


def test_a_tokenizer_that_is_no_file(config: Make, corpus_file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(UserError, match=r"data\.tokenizer="):
            build(config(path=str(corpus_file), tokenizer=str(path)))


def test_a_tokenizer_that_cannot_encode(config: Make, corpus_file: Path, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="missing")).save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=r"t\.json: cannot encode the text \(WordLevel error: Missing"):
        build(config(path=str(corpus_file), tokenizer=str(tmp_path / "t.json")))
