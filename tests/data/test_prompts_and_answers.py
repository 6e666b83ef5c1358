"""Prompts and answers: what is read, which rows are for validation, and what a mistake is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpora import write_examples

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.corpora import Example, open_corpus
from gnmr.lab.data.tokens import prepare

Make = Callable[..., DataConfig]


def read(config: DataConfig) -> tuple[list[Example], list[Example]]:
    """The examples of the two splits."""
    examples = open_corpus(config)
    return list(examples.read("train")), list(examples.read("validation"))


def solved(number: int) -> dict[str, str]:
    return {"question": f"What is {number} + 1?", "answer": f"One more.\n#### {number + 1}"}


def write(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows, indent=1))
    return file


# ---- gsm8k ----


@pytest.mark.parametrize("name", ["train.json", "train.parquet"])
def test_gsm8k_has_the_form_in_which_it_is_scored(name: str, config: Make, tmp_path: Path) -> None:
    write(tmp_path / "main" / name, [solved(number) for number in range(40)])
    write(tmp_path / "main" / f"test{Path(name).suffix}", [solved(99)])
    write(tmp_path / "socratic" / name, [{"question": "other", "answer": "other"}] * 30)
    train, validation = read(config(name="gsm8k", path=str(tmp_path)))
    assert train[0] == Example("Question: What is 0 + 1?\nAnswer:", " One more.\n#### 1")
    assert [example.answer for example in validation] == [" One more.\n#### 20", " One more.\n#### 40"]
    assert len(train) == 38 and not any("99 + 1" in example.prompt for example in train + validation)


def test_the_test_split_is_never_read(config: Make, tmp_path: Path) -> None:
    file = write(tmp_path / "test.json", [solved(1)] * 30)
    for path in (file, tmp_path):
        with pytest.raises(UserError, match="holds the test split alone"):
            read(config(name="gsm8k", path=str(path)))
    write(tmp_path / "mine.json", [solved(2)] * 30)  # no file is named train
    write(tmp_path / "val.json", [solved(3)])
    train, validation = read(config(name="gsm8k", path=str(tmp_path)))
    assert (len(train), len(validation)) == (30, 1)


# ---- instructions ----


@pytest.mark.parametrize(
    "prompt, given, response, expected",
    [
        ("Add.", "1 and 2", "3", Example("Add.\n\n1 and 2", "\n\n3")),
        ("Add.", "", "3", Example("Add.", "\n\n3")),
        ("Add.", None, "3", Example("Add.", "\n\n3")),
        ("Question: 1 + 2\nAnswer:", "", " 3", Example("Question: 1 + 2\nAnswer:", " 3")),
        ("Question: 1 + 2\nAnswer: ", "", "3", Example("Question: 1 + 2\nAnswer: ", "3")),
        ("", "", "3", Example("", "3")),
    ],
)
def test_the_parts_of_an_instruction(
    prompt: str, given: str | None, response: str, expected: Example, config: Make, tmp_path: Path
) -> None:
    row = {"instruction": prompt, "input": given, "output": response, "text": "all of it"}
    file = write(tmp_path / "alpaca.json", [row, row | {"output": " \n"}, row])
    columns = ["instruction", "input", "output"]
    assert read(config(name="instructions", path=str(file), columns=columns)) == ([expected], [expected])


@pytest.mark.parametrize("number, held_out", [(2, [1]), (19, [18]), (20, [19]), (21, [19]), (40, [19, 39])])
def test_rows_for_validation(number: int, held_out: list[int], config: Make, tmp_path: Path) -> None:
    pairs = [(f"{place}?", f"{place}!") for place in range(number)]
    train, validation = read(config(name="instructions", path=str(write_examples(tmp_path / "a.jsonl", pairs))))
    assert [example.prompt for example in validation] == [f"{place}?" for place in held_out]
    assert [example.prompt for example in train] == [f"{i}?" for i in range(number) if i not in held_out]


# ---- mistakes ----


ROW = b'{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.jsonl", b"", {}, "a.jsonl: holds no rows"),
        ("a.json", b"[{", {}, r"a\.json: cannot be read \("),
        ("a.jsonl", ROW + b'{"prompt": "a"}', {}, "row 2: column 'response' holds nothing"),
        ("a.jsonl", ROW, {"columns": ["x", "response"]}, r"row 1: no column 'x'; data\.columns .* prompt, response$"),
        ("a.jsonl", ROW, {"columns": ["prompt", "x", "response"]}, r"row 1: no column 'x'; data\.columns"),
        ("a.jsonl", ROW, {"name": "gsm8k"}, "row 1: no column 'question'; it has prompt, response$"),
        ("a.jsonl", ROW.replace(b'"b"', b"7"), {}, "row 1: column 'response' holds int"),
        ("a.jsonl", ROW.replace(b'"a"', b"null"), {}, "row 1: column 'prompt' holds nothing"),
        ("a.txt", b"text", {}, "a.txt: no column 'prompt'; data.columns must be of text"),
    ],
)
def test_bad_input_is_one_line(
    name: str, content: bytes, options: dict[str, str], message: str, config: Make, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(config(**{"name": "instructions", "path": str(tmp_path)} | options))
    assert "\n" not in str(caught.value)


def test_prompts_and_answers_are_no_corpus(config: Make) -> None:
    with pytest.raises(UserError, match=r"^data\.name=gsm8k: prompts and answers"):
        prepare(config(name="gsm8k"), 10, len)
