"""What is read, what is for validation, and what a mistake in the data is answered with."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_corpora import DOCUMENTS, TRAIN, VALIDATION, build, shared_data, write_rows

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import corpora
from gnmr.lab.data.tokens import prepare

Make = Callable[..., DataConfig]


def read(config: DataConfig) -> tuple[list[str], list[str]]:
    """Documents of the two splits."""
    corpus = corpora.open_corpus(config)
    train, validation = ([example.answer for example in corpus.read(split)] for split in ("train", "validation"))
    return train, validation


# ---- formats and splits of local files ----


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.json.gz", "a.jsonl.gz", "a.parquet", "odd [1]*?.jsonl"])
def test_file_types(name: str, config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / name, DOCUMENTS, "content")
    assert read(config(path=str(file), columns=["content"])) == (TRAIN, VALIDATION)


def test_text_files_are_documents(config: Make, tmp_path: Path) -> None:
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "books" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / f"{i % 3}" / f"{i:02}.txt").write_bytes(text.encode())
    (tmp_path / "books" / "README.md").write_text("not a document")
    (tmp_path / "books" / ".hidden.txt").write_text("not a document")
    for folder in (".cache", ".ipynb_checkpoints", "@eaDir", "#recycle"):
        (tmp_path / "books" / folder).mkdir()
        (tmp_path / "books" / folder / "x.txt").write_text("not a document")
    in_path_order = [text for folder in range(3) for text in DOCUMENTS[folder::3]]
    train, validation = read(config(path=str(tmp_path / "books")))
    assert validation == [in_path_order[19], in_path_order[39]]
    assert train == in_path_order[:19] + in_path_order[20:39]


@pytest.mark.parametrize(
    "train, validation, left_out",
    [
        ("train.jsonl", "validation.jsonl", None),
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


def test_c4_prefers_the_en_folder_of_a_clone(config: Make, tmp_path: Path) -> None:
    write_rows(tmp_path / "en" / "c4-train.00000-of-01024.json.gz", DOCUMENTS)
    write_rows(tmp_path / "en" / "c4-validation.00000-of-00008.json.gz", VALIDATION)
    write_rows(tmp_path / "realnewslike" / "c4-train.00000-of-00512.json.gz", ["news"] * 30)
    assert read(config(name="c4", path=str(tmp_path))) == (DOCUMENTS, VALIDATION)


def test_identity_follows_names_columns_and_contents(config: Make, tmp_path: Path) -> None:
    """Not times: files of equal sizes and times (cp -p, Nix) are told apart, also one that is edited in place."""
    file = write_rows(tmp_path / "a.jsonl", DOCUMENTS)

    def identity(**changes: Any) -> str:
        os.utime(file, (1, 1))
        return corpora.open_corpus(config(**({"path": str(tmp_path)} | changes))).identity

    first = identity()
    found = {first, identity(columns=["number"]), identity(name="instructions"), identity(name="gsm8k")}
    found |= {identity(name="instructions", columns=["x", "y"]), identity(name="instructions", columns=["x", "i", "y"])}
    file.write_text(file.read_text().replace("brown", "quick"))
    found.add(identity())
    file.write_text(file.read_text().replace("quick", "brown"))
    assert identity() == first
    file = file.rename(tmp_path / "b.jsonl")
    assert len(found | {identity()}) == 8


def test_a_corpus_that_changes_while_it_is_read_is_refused(config: Make, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", DOCUMENTS)

    def say(line: str) -> None:
        if "tokenizing validation" in line:
            write_rows(file, DOCUMENTS[::-1])

    with pytest.raises(UserError, match=r"data\.path=.*: changed while it was read; run the command again"):
        prepare(config(path=str(file)), 0, say)


# ---- what is not read ----


def test_what_is_not_read_is_said(config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kinds of files, links to folders, what is no file, and records of programs: no corpus."""
    folder, away = tmp_path / "corpus", tmp_path / "away"
    write_rows(folder / "a.jsonl", DOCUMENTS)
    write_rows(away / "x.jsonl", DOCUMENTS)
    records = ["runs/two-s0/config.yaml", "runs/two-s0/header.json", "plans/plan.json", "plans/diagnosis.json"]
    records += ["hf/config.json", "hf/model.safetensors", "wandb/run-1/requirements.txt", "a/dataset_info.json"]
    for name in ("c.jsonl.zst", "README.md", "tsv/h.tsv", ".hidden", *records):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    os.mkfifo(folder / "pipe.txt")
    (folder / "linked.jsonl").symlink_to(away / "x.jsonl")
    (folder / "more").symlink_to(away)
    monkeypatch.setenv("GNMR_CACHE", str(folder / "cache"))
    chosen = config(path=str(folder))
    first, _ = build(chosen)
    _, splits, summary = corpora.local_files(chosen)
    assert splits["train"] == ["a.jsonl", "linked.jsonl"]
    assert summary.endswith(
        "; not read: README.md, a/dataset_info.json, c.jsonl.zst, cache/" + first.folder.name + "/ (token cache), "
        "hf/ (a checkpoint), more/ (a link to a folder), pipe.txt, plans/ (a diagnosis), runs/two-s0/ (a run), "
        "tsv/h.tsv, ... (11)"
    )
    assert build(chosen)[0].folder == first.folder


def test_rows_without_text_are_counted(config: Make, tmp_path: Path) -> None:
    """Once, though the file is read for the tokenizer and for both splits."""
    rows = [{"text": f"fox {i}"} if i % 10 == 0 else {"n": i} for i in range(300)]
    rows[1:4] = [{"text": None}, {"text": " "}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(tmp_path / "b.parquet", [None, *DOCUMENTS])
    (tmp_path / "c.txt").write_text(" \n")
    (tmp_path / "d.jsonl").write_bytes(b"")
    assert build(config(path=str(tmp_path)))[1][-1].endswith("; 272 documents without text")


# ---- the standard library ----


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """200 modules in place of the real library, and what must not be read."""
    root = tmp_path / "lib"
    left_out = ["test/test_os.py", "package0/tests/test_x.py", "site-packages/torch/big.py", "__pycache__/x.py"]
    for name in [f"package{i % 3}/module{i}.py" for i in range(200)] + left_out:
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

    first = corpora.open_corpus(config(name="stdlib")).identity
    (library / "package0" / "module0.py").touch()
    assert corpora.open_corpus(config(name="stdlib")).identity == first
    (library / "package0" / "module0.py").write_text("# changed")
    assert corpora.open_corpus(config(name="stdlib")).identity != first


# ---- real data ----


def test_a_sample_of_c4(config: Make) -> None:
    train, validation = read(config(name="c4", path=str(shared_data("c4_sample"))))
    assert (len(train), len(validation)) == (950, 50) and not set(train) & set(validation)


# ---- mistakes ----


@pytest.mark.parametrize(
    "files, options, message",
    [
        ([], {}, r"data\.path=.*: the folder holds none"),
        ([], {"path": "nowhere"}, r"data\.path=.*nowhere: no such file"),
        (["a.docx"], {}, r"data\.path=.*: the folder holds none"),
        (["a.docx"], {"path": "a.docx"}, r"data\.path=.*a\.docx: cannot read this kind"),
        (["0-validation.jsonl", "1-validation.jsonl"], {}, r"data\.path=.*: every file is named as validation"),
        (["a.jsonl"], {"columns": ["body"]}, r"no column 'body'; data\.columns must be of number, text"),
        (["a.jsonl"], {"path": "x" * 300}, r"^data\.path="),
    ],
)
def test_bad_input_is_one_line(
    files: list[str], options: dict[str, str], message: str, config: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in files:
        write_rows(folder / name, DOCUMENTS)
    path = options.get("path", "")
    with pytest.raises(UserError, match=message) as caught:
        build(config(**options | {"path": str(folder / path)}))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")), "a failed build left something behind"
