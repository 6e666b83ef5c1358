"""The marked numbers of the pages are what the records give, and a changed number is found."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gnmr.plan.diagnosis import label

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


# ---- the unmarked numbers of the first page ----

RESULTS = tables.ROOT / "benchmarks" / "results"
GRADIENT = "AutoQuantize, gradient"
LOWS, BUDGETS = ("fp8_hybrid", "nvfp4"), (0.03, 0.05, 0.1, 0.2, 0.3)
LINE = re.compile(r"(layers\S+) +(\S+) [█▓▒░] +(\d+%) (\S+) +(.*?) +(\S+) ± +(\d+%)")
"""A line of both tables of the case: operator, nats, ± and recipe; choice, KL and ±."""


def first_page() -> str:
    """The page without line ends and marks."""
    text = re.sub("<!--.*?-->", "", (tables.ROOT / "README.md").read_text())
    return " ".join(text.split())


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_case_of_the_first_page_is_its_record():
    fp8, page = record("diagnosis-smollm2-fp8"), (tables.ROOT / "README.md").read_text()
    assert f"\n{fp8['command']}\n" in page
    shown = re.search("```text\n(fp8_hybrid costs .*?)\n\n(.*?)```", page, re.DOTALL)
    assert shown
    for piece in shown[1].split("..."):
        assert re.sub(r"[,; ]+$", "", " ".join(piece.split())) in fp8["verdict"]
    pins = json.loads((tables.ROOT / "plans" / "smollm2-fp8_hybrid.json").read_text())["pins"]
    left = {label(name): (choice["kl_left"], choice["noise"]) for name, choice in fp8["choices"].items()}
    left |= {"nothing kept": (fp8["held_out"]["kl"], fp8["held_out"]["noise"]), "the plan, by price": left.pop("plan")}
    rows = pq.read_table(RESULTS / "diagnosis-smollm2-fp8.parquet").to_pylist()
    prices = {row["operator"]: row for row in rows if row["gemm"] == "fprop"}
    _, *lines = shown[2].splitlines()
    highest = sorted(prices, key=lambda name: -prices[name]["value"])[: len(lines)]
    assert len(lines) == len(left) == 8
    for line, operator in zip(lines, highest, strict=True):
        name, nats, half, kept_on, choice, nats_left, half_left = LINE.fullmatch(line).groups()
        value, (low, high) = prices[operator]["value"], prices[operator]["interval"]
        assert f"model.{name}" == operator and pins[operator]["fprop"] == kept_on
        assert (nats, half) == (f"{value:.2g}", f"{(high - low) / 2 / value:.0%}")
        kl, noise = left.pop(choice)
        assert (nats_left, half_left) == (f"{kl:.3g}", f"{noise / kl:.0%}")


def test_the_words_about_the_case_are_its_record():
    fp8, nvfp4, page = record("diagnosis-smollm2-fp8"), record("diagnosis-smollm2-nvfp4"), first_page()
    minutes = {5: "five", 6: "six", 7: "seven"}[round(fp8["seconds"] / 60)]
    assert f"a text, {minutes} minutes of one core and {fp8['max_resident_kb'] * 1024 / 1e9:.1f} GB" in page
    plan, held_out = fp8["choices"]["plan"], fp8["held_out"]
    assert f"differ by {fp8['measured']['kl']:.3f} nats" in page
    assert f"With nothing kept they cost {held_out['kl']:.3f} nats." in page
    pinned = re.search(r"keeping (\d+) of", fp8["verdict"])
    words = f"of {pinned and pinned[1]} of the {len(fp8['operators'])} linears stay in BF16, {plan['kl_left']:.3f}"
    assert words in page
    assert f"this is {plan['extra_of_all']:+.2%}" in page
    losses = [choice["loss_left"] for choice in fp8["choices"].values()]
    assert max(losses) - min(losses) < held_out["loss_noise"], "their losses cannot be told apart"
    told = re.search(r"NVFP4 costs (\S+) nats.* keeps (\d+) .* (\S+) become (\S+) ± (\S+) \(", page)
    assert told and told[1] == f"{nvfp4['measured']['kl']:.3g}" and f"keeping {told[2]} of" in nvfp4["verdict"]
    plan = nvfp4["choices"]["plan"]
    assert told.groups()[2:] == (f"{nvfp4['held_out']['kl']:.3g}", f"{plan['kl_left']:.3g}", f"{plan['noise']:.2g}")


def test_what_a_diagnosis_prints_of_tokens_is_its_record():
    fp8, page = record("diagnosis-smollm2-fp8"), (tables.ROOT / "docs" / "diagnose.md").read_text()
    low, plan = fp8["held_out"], fp8["choices"]["plan"]
    words = f"{low['same_top']:.1%} of tokens and {low['kl_99']:.3f} nats on fp8_hybrid; "
    words += f"{plan['same_top']:.1%} of tokens and {plan['kl_99']:.3f} nats under the plan"
    assert words in " ".join(page.split())


def rows_of_rivals(name: str) -> list[dict[str, Any]]:
    return [row for row in record(f"rivals-{name}")["rows"] if row["budget"] in BUDGETS]


def cells_of(name: str, low: str, arms: set[str], least: float = 0.0, most: float = 1.0) -> list[dict[str, Any]]:
    """The rows of these arms from one budget to another."""
    rows = [row for row in rows_of_rivals(name) if row["low"] == low and row["arm"] in arms]
    return [row for row in rows if least <= row["budget"] <= most]


def more_than_the_plan(*cells: Any) -> tuple[str, str]:
    """The smallest and the largest share that these cells leave more than the plan."""
    name, low = cells[:2]
    plans = {row["budget"]: row["kl"] for row in cells_of(name, low, {"plan"})}
    shares = [row["kl"] / plans[row["budget"]] - 1 for row in cells_of(*cells)]
    return f"{min(shares):.0%}", f"{max(shares):.0%}"


def test_the_close_rivals_of_the_first_page_are_the_record_s():
    page, numbers = first_page(), {2: "two", 4: "four", 9: "nine"}
    arms = {GRADIENT, "PrismaQuant", "gradient norm"}
    fp8, nvfp4 = (cells_of("smollm2", low, arms, 0.1) for low in ("fp8_hybrid", "nvfp4"))
    low, high = more_than_the_plan("smollm2", "fp8_hybrid", arms, 0.1)
    strict = sum(row["p_plan_less"] < 0.01 for row in fp8)
    assert (
        f"leave {low} to {high} more in FP8 (p < 0.01 in {numbers[strict]} of {numbers[len(fp8)]} cases), and" in page
    )
    low, high = more_than_the_plan("smollm2", "nvfp4", arms, 0.1)
    (p,) = {f"{row['p_plan_less']:.3f}" for row in nvfp4 if row["p_plan_less"] < 0.05}
    shown = sum(row["p_plan_less"] < 0.05 for row in nvfp4)
    less = low.removeprefix("-")
    assert (
        low.startswith("-") and f"between {less} less and {high} more in NVFP4 (p = {p} in {numbers[shown]} of" in page
    )
    assert all(row["p_plan_more"] >= 0.05 for row in rows_of_rivals("smollm2") if "p_plan_more" in row)
    assert "no rival leaves significantly less than it" in page


def test_what_the_first_page_says_of_the_oracle_is_its_record():
    page = first_page()
    of_oracle = [row["of_oracle"] for row in rows_of_rivals("smollm2") if row["arm"] == "plan"]
    assert len(of_oracle) == 10, "two low paths, five budgets"
    assert (
        f"the plan removes {min(of_oracle):.0%} to {max(of_oracle):.0%} of the KL that the same solver removes" in page
    )
    both = [more_than_the_plan(name, low, {"oracle"}) for name in ("smollm2", "whisper") for low in LOWS]
    less = [max(-int(low.rstrip("%")) for low, _ in of_model) for of_model in (both[:2], both[2:])]
    assert f"the solver leaves up to {less[0]}% less KL, and on Whisper up to {less[1]}% less" in page


def test_what_the_first_page_says_of_whisper_is_its_record():
    page = first_page()
    (fp8, _), (nvfp4, _) = (more_than_the_plan("whisper", low, {GRADIENT}, 0.3) for low in LOWS)
    used = [f"{row['extra'] / 0.3:.0%}" for low in LOWS for row in cells_of("whisper", low, {GRADIENT}, 0.3)]
    assert f"leaves {fp8} more in FP8 and {nvfp4} more in NVFP4 at +30%, with {' and '.join(used)} of the time" in page
    least = min(row["extra"] / row["budget"] for low in LOWS for row in cells_of("whisper", low, {GRADIENT}))
    assert f"as little as {least:.0%} of the time" in page
    plans = {row["budget"]: row["kl"] for row in cells_of("whisper", "fp8_hybrid", {"plan"})}
    for row in cells_of("whisper", "fp8_hybrid", {"by element"}):
        assert abs(row["more"]) + row["more_half_width"] < 0.1 * plans[row["budget"]]
    more, _ = more_than_the_plan("whisper", "nvfp4", {"by element"}, 0.3)
    assert f"is within 10% of the plan's KL in FP8, and leaves {more} more in NVFP4 at +30%" in page
    low, high = more_than_the_plan("whisper", "nvfp4", {"PrismaQuant"}, 0.1)
    assert f"leaves {high.removeprefix('-')} to {low.removeprefix('-')} less from +10% on (not significant)" in page
    (worse,) = [row for row in rows_of_rivals("whisper") if row.get("p_plan_more", 1.0) < 0.05]
    assert (worse["low"], worse["arm"], worse["budget"]) == ("nvfp4", "gradient norm squared", 0.1)
    _, less = more_than_the_plan("whisper", "nvfp4", {worse["arm"]}, 0.1, 0.1)
    assert f"the squared gradient norm at +10% in NVFP4, by {less.removeprefix('-')}" in page


def test_what_the_first_page_says_of_top_predictions_is_its_record():
    """Rows of the record have means; the test is over sequences, Holm-adjusted over the rivals at one budget."""
    behind, significant = [], []
    for name in ("smollm2", "whisper"):
        rows = pq.read_table(RESULTS / f"rivals-{name}.parquet").to_pylist()
        kept = [row for row in rows if row["kind"] == "kl" or (row["kind"] == "plan" and row["budget"] in BUDGETS)]
        kls, _ = rival_table.kls_of([row | {"pins": json.loads(row["pins"] or "{}")} for row in kept])
        for (low, budget), cell in kls.groupby(["low", "budget"]):
            same_top = dict(zip(cell.arm, cell.same_top, strict=True))
            more = {arm: top - same_top["plan"] for arm, top in same_top.items() if arm not in rival_table.OURS}
            assert len(more) == 12
            behind.append(max(top.mean() for top in more.values()) > 0)
            p_values = {arm: rival_table.one_sided(top, "greater") for arm, top in more.items()}
            p_adjusted = rival_table.holm(p_values).items()
            significant += [(name, low, budget, arm, f"{p:.3f}") for arm, p in p_adjusted if p < 0.05]
    assert significant == [("smollm2", "fp8_hybrid", 0.2, "gradient norm", "0.047")]
    page = first_page()
    assert f"in {sum(behind)} of {len(behind)} cells of both models the best of twelve rivals" in page
    assert "once significantly (gradient norm, FP8, +20%" in page and "one-sided p = 0.047)" in page


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
