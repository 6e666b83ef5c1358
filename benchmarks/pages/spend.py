"""What arms close of the gap, against what they spend: docs/results/spend.md and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from gnmr.lab.bench.scenes import BOUNDS, EACH, SCENES
from gnmr.lab.bench.spend import Fork, closed_by, smallest
from gnmr.lab.report.family import Family, modelled
from gnmr.lab.report.family_notes import p_text
from gnmr.lab.report.layout import Table
from gnmr.lab.report.statistics import BETTER
from pages.forks import family_of
from pages.layout import Results, by_name, origin, percent, spends, table_head, table_row

SPEND = tuple(f"spend-{scene}.json" for scene in ("sim_e2m1", "nvfp4", "nvfp4_curve", "int4", "broken"))
TABLE11, REGIMES = ("spend-table11.json",), "spend-regime_*.json"
MAPPED = ("spend-sim_e2m1.json", "spend-nvfp4_curve.json", "spend-int4.json")
"""Scenes of spend.md that stand in the map of low paths too, with their forks at `TENTH`."""
TENTH = 0.1
SHARES = "price-shares.json"


def spend(results: Results) -> str:
    """docs/results/spend.md"""
    text = [
        "# Gap closed against spend",
        "",
        "Forks of trained bases: the share of the gap from always-low to always-high (validation loss on the 16-bit",
        "path) that an arm closes, mean over bases and orders of the data, with 95 % intervals: by the residual of",
        "one model of all arms, or where that model is refused by Fieller of each arm's own differences (half their",
        "width is shown).",
        "gnmr/lab/bench/spend.py says what the arms are. A star: p < 0.01 against `price`, in the scene `broken` against",
        "`price, each step`, at the same budget, Holm over the table. *Prices in the pins*, dashed in the figure: of",
        "all prices of a base the share in the operators that pins by price choose, mean over bases. No bound: gains",
        "need not add up, nor be in proportion to prices. *Smallest difference*: to what is tested against, shown with",
        "80 % power, the median over the arms of that budget.",
        "Forks of nvfp4 have block scales that were rounded twice (today's change the shipped base's KL by 0.1%) and",
        "drew their rounding from one generator.",
    ]
    records = results.records(SPEND)
    for record in records:
        figures = by_name(record)
        scene = scene_of(record)
        told = [f for name, f in figures.items() if name.endswith("gap, nats")]
        power = figures.get(f"{scene}: smallest effect at 80 % power")
        if power is None:
            text += ["", f"## {scene}", "", "The positive control is not shown, so no other arm is made."]
            continue
        gaps = ", ".join(
            f"{f['name'].removeprefix(scene + ', ').removesuffix(': gap, nats')} {f['value']:.4f}" for f in told
        )
        text += ["", f"## {scene}", "", f"Gap, nats: {gaps}. n = {power['n']} blocks; {power['note']}."]
        text += [
            f"Smallest difference that is shown with 80 % power, median: {power['value']:.1%} of the gap.",
            "",
        ]
        arms = [
            name.removeprefix(f"{scene}: ").rsplit(" at ", 1)
            for name in figures
            if " at " in name and name != power["name"]
        ]
        budgets = [b for b in dict.fromkeys(budget for _, budget in arms) if (["price", b]) in arms]
        text += table_head(["arm", *(f"{float(budget[:-1]):g} %" for budget in budgets)])
        for arm in dict.fromkeys(arm for arm, budget in arms if budget in budgets):
            text.append(table_row([arm, *(_closed(figures[f"{scene}: {arm} at {budget}"]) for budget in budgets)]))
        if bought := prices_bought(results, scene):
            held = (bought.get(budget) for budget in budgets)
            text.append(table_row(["*prices in the pins*", *("-" if one is None else percent(one[1]) for one in held)]))
        least = smallest_by(results, record)
        text.append(table_row(["*smallest difference*", *(f"{100 * least[budget]:.1f}" for budget in budgets)]))
        whole = [(arm, budget) for arm, budget in arms if budget not in budgets]
        if whole:
            text += ["", *table_head(["GEMM of every operator", "share of the arithmetic", "gap closed"])]
            text += [table_row([arm, budget, _closed(figures[f"{scene}: {arm} at {budget}"])]) for arm, budget in whole]
    return "\n".join([*text, "", *origin([*records, *results.there([SHARES])])])


def smallest_by(results: Results, record: dict[str, Any]) -> dict[str, float]:
    """By budget (10.0%) the difference to `ours` that one test shows with 80 % power, the median over arms."""
    scene, known = SCENES[scene_of(record)], {Fork(**row["fork"]): row for row in results.beside(record)}
    model = modelled(closed_by([*known], known))
    assert model is not None
    return {f"{budget:.1%}": smallest(model, scene, budget) for budget in scene.budgets}


def prices_bought(results: Results, scene: str) -> dict[str, tuple[float, float]]:
    """By budget (10.0%) what pins by price spend and hold of all prices, means over bases; empty without a record."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, figure in by_name(*results.there([SHARES])).items():
        where, budget = name.removesuffix(" of the GEMMs").split(": prices in ")
        if where.endswith(f", {scene}"):
            found.setdefault(budget, []).append((spends(figure), figure["value"]))
    return {budget: (fmean(x for x, _ in pairs), fmean(y for _, y in pairs)) for budget, pairs in found.items()}


def _closed(figure: dict[str, Any]) -> str:
    half = (figure["high"] - figure["low"]) / 2
    p = figure["note"].rpartition(" ")[2] if ", p against" in figure["note"] else "1"
    return f"{100 * figure['value']:.0f} ± {100 * half:.0f}{' *' if float(p) < 0.01 else ''}"


def table11(results: Results) -> str:
    """docs/results/spend-table11.md"""
    records = results.records(TABLE11)
    text = [
        "# Table 11 as forks",
        "",
        "Signals at one budget, four of 28 units, 4-bit inputs in the forward pass too, 8 bits for recovery: forks",
        "of 40 steps, a new set in every step or one that holds for 20. A block is an order of the data of a base.",
        "*Spends* is the share of the GEMMs' arithmetic, which differs since units differ in size; `price, 8 %` has",
        "less of it than any four units. Against never, and against random of its kind.",
        "",
        family_of("Table 11 as forks", results.beside(records[0]))[1].markdown(),
    ]
    return "\n".join([*text, *origin(records)])


def regimes(results: Results) -> str:
    """docs/results/spend-regimes.md"""
    told = low_paths(results)
    text = [
        "# Low paths as forks",
        "",
        "A tenth of the GEMMs' arithmetic, spent by pins of the base and by controllers, on many low paths: which of",
        "them has a gap to close within 40 steps, and who closes it. Against never, and against random of its kind.",
        "The positive control comes first, always against never: where it is not shown no other arm is made, and the",
        "interval of the gap says how large it can be. Tables of sim_e2m1, nvfp4 and int4 (4-bit inputs) are in",
        "[spend.md](spend.md), where a share is of each base's own gap and here of the mean gap of all blocks, which",
        "moves it by two points at the most. quick is int2 on the shipped base.",
        "Forks of mxfp4 have the scale rule that is now named mxfp4_floor; with today's, the shipped base's KL under",
        "mxfp4 is 3% smaller.",
        "",
        *_map({scene: family for scene, (family, _) in told.items()}),
    ]
    names = {scene: f"spend-{scene}.json" for scene in told}
    for scene, (family, table) in told.items():
        text += ["", table.markdown()] if family.gate and names[scene] not in MAPPED else []
    return "\n".join([*text, "", *origin(results.records([*names.values()]))])


def low_paths(results: Results) -> dict[str, tuple[Family, Table]]:
    """By scene of the map, the largest gap first. FileNotFoundError where none is there."""
    names = [*MAPPED, *sorted(path.name for path in results.folder.glob(REGIMES))]
    records = results.records(names)
    told = {scene_of(record): family_of(scene_of(record), _tenth(results, record)) for record in records}
    return dict(sorted(told.items(), key=lambda one: -_gap(one[1][0])))


def _tenth(results: Results, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the bounds and of the arms that spend a tenth."""
    return [row for row in results.beside(record) if row["fork"]["budget"] in (*BOUNDS.values(), TENTH)]


def _gap(family: Family) -> float:
    return -1.0 if family.gap is None else family.gap.estimate


def _map(families: Mapping[str, Family]) -> Iterator[str]:
    """Of each scene the gap and what is closed of it, the largest gap first."""
    arms = ("price", "MSE", "gap", "random", *(f"{name}{EACH}" for name in ("price", "GNMR", "MSE", "random")))
    yield from table_head(["low path", "n", "gap, nats [95 %]", "p of the control", *arms])
    for scene, family in families.items():
        closed = {row.arm: f"{row.closed[0]:.0%}" for row in family.rows if row.closed is not None and family.gate}
        tests = [row for row in family.rows if row.control.startswith("random") and row.verdict == BETTER]
        better = {row.arm for row in tests if row.p is not None and row.p < 0.01}
        size = "-" if family.gap is None else "{:.4f} ({:.4f} to {:.4f})".format(_gap(family), *family.gap.interval)
        found = (closed.get(arm, "-") + (" *" if arm in better else "") for arm in arms)
        yield table_row(
            [scene.removeprefix("regime_").removesuffix("_curve"), str(family.n), size, p_text(family.p_gate), *found]
        )
    yield ""
    yield "A star: better than random of its kind, p < 0.01 by Holm over the scene's tests."


def scene_of(record: dict[str, Any]) -> str:
    """By its file's name."""
    return str(record["file"]).removeprefix("spend-").removesuffix(".json")
