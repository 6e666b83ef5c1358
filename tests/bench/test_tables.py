"""The marked numbers of the pages are what the records give, and a changed number is found."""

from __future__ import annotations

import json
import math
import re
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


def test_the_case_of_the_first_page_is_its_record():
    results, page = tables.ROOT / "benchmarks" / "results", (tables.ROOT / "README.md").read_text()
    fp8, nvfp4 = (json.loads((results / f"diagnosis-smollm2-{low}.json").read_text()) for low in ("fp8", "nvfp4"))
    assert f"\n{fp8['command']}\n" in page
    shown = re.search("```text\n(fp8_hybrid costs .*?)\n\n(.*?)```", page, re.DOTALL)
    assert shown
    for piece in shown[1].split("..."):
        assert re.sub(r"[,; ]+$", "", " ".join(piece.split())) in fp8["verdict"]
    left = [f"{choice['kl_left']:.3g}" for choice in fp8["choices"].values()]
    assert len(left) == 7 and all(f" {nats} ±" in shown[2] for nats in left)
    told = re.search(r"NVFP4 costs (\S+) nats.* keeps (\d+) .* (\S+) become (\S+) ± (\S+)", page)
    assert told and told[1] == f"{nvfp4['measured']['kl']:.3g}" and f"keeping {told[2]} of" in nvfp4["verdict"]
    plan = nvfp4["choices"]["plan"]
    assert told.groups()[2:] == (f"{nvfp4['held_out']['kl']:.3g}", f"{plan['kl_left']:.3g}", f"{plan['noise']:.2g}")


def rows_of_rivals(name: str) -> list[dict[str, Any]]:
    return json.loads((tables.ROOT / "benchmarks" / "results" / f"rivals-{name}.json").read_text())["rows"]


def more_than_the_plan(name: str, low: str, arms: set[str], least: float = 0.0) -> tuple[str, str]:
    """The smallest and the largest share that these arms leave more than the plan, from this budget on."""
    rows = rows_of_rivals(name)
    plans = {row["budget"]: row["kl"] for row in rows if (row["low"], row["arm"]) == (low, "plan")}
    shares = [
        row["kl"] / plans[row["budget"]] - 1
        for row in rows
        if row["low"] == low and row["arm"] in arms and row["budget"] >= least
    ]
    return f"{min(shares):.0%}", f"{max(shares):.0%}"


def test_the_ranges_of_the_first_page_are_their_records():
    page = " ".join((tables.ROOT / "README.md").read_text().split())
    arms = {"AutoQuantize, gradient", "PrismaQuant", "gradient norm"}
    low, high = more_than_the_plan("smollm2", "fp8_hybrid", arms, 0.1)
    assert f"leave {low} to {high} more in FP8 (p < 0.01 in four of nine cases), and" in page
    low, high = more_than_the_plan("smollm2", "nvfp4", arms, 0.1)
    assert f"between {low.removeprefix('-')} less and {high} more in NVFP4" in page
    fp8, _ = more_than_the_plan("whisper", "fp8_hybrid", {"AutoQuantize, gradient"}, 0.3)
    nvfp4, _ = more_than_the_plan("whisper", "nvfp4", {"AutoQuantize, gradient"}, 0.3)
    assert f"leaves {fp8} more in FP8 and {nvfp4} more in NVFP4 at +30%" in page
    plans = [row for row in rows_of_rivals("smollm2") if row["arm"] == "plan"]
    of_oracle = [row["of_oracle"] for row in plans if "of_oracle" in row]
    assert len(of_oracle) == 10, "two low paths, five budgets"
    assert f"it removes {min(of_oracle):.0%} to {max(of_oracle):.0%} of the KL that the same solver removes" in page


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
