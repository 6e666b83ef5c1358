"""Tables of docs/results and numbers of other texts that come from benchmarks/results: python benchmarks/tables.py
writes them.

    python benchmarks/tables.py [RESULTS [DOCS]]    from another folder (benchmarks/evidence.py fills one)

A number in a text is <!--:NAME-->, and behind it ?<!--/-->; `numbers` has the names. A page of which RESULTS has no
record is left out. tests/bench/test_tables.py fails where a committed table or number is not what the committed figures
give.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnmr.bench.compressed import CONTRASTS
from gnmr.bench.fair import FAMILIES, MORE, WHOLE, arms_of
from gnmr.bench.price import SCORE_OF
from gnmr.bench.rise import LATER
from gnmr.bench.rise import SCORES as RISES
from gnmr.bench.scenes import EACH, HELD, SCENES
from gnmr.report.family import Family, judge
from gnmr.report.family_notes import assumptions, p_text, positive_control, power, row_numbers
from gnmr.report.layout import Table
from gnmr.report.statistics import BETTER

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "img" / "spend.svg"
TRUTH = ("price-truth-early.json", "price-truth-late.json")
SAMPLING, ATLAS = ("price-sampling.json", "price-sampling-shipped.json"), ("price-atlas.json",)
CADENCE = ("price-cadence.json", "price-cadence-shipped.json")
SPEND = tuple(f"spend-{scene}.json" for scene in ("sim_e2m1", "nvfp4", "nvfp4_curve", "int4", "broken"))
TABLE11, REGIMES = ("spend-table11.json",), "spend-regime_*.json"
COMPRESSED = ("compressed.json", "compressed-hook.json", "compressed-rise.json")
BLAME = ("blame-planted-cpu.json", "blame-spikes-cpu.json")
DIVERGENCE = ("divergence-search.json", "divergence-language.json", "divergence-survival.json")
RIVALS = {"GNMR, 4 of 8 operators": "random, 4 of 8 operators", "GNMR, fprop of 6": "random, fprop of 6"}
RIVALS |= {name.replace("GNMR", "price"): other for name, other in RIVALS.items()}
"""Arms of the survival table that are tested against random at the same spend too."""
MARKS = {"price": "o", "gap": "s", "gradient norm": "^", "MSE": "D", "GNMR": "<", "first_last": "v", "random": "x"}
"""What the figure shows, and its mark; a scene's controllers are dashed where it has pins of the same name."""
LASTING = ("price", "gap", "gradient norm", "MSE", "GNMR, each step", "first_last", "random")
PASSING = (*(f"{name}{EACH}" for name in ("price", "gap", "MSE", "GNMR", "random")), "price", "random")
ARMS = {"broken": PASSING}
"""Of the figure, by scene; others are lasting."""
TITLES = {
    "sim_e2m1": "the error lasts: E2M1 operands",
    "nvfp4_curve": "the error lasts: NVFP4",
    "int4": "the error lasts: 4-bit inputs",
    "broken": "one FP8 operator breaks for 20 of 40 steps",
}
TEXTS = tuple(
    ROOT / name for name in ("README.md", "docs/evidence.md", "docs/cost.md", "docs/diagnose.md", "docs/price.md")
)
"""In which marked numbers stand."""
_MARK = re.compile(r"(<!--:([^>\n]+?)-->)(.*?)(<!--/-->)")
_SCORES = ("price", "price, by elements", "ModelOpt's score", "gap", "gradient norm", "MSE", "underflow", "update norm")
_CHOSEN = ("price", "gap", "gradient norm", "MSE", "the truth itself")
_BY_SCORE = {"price, by elements": "by elements", "ModelOpt's score": "ModelOpt", "the truth itself": "the truth"}


def price_truth() -> str:
    """docs/results/price-truth.md"""
    text = [
        "# Price against the truth",
        "",
        "One operator at a time is put on the low path, the others in 16 bits; its *rise* is what the loss is higher",
        "then, over held-out blocks. Scores are measured on other blocks, in one backward pass. The base's name is its",
        "seed and its age in steps, of a schedule of 1,000. *Found* is the share of all rises in the operators that a",
        "score per cost chooses for 10 % of the GEMMs' arithmetic. *Clear* counts operators whose rise is above two",
        "standard errors: where they are few, rank correlations say nothing, and below ten shares are left out.",
    ]
    records = _records(TRUTH)
    figures = {figure["name"]: figure for record in records for figure in record["figures"]}
    cells = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    heads = ["base", "low path", "all rises, nats", "clear", *(_BY_SCORE.get(name, name) for name in _SCORES)]
    text += ["", "## Spearman with the rises", "", *_head(heads)]
    for cell in cells:
        note = figures[f"{cell}: Spearman, price"]["note"].split()
        total = note[note.index("up") + 2]
        values = (f"{figures[f'{cell}: Spearman, {name}']['value']:.2f}" for name in _SCORES)
        text.append(_row([*cell.split(", "), total, f"{note[0]} of {note[2]}", *values]))
    heads = [
        "base",
        "low path",
        *(_BY_SCORE.get(name, name) for name in _CHOSEN),
        "prices / rises",
        "rises / all at once",
    ]
    text += ["", "## Found in 10 % of the GEMMs, and sums", "", *_head(heads)]
    for cell in (cell for cell in cells if _clear(figures, cell) >= 10):
        found = (f"{figures[f'{cell}: rises in 10% of the GEMMs, {name}']['value']:.0%}" for name in _CHOSEN)
        sums = (
            f"{figures[f'{cell}: {what}']['value']:.2f}" for what in ("prices over rises", "rises over all at once")
        )
        text.append(_row([*cell.split(", "), *found, *sums]))
    return "\n".join([*text, "", *_origin(records)])


def spend() -> str:
    """docs/results/spend.md"""
    text = [
        "# Gap closed against spend",
        "",
        "Forks of trained bases: the share of the gap from always-low to always-high (validation loss on the 16-bit",
        "path) that an arm closes, mean over bases and orders of the data, with 95 % intervals: by the residual of",
        "one model of all arms, or where that model is refused by Fieller of each arm's own differences (half their",
        "width is shown).",
        "gnmr/bench/spend.py says what the arms are. A star: p < 0.01 against `price`, in the scene `broken` against",
        "`price, each step`, at the same budget, Holm over the table.",
    ]
    records = _records(SPEND)
    for record in records:
        figures = {figure["name"]: figure for figure in record["figures"]}
        scene = _scene(record)
        told = [f for name, f in figures.items() if name.endswith("gap, nats")]
        power = figures[f"{scene}: smallest effect at 80 % power"]
        gaps = ", ".join(
            f"{f['name'].removeprefix(scene + ', ').removesuffix(': gap, nats')} {f['value']:.4f}" for f in told
        )
        text += ["", f"## {scene}", "", f"Gap, nats: {gaps}. n = {power['n']} blocks; {power['note']}."]
        text += [f"Smallest difference of two arms that is shown with 80 % power: {power['value']:.1%} of the gap.", ""]
        arms = [
            name.removeprefix(f"{scene}: ").rsplit(" at ", 1)
            for name in figures
            if " at " in name and name != power["name"]
        ]
        budgets = [b for b in dict.fromkeys(budget for _, budget in arms) if (["price", b]) in arms]
        text += _head(["arm", *(f"{float(budget[:-1]):g} %" for budget in budgets)])
        for arm in dict.fromkeys(arm for arm, budget in arms if budget in budgets):
            text.append(_row([arm, *(_closed(figures[f"{scene}: {arm} at {budget}"]) for budget in budgets)]))
        whole = [(arm, budget) for arm, budget in arms if budget not in budgets]
        if whole:
            text += ["", *_head(["GEMM of every operator", "share of the arithmetic", "gap closed"])]
            text += [_row([arm, budget, _closed(figures[f"{scene}: {arm} at {budget}"])]) for arm, budget in whole]
    return "\n".join([*text, "", *_origin(records)])


def sampling() -> str:
    """docs/results/price-sampling.md"""
    records = _records(SAMPLING)
    text = [
        "# Prices of few tokens against those of all",
        "",
        "Of one batch each operator's price is measured on one token in k, and on all tokens: the rank correlation",
        "of both over operators, and the median of |log ratio|, each a mean over batches.",
        "",
        *_head(["base", "low path", "one token in", "Spearman", "median factor", "batches"]),
    ]
    figures = {figure["name"]: figure for record in records for figure in record["figures"]}
    for name, figure in figures.items():
        where, _, what = name.rpartition(", ")
        if what.startswith("Spearman"):
            base, low, stride = where.replace(": one token in ", ", ").split(", ")
            factor = math.exp(figures[f"{where}, median |log ratio|"]["value"])
            text.append(_row([base, low, stride, f"{figure['value']:.2f}", f"{factor:.2f}", str(figure["n"])]))
    steps = _records(CADENCE) if any((RESULTS / name).exists() for name in CADENCE) else []
    text += _cadence(steps) if steps else []
    return "\n".join([*text, "", *_origin([*records, *steps])])


def _cadence(records: list[dict[str, Any]]) -> list[str]:
    """Lines: the price that the signal holds, by how often it measures."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for figure in (figure for record in records for figure in record["figures"]):
        base, how = figure["name"].split(", ")[:2]
        low, every = how.split(": one step in ")
        found.setdefault((base, low), {})[int(every)] = figure
    cadences = sorted({one for figures in found.values() for one in figures})
    return [
        "",
        "## One step in so many",
        "",
        "In a fork on the low path the signal measures its first ten steps and then one step in k. Spearman, over",
        "operators, of the price that it then holds with the mean price of each of the next 20 steps; a mean over",
        "stretches of 20 steps.",
        "",
        *_head(["base", "low path", *(f"k = {one}" for one in cadences), "stretches"]),
        *(
            _row([*key, *(f"{figures[one]['value']:.2f}" for one in cadences), str(figures[cadences[0]]["n"])])
            for key, figures in found.items()
        ),
    ]


def atlas() -> str:
    """docs/results/price-atlas.md"""
    records = _records(ATLAS)
    scores = ("gradient norm", "update norm", "gap", "MSE")
    text = [
        "# What training gains of one GEMM in 16 bits, against scores of the base",
        "",
        "Forks of 40 steps with one GEMM of one operator in 16 bits. Its gain: by how much the loss is lower than",
        "without, a mean over orders of the data. Spearman over the operators with scores of the base: its own price,",
        "which is fprop's in nats, the relative squared error of dgrad's gradient, and the squared error of wgrad's",
        "gradient. *Two orders*: how their gains rank alike. *Most*: what a score would have that knew the true gains,",
        "by Spearman and Brown from two orders; where it is near 0 the gains are noise. All gains of an order are",
        "taken from one fork, whose noise they share: it moves their level and not their ranks. Scores are of 16 of",
        "the 64 validation blocks that the loss is of.",
        "",
        *_head(["base, low path, GEMM", "its own price", *scores, "two orders", "most", "orders", "gains"]),
    ]
    figures = {figure["name"]: figure for record in records for figure in record["figures"]}
    for where in dict.fromkeys(name.partition(": ")[0] for name in figures):
        own = figures[f"{where}: Spearman, {SCORE_OF[where.rpartition(', ')[2]]}"]
        found = [own, *(figures[f"{where}: Spearman, {name}"] for name in scores)]
        found += [
            figures.get(f"{where}: {name}", {}) for name in ("Spearman, two orders", "most that a score can have")
        ]
        ranks = (f"{figure['value']:.2f}" if figure else "-" for figure in found)
        text.append(_row([where, *ranks, str(own["n"]), own["note"]]))
    return "\n".join([*text, "", *_origin(records)])


def table11() -> str:
    """docs/results/spend-table11.md"""
    records = _records(TABLE11)
    text = [
        "# Table 11 as forks",
        "",
        "Signals at one budget, four of 28 units, 4-bit inputs in the forward pass too, 8 bits for recovery: forks",
        "of 40 steps, a new set in every step or one that holds for 20. A block is an order of the data of a base.",
        "*Spends* is the share of the GEMMs' arithmetic, which differs since units differ in size; `price, 8 %` has",
        "less of it than any four units. Against never, and against random of its kind.",
        "",
        _family("Table 11 as forks", _forks(records[0]))[1].markdown(),
    ]
    return "\n".join([*text, *_origin(records)])


def regimes() -> str:
    """docs/results/spend-regimes.md"""
    records = _records(sorted(path.name for path in RESULTS.glob(REGIMES)))
    told = {_scene(record): _family(_scene(record), _forks(record)) for record in records}
    text = [
        "# Low paths as forks",
        "",
        "A tenth of the GEMMs' arithmetic, spent by pins of the base and by controllers, on many low paths: which of",
        "them has a gap to close within 40 steps, and who closes it. Against never, and against random of its kind.",
        "The positive control comes first, always against never: where it is not shown no other arm is made.",
        "",
        *_map({scene: family for scene, (family, _) in told.items()}),
    ]
    for _, table in told.values():
        text += ["", table.markdown()]
    return "\n".join([*text, *_origin(records)])


def _map(families: Mapping[str, Family]) -> Iterator[str]:
    """Of each scene the gap and what is closed of it."""
    arms = ("price", "MSE", "gap", "random", *(f"{name}{EACH}" for name in ("price", "GNMR", "MSE", "random")))
    yield from _head(["scene", "n", "gap, nats", "p of the control", *arms])
    for scene, family in families.items():
        closed = {row.arm: f"{row.closed[0]:.0%}" for row in family.rows if row.closed is not None and family.gate}
        tests = [row for row in family.rows if row.control.startswith("random") and row.verdict == BETTER]
        better = {row.arm for row in tests if row.p is not None and row.p < 0.01}
        gap = "-" if family.gap is None else f"{family.gap.estimate:.3f}"
        found = (closed.get(arm, "-") + (" *" if arm in better else "") for arm in arms)
        yield _row([scene, str(family.n), gap, p_text(family.p_gate), *found])
    yield ""
    yield "A star: better than random of its kind, p < 0.01 by Holm over the scene's tests."


def _scene(record: dict[str, Any]) -> str:
    return str(record["file"]).removeprefix("spend-").removesuffix(".json")


def _forks(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows beside a record."""
    lines = (RESULTS / record["file"]).with_suffix(".jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _family(title: str, rows: Sequence[dict[str, Any]]) -> tuple[Family, Table]:
    """One model of all arms, each against never and against random of its kind (anew, held or pinned)."""
    values = _losses(rows)
    arms = [arm for arm in values if arm not in ("never", "always")]
    drawn = {arm: "random" + next((end for end in (EACH, HELD) if arm.endswith(end)), "") for arm in arms}
    pairs = [(arm, "never") for arm in arms]
    pairs += [(arm, one) for arm, one in drawn.items() if one in values and one != arm]
    family, table = _tested(title, rows, pairs, "always", "share")
    if family.gate and (left := [arm for arm, _ in SCENES[rows[0]["fork"]["low"]].arms() if arm not in values]):
        table.notes.append(f"Arms of the scene that are not made yet: {'; '.join(left)}.")
    return family, table


def _losses(rows: Sequence[dict[str, Any]]) -> dict[str, dict[Any, float]]:
    """Of forks, by arm and block."""
    values: dict[str, dict[Any, float]] = {}
    for row in rows:
        fork = row["fork"]
        values.setdefault(fork["arm"], {})[fork["base"], fork["order"]] = row["loss"]
    return values


def _tested(
    title: str, rows: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]], high: str, spent: str
) -> tuple[Family, Table]:
    """One model of all arms of these forks, `spent` the key of what an arm costs, `high` the upper bound."""
    spends: dict[str, list[float]] = {}
    for row in rows:
        spends.setdefault(row["fork"]["arm"], []).append(row[spent])
    values = _losses(rows)
    family = judge(values, [pair for pair in pairs if values.keys() >= set(pair)], low="never", high=high)
    columns = ["arm", "against", "n", "sends" if spent == "sent" else "spends", "difference [95 %]", "p (Holm)"]
    table = Table(title, [*columns, "gap closed [95 %]", "p, equal to 10 %", "verdict"])
    for row in family.rows:
        told = row_numbers(row)
        closed = f"{told['closed']} {told['closed_interval']}".strip()
        cells = [
            f"{sum(spends[row.arm]) / len(spends[row.arm]):.1%}",
            f"{told['difference']} {told['interval']}".strip(),
        ]
        table.rows.append(
            [row.arm, row.control, told["tested"], *cells, told["p"], closed, told["p_equal"], told["verdict"]]
        )
    table.notes = [positive_control(family, "never", high), *power(family), *assumptions(family.fit)]
    table.notes += [f"Commits of the forks: {', '.join(dict.fromkeys(row['commit'] for row in rows))}."]
    return family, table


def compressed() -> str:
    """docs/results/compressed.md"""
    records = _records(COMPRESSED)
    text = [
        "# Compressed gradients: gap closed",
        "",
        "Forks of two trained bases (0.9 M LLaMA in 16 bits, 24 steps, two virtual workers): the share of the gap",
        "from never recovering (one row of each matrix is sent) to dense gradients that an arm closes, validation",
        "loss, mean over bases and orders of the data; a block is one of each. *Sends* is of dense gradients, the",
        "difference of perplexity. Routed arms have a tenth of what recovery of everything would send more,",
        "`more rows` and PowerSGD the largest rank that sends no more; gnmr/bench/compressed.py has the arms.",
        "",
        _tested("Arms", _forks(records[0]), CONTRASTS, "dense", "sent")[1].markdown(),
        *_hook(_read("compressed-hook.json")),
        *_rise(_read("compressed-rise.json")),
    ]
    return "\n".join([*text, *_origin(records)])


def _hook(record: dict[str, Any]) -> list[str]:
    """What compressing costs a step."""
    figures = {figure["name"]: figure for figure in record["figures"]}

    def ratio(where: str, arm: str, told: str) -> str:
        one = figures.get(f"{where}: {arm}, {told} over dense")
        if one is None:
            return "-"
        between = "" if one["low"] is None else f" ({one['low']:.2f} to {one['high']:.2f})"
        return f"{one['value']:.2f}x{between}"

    machine, steps = record["machine"], figures["two processes: GreedyLore, CPU time over dense"]["note"].split()[-2]
    load = f"{machine['cores']} cores with a load of {machine['load_average'][0]:.0f}"
    text = [
        "## What compressing costs a step",
        "",
        "`gnmr bench hook`: steps over dense ones that take turns with them (0.9 M LLaMA, four rows of each matrix),",
        "two workers, medians with their 95 % intervals. Processes are gloo's, on one machine: the wall clock has",
        f"waiting in it, on {load} beside it, CPU time has not. No network is spared",
        "anything here, so what compressing wins is not in it.",
        "",
        *_head(["arm", "sends", "two processes", "their CPU time", "virtual workers", "their CPU time"]),
    ]
    for arm in ("low", "recovery", "refresh", "PowerSGD", "GreedyLore"):
        sends = figures.get(f"two processes: {arm}, step over dense", {"note": "sends -"})["note"].split()[1]
        cells = [
            ratio(where, arm, told) for where in ("two processes", "virtual workers") for told in ("step", "CPU time")
        ]
        text.append(_row([f"all, a basis every {steps} steps" if arm == "GreedyLore" else arm, sends, *cells]))
    return [*text, ""]


def _rise(record: dict[str, Any]) -> list[str]:
    """What compressing one matrix does to the loss of a step."""
    figures = {figure["name"]: figure for figure in record["figures"]}
    bases = list(dict.fromkeys(name.partition(": ")[0] for name in figures))
    text = [
        "## What compressing one matrix does to the loss of a step",
        "",
        "`gnmr bench rise`: in four steps of each base that never recovers, the rise of the held-out loss when one",
        "matrix at a time takes the low path, against a dense step; what could tell it, by rank, and its sum over that",
        "of the rises, of what is in nats. gnmr/bench/rise.py has the definitions, docs/compressed.md the derivation.",
        "",
        *_head(["estimate", *(f"{base}: Spearman" for base in bases), *(f"{base}: over rises" for base in bases)]),
    ]
    for score in RISES:
        ranks = [f"{figures[f'{base}: Spearman, {score}']['value']:.2f}" for base in bases]
        sums = [figures.get(f"{base}: {score} over rises") for base in bases]
        text.append(_row([score, *ranks, *("-" if one is None else f"{one['value']:.2f}x" for one in sums)]))
    text += ["", "All matrices in one step, and what is left of that rise after as many dense steps:", ""]
    text += _head(
        ["base", "rise, nats", *(f"{what}, {steps}" for what in ("held back", "lost") for steps in LATER[1:])]
    )
    for base in bases:
        whole = figures[f"{base}: rise of all matrices in one step, nats"]
        names = (f"{steps} dense steps, {what}" for what in ("held back", "lost") for steps in LATER[1:])
        left = [f"{figures[f'{base}: left of the rise after {name}']['value']:.0%}" for name in names]
        text.append(_row([base, f"{whole['value']:.4f}", *left]))
    notes = (figures[f"{base}: rise of all matrices in one step, nats"]["note"] for base in bases)
    return [*text, "", *(f"- {base}: {note}." for base, note in zip(bases, notes, strict=True)), ""]


def fair() -> str:
    """docs/results/fair.md"""
    rows, families = _lines("fair.jsonl"), _read("fair.json")
    recorded = _read("fair-lengths.json")
    figures = {figure["name"]: figure for figure in recorded["figures"]}
    apart = figures["recorded: gap after 500 steps less that after 250"]
    low, high = apart["low"], apart["high"]
    own, pins, each = _ranks()
    moved = [r["second_moments_fell"] for r in rows if r["cell"]["optimizer"] == "beta2 0.95"]
    stuck = [r["second_moments_fell"] for r in rows if r["cell"]["optimizer"] == "beta2 0.999"]
    text = [
        "# Fair baselines, fair stress",
        "",
        "What in the evidence is the optimizer's, the rounding's, the length's or the evaluation's. Losses are",
        "validation losses on the 16-bit path, nats. 2-bit saved activations, 8 bits on the recovery path.",
        "",
        "## Optimizer, switching and rounding",
        "",
        f"In the last steps of {len(stuck)} forks and runs with beta2 0.999 at most {max(stuck):.0%} of Adam's second",
        f"moments fell, of {len(moved)} with 0.95 {min(moved):.0%} to {max(moved):.0%}: they are bfloat16,",
        "which rounds a thousandth away.",
        "",
        *_from_scratch({figure["name"]: figure for figure in families["figures"]}),
    ]
    text += [
        "",
        "## A trained base",
        "",
        "Forks of seed0_600, beta2 0.999, never minus always by order of the data.",
        "",
    ]
    text += _head(["steps", *(f"order {n}" for n in range(3))])
    forks = {(r["cell"]["arm"], r["cell"]["order"]): r["after"] for r in rows if r["cell"]["base"] == "seed0_600"}
    for step in ("20", "40"):
        gaps = (forks["never", n][step] - forks["always", n][step] for n in range(3))
        text.append(_row([step, *(f"{gap:+.4f}" for gap in gaps)]))
    text += [
        "",
        "## Length and annealing, from the packed records",
        "",
        "Rate 1.5e-3, five seeds of schedules of 500 steps, three of 1,000. The gap grows by",
        f"{apart['value']:.3f} nats ({low:.3f} to {high:.3f}, {apart['note']}) from step 250 to 500.",
        "",
        *_head(["run", *(f"{n} steps" for n in (200, 250, 300, 500, 1000))]),
    ]
    for arm in ("never", "always", "1,000 steps, 8 bits", "1,000 steps, 16 bits"):
        found = (figures.get(f"schedules: {arm} after {n} steps") for n in (200, 250, 300, 500, 1000))
        name = f"500 steps, {arm}" if arm in ("never", "always") else arm
        text.append(_row([name, *("-" if one is None else f"{one['value']:.3f}" for one in found)]))
    text += [
        "",
        "## Evaluation on the low path",
        "",
        "E2M1 operands, forks of docs/results/spend.md at 10 % of the GEMMs: share of the gap that is closed, mean",
        "over all blocks. On the low path what is pinned stays in 16 bits; what a controller chose in every step does",
        "not.",
        f"Spearman of the two columns over all budgets: {pins:.2f} for pins, {each:.2f} for controllers.",
        "",
        *_head(["arm", "in 16 bits", "on the low path"]),
        *(_row([arm, f"{loss:.0%}", f"{low:.0%}"]) for arm, (loss, low) in own.items()),
    ]
    commits = ",".join(dict.fromkeys(r["commit"] for r in rows))
    origin = [*_origin([families, recorded])]
    origin[-1:] = [
        f"- benchmarks/results/fair.jsonl: rows of commits {commits}.",
        "- benchmarks/results/spend-sim_e2m1.jsonl: as docs/results/spend.md.",
        "",
    ]
    return "\n".join([*text, "", *origin])


def _from_scratch(figures: dict[str, Any]) -> Iterator[str]:
    """Families of `gnmr bench fair only=scratch,more`: arms, what is tested, and what could have been seen."""
    last, names = f", {WHOLE[-1]} steps", FAMILIES | MORE
    arms = [f"after {step}" for step in WHOLE]
    yield f"Runs of {WHOLE[-1]} steps of a schedule of 1,000, from scratch; blocks are seeds. The gap is never's loss"
    yield "less always's, a share of it is what an arm closes, and each family is one model of all its arms."
    yield ""
    yield from _head(["family", "arm", *arms, "gap closed \\[95 %\\]", "second moments that fall"])
    for family, (_, contrasts) in names.items():
        for arm in arms_of(contrasts):
            losses = (f"{figures[f'{family}, {step} steps: loss, {arm}']['value']:.3f}" for step in WHOLE)
            fell = figures[f"{family}{last}: second moments that fell, {arm}"]["value"]
            yield _row([family, arm, *losses, _share_of(figures.get(f"{family}{last}: {arm}")), f"{fell:.0%}"])
    yield ""
    yield from _head(["family", "arm", "against", "share of the gap \\[95 %\\]", "n", "test (p by Holm)"])
    for family, (_, contrasts) in names.items():
        for arm, control in contrasts:
            if (one := figures.get(f"{family}{last}: {arm} - {control}")) is not None:
                yield _row([family, arm, control, _share_of(one), str(one["n"]), one["note"]])
    yield ""
    for family in names:
        if (gap := figures.get(f"{family}{last}: gap")) is None:
            continue
        between = f"{gap['low']:.3f} to {gap['high']:.3f}, {gap['note']}"
        told = f"- {family}: always is better by {gap['value']:.3f} nats ({between})"
        least = figures.get(f"{family}{last}: smallest effect at 80 % power")
        yield told + ("." if least is None else f"; smallest effect {least['value']:.0%} of it; {least['note']}.")
    if (cost := figures.get("cost of switching: beta2 0.999 less 0.95")) is not None:
        yield f"- Random less random held, nats, under beta2 0.999 less under 0.95: {cost['value']:+.3f}"
        yield f"  ({cost['low']:+.3f} to {cost['high']:+.3f}, {cost['note']})."


def _share_of(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{one['value']:.0%}" + (
        "" if one["low"] is None else f" ({100 * one['low']:.0f} to {100 * one['high']:.0f})"
    )


def _ranks() -> tuple[dict[str, tuple[float, float]], float, float]:
    """Of forks on E2M1 the shares closed in 16 bits and on the low path at 10 %, by arm; Spearman of the two over all
    budgets, of pins and of controllers."""
    from scipy.stats import spearmanr

    losses: dict[tuple[str, float], dict[str, list[float]]] = {}
    for row in _lines("spend-sim_e2m1.jsonl"):
        of = losses.setdefault((row["fork"]["arm"], row["fork"]["budget"]), {"loss": [], "own_loss": []})
        for key, found in of.items():
            found.append(row[key])
    mean = {arm: {key: sum(found) / len(found) for key, found in of.items()} for arm, of in losses.items()}
    never, always = mean["never", 0.0], mean["always", 1.0]
    shares = {
        arm: tuple((never[key] - of[key]) / (never[key] - always[key]) for key in ("loss", "own_loss"))
        for arm, of in mean.items()
        if arm[1] in (0.025, 0.05, 0.075, 0.1, 0.15, 0.25)
    }
    told = [
        float(
            spearmanr(*zip(*(share for arm, share in shares.items() if arm[0].endswith(EACH) == each), strict=True))[0]
        )
        for each in (False, True)
    ]
    return {arm[0]: (share[0], share[1]) for arm, share in shares.items() if arm[1] == 0.1}, told[0], told[1]


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def blame() -> str:
    """docs/results/blame.md"""
    planted, spikes = records = _records(BLAME)
    text = [
        "# Verdicts on planted causes and on ordinary spikes",
        "",
        "Tiny trained runs. A cause is planted in a step that would hardly differ from the one before; what makes",
        "no spike has no verdict. *Single* and *pairs*: of one and of two broken operators, verdicts that name all",
        "that make a spike alone, and none that was not broken. *Not finite*: faults of the forward pass, and steps",
        "that they cost.",
        "",
        *_head(["run", "spiked", "right verdict", "single", "pairs", "step times, at most", "not finite, lost"]),
    ]
    total: dict[str, list[int]] = {}
    for name, arm in planted["arms"].items():
        found, figures = [row for row in arm["planted"] if row["verdict"]], arm["figures"]
        told = {
            "spiked": [len(found), len(arm["planted"])],
            "right": [sum(row["verdict"] == row["cause"] for row in found), len(found)],
            "single": figures["single"],
            "pairs": figures["pairs"],
            "lost": [figures["not finite"]["lost"], figures["not finite"]["n"]],
        }
        for key, (number, of) in told.items():
            total[key] = [a + b for a, b in zip(total.get(key, [0, 0]), (number, of), strict=True)]
        text.append(_row([name, *_of(told, figures["most step times"])]))
    most = max(arm["figures"]["most step times"] for arm in planted["arms"].values())
    text.append(_row(["all", *_of(total, most)]))
    causes = dict.fromkeys(("data", "precision", "not_reproducible"), 0)
    steps = 0
    for arm in spikes["arms"].values():
        steps += arm["figures"]["steps"]
        for cause, number in arm["figures"]["causes"].items():
            causes[cause] += number
    n = sum(causes.values())
    text += [
        "",
        f"{n} ordinary spikes (above 3 standard deviations) of sound runs, in {steps:,} steps: {causes['data']} data,",
        f"{causes['precision']} precision (a false verdict), {causes['not_reproducible']} not reproducible.",
    ]
    return "\n".join([*text, "", *_origin(records)])


def numbers() -> dict[str, str]:
    """Every number that a text may name, as it stands there."""
    found: dict[str, str] = {}
    spent = _figures("spend-sim_e2m1.json")
    for name, arm in (("price", "price"), ("GNMR", "GNMR, each step"), ("random", "random")):
        found[f"pins/{name}"] = _percent(spent[f"sim_e2m1: {arm} at 10.0%"]["value"])
    few = ("MSE", "gap", "random", "GNMR, each step")
    more = ("gradient norm", "price, each step", "first")
    for where, scene, arms in (("inputs", "int4", few + more), ("nvfp4", "nvfp4_curve", few)):
        figures = _figures(f"spend-{scene}.json")
        found[f"{where}/price"] = _percent(figures[f"{scene}: price at 10.0%"]["value"])
        for arm in arms:
            figure = figures[f"{scene}: {arm} at 10.0%"]
            found |= {
                f"{where}/{arm}": _percent(figure["value"]),
                f"{where}/{arm}/p": figure["note"].rpartition(" ")[2],
            }
    gains = _figures("price-atlas.json")
    found["atlas/most"] = f"{gains['seed0_600, sim_e2m1, fprop: most that a score can have']['value']:.2f}"
    for name in ("price", "gradient norm", "gap", "MSE"):
        found[f"atlas/{name}"] = f"{gains[f'seed0_600, sim_e2m1, fprop: Spearman, {name}']['value']:.2f}"
    for recipe, shares in plans_close("nvfp4", "sim_e2m1").items():
        closed = [round(100 * share) for share in shares]
        found[f"plan/{recipe}"] = f"{min(closed)} to {max(closed)} %"
        found[f"plan/{recipe}/orders"] = ", ".join(map(str, closed)) + " %"
    found["verdict"] = _read("diagnosis-nvfp4.json")["verdict"].partition(":")[0]
    faults = _read("detection-cpu.json")["signals"]
    for key, signal in (("GNMR", "gnmr"), ("dGNMR", "gnmr_delta"), ("path", "grad_to_noise")):
        found[f"faults/{key}"] = str(sum(kind["detected"] for kind in _finite(faults[signal])))
    found["faults"] = str(sum(kind["windows"] for kind in _finite(faults["gnmr"])))
    for name, record in (("outliers", "detection-outliers-cpu"), ("outliers/bf16", "detection-outliers-bf16-cpu")):
        windows = _read(f"{record}.json")["signals"]["gnmr"]["all"]
        found[f"{name}/GNMR"] = f"{windows['detected']}"
        found["outliers"] = f"{windows['windows']}"
    planted, spikes = (_read(name)["arms"].values() for name in BLAME)
    verdicts = [row for arm in planted for row in arm["planted"] if row["verdict"]]
    right = sum(row["verdict"] == row["cause"] for row in verdicts)
    found["planted"] = f"{right} of {len(verdicts)}"
    causes = [arm["figures"]["causes"] for arm in spikes]
    found["spikes"] = str(sum(sum(one.values()) for one in causes))
    found["spikes/precision"] = str(sum(one.get("precision", 0) for one in causes))
    for name, record in (
        ("two", "controller-cpu"),
        ("one", "controller-one-thread-cpu"),
        ("avx2", "controller-avx2-cpu"),
    ):
        figures = _figures(f"{record}.json")
        whole = figures["step with over step without"]
        found[f"step/{name}"] = f"{100 * (whole['value'] - 1):.1f} %"
        found[f"step/{name}/interval"] = f"({100 * (whole['low'] - 1):+.1f} to {100 * (whole['high'] - 1):+.1f})"
        found[f"step/{name}/parts"] = f"{100 * figures['controller and records, share of a step']['value']:.2f} %"
    found["step/int4"] = f"{_figures('all-cpu.json')['step with int4 over bf16']['value']:.2f}x"
    return found


def plans_close(*recipes: str) -> dict[str, list[float]]:
    """By recipe the shares of the gap to 16 bits that the plan of `gnmr diagnose` closed, by order of the data."""
    from gnmr.records.find import find_runs
    from gnmr.records.pack import unpacked
    from gnmr.report.comparisons import compare
    from gnmr.report.forks import losses_after
    from gnmr.report.runs import load

    with unpacked([ROOT / "runs" / "reference" / "diagnosed_plans.parquet"]) as found:
        arms = [arm for comparison in compare(map(load, find_runs(found.paths))) for arm in comparison.arms]
        losses = {arm.name: losses_after(arm, "low", "val_loss") for arm in arms}
    closed = {}
    for recipe in recipes:
        low, plan, high = (losses[f"{recipe}_bf16{arm}"] for arm in ("-always_low", "_pins-always_low", "-always_high"))
        closed[recipe] = [(low[order] - plan[order]) / (low[order] - high[order]) for order in sorted(low)]
    return closed


def _finite(kinds: dict[str, dict[str, int]]) -> Iterator[dict[str, int]]:
    """Of the faults whose numbers are finite."""
    return (found for kind, found in kinds.items() if kind not in ("all", "nan", "inf"))


def _figures(name: str) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in _read(name)["figures"]}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def filled(text: str, known: dict[str, str]) -> str:
    """The text with its marked `numbers`. KeyError for a name that there is not."""
    return _MARK.sub(lambda found: f"{found[1]}{known[found[2]]}{found[4]}", text)


def _of(told: dict[str, list[int]], most: float) -> Iterator[str]:
    for key, (number, of) in told.items():
        if key == "lost":
            yield f"{most:.1f}"
        yield f"{number} of {of}"


def divergence() -> str:
    """docs/results/divergence.md"""
    search, language, survival = records = [_read(name) for name in DIVERGENCE]
    text = [
        "# Where low precision diverges",
        "",
        "The student and teacher of 2506.20752 made small (residual blocks, layer norm's parameters cast too), on",
        "fresh Gaussian inputs; benchmarks/divergence.py has the setting. *Diverged*: ten steps in a row that are not",
        "finite, or the mean error of the run's last tenth above three times the lowest mean of any tenth. Formats",
        "cast every operand of every GEMM; mxint3 and mxint2: 3 and 2 bits under MX's scales of 32 elements.",
        "",
        "## Always low, by optimizer, rate and format",
        "",
        "One seed. The error of the last tenth, in brackets over the lowest; or the first step that was not finite.",
        "",
        *_by_rate(search, {"adam": "Adam", "sgd": "SGD, momentum 0.9"}),
        "",
        "A small LLaMA of `gnmr train` under AdamW, perplexity:",
        "",
        *_by_rate(language, {"adam": "AdamW"}),
        "",
        "## Who survives",
        "",
        *_survivors(survival["rows"]),
    ]
    return "\n".join([*text, "", *_origin(records)])


def _by_rate(record: dict[str, Any], optimizers: dict[str, str]) -> Iterator[str]:
    """A row an optimizer and rate, a column a format."""
    cells = {(row["run"]["optimizer"], row["run"]["rate"], row["run"]["low"]): row for row in record["rows"]}
    lows = list(dict.fromkeys(low for _, _, low in cells))
    yield from _head(["optimizer", "rate", *lows])
    for optimizer, rate in dict.fromkeys((optimizer, rate) for optimizer, rate, _ in cells):
        told = [_course(cells[optimizer, rate, low]) for low in lows]
        yield _row([optimizers[optimizer], f"{rate:g}", *told])


def _course(row: dict[str, Any]) -> str:
    errors = row["errors"]
    if row["not_finite"] is not None and row["diverged"]:
        return f"**diverged**, step {row['not_finite']}"
    told = f"{errors[-1]:.3g} ({errors[-1] / min(errors):.1f})"
    return f"**diverged**, {told}" if row["diverged"] else told


def _survivors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row an arm: its spend, how many seeds survive, and p; the bounds first, without which nothing is told."""
    import numpy as np
    from scipy.stats import fisher_exact

    from gnmr.report.statistics import LEVEL, holm

    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["run"]["arm"], []).append(row)
    setting, n = rows[0]["run"], len(arms["never"])

    def p(name: str, other: str) -> float:
        lost = [sum(row["diverged"] for row in arms[one]) for one in (name, other)]
        table = [[count, len(arms[one]) - count] for count, one in zip(lost, (name, other), strict=True)]
        return float(fisher_exact(table).pvalue)

    yield f"{setting['low']}, SGD with momentum at {setting['rate']:g}, {setting['steps']} steps, {n} seeds."
    yield "*In 16 bits*: the share of the GEMMs' arithmetic, mean over the steps. *Ends at*: median error of the"
    yield "survivors' last tenth. p: Fisher's exact test against never, Holm over all arms; in brackets against random"
    yield "at the same spend, by itself."
    yield ""
    if p("always", "never") >= LEVEL:
        yield "That low precision diverges here and 16 bits do not is not shown; nothing else is told."
        return
    tested = [name for name in arms if name != "never"]
    told = dict(zip(tested, holm([p(name, "never") for name in tested]), strict=True))
    yield from _head(["arm", "in 16 bits", "survive", "ends at", "p"])
    for name, runs in arms.items():
        ends = [row["errors"][-1] for row in runs if not row["diverged"]]
        against = f" ({p(name, RIVALS[name]):.1g})" if name in RIVALS else ""
        spent = np.mean([row["spent"] for row in runs])
        end = f"{np.median(ends):.2f}" if ends else ""
        tested_p = f"{told[name]:.1g}{against}" if name in told else ""
        yield _row([name, f"{spent:.0%}", f"{len(ends)} of {len(runs)}", end, tested_p])


def spend_figure() -> bytes:
    """docs/img/spend.svg: gap closed against spend, a panel a scene of several budgets."""
    import io

    import matplotlib as mpl
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    from gnmr.report.style import COLOURS, FAINT, INK, STYLE, foot, new_figure

    records = [one for one in _records(SPEND) if _num_budgets(one) > 1]
    with mpl.rc_context(STYLE | {"svg.hashsalt": "gnmr", "svg.fonttype": "path"}):
        columns = len(records) if len(records) < 4 else 2
        rows = len(records) // columns
        figure, panels = new_figure(4.2 * columns, 4.4 * rows, rows, columns, share=True)
        for axes, record in zip(panels, records, strict=True):
            figures = {found["name"]: found for found in record["figures"]}
            scene = _scene(record)
            for arm in ARMS.get(scene, LASTING):
                points = [found for name, found in figures.items() if name.startswith(f"{scene}: {arm} at ")]
                if not points:
                    continue
                spends = [float(found["note"].split()[1].rstrip("%,")) / 100 for found in points]
                closed = [found["value"] for found in points]
                bars = np.transpose([(max(f["value"] - f["low"], 0), max(f["high"] - f["value"], 0)) for f in points])
                place = list(MARKS).index(arm.removesuffix(EACH))
                look = {"color": COLOURS[place], "marker": MARKS[arm.removesuffix(EACH)], "ms": 5}
                look |= {"lw": 2.2 if arm.startswith("price") else 1.1, "ls": "-"}
                if scene in ARMS and not arm.endswith(EACH):
                    look |= {"ls": ":", "mfc": "none"}
                axes.errorbar(spends, closed, bars, **look, elinewidth=0.8, capsize=2, label=arm)
            axes.axhline(1, color=FAINT, lw=1, ls="--")
            axes.axhline(0, color=INK, lw=1)
            axes.set_title(TITLES.get(scene, scene))
            if scene in ARMS or axes is panels[0]:  # panels of lasting errors have the same arms
                axes.legend(loc="center right" if scene in ARMS else "lower right")
            if axes in panels[-columns:]:
                axes.set_xlabel("share of the GEMMs' arithmetic in 16 bits")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axes in panels[::columns]:
            axes.set_ylabel("gap closed, validation in 16 bits")
        blocks = [found["n"] for one in records for found in one["figures"] if "smallest effect" in found["name"]]
        counted = ", ".join(map(str, blocks[:-1])) + f" and {blocks[-1]}"
        foot(figure, f"forks of 40 steps, {counted} blocks, 95 % intervals")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _num_budgets(record: dict[str, Any]) -> int:
    """How many budgets pins by price were given."""
    return sum(": price at " in found["name"] for found in record["figures"])


def _clear(figures: dict[str, Any], cell: str) -> int:
    return int(figures[f"{cell}: Spearman, price"]["note"].partition(" ")[0])


def _closed(figure: dict[str, Any]) -> str:
    half = (figure["high"] - figure["low"]) / 2
    p = figure["note"].rpartition(" ")[2] if ", p against" in figure["note"] else "1"
    return f"{100 * figure['value']:.0f} ± {100 * half:.0f}{' *' if float(p) < 0.01 else ''}"


def _records(names: Sequence[str]) -> list[dict[str, Any]]:
    """Those that are there. FileNotFoundError where none is."""
    found = [_read(name) for name in names if (RESULTS / name).exists()]
    if not found:
        raise FileNotFoundError(f"{RESULTS}: has none of {', '.join(names) or 'these records'}")
    return found


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found | {"file": name}


def parallel() -> str:
    """docs/results/parallel.md"""
    record = _read("parallel-cpu.json")
    figures = {figure["name"].strip(): figure for figure in record["figures"]}
    text = [
        "# What control costs several processes",
        "",
        "`gnmr bench parallel` with gloo: steps with control and without it take turns in every process, each of them",
        "with a micro-batch of its own. *Control* is norms, packing, signal, policy and switching, without the one sum",
        "over ranks; *its sum* that sum in the rank that came last, no waiting; *waiting* the mean of all ranks.",
        "Shares of a step without control, medians; the ratio is of whole steps, with its 95 % interval, and holds",
        "clipping and the count of saved bytes too.",
        "",
        *_head(
            ["processes", "a step without, ms", "control", "its sum", "the sum and waiting", "step over step without"]
        ),
    ]
    for of in ("1 process", "2 processes", "4 processes"):
        names = (f"control, {of}", f"its sum over ranks, {of}", f"the same with waiting, {of}")
        shares = [f"{figures[name]['value']:.2%}" if name in figures else "-" for name in names]
        ratio = figures[f"step with control over step without, {of}"]
        step = f"{1000 * figures[f'step without, {of}']['value']:.0f}"
        text.append(_row([of[0], step, *shares, f"{ratio['value']:.3f}x ({ratio['low']:.3f} to {ratio['high']:.3f})"]))
    text += ["", "The sum of a controller alone, of units with one number each, ms:", ""]
    text += _head(["units", "bytes", "2 processes", "4 processes"])
    for units in ("28", "1,000", "10,000"):
        found = [figures[f"sum of {units} units, {size} processes"] for size in (2, 4)]
        sent = found[0]["note"].split(" bytes")[0]
        text.append(_row([units, sent, *(f"{figure['value']:.2f}" for figure in found)]))
    load = record["machine"]["load_average"][0]
    text += [
        "",
        f"On {record['machine']['cores']} cores with a load of {load:.0f} beside it: what waits says as much of the",
    ]
    text += ["machine as of the code.", ""]
    return "\n".join([*text, *_origin([record])])


def _origin(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "## Where it comes from"
    yield ""
    for one in records:
        machine = one["machine"]
        cpu = f"{machine['cpu']}{', products in FP32' if machine.get('products') == 'in FP32' else ''}"
        yield f"- benchmarks/results/{one['file']}: commit {one['commit']}, {cpu}, PyTorch {one['torch']}:"
        note = f": {one['note']}" if "note" in one else ""
        yield f"  `{one['command']}`{note}"
    yield ""


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), _row(["---", *["---:"] * (len(names) - 1)])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[], str]] = {
    "price-truth.md": price_truth,
    "price-sampling.md": sampling,
    "price-atlas.md": atlas,
    "spend.md": spend,
    "spend-table11.md": table11,
    "spend-regimes.md": regimes,
    "compressed.md": compressed,
    "blame.md": blame,
    "divergence.md": divergence,
    "parallel.md": parallel,
    "fair.md": fair,
}


def made() -> dict[str, str]:
    """Text by file: the pages of which there are records."""
    found = {}
    for name, table in TABLES.items():
        with contextlib.suppress(FileNotFoundError):
            found[name] = table()
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        RESULTS = Path(sys.argv[1])
        DOCS = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
        FIGURE = DOCS / FIGURE.name
    DOCS.mkdir(parents=True, exist_ok=True)
    for name, text in made().items():
        (DOCS / name).write_text(text)
    with contextlib.suppress(FileNotFoundError):
        FIGURE.write_bytes(spend_figure())
    if len(sys.argv) == 1:
        found = numbers()
        for page in TEXTS:
            page.write_text(filled(page.read_text(), found))
