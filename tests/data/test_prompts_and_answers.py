"""Prompts and answers: what is read, which rows are for validation, and what a mistake is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpora import DOCUMENTS, shared_data, write_examples, write_rows

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.corpora import Example, articles, open_corpus
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


@pytest.mark.parametrize("name", ["gsm8k", "wikitext2"])
def test_a_test_split_is_never_read(name: str, config: Make, tmp_path: Path) -> None:
    file = write(tmp_path / "test.json", [solved(1)] * 30)
    for path in (file, tmp_path):
        with pytest.raises(UserError, match=f"holds the test split alone, which {name} keeps for scores"):
            read(config(name=name, path=str(path)))
    write(tmp_path / "mine.json", [solved(2) | {"text": "a"}] * 30)  # no file is named train
    write(tmp_path / "val.json", [solved(3) | {"text": "b"}])
    assert len(read(config(name=name, path=str(tmp_path)))[1]) == 1  # the test rows have no column "text"


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
    columns = {"prompt_column": "instruction", "input_column": "input", "response_column": "output"}
    assert read(config(name="instructions", path=str(file), **columns)) == ([expected], [expected])


@pytest.mark.parametrize("number, held_out", [(2, [1]), (19, [18]), (20, [19]), (21, [19]), (40, [19, 39])])
def test_rows_for_validation(number: int, held_out: list[int], config: Make, tmp_path: Path) -> None:
    pairs = [(f"{place}?", f"{place}!") for place in range(number)]
    train, validation = read(config(name="instructions", path=str(write_examples(tmp_path / "a.jsonl", pairs))))
    assert [example.prompt for example in validation] == [f"{place}?" for place in held_out]
    assert [example.prompt for example in train] == [f"{i}?" for i in range(number) if i not in held_out]


def test_identity_follows_files_and_columns(config: Make, tmp_path: Path) -> None:
    file = write_examples(tmp_path / "a.jsonl", [("a", "b")] * 3)

    def identity(**changes: Any) -> str:
        return open_corpus(config(**({"name": "instructions", "path": str(file)} | changes))).identity

    first = identity()
    assert first == identity()
    assert len({first, identity(name="gsm8k"), identity(response_column="x"), identity(input_column="x")}) == 4
    file.touch()
    assert identity() == first


# ---- plain text ----


def test_documents_are_answers_without_a_prompt(config: Make, corpus_file: Path) -> None:
    settings = config(path=str(corpus_file))
    assert read(settings) == (
        [Example("", text) for i, text in enumerate(DOCUMENTS) if i not in (19, 39)],
        [Example("", DOCUMENTS[19]), Example("", DOCUMENTS[39])],
    )


WIKI = [" \n", " = One = \n", "\n", " A line . \n", " = = Section = = \n", "\n", " where \n", " = 2 k = \n", "\n"]
WIKI += [" = Two ( film ) = \n", " \n", " B . \n"]
FIRST = " = One = \n\n A line . \n = = Section = = \n\n where \n = 2 k = \n\n"
SECOND = " = Two ( film ) = \n\n B . \n"


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.parquet"])
def test_articles_of_wikitext(name: str, config: Make, tmp_path: Path) -> None:
    """Files hold the lines of a split, rows of the hub one line each (blank ones are empty there)."""
    folder = tmp_path / "wikitext-2-raw-v1"
    if name.endswith(".txt"):
        folder.mkdir()
        (folder / name).write_text("".join(WIKI))
        (folder / "valid.txt").write_text(" = V = \n")
        (folder / "test.txt").write_text(" = T = \n")
    else:
        for split, lines in (("train", WIKI), ("validation", [" = V = \n"]), ("test", [" = T = \n"])):
            write_rows(folder / name.replace("train", split), ["" if line.isspace() else line for line in lines])
    train, validation = read(config(name="wikitext2", path=str(tmp_path)))
    assert [example.answer for example in train] == [FIRST, SECOND]
    assert validation == [Example("", " = V = \n")]


def test_real_wikitext2(config: Make) -> None:
    folder = shared_data("wikitext2")
    train, validation = read(config(name="wikitext2", path=str(folder)))
    assert len(validation) == 60 and validation[0].answer.startswith(" = Homarus gammarus = \n\n Homarus")
    content = (folder / "valid.txt").read_text()
    assert "".join(example.answer for example in validation).split() == content.split()
    assert sum(not article.isspace() for article in articles([(folder / "test.txt").read_text()])) == 60
    assert "Valkyria" in train[0].answer and all("Robert <unk>" not in example.answer[:20] for example in train)


# ---- mistakes ----


ROW = b'{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.jsonl", b"", {}, "a.jsonl: holds no rows"),
        ("a.json", b"[]", {}, "a.json: holds no rows"),
        ("a.json", b"[{", {}, r"a\.json: cannot be read \(JSONDecodeError"),
        ("a.jsonl", ROW + b'\n"text"\n', {}, "row 3 is no object"),
        ("a.jsonl", ROW + b'{"prompt": "a"}', {}, r"row 2: no column 'response'; data\.response_column"),
        ("a.jsonl", ROW, {"prompt_column": "x"}, r"row 1: no column 'x'; data\.prompt_column .* prompt, response$"),
        ("a.jsonl", ROW, {"input_column": "x"}, r"row 1: no column 'x'; data\.input_column"),
        ("a.jsonl", ROW, {"name": "gsm8k"}, "row 1: no column 'question'; it has prompt, response$"),
        ("a.jsonl", ROW.replace(b'"b"', b"7"), {}, "row 1: column 'response' holds int"),
        ("a.jsonl", ROW.replace(b'"a"', b"null"), {}, "row 1: column 'prompt' holds nothing"),
        ("a.txt", b"text", {}, "a.txt: plain text has no columns"),
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
