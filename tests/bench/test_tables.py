from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from gnmr.lab.bench.figures import record
from gnmr.lab.report.family import judge
from gnmr.lab.report.family_notes import p_text

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks" / "results").is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(ROOT / "benchmarks"))
tables = import_module("tables")
compressed, forks, numbers, price, spend = (
    import_module(f"pages.{name}") for name in ("compressed", "forks", "numbers", "price", "spend")
)

RESULTS = tables.Results(tables.RESULTS)


def test_committed_pages_are_what_the_committed_figures_give() -> None:
    made = tables.made(RESULTS)
    assert set(made) == set(tables.PAGES), "a page of which a record is missing"
    for name, page in made.items():
        assert (tables.DOCS / name).read_text() == page, f"{name}: run python benchmarks/tables.py"
    assert tables.FIGURE.read_bytes() == tables.spend_figure(RESULTS), "run python benchmarks/tables.py"


def test_what_docs_say_of_compressed_gradients_is_recorded() -> None:
    rows = RESULTS.lines("compressed.jsonl")
    found = judge(forks.losses(rows), compressed.CONTRASTS, low="never", high="dense")
    said = " ".join((ROOT / "docs" / "compressed.md").read_text().split())
    told = {(row.arm, row.control): row for row in found.rows}
    share = {row.arm: round(100 * row.closed[0]) for row in found.rows if row.closed}
    assert (
        f"Never recovering costs {found.gap.estimate:.4f} nats" in said
        and len(told) == 11
        and "over eleven tests" in said
    )
    assert f"A fixed choice {share['pin']} %." in said and f"PowerSGD {share['PowerSGD']} %" in said
    assert f"`pin_excess` of the same gap closes {share['pin and excess']} %, GNMR {share['GNMR']} %," in said
    assert f"random units {share['random units']} %" in said and f"closes {share['gap']} % and is worse" in said
    assert f"basis closes {share['random basis']} % of the gap and no feedback {share['no feedback']} %" in said
    for pair, text in {
        ("gap", "pin"): "is worse (p = {})",
        ("PowerSGD", "more rows"): "sends as much (p = {})",
        ("gap", "PowerSGD"): "than `gap` (p = {})",
        ("gap", "more rows"): "than on a higher rank (p = {})",
    }.items():
        assert text.format(p_text(told[pair].p)) in said, pair
    assert f"**Rank 13 {round(100 * found.fit.closed('more rows', 'never', 'dense')[0])} %.**" in said
    for arm in ("pin", "pin and excess", "gap", "GNMR"):
        assert told[arm, "random units"].verdict == "better"
    assert {row["fork"]["arm"] for row in rows if "pins" in row} == {"pin"}
    assert {tuple(row["pins"]) for row in rows if "pins" in row} == {
        (
            "layers.0.self_attn.v_proj",
            "layers.0.self_attn.o_proj",
            "layers.1.self_attn.v_proj",
            "layers.2.self_attn.v_proj",
        )
    }


def test_what_docs_say_of_a_compressed_steps_cost_is_recorded() -> None:
    figures = {one["name"]: one["value"] for one in RESULTS.read("compressed-hook.json")["figures"]}
    said = " ".join((ROOT / "docs" / "compressed.md").read_text().split())
    low, recovery, refresh, power, mean = (
        f"{figures[f'two processes: {arm}, CPU time over dense']:.2f}x"
        for arm in ("low", "recovery", "refresh", "PowerSGD", "GreedyLore")
    )
    assert f"takes {low} the CPU time of a dense one, one that makes a new basis {refresh};" in said
    assert f"that is {mean} on the mean. PowerSGD of the same rank takes {power}. Recovery takes {recovery}," in said


def test_what_docs_say_of_compression_in_nats_is_recorded() -> None:
    figures = {one["name"]: one["value"] for one in RESULTS.read("compressed-rise.json")["figures"]}
    said = " ".join((ROOT / "docs" / "compressed.md").read_text().split())
    bases = list(dict.fromkeys(name.partition(": ")[0] for name in figures))

    def both(name: str, text: str) -> str:
        return text.format(*(figures[f"{base}: {name}"] for base in bases))

    assert {f"{figures[f'{base}: Spearman, fresh gradient']:.2f}" for base in bases} == {"0.99"}
    assert "single matrices at 0.99 on both bases" in said
    for name, text in {
        "fresh gradient over rises": "their sum is {:.2f} and {:.2f} of the rises'",
        "Spearman, momentum": "the wrong way round ({:.2f}, {:.2f})",
        "Spearman, Adam's gap": "ranks them at {:.2f} and {:.2f}, and makes",
        "Adam's gap over rises": "makes {:.0f} and {:.0f} times too much",
        "Spearman, gap": "scale, is at {:.2f} and {:.2f}.",
        "left of the rise after 1 dense steps, held back": "after one dense step {:.0%} and {:.0%}",
    }.items():
        assert both(name, text).replace("%", " %") in said, name
    left = [
        figures[f"{base}: left of the rise after {steps} dense steps, held back"]
        for base in bases
        for steps in (2, 4, 8)
    ]
    assert f"between {min(left):.0%} and {max(left):.0%} after two".replace("%", " %") in said
    lost = [round(-100 * figures[f"{base}: left of the rise after 8 dense steps, lost"]) for base in bases]
    assert (
        f"by {lost[0]} % and {lost[1]} % of it" in said
        and max(figures[f"{base}: momentum over rises"] for base in bases) < 0
    )


def test_the_dashed_line_is_of_the_pins_that_forks_had(tmp_path: Path) -> None:
    """Of E2M1 the bases are others, of another CPU."""
    shares = RESULTS.figures("price-shares.json")
    for scene in ("nvfp4_curve", "int4"):
        rows = [row for row in RESULTS.lines(f"spend-{scene}.jsonl") if row["fork"]["arm"] == "price"]
        for row in rows:
            fork = row["fork"]
            figure = shares[f"{fork['base']}, {scene}: prices in {fork['budget']:.1%} of the GEMMs"]
            assert figure["note"] == f"spends {row['share']:.1%}: {', '.join(row['pins'])}"
        assert len(rows) >= 30 and list(spend.prices_bought(RESULTS, scene)) == ["5.0%", "10.0%", "25.0%"]
    assert spend.prices_bought(RESULTS, "broken") == {}
    assert spend.prices_bought(tables.Results(tmp_path), "int4") == {}


def test_numbers_in_texts_are_what_the_committed_figures_give() -> None:
    texts, known = {page: page.read_text() for page in numbers.TEXTS}, numbers.numbers(RESULTS)
    for page, text in texts.items():
        assert text == numbers.filled(text, known), f"{page.name}: run python benchmarks/tables.py"
    named = set(re.findall(r"<!--:(.+?)-->", "".join(texts.values())))
    assert named | {"plan/sim_e2m1"} == set(known), "every number has its place"
    readme = texts[numbers.TEXTS[0]]
    wrong = re.sub(r"(?<=<!--:pins/price-->)\d+ %", "12 %", readme)
    assert wrong != readme and numbers.filled(wrong, known) == readme


def test_another_figure_is_another_page(tmp_path: Path) -> None:
    for name in price.TRUTH:
        tree = json.loads((RESULTS.folder / name).read_text())
        tree["figures"][0]["value"] += 0.01
        (tmp_path / name).write_text(json.dumps(tree))
    other = tables.Results(tmp_path)
    assert price.truth(other) != price.truth(RESULTS)
    assert set(tables.made(other)) == {"price-truth.md"}, "pages of which there is no record are left out"


def test_a_low_path_whose_control_is_not_shown_has_no_verdicts() -> None:
    page = tables.PAGES["spend-regimes.md"](RESULTS)
    shown = {}
    for path in RESULTS.folder.glob("spend-regime_*.json"):
        notes = [figure["note"] for figure in RESULTS.figures(path.name).values() if "control" in figure["name"]]
        shown[path.stem.removeprefix("spend-regime_")] = not any("not shown" in note for note in notes)
    assert {*shown.values()} == {True, False}
    for low, control in shown.items():
        (row,) = re.findall(rf"^\| {low} \|.*$", page, re.MULTILINE)
        assert ("%" in row) == control and (f"### regime_{low}\n" in page) == control, low


def test_a_record_names_no_place_of_the_machine() -> None:
    tree = record({}, "gnmr bench price run=/scratch/me/a,/scratch/me/b out=/home/of/me/x.json", {})
    assert tree["command"] == "gnmr bench price run=a,b out=x.json"
