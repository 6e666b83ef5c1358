"""The marked numbers of the pages are what the records give, and a changed number is found."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import rival_table
import tables

PERPLEXITY = {"int4": (80.0, 84.0, 79.0), "int4_int8": (60.0, 64.0, 59.0), "int8": (40.0, 41.0, 40.0)}
FAMILY = {
    "arms": {"never": "study/int4-*", "gnmr": "study/int4_int8-*", "always": "study/int8-*"},
    "low": "never",
    "high": "always",
}


def rows(**changed: Any) -> list[dict[str, Any]]:
    keys = ("order", "base", "sent", "spent", "promoted", *tables.COMPARABLE)
    return [
        dict.fromkeys(keys)
        | {"study": "study", "run": f"{arm}-s{seed}", "arm": arm, "seed": seed, "loss": math.log(perplexity)}
        | {"state": "done", "recovery": "int8", "config": arm}
        | changed
        for arm, of_arm in PERPLEXITY.items()
        for seed, perplexity in enumerate(of_arm)
    ]


def numbers(table: list[dict[str, Any]], family: dict[str, Any] = FAMILY) -> dict[str, str]:
    cells = tables.runs_by_arm(family, table)
    return tables.numbers_of_family("first", cells, tables.judged(family, cells))


def test_numbers_by_hand():
    pairs = list(zip(PERPLEXITY["int4_int8"], PERPLEXITY["int4"], strict=True))
    difference = (math.prod(mine / never for mine, never in pairs) ** (1 / 3) - 1) * 100
    texts = numbers(rows())
    assert texts["first/gnmr/difference"] == texts["first/gnmr - never/difference"] == f"{difference:+.1f}%"
    gap = math.log(math.prod(n / a for n, a in zip(PERPLEXITY["int4"], PERPLEXITY["int8"], strict=True)) ** (1 / 3))
    assert texts["first/gnmr/closed"] == f"{-100 * math.log1p(difference / 100) / gap:.0f}%"
    assert texts["first/n"] == texts["first/gnmr/n"] == "3" and texts["first/never/closed"] == "-"


def test_a_family_of_runs_that_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="they differ in steps"):
        numbers([row | {"steps": row["seed"]} for row in rows()])
    with pytest.raises(ValueError, match="no such run in the table"):
        numbers(rows(study="other"))
    with pytest.raises(ValueError, match="several runs of one seed"):
        numbers(rows(seed=0))


def test_marks_are_filled_in_text_and_columns():
    texts = {"first/a/p": "0.01", "first/b/p": "0.5", "first/b/closed": "3%"}
    text = "p = <!--=first/a/p-->?<!--/-->\n\n| arm | p<!--:first/*/p--> | recovered<!--:closed--> |\n|---|---|---|\n"
    text += "| A<!--:a--> | ? | |\n| b | ? | ? |\n"
    assert tables.filled(text, texts) == (
        text.replace(">?<", ">0.01<").replace("| ? | |", "| 0.01 | |").replace("| ? | ? |", "| 0.5 | 3% |")
    )
    with pytest.raises(KeyError, match="first/c/p"):
        tables.filled("<!--=first/c/p-->?<!--/-->", texts)


def test_the_pages_have_the_numbers_of_the_records(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_number_is_found(monkeypatch, capsys):
    """Without writing anything."""
    honest = rival_table.numbers
    changed = lambda *args: honest(*args) | {"rivals_smollm2_nvfp4/plan at 30%/kl": "0.100 ± 0.001"}
    monkeypatch.setattr(rival_table, "numbers", changed)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    before = (tables.ROOT / "README.md").read_text()
    assert tables.main() == 1 and "README.md, line " in capsys.readouterr().out
    assert (tables.ROOT / "README.md").read_text() == before
