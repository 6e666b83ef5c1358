"""The tasks that `gnmr eval` knows: lm-eval's own definitions, from the hub or over local files.

A local definition is a YAML file that includes lm-eval's and changes only the source of the rows: prompts, filters and
metrics are lm-eval's. The rows are read and checked here, brought into the hub's schema, and written beside the YAML in
a temporary folder. The user's folder holds, as .jsonl or .parquet (the hub's names too: test-00000-of-00001.parquet):

    gsm8k/train.jsonl, test.jsonl      question, answer (with "#### ")
    mmlu/dev.jsonl, test.jsonl         question, subject, choices (4), answer (0 to 3)
    hellaswag/validation.jsonl         activity_label, ctx_a and ctx_b (or ctx), endings (4), label (0 to 3)
    wikitext2/test.txt                 the text; or rows with page (a document) or text (a line)

**Choice 49**: where a HellaSwag row has only `ctx`, `ctx_b` is what follows its last whole sentence in lower case
(lm-eval capitalizes it). WikiText's documents are its articles, split at their headings as
in EleutherAI/wikitext_document_level.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gnmr.errors import UserError, told_as
from gnmr.lab.data.rows import read_rows, utf8
from gnmr.lab.data.tokenizer import regular_content

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task under our name."""

    theirs: str
    """lm-eval's name of the task or group."""
    yaml: str
    """The folder below lm_eval/tasks that holds its YAML files."""
    hub: str
    """The dataset's name on the hub."""
    splits: tuple[str, ...]
    """The split whose rows are scored first, then the one that examples are drawn from."""
    shots: int
    """Examples in the prompt if nothing else is asked for; a task of one split has none."""
    convention: str
    """How to read the figures."""


TASKS = {
    "gsm8k": Task(
        "gsm8k",
        "gsm8k",
        "openai/gsm8k",
        ("test", "train"),
        5,
        "greedy answers of up to 256 tokens, or half of the context; exact match of the number behind '####' "
        "(strict-match) or of the last one (flexible-extract)",
    ),
    "mmlu": Task(
        "mmlu",
        "mmlu/default",
        "cais/mmlu",
        ("test", "dev"),
        5,
        "the likeliest of the letters A to D; examples are the subject's first dev rows; the mean over all items",
    ),
    "hellaswag": Task(
        "hellaswag",
        "hellaswag",
        "Rowan/hellaswag",
        ("validation",),
        0,
        "the likeliest ending (acc), by log-likelihood a character (acc_norm)",
    ),
    "wikitext2": Task(
        "wikitext",
        "wikitext",
        "EleutherAI/wikitext_document_level",
        ("test",),
        0,
        "word_perplexity, byte_perplexity, bits_per_byte: lm-eval's, a document at a time, its log-likelihood over the "
        "words or bytes of the untouched text; token_perplexity: a token, blocks of {block} tokens of the whole text, "
        "each by itself (the convention of LLaMA's published figures, mostly at 2048)",
    ),
}


def check_names(names: Collection[str]) -> None:
    """UserError for no task and for an unknown one."""
    if not names:
        raise UserError(f"tasks=[]: name at least one of {', '.join(TASKS)}")
    for name in names:
        if name not in TASKS:
            raise UserError(f"tasks: {name!r} is not known: use some of {', '.join(TASKS)}")


def shipped(name: str) -> Path:
    """The folder of lm-eval's own definitions of a task."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / TASKS[name].yaml


def read(name: str, data: Path) -> dict[str, list[Row]]:
    """{split: rows in the hub's schema} of the local files of a task.

    UserError names the file, and the row from 1, of what is missing, empty or malformed.
    """
    task, folder = TASKS[name], data / name
    if not folder.is_dir():
        raise UserError(f"data={data}: there is no folder {folder} for the task {name}")
    found = {}
    kinds = ("txt", "jsonl", "parquet") if name == "wikitext2" else ("jsonl", "parquet")
    for split in task.splits:
        files = next((files for kind in kinds if (files := sorted(folder.glob(f"{split}*.{kind}")))), None)
        if not files:
            wanted = ", ".join(f"{split}*.{kind}" for kind in kinds)
            raise UserError(f"{folder}: holds none of {wanted}, which the task {name} needs")
        found[split] = _pages(files) if name == "wikitext2" else _checked(files, _CHECKS[name])
        if not found[split]:
            raise UserError(f"{files[0]}: holds no rows")
    return found


def define(name: str, rows: dict[str, list[Row]], folder: Path, shots: int) -> None:
    """Writes the definition of a task over these rows, and the rows, into `folder`.

    UserError where there are fewer rows to draw examples from than `shots`.
    """
    if name == "mmlu":
        _define_mmlu(rows, folder, shots)
        return
    task = TASKS[name]
    if len(task.splits) > 1 and len(rows[task.splits[1]]) < shots:
        raise UserError(f"{name}: {len(rows[task.splits[1]])} rows of {task.splits[1]} are too few for shots={shots}")
    # Splits without rows are unset: lm-eval would draw examples from them.
    absent = {f"{split}_split": None for split in ("training", "validation", "test")}
    present = {f"{'training' if split == 'train' else split}_split": split for split in rows}
    _leaf(f"{task.theirs}.yaml", rows, folder / name, shipped(name), absent | present)


def _define_mmlu(rows: dict[str, list[Row]], folder: Path, shots: int) -> None:
    """A definition a subject, below the groups that lm-eval puts them in."""
    groups: set[str] = set()
    for subject in dict.fromkeys(row["subject"] for row in rows["test"]):
        file = shipped("mmlu") / f"mmlu_{subject}.yaml"
        own = {split: [row for row in rows[split] if row["subject"] == subject] for split in rows}
        if len(own["dev"]) < shots:
            raise UserError(f"mmlu: {len(own['dev'])} dev rows of {subject} are too few for shots={shots}")
        groups.add(yaml.safe_load(file.read_text())["tag"].removesuffix("_tasks"))
        _leaf(file.name, own, folder / "mmlu" / subject, shipped("mmlu"))
    for group in groups:
        _write(folder / f"{group}.yaml", {"include": str(shipped("mmlu") / f"_{group}.yaml")})
    _write(folder / "mmlu.yaml", {"include": str(shipped("mmlu") / "_mmlu.yaml"), "task": sorted(groups)})


def _leaf(file: str, rows: dict[str, list[Row]], folder: Path, above: Path, changes: Row | None = None) -> None:
    folder.mkdir(parents=True)
    for split, own in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    source = {
        "include": str(above / file),
        "dataset_path": "json",
        "dataset_name": None,
        # The library copies what it reads; the copy must not outlive the temporary folder.
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in rows},
            "cache_dir": str(folder / "cache"),
        },
    }
    _write(folder / file, source | (changes or {}))


def _write(file: Path, tree: Row) -> None:
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


# ---- rows ----


def _checked(files: list[Path], check: Callable[[Row], Row]) -> list[Row]:
    """The rows of these files in the hub's schema."""
    rows = []
    for where, row in _rows(files):
        with told_as(f"{where}: "):
            rows.append(check(row))
    return rows


def _rows(files: list[Path]) -> Iterator[tuple[str, Row]]:
    """(where it stands, the row)."""
    return ((row.where, row.cells) for file in files for row in read_rows(file))


def _text(row: Row, key: str, blank: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not (blank or value.strip()):
        raise ValueError(f"{key!r} must be a text, and is {value!r:.60}")
    return value


def _choice(row: Row, key: str, number: int) -> int:
    """0 to number - 1; HellaSwag's labels are texts on the hub and numbers in its own files."""
    value = row.get(key)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or not 0 <= value < number:
        raise ValueError(f"{key!r} must be a whole number from 0 to {number - 1}, and is {value!r:.60}")
    return value


def _four(row: Row, key: str) -> list[str]:
    value = row.get(key)
    if not isinstance(value, list) or len(value) != 4 or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{key!r} must be four texts, and is {value!r:.60}")
    return value


def _gsm8k(row: Row) -> Row:
    if "#### " not in _text(row, "answer"):
        raise ValueError("'answer' has no '#### ' before the number")
    return {"question": _text(row, "question"), "answer": row["answer"]}


def _mmlu(row: Row) -> Row:
    subject = _text(row, "subject")
    if not (shipped("mmlu") / f"mmlu_{subject}.yaml").is_file():
        raise ValueError(f"{subject!r} is none of MMLU's subjects")
    own = {"question": _text(row, "question"), "subject": subject, "choices": _four(row, "choices")}
    return own | {"answer": _choice(row, "answer", 4)}


def _hellaswag(row: Row) -> Row:
    if "ctx_a" in row and "ctx_b" in row:
        context = _text(row, "ctx_a", blank=True), _text(row, "ctx_b", blank=True)
    else:
        context = context_parts(_text(row, "ctx"))
    own = {"activity_label": _text(row, "activity_label"), "ctx_a": context[0], "ctx_b": context[1]}
    return own | {"endings": _four(row, "endings"), "label": str(_choice(row, "label", 4))}


_CHECKS = {"gsm8k": _gsm8k, "mmlu": _mmlu, "hellaswag": _hellaswag}


def context_parts(context: str) -> tuple[str, str]:
    """HellaSwag's (ctx_a, ctx_b) of its ctx: whole sentences, and the beginning of the next one, which may be empty."""
    found = re.fullmatch(r"(.*[.!?][\"')\]]*)\s+([a-z][^.!?]*)", context.strip(), re.DOTALL)
    return (found[1], found[2]) if found else (context.strip(), "")


def _pages(files: list[Path]) -> list[Row]:
    """WikiText as documents, from text, from rows of a line or from documents."""
    if files[0].suffix == ".txt":
        try:
            return [{"page": page} for file in files for page in pages(utf8(regular_content(file), f"{file}:"))]
        except OSError as error:
            raise UserError(f"{files[0]}: cannot be read ({error})") from error
    found = []
    for where, row in _rows(files):
        kind = "page" if "page" in row else "text"
        with told_as(f"{where}: "):
            found.append((kind, _text(row, kind, blank=True)))
    if all(kind == "page" for kind, _ in found):
        return [{"page": text} for _, text in found if text.strip()]
    return [{"page": page} for page in pages("\n".join(text.removesuffix("\n") for _, text in found))]


def pages(text: str) -> list[str]:
    """The articles of WikiText's text. One begins with a line like ` = Robert Boulter = `; sections have more signs."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        bare = line.strip()
        if bare.startswith("= ") and bare.endswith(" =") and not (bare.startswith("= =") or bare.endswith("= =")):
            found.append([])
        found[-1].append(line)
    return [page for page in map("\n".join, found) if page.strip()]


def lines_of(documents: list[str]) -> str:
    """The text of token_perplexity, as in GPTQ and later work: the rows of wikitext-2-raw-v1, which are lines
    (empty for a blank one), joined by two newlines."""
    lines = "\n".join(documents).removesuffix("\n").split("\n")
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines)
