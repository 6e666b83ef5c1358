"""The regime map: cell by cell of a search over pressure, does the low path hurt, and does routing help?

A view of whatever runs an experiment has. A cell is one setting of all that varies in it besides what makes an arm
(controller, optimizer): rate, batch, outlier gain, site, faults, scale ... and the pair of formats where there are
several. In each cell the static low path is held against the static recovery path, and every routed arm against the
static low path and against the random arm at its budget, by the paired test of `gnmr.lab.report.statistics`, among runs of
the same data, tokens a step and steps. Whether there is a gap is one family of tests over the whole experiment, its
cells and its tables alike (`gap_tests`). Of routed arms Holm's adjustment is made within a cell, for each of the two
questions; over many cells some verdicts are due to chance.

There is a map where at least two cells have both static arms. It shows the routed arms that stand in two cells and
more; arms of one name are told apart by their controller's settings, all cells alike. Settings that only set the budget
(trigger, thresholds, share, max_o) are told where one cell has several of them: the budget stands in every cell, and a
trigger that was calibrated for each cell makes no two arms.

Static low path
    fine                  not worse than static recovery by the test, less than 0.5 % worse in the mean, and by the 95 %
                          interval less than 5 % worse
    hurt                  worse by the test
    unclear               neither
    failed                diverged in at least half of its seeds
    no recovery arm       there is nothing to hold it against, or no static low path
Routed arm
    closes the gap        better than static low by the test, and at least 90 % of the gap to static recovery closed in
                          the mean; where static low diverged: better by the test, and by itself fine in the sense above
    part of the gap       better than static low and than random by the test, and no more
    better than static low    the random arm itself, better than static low by the test, and no more
    no better than random better than static low, not better than random
    no random arm         better than static low; no random arm at its budget, so no more can be said
    not at all            not better than static low
    no gap                static low is fine
All
    too few seeds         below three common seeds (five where a run diverged)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from gnmr.lab.report.arms import BUDGET, QUANTIZER, Arm, tell, telling, varying
from gnmr.lab.report.comparisons import Comparison, by_experiment, short
from gnmr.lab.report.layout import NOTHING, Table, percent
from gnmr.lab.report.statistics import (
    BETTER,
    NO_DIFFERENCE,
    TOO_FEW,
    WORSE,
    Paired,
    as_percent,
    gap_closed,
    paired,
    verdicts,
)

FINE, UNCLEAR, HURT, FAILED, NO_RECOVERY = "fine", "unclear", "hurt", "failed", "no recovery arm"
CLOSES, PART, AS_RANDOM, NO_RANDOM = "closes the gap", "part of the gap", "no better than random", "no random arm"
RANDOM_HELPS, NOT_AT_ALL, NO_GAP = "better than static low", "not at all", "no gap"
_LOWS = (HURT, FAILED, UNCLEAR, FINE, TOO_FEW)
_FINE_PERCENT, _FINE_AT_MOST, _CLOSED = 0.5, 5.0, 0.9
_OF_AN_ARM = ("controller.", "precision.", "optim.name", "optim.options.", "optim.transform.", "optim.clip_norm")
_OF_NEITHER = ("records.", "faults.seed", "training.threads", "training.eval_every", "training.max_nonfinite_streak")
_OF_KIND = ("training.seq_len", "training.batch_size", "training.accumulation", "training.steps")

RegimeCell = dict[str, Any]


def regime_maps(comparisons: Iterable[Comparison]) -> dict[str, list[RegimeCell]]:
    """By experiment, the cells of each that has at least two with both static arms."""
    cells = {experiment: regime_cells(of_it) for experiment, of_it in by_experiment(comparisons).items()}
    return {name: made for name, made in cells.items() if sum(entry["low"] != NO_RECOVERY for entry in made) > 1}


def regime_cells(comparisons: list[Comparison]) -> list[RegimeCell]:
    """The cells of one experiment's comparisons, in order of their settings; plain values, fit for JSON.

    {"cell": {key: value}, "low": verdict, "low_difference": % or None, "seeds": n, "arms": {name: {"verdict",
    "vs_low", "vs_random" (None without a random arm), "difference" (% to static low), "p", "p_random" (both adjusted),
    "gap_closed" (share), "promoted" (share), "diverged", "seeds"}}}. "seeds" are common ones; a number that does not
    exist is None. Keys of a cell are config keys; "data" tells apart cells that differ in nothing but the data.
    """
    keys = _keys([arm for comparison in comparisons for arm in comparison.arms])
    parts = [part for comparison in comparisons for part in _parts(comparison, keys)]
    made = [(cell, part, arms) for part in parts for cell, arms in _cells(part, keys)]
    pairs = {(cell["precision.low"], cell["precision.recovery"]) for cell, _, _ in made}
    data = {comparison.kind.fingerprint for comparison in comparisons}
    columns = _columns([(part, arms) for _, part, arms in made])
    gaps = gap_tests(comparisons)
    found = []
    for (cell, part, arms), named in zip(made, columns, strict=True):
        shown = cell if len(pairs) > 1 else {key: cell[key] for key in keys}
        if len(data) > 1:
            shown = shown | {"data": short(part.kind.fingerprint)}
        found.append({"cell": shown, **_judge(part, part.low(arms[0]), part.recovery(arms[0]), named, gaps)})
    return sorted(found, key=lambda entry: [_sortable(value) for value in entry["cell"].values()])


def gap_tests(comparisons: list[Comparison]) -> dict[tuple[int, int], tuple[float | None, str]]:
    """Whether static low differs from static recovery, by the two arms' ids: p and verdict of low against recovery.

    Adjusted by Holm's method over all such pairs of an experiment, those of the map's cells and those of the tables, so
    that both say the same. None and `TOO_FEW` for a pair with too few seeds, which is no member of the family.
    """
    keys = _keys([arm for comparison in comparisons for arm in comparison.arms])
    found: dict[tuple[int, int], Paired] = {}
    for comparison in comparisons:
        for part in (comparison, *_parts(comparison, keys)):
            for arm in part.arms:
                low, recovery = part.low(arm), part.recovery(arm)
                if low and recovery and low is not recovery and (id(low), id(recovery)) not in found:
                    found[id(low), id(recovery)] = paired(low.outcomes, recovery.outcomes)
    return dict(zip(found, verdicts(list(found.values())), strict=True))


def summary(cells: Iterable[RegimeCell]) -> str:
    """The map in a few sentences that can be quoted."""
    cells = [entry for entry in cells if entry["low"] != NO_RECOVERY]
    lows = Counter(entry["low"] for entry in cells)
    first, *others = [(verdict, lows[verdict]) for verdict in _LOWS if lows[verdict] or verdict == HURT]
    told = f"In {_of(first[1], len(cells))} cells the static low path is {first[0]}"
    told += "".join(f", in {number} {verdict}" for verdict, number in others) + "."
    pressed = [entry for entry in cells if entry["low"] in (HURT, FAILED)]
    arms = []
    for name in dict.fromkeys(name for entry in pressed for name in entry["arms"]):
        mine = [entry["arms"][name] for entry in pressed if name in entry["arms"]]
        against = [arm["vs_random"] for arm in mine if arm["vs_random"] is not None]
        closing = sum(arm["verdict"] == CLOSES for arm in mine)
        arms.append(f"{name} closes at least 90 % of the gap in {_of(closing, len(mine))}")
        if against:
            arms[-1] += f" and is better than random at its budget in {_of(against.count(BETTER), len(against))}"
        if few := [arm["verdict"] for arm in mine].count(TOO_FEW):
            arms[-1] += f" (too few seeds in {few})"
    return told + (f" Where it is hurt or failed: {'; '.join(arms)}." if arms else "")


def _of(number: int, total: int) -> str:
    return f"{number or 'none'} of {total}"


def regime_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Each map as a table: one row a cell, one column for the static low path and for each arm."""
    return [_table(experiment, cells) for experiment, cells in regime_maps(comparisons).items()]


def _table(experiment: str, cells: list[RegimeCell]) -> Table:
    names = list(dict.fromkeys(name for entry in cells for name in entry["arms"]))
    table = Table(f"Regime map: {experiment}", ["cell", "seeds", "static low", *names])
    for entry in cells:
        what = " ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in entry["cell"].items()) or "all"
        apart = "" if entry["low_difference"] is None else f"\n{entry['low_difference']:+.2f} %"
        arms = [_told(entry["arms"].get(name)) for name in names]
        table.rows.append([what, str(entry["seeds"]), entry["low"] + apart, *arms])
    table.notes = [
        summary(cells),
        "Static low: perplexity relative to static recovery, over the seeds of both. Arms: share of that gap closed, "
        "at the promotion behind @. Paired t-test, p by Holm: static low over all pairs of static arms of the "
        "experiment, routed arms within a cell; over many cells some verdicts are chance.",
        f"{FINE}: not shown worse than static recovery, less than {_FINE_PERCENT} %; {HURT}: shown worse; {UNCLEAR}: "
        f"neither; {FAILED}: diverged in half of the seeds or more.",
        f"{CLOSES}: better than static low, 90 % and more of the gap; {PART}: better than static low and than random "
        f"at the same budget; {AS_RANDOM}: better than static low alone; {NO_RANDOM}: better than static low, and no "
        f"random arm has its budget; {RANDOM_HELPS}: so is the random arm itself; {NOT_AT_ALL}: not better than static "
        f"low; {NO_GAP}: static low is fine.",
    ]
    return table


def _told(arm: RegimeCell | None) -> str:
    if arm is None:
        return NOTHING
    share = "" if arm["gap_closed"] is None else f"{100 * arm['gap_closed']:z.0f} % "
    budget = "" if arm["promoted"] is None else f"@ {percent(arm['promoted'])}"
    also = f"\n{AS_RANDOM}" if arm["verdict"] == CLOSES and arm["vs_random"] in (NO_DIFFERENCE, WORSE) else ""
    return f"{arm['verdict']}{also}\n{share}{budget}".rstrip()


def _keys(arms: list[Arm]) -> list[str]:
    """Keys that make a cell.

    One that follows from the scale and those before it in its group says nothing new and is left out, unless it decides
    what may be compared at all.
    """

    aside = (*_OF_AN_ARM, *_OF_NEITHER)
    keys = [key for key in varying(arms) if key in QUANTIZER or not key.startswith(aside)]
    return telling(arms, sorted(keys, key=lambda key: key != "scale_name"), "scale_name", alone=_OF_KIND)


def _parts(comparison: Comparison, keys: list[str]) -> list[Comparison]:
    """The comparison cut along the keys that a static arm shares with all that it is held against: cells are many."""
    shared = [key for key in keys if not key.startswith(("faults.", "precision."))]
    parts: dict[str, list[Arm]] = defaultdict(list)
    for arm in comparison.arms:
        parts[repr([arm.settings.get(key) for key in shared])].append(arm)
    return [Comparison(comparison.kind, arms) for arms in parts.values()]


def _cells(comparison: Comparison, keys: list[str]) -> list[tuple[RegimeCell, list[Arm]]]:
    """Cells of a comparison with the arms in them; where nothing is routed, with the static low arm alone.

    A static arm belongs to the cells that look for it, so it makes no cell beside a routed arm's.
    """
    found: dict[str, tuple[RegimeCell, list[Arm]]] = {}
    bounds: list[Arm | None] = []
    for arm in sorted(comparison.arms, key=lambda arm: arm.always is not None):
        if arm.always is not None and any(arm is bound for bound in bounds):
            continue
        low, recovery = comparison.formats(arm)
        if arm.always is not None and (comparison.low(arm) is not arm or low == recovery):
            continue
        bounds += [comparison.low(arm), comparison.recovery(arm), comparison.reference(arm)]
        cell = {key: arm.settings.get(key) for key in keys} | {"precision.low": low, "precision.recovery": recovery}
        found.setdefault(repr(cell), (cell, []))[1].append(arm)
    return list(found.values())


def _columns(cells: list[tuple[Comparison, list[Arm]]]) -> list[dict[str, Arm]]:
    """For each cell the routed arms that the map shows, by name: those in two cells that have both static arms."""
    routed = [[arm for arm in arms if arm.always is None] for _, arms in cells]
    names = _names(routed)
    bounded = [bool(part.low(arms[0]) and part.recovery(arms[0])) for part, arms in cells]
    named: list[dict[str, Arm]] = []
    for arms in routed:
        named.append({})
        for arm in sorted(arms, key=lambda arm: len(arm.outcomes)):  # of two that only recorded differently the longer
            named[-1][names[id(arm)]] = arm
    stands = Counter(name for of_cell, counts in zip(named, bounded, strict=True) if counts for name in of_cell)
    shown = {name for name, number in stands.items() if number >= min(2, sum(bounded))}
    return [{name: of_cell[name] for name in sorted(of_cell) if name in shown} for of_cell in named]


def _names(cells: list[list[Arm]]) -> dict[int, str]:
    """By the arms' ids: names without their paths', and the settings that tell apart those that share one."""

    def plain(arm: Arm) -> str:
        return arm.name.removeprefix(f"{arm.settings.get('precision.name')}-")

    names: dict[int, str] = {}
    for name in {plain(arm) for arms in cells for arm in arms}:
        mine = [[arm for arm in arms if plain(arm) == name] for arms in cells]
        side_by_side = {key for arms in mine for key in varying(arms)}
        keys = [
            key
            for key in varying(arm for arms in mine for arm in arms)
            if key.startswith(_OF_AN_ARM)
            and not key.startswith(("precision.low", "precision.recovery", "precision.recipes", *QUANTIZER))
            and (key in side_by_side or not key.startswith(BUDGET))
        ]
        names |= {id(arm): " ".join([name, *tell(arm, keys)]) for arms in mine for arm in arms}
    return names


def _judge(
    comparison: Comparison,
    low: Arm | None,
    recovery: Arm | None,
    routed: dict[str, Arm],
    gaps: dict[tuple[int, int], tuple[float | None, str]],
) -> RegimeCell:
    bound = paired(low.outcomes, recovery.outcomes) if low and recovery else Paired(0)
    verdict = _low_verdict(low, recovery, bound, gaps.get((id(low), id(recovery)), (None, TOO_FEW))[1])
    randoms = [comparison.random(arm) for arm in routed.values()]
    to_low = [paired(arm.outcomes, low.outcomes if low else {}) for arm in routed.values()]
    to_random = [paired(a.outcomes, b.outcomes if b else {}) for a, b in zip(routed.values(), randoms, strict=True)]
    told = {}
    tests = zip(to_low, verdicts(to_low), verdicts(to_random), strict=True)
    for (name, arm), other, (change, (p, vs_low), (p_random, vs_random)) in zip(
        routed.items(), randoms, tests, strict=True
    ):
        gap = gap_closed(low.outcomes, arm.outcomes, recovery.outcomes) if low and recovery else None
        closed, against = gap and gap[0], vs_random if other else None
        told[name] = {
            "verdict": _arm_verdict(arm, recovery, verdict, vs_low, against, closed),
            "vs_low": vs_low,
            "vs_random": against,
            "difference": None if change.mean is None else as_percent(change.mean),
            "p": p,
            "p_random": p_random,
            "gap_closed": closed,
            "promoted": arm.promoted,
            "diverged": len(arm.diverged),
            "seeds": change.n,
        }
    apart = None if bound.mean is None else as_percent(bound.mean)
    return {"low": verdict, "low_difference": apart, "seeds": bound.n, "arms": told}


def _low_verdict(low: Arm | None, recovery: Arm | None, bound: Paired, shown: str) -> str:
    if low is None or recovery is None:
        return NO_RECOVERY
    if len(low.outcomes) >= 3 and 2 * len(low.diverged) >= len(low.outcomes):
        return FAILED
    return _against_recovery(bound, shown)


def _against_recovery(change: Paired, shown: str) -> str:
    """`shown`: the test's verdict on this change."""
    if shown == TOO_FEW:
        return TOO_FEW
    if shown == WORSE:
        return HURT
    if change.mean is None or change.interval is None:
        return UNCLEAR
    fine = as_percent(change.mean) < _FINE_PERCENT and as_percent(change.interval[1]) < _FINE_AT_MOST
    return FINE if fine else UNCLEAR


def _arm_verdict(
    arm: Arm, recovery: Arm | None, low: str, vs_low: str, vs_random: str | None, closed: float | None
) -> str:
    if low == FINE:
        return NO_GAP
    if TOO_FEW in (low, vs_low):
        return TOO_FEW
    if vs_low != BETTER:
        return NOT_AT_ALL
    if closed is not None:
        whole = closed >= _CLOSED
    else:
        change = paired(arm.outcomes, recovery.outcomes) if recovery else Paired(0)
        whole = _against_recovery(change, verdicts([change])[0][1]) == FINE  # unadjusted: harder to call fine
    if whole:
        return CLOSES
    if vs_random is None:
        return RANDOM_HELPS if arm.signal == "random" else NO_RANDOM
    return PART if vs_random == BETTER else TOO_FEW if vs_random == TOO_FEW else AS_RANDOM


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))
