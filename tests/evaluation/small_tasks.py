"""Few items of the four tasks in local files: real ones where they are at hand, else made by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("GNMR_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
SUBJECTS = ("anatomy", "philosophy")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def real(folder: Path) -> None:
    """The first items of the real files."""
    write_rows(folder / "gsm8k" / "train.jsonl", rows_of(SHARED / "gsm8k" / "train.jsonl")[:12])
    write_rows(folder / "gsm8k" / "test.jsonl", rows_of(SHARED / "gsm8k" / "test.jsonl")[:3])
    for split, most in (("dev", 5), ("test", 3)):
        rows = rows_of(SHARED / "mmlu" / f"{split}.jsonl")
        chosen = [[row for row in rows if row["subject"] == subject][:most] for subject in SUBJECTS]
        write_rows(folder / "mmlu" / f"{split}.jsonl", chosen[0] + chosen[1])
    write_rows(folder / "hellaswag" / "validation.jsonl", rows_of(SHARED / "hellaswag" / "validation.jsonl")[:6])
    (folder / "wikitext2").mkdir()
    text = (SHARED / "wikitext2" / "test.txt").read_text().split("\n")[:40]
    (folder / "wikitext2" / "test.txt").write_text("\n".join(text) + "\n")


def handmade(folder: Path) -> None:
    """As many items in the same layout."""

    def sums(first: int, last: int) -> list[dict[str, Any]]:
        return [
            {
                "question": f"Ann has {i} pears and buys {i + 2}. How many?",
                "answer": f"{i} + {i + 2}.\n#### {2 * i + 2}",
            }
            for i in range(first, last)
        ]

    write_rows(folder / "gsm8k" / "train.jsonl", sums(10, 22))
    write_rows(folder / "gsm8k" / "test.jsonl", sums(1, 4))
    for split, most in (("dev", 5), ("test", 3)):
        rows = [
            {
                "subject": name,
                "question": f"Which is {i}? ",
                "choices": ["one", "two", "three", "four"],
                "answer": i % 4,
            }
            for name in SUBJECTS
            for i in range(most)
        ]
        write_rows(folder / "mmlu" / f"{split}.jsonl", rows)
    endings = ["lifts it.", "sits down [step] slowly.", "eats the barbell, all of it.", "goes."]
    contexts = ["A lady walks to a barbell. She bends down. the lady", "How to sit. Take a chair. "]
    rows = [{"activity_label": "Lifting", "ctx": contexts[i % 2], "endings": endings, "label": i % 4} for i in range(6)]
    write_rows(folder / "hellaswag" / "validation.jsonl", rows)
    articles = [
        f" \n = Town {i} = \n \n The town of {i} @,@ 000 is a town . \n = = History = = \n" * 6 for i in range(3)
    ]
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "test.txt").write_text("".join(articles))
