"""Local task files: what is read of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tasks import rows_of, write_rows

pytest.importorskip("lm_eval")

from gnmr.errors import UserError
from gnmr.lab.evaluation import tasks

pytestmark = pytest.mark.xdist_group("evaluation")

# As they stand in HellaSwag's own file: ctx is ctx_a, a space and ctx_b.
CONTEXTS = [
    ("A lady walks to a barbell. She bends down and grabs the pole.", "the lady"),
    (
        "Two women in a child are shown in a canoe while a man pulls the canoe while standing in the water, with other "
        "individuals visible in the background.",
        "the child and a different man",
    ),
    ("A man is sitting on a roof.", "he"),
    ("How to choose a desk. Measure it! Is it wide?", ""),
    ('He says "no."', "then she"),
    ("A man on a roof", ""),
]


@pytest.mark.parametrize(("first", "second"), CONTEXTS)
def test_a_context_is_split_behind_its_last_sentence(first, second) -> None:
    assert tasks.context_parts(f"{first} {second}") == (first, second)


ARTICLES = [
    " = Robert Boulter = \n \n Robert <unk> is an actor . \n = = Career = = \n ",
    " = Du Fu = \n \n A = 1 = \n poet . \n",
]


def test_wikitext_as_articles_and_as_lines() -> None:
    assert tasks.pages(" \n" + "\n".join(ARTICLES)) == ARTICLES
    heads = [" = Robert Boulter = \n", "", " Robert <unk> is an actor . \n", " = = Career = = \n", ""]
    assert tasks.lines_of(ARTICLES) == "\n\n".join([*heads, " = Du Fu = \n", "", " A = 1 = \n", " poet . \n"])


def test_the_hubs_own_files_are_read_alike(task_data, tmp_path) -> None:
    """Parquet under the hub's names; HellaSwag with both parts and labels as texts; WikiText as lines and documents."""
    for name in ("gsm8k", "mmlu", "hellaswag"):
        for file in (task_data / name).iterdir():
            rows = rows_of(file)
            for row in rows if name == "hellaswag" else ():
                row["ctx_a"], row["ctx_b"] = tasks.context_parts(row["ctx"])
                row["label"] = str(row["label"])
            (tmp_path / name).mkdir(exist_ok=True)
            half = len(rows) // 2
            for number, part in enumerate((rows[:half], rows[half:])):
                table = pa.Table.from_pylist(part)
                pq.write_table(table, tmp_path / name / f"{file.stem}-0000{number}-of-00002.parquet")
        assert tasks.read(name, tmp_path) == tasks.read(name, task_data)
    plain = tasks.read("wikitext2", task_data)
    lines = (task_data / "wikitext2" / "test.txt").read_text().split("\n")
    write_rows(tmp_path / "wikitext2" / "test.jsonl", [{"text": f"{line}\n" if line.strip() else ""} for line in lines])
    assert [page["page"].split() for page in tasks.read("wikitext2", tmp_path)["test"]] == [
        page["page"].split() for page in plain["test"]
    ]
    write_rows(tmp_path / "wikitext2" / "test.jsonl", plain["test"])
    assert tasks.read("wikitext2", tmp_path) == plain


def test_mmlu_has_lm_evals_groups(task_data, tmp_path) -> None:
    from lm_eval.tasks import TaskManager

    tasks.define("mmlu", tasks.read("mmlu", task_data), tmp_path, 5)
    loaded = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["mmlu"])
    assert loaded["group_map"] == {
        "mmlu": ["mmlu_humanities", "mmlu_stem"],
        "mmlu_humanities": ["mmlu_philosophy"],
        "mmlu_stem": ["mmlu_anatomy"],
    }


def change(task_data: Path, folder: Path, name: str, file: str, row: int, **changes: object) -> None:
    """A copy of a task's files with one row (from 1) changed; a value of None takes the key out."""
    for source in (task_data / name).iterdir():
        rows = rows_of(source)
        if source.name == file:
            rows[row - 1] = {key: value for key, value in (rows[row - 1] | changes).items() if value is not None}
        write_rows(folder / name / source.name, rows)


@pytest.mark.parametrize(
    ("name", "file", "changes", "line"),
    [
        ("gsm8k", "test.jsonl", {"answer": "it is 3"}, "'answer' has no '#### ' before the number"),
        ("gsm8k", "train.jsonl", {"question": None}, "'question' must be a text, and is None"),
        ("mmlu", "test.jsonl", {"subject": "alchemy"}, "'alchemy' is none of MMLU's subjects"),
        ("mmlu", "dev.jsonl", {"choices": ["a", "b", "c"]}, "'choices' must be four texts, and is ['a', 'b', 'c']"),
        ("mmlu", "test.jsonl", {"answer": 4}, "'answer' must be a whole number from 0 to 3, and is 4"),
        ("hellaswag", "validation.jsonl", {"ctx": " "}, "'ctx' must be a text, and is ' '"),
        ("hellaswag", "validation.jsonl", {"label": ""}, "'label' must be a whole number from 0 to 3, and is ''"),
        ("hellaswag", "validation.jsonl", {"endings": "a"}, "'endings' must be four texts, and is 'a'"),
    ],
)
def test_a_malformed_row_is_named(name, file, changes, line, task_data, tmp_path) -> None:
    change(task_data, tmp_path, name, file, 2, **changes)
    with pytest.raises(UserError) as caught:
        tasks.read(name, tmp_path)
    assert str(caught.value) == f"{tmp_path / name / file}: row 2: {line}"


def test_files_that_cannot_be_read(task_data, tmp_path) -> None:
    def line(name: str, file: str, content: bytes | None) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for source in (task_data / name).iterdir():
            (folder / source.name).write_bytes(source.read_bytes())
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        with pytest.raises(UserError) as caught:
            tasks.read(name, tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(tmp_path), "DATA")

    with pytest.raises(UserError, match=r"there is no folder .*mmlu for the task mmlu"):
        tasks.read("mmlu", tmp_path)
    assert line(
        "gsm8k", "train.jsonl", None
    ) == "DATA/gsm8k: holds none of train*.jsonl, train*.parquet, which the " + ("task gsm8k needs")
    assert line("gsm8k", "test.jsonl", b"\n") == "DATA/gsm8k/test.jsonl: holds no rows"
    assert line("gsm8k", "test.jsonl", b'\n{"question": "a').startswith("DATA/gsm8k/test.jsonl: row 2 is not JSON (")
    assert line("gsm8k", "test.jsonl", b"[1]") == "DATA/gsm8k/test.jsonl: row 1 is no object with columns"
    assert line("gsm8k", "test.jsonl", b"\xff").startswith("DATA/gsm8k/test.jsonl: row 1 is not UTF-8 (")
    assert line("wikitext2", "test.txt", b" \n \n") == "DATA/wikitext2/test.txt: holds no rows"
    assert line("hellaswag", "validation.jsonl", json.dumps({"ind": 1}).encode()).endswith(
        "row 1: 'ctx' must be a text, and is None"
    )


def test_a_damaged_parquet_file(tmp_path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test-0.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"test-0.parquet: cannot be read \("):
        tasks.read("gsm8k", tmp_path)


def test_too_few_rows_to_draw_examples_from(task_data, tmp_path) -> None:
    for name, shots, line in (
        ("gsm8k", 13, "gsm8k: 12 rows of train are too few for shots=13"),
        ("mmlu", 6, "mmlu: 5 dev rows of anatomy are too few for shots=6"),
    ):
        with pytest.raises(UserError) as caught:
            tasks.define(name, tasks.read(name, task_data), tmp_path / name, shots)
        assert str(caught.value) == line
