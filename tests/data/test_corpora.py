"""What is read, what is for validation, and what a mistake in the data is answered with."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from small_corpora import DOCUMENTS, build, shared_data, texts, write_rows

from gnmr.config import DataConfig
from gnmr.data import corpora
from gnmr.errors import UserError

Make = Callable[..., DataConfig]
TRAIN = [text for i, text in enumerate(DOCUMENTS) if i not in (19, 39)]
VALIDATION = [DOCUMENTS[19], DOCUMENTS[39]]


def read(config: DataConfig) -> tuple[list[str], list[str]]:
    """Documents of the two splits."""
    corpus = corpora.open_corpus(config)
    return list(corpus.read("train")), list(corpus.read("validation"))


# ---- formats and splits of local files ----


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "a.jsonl.gz", "a.parquet", "odd [1]*?.jsonl"])
@pytest.mark.parametrize("column", ["text", "content"])
@pytest.mark.slow
def test_file_types(name: str, column: str, config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / name, DOCUMENTS, column)
    assert read(config(path=str(file), text_column=column)) == (TRAIN, VALIDATION)


def test_text_files_are_documents(config: Make, tmp_path: Path) -> None:
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "books" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{i % 3}" / f"{i:02}.txt").write_bytes(text.encode())
    (tmp_path / "books" / "README.md").write_text("not a document")
    (tmp_path / "books" / ".hidden.txt").write_text("not a document")
    (tmp_path / "books" / ".cache").mkdir()
    (tmp_path / "books" / ".cache" / "x.txt").write_text("not a document")
    in_path_order = [text for folder in range(3) for text in DOCUMENTS[folder::3]]
    train, validation = read(config(path=str(tmp_path / "books")))
    assert validation == [in_path_order[19], in_path_order[39]]
    assert train == in_path_order[:19] + in_path_order[20:39]


def test_bytes_that_are_not_utf8_are_replaced(config: Make, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 " * 3)
    train, validation = read(config(path=str(tmp_path / "a.txt")))
    assert "".join(train + validation).startswith("caf\ufffd ")


@pytest.mark.parametrize(
    "train, validation, left_out",
    [
        ("train.jsonl", "validation.jsonl", None),
        ("en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz", None),
        ("train-00000-of-00008.json.gz", "validation-00000-of-00001.json.gz", "test-00000-of-00001.json.gz"),
        ("train/0000.parquet", "validation/0000.parquet", "test/0000.parquet"),
        ("invalid.jsonl", "valid.jsonl", None),
        ("story.jsonl", "story_val.jsonl", None),
    ],
)
def test_validation_by_name(train: str, validation: str, left_out: str | None, config: Make, tmp_path: Path) -> None:
    write_rows(tmp_path / train, DOCUMENTS[:30])
    write_rows(tmp_path / validation, DOCUMENTS[30:])
    if left_out is not None:
        write_rows(tmp_path / left_out, ["from the test split"])
    assert read(config(path=str(tmp_path))) == (DOCUMENTS[:30], DOCUMENTS[30:])
    summary = corpora.open_corpus(config(path=str(tmp_path))).summary
    assert ("left out" in summary) == (left_out is not None) and (left_out or "") in summary


def test_a_single_file_is_the_corpus_whatever_its_name(config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "validation.jsonl", DOCUMENTS)
    assert read(config(path=str(file))) == (TRAIN, VALIDATION)


@pytest.mark.parametrize("number", [1, 2, 19])
def test_few_documents_give_the_end_of_their_text(number: int, config: Make, tmp_path: Path) -> None:
    documents = [f"{i} " + "lorem ipsum " * 20 for i in range(number)]
    train, validation = read(config(path=str(write_rows(tmp_path / "a.jsonl", documents))))
    assert "".join(train + validation) == "".join(documents)
    assert len("".join(train)) == len("".join(documents)) * 19 // 20


def test_twenty_documents_are_split_by_document(config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", DOCUMENTS[:20])
    assert read(config(path=str(file))) == (DOCUMENTS[:19], [DOCUMENTS[19]])


def test_blank_documents_and_nulls_and_empty_files_are_passed_over(config: Make, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["", None, " \n", *DOCUMENTS])
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"")
    assert read(config(path=str(tmp_path))) == (TRAIN, VALIDATION)


def test_c4_prefers_the_en_folder_of_a_clone(config: Make, tmp_path: Path) -> None:
    write_rows(tmp_path / "en" / "c4-train.00000-of-01024.json.gz", DOCUMENTS)
    write_rows(tmp_path / "en" / "c4-validation.00000-of-00008.json.gz", VALIDATION)
    write_rows(tmp_path / "realnewslike" / "c4-train.00000-of-00512.json.gz", ["news"] * 30)
    assert read(config(name="c4", path=str(tmp_path))) == (DOCUMENTS, VALIDATION)


def test_identity_follows_the_files(config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", DOCUMENTS)

    def identity(column: str = "text") -> str:
        return corpora.open_corpus(config(path=str(tmp_path), text_column=column)).identity

    first = identity()
    assert identity() == first
    assert identity("number") != first
    file.rename(tmp_path / "b.jsonl")
    renamed = identity()
    assert renamed != first
    (tmp_path / "b.jsonl").touch()
    assert identity() != renamed


# ---- the standard library ----


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """200 modules in place of the real library, and what must not be read."""
    root = tmp_path / "lib"
    for name in [f"package{i % 3}/module{i}.py" for i in range(200)] + [
        "test/test_os.py",
        "package0/tests/test_x.py",
        "idlelib/idle_test/a.py",
        "site-packages/torch/big.py",
        "dist-packages/x.py",
        "__pycache__/x.py",
    ]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}")
    (root / "package0" / "data.txt").write_text("# no source")
    (root / "package0" / "empty.py").write_text("")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_library_split_by_file(library: Path, config: Make) -> None:
    train, validation = read(config(name="stdlib"))
    expected = {f"# package{i % 3}/module{i}.py" for i in range(200)}
    assert set(train) | set(validation) == expected and len(train) + len(validation) == 200
    assert train == sorted(train)
    assert 4 <= len(validation) <= 20

    (library / "aaa.py").write_text("# aaa.py")
    more_train, more_validation = read(config(name="stdlib"))
    assert set(train) <= set(more_train) and set(validation) <= set(more_validation)


def test_library_identity_is_paths_and_contents(library: Path, config: Make) -> None:
    first = corpora.open_corpus(config(name="stdlib")).identity
    (library / "package0" / "module0.py").touch()
    assert corpora.open_corpus(config(name="stdlib")).identity == first
    (library / "package0" / "module0.py").write_text("# changed")
    assert corpora.open_corpus(config(name="stdlib")).identity != first


def test_the_real_library(config: Make) -> None:
    train, validation = read(config(name="stdlib"))
    share = sum(map(len, validation)) / sum(map(len, train + validation))
    assert 0.02 < share < 0.09
    assert sum(map(len, train)) > 3e6
    assert not set(train) & set(validation)


# ---- real data ----


def test_c4_sample(config: Make) -> None:
    train, validation = read(config(name="c4", path=str(shared_data("c4_sample"))))
    assert (len(train), len(validation)) == (950, 50)
    assert not set(train) & set(validation)


def test_novels_in_the_layout_of_the_hub(config: Make) -> None:
    folder = shared_data("eltec_eng")
    corpus, _ = build(config(name="c4", path=str(folder), max_tokens=20_000, tokenizer_bytes=100_000))
    assert len(corpus.train) == 20_000
    assert len(corpus.val) > 100_000
    assert len(texts(corpus, "val")) == 65


# ---- mistakes ----


def broken(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


ROWS = b'{"text": "one"}\n' * 30


@pytest.mark.parametrize(
    "prepare_folder, options, message",
    [
        (lambda folder: None, {}, r"data\.path=.*: the folder holds none of the supported files \(\.txt, "),
        (lambda folder: None, {"path": "nowhere"}, r"data\.path=.*nowhere: no such file or folder"),
        (broken("a.docx", b"x"), {}, "none of the supported files"),
        (broken("a.docx", b"x"), {"path": "a.docx"}, r"a\.docx: cannot read this kind of file; supported are \.txt"),
        (
            lambda folder: [write_rows(folder / f"{i}-validation.jsonl", DOCUMENTS) for i in range(2)],
            {},
            "every file is named as validation",
        ),
        (
            lambda folder: write_rows(folder / "a.jsonl", DOCUMENTS),
            {"text_column": "body"},
            r"a\.jsonl: no column 'body'; data\.text_column must be one of number, text",
        ),
        (
            lambda folder: write_rows(folder / "a.parquet", DOCUMENTS),
            {"text_column": "body"},
            r"a\.parquet: no column 'body'; data\.text_column must be one of number, text",
        ),
        (
            lambda folder: write_rows(folder / "a.jsonl", DOCUMENTS),
            {"text_column": "number"},
            r"a\.jsonl: row 1: column 'number' holds int; it needs text",
        ),
        (broken("a.json.gz", gzip.compress(ROWS)[:-20]), {}, r"a\.json\.gz: cannot be read \(EOFError"),
        (broken("a.json.gz", ROWS), {}, r"a\.json\.gz: cannot be read \(BadGzipFile"),
        (broken("a.jsonl", ROWS + b"{{{"), {}, r"a\.jsonl: row 31 is not JSON \("),
        (broken("a.parquet", b"no parquet"), {}, r"a\.parquet: cannot be read \(ArrowInvalid"),
        (broken("a.txt", b" \n"), {}, r"data\.path=.*: holds no train text"),
        (
            lambda folder: [write_rows(folder / "train.jsonl", DOCUMENTS), broken("valid.txt", b"")(folder)],
            {},
            "holds no validation text",
        ),
    ],
)
def test_bad_input_is_one_line(
    prepare_folder: Callable[[Path], object],
    options: dict[str, str],
    message: str,
    config: Make,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    prepare_folder(folder)
    chosen = options | {"path": str(folder / options.get("path", ""))}
    with pytest.raises(UserError, match=message) as caught:
        build(config(**chosen))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")), "a failed build left something behind"


def test_no_library_speaks_beside_our_line_or_leaves_files(config: Make, tmp_path: Path) -> None:
    """In a process of its own: a library's log handler keeps the stderr that it found when it was imported."""
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    script = (
        "from gnmr.config import DataConfig\nfrom gnmr.data.tokens import prepare\nfrom gnmr.errors import UserError\n"
        f"try:\n    prepare({config(path=str(tmp_path))!r}, 0, len)\n"
        "except UserError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == ""
    assert "a.parquet: cannot be read (ArrowInvalid" in result.stdout and result.stdout.count("\n") == 1
    assert not list(Path(os.environ["HF_HOME"]).rglob("*.lock"))
