"""The regime map: cell by cell of a search over pressure, does the low path hurt, and does routing help?

A cell is one setting of all that varies in the experiment besides what makes an arm (formats of the two paths and
controller): rate, batch, outlier gain, site, faults ... and the pair of formats where there are several. In each cell
the static low path is held against the static recovery path, and every routed arm against the static low path and
against the random arm at its budget, by the paired test of `gnmr.report.statistics`. Holm's adjustment is made within
a cell, for each of the two questions; over many cells some verdicts are due to chance.

Static low path
    fine                  not worse than static recovery by the test, and less than 0.5 % worse in the mean
    hurt                  worse by the test
    unclear               neither
    failed                diverged in at least half of its seeds
    no recovery arm       there is nothing to hold it against
Routed arm
    closes the gap        better than static low by the test, and at least 90 % of the gap to static recovery closed in
                          the mean; where static low diverged: better by the test, and by itself fine in the sense above
    part of the gap       better than static low and than random by the test, and no more
    no better than random better than static low, not better than random
    no random arm         better than static low; no random arm at its budget, so no more can be said
    not at all            not better than static low
    no gap                static low is fine
All
    too few seeds         below three common seeds (five where a run diverged)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gnmr.report.arms import QUANTIZER, Arm, Comparison, short, tell, varying
from gnmr.report.layout import NOTHING, Table, percent
from gnmr.report.statistics import (
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

REGIME_MAP = "regime_map"
"""Name of the experiment whose runs make the map."""
FINE, UNCLEAR, HURT, FAILED, NO_RECOVERY = "fine", "unclear", "hurt", "failed", "no recovery arm"
CLOSES, PART, AS_RANDOM, NO_RANDOM = "closes the gap", "part of the gap", "no better than random", "no random arm"
NOT_AT_ALL, NO_GAP = "not at all", "no gap"
VERDICTS = (CLOSES, PART, NO_RANDOM, AS_RANDOM, NOT_AT_ALL, NO_GAP, TOO_FEW)
"""Of routed arms, from good to bad to silent."""
_FINE_PERCENT, _CLOSED = 0.5, 0.9
_NOT_A_CELLS = ("controller.", "records.", "paths.", "stress.seed")

Cell = dict[str, Any]


def regime_map(comparisons: Iterable[Comparison]) -> list[Cell]:
    """The cells of all runs of the experiment `regime_map`, in order of their settings; plain values, fit for JSON.

    {"cell": {key: value}, "low": verdict, "low_difference": % or None, "seeds": n, "arms": {name: {"verdict",
    "vs_low", "vs_random" (None without a random arm), "difference" (% to static low), "p", "p_random" (both adjusted),
    "gap_closed" (share), "promoted" (share), "diverged", "seeds"}}}. "seeds" are common ones; a number that does not
    exist is None. Keys of a cell are config keys; "data" tells apart cells that differ in nothing but the data.
    """
    comparisons = [comparison for comparison in comparisons if comparison.kind.experiment == REGIME_MAP]
    keys = _keys([arm for comparison in comparisons for arm in comparison.arms])
    parts = [part for comparison in comparisons for part in _parts(comparison, keys)]
    made = [(cell, part, arms) for part in parts for cell, arms in _cells(part, keys)]
    pairs = {(cell["paths.low"], cell["paths.recovery"]) for cell, _, _ in made}
    data = {comparison.kind.fingerprint for comparison in comparisons}
    found = []
    for cell, comparison, arms in made:
        shown = cell if len(pairs) > 1 else {key: cell[key] for key in keys}
        if len(data) > 1:
            shown = shown | {"data": short(comparison.kind.fingerprint)}
        found.append({"cell": shown, **_judge(comparison, arms)})
    return sorted(found, key=lambda entry: [_sortable(value) for value in entry["cell"].values()])


def flat(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """One row for each routed arm of each cell: the cell's settings, "arm", and the arm's entries; for a heatmap."""
    return [
        {**entry["cell"], "arm": name, "low": entry["low"], **told}
        for entry in cells
        for name, told in entry["arms"].items()
    ]


def regime_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """The map as a table: one row a cell, one column for the static low path and for each arm."""
    cells = regime_map(comparisons)
    names = list(dict.fromkeys(name for entry in cells for name in entry["arms"]))
    table = Table("Regime map", ["cell", "seeds", "static low", *names])
    for entry in cells:
        what = " ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in entry["cell"].items()) or "all"
        low = entry["low"]
        if entry["low_difference"] is not None:
            low += f"\n{entry['low_difference']:+.2f} %"
        arms = [_told(entry["arms"].get(name)) for name in names]
        table.rows.append([what, str(entry["seeds"]), low, *arms])
    table.notes = [
        "Static low: perplexity relative to static recovery, over the seeds of both. Arms: share of that gap closed, "
        "at the promotion behind @. Paired t-test, p by Holm within a cell; over many cells some verdicts are chance.",
        f"{FINE}: not shown worse than static recovery, less than {_FINE_PERCENT} %; {HURT}: shown worse; {UNCLEAR}: "
        f"neither; {FAILED}: diverged in half of the seeds or more.",
        f"{CLOSES}: better than static low, 90 % and more of the gap; {PART}: better than static low and than random "
        f"at the same budget; {AS_RANDOM}: better than static low alone; {NOT_AT_ALL}: not better than static low; "
        f"{NO_GAP}: static low is fine.",
    ]
    return [table]


def _told(arm: Cell | None) -> str:
    if arm is None:
        return NOTHING
    share = "" if arm["gap_closed"] is None else f"{100 * arm['gap_closed']:.0f} % "
    budget = "" if arm["promoted"] is None else f"@ {percent(arm['promoted'])}"
    also = f"\n{AS_RANDOM}" if arm["verdict"] == CLOSES and arm["vs_random"] in (NO_DIFFERENCE, WORSE) else ""
    return f"{arm['verdict']}{also}\n{share}{budget}".rstrip()


def _keys(arms: list[Arm]) -> list[str]:
    """Keys that make a cell; one that follows from those before it in its group says nothing new and is left out."""
    kept: list[str] = []
    for key in varying(arms):
        if key.startswith(_NOT_A_CELLS) and key not in QUANTIZER:
            continue
        group = [other for other in kept if other.split(".")[0] == key.split(".")[0]]
        before = {repr([arm.settings.get(other) for other in group]) for arm in arms}
        if len({repr([arm.settings.get(other) for other in [*group, key]]) for arm in arms}) > len(before):
            kept.append(key)
    return kept


def _parts(comparison: Comparison, keys: list[str]) -> list[Comparison]:
    """The comparison cut along the keys that a static arm shares with all that it is held against: cells are many."""
    shared = [key for key in keys if not key.startswith(("stress.", "paths.", "optim.name", "optim.transform."))]
    parts: dict[str, list[Arm]] = {}
    for arm in comparison.arms:
        parts.setdefault(repr([arm.settings.get(key) for key in shared]), []).append(arm)
    return [Comparison(comparison.kind, arms) for arms in parts.values()]


def _cells(comparison: Comparison, keys: list[str]) -> list[tuple[Cell, list[Arm]]]:
    """Cells of a comparison with the arms in them; where nothing is routed, with the static low arm alone.

    A static arm belongs to the cells that look for it, so it makes no cell beside a routed arm's.
    """
    found: dict[str, tuple[Cell, list[Arm]]] = {}
    bounds: list[Arm | None] = []
    for arm in sorted(comparison.arms, key=lambda arm: arm.always is not None):
        if arm.always is not None and any(arm is bound for bound in bounds):
            continue
        low, recovery = comparison.formats(arm)
        if arm.always is not None and (comparison.low(arm) is not arm or low == recovery):
            continue
        bounds += [comparison.low(arm), comparison.recovery(arm), comparison.reference(arm)]
        cell = {key: arm.settings.get(key) for key in keys} | {"paths.low": low, "paths.recovery": recovery}
        found.setdefault(repr(cell), (cell, []))[1].append(arm)
    return list(found.values())


def _judge(comparison: Comparison, arms: list[Arm]) -> Cell:
    low, recovery = comparison.low(arms[0]), comparison.recovery(arms[0])
    routed = [arm for arm in arms if arm.always is None]
    bound = paired(low.outcomes, recovery.outcomes) if low and recovery else Paired(0)
    verdict = _low_verdict(low, recovery, bound)
    against_low = [paired(arm.outcomes, low.outcomes if low else {}) for arm in routed]
    randoms = [comparison.random(arm) for arm in routed]
    against_random = [
        paired(arm.outcomes, other.outcomes) if other else Paired(0) for arm, other in zip(routed, randoms, strict=True)
    ]
    told = {}
    for arm, name, change, to_low, to_random, other in zip(
        routed, _names(routed), against_low, verdicts(against_low), verdicts(against_random), randoms, strict=True
    ):
        closed = gap_closed(low.outcomes, arm.outcomes, recovery.outcomes) if low and recovery else None
        vs_random = to_random[1] if other else None
        told[name] = {
            "verdict": _arm_verdict(arm, recovery, verdict, to_low[1], vs_random, closed[0] if closed else None),
            "vs_low": to_low[1],
            "vs_random": vs_random,
            "difference": None if change.mean is None else as_percent(change.mean),
            "p": to_low[0],
            "p_random": to_random[0],
            "gap_closed": closed[0] if closed else None,
            "promoted": arm.promoted,
            "diverged": len(arm.diverged),
            "seeds": change.n,
        }
    apart = None if bound.mean is None else as_percent(bound.mean)
    return {"low": verdict, "low_difference": apart, "seeds": bound.n, "arms": told}


def _low_verdict(low: Arm | None, recovery: Arm | None, bound: Paired) -> str:
    if low is not None and len(low.outcomes) >= 3 and 2 * len(low.diverged) >= len(low.outcomes):
        return FAILED
    if recovery is None or low is None:
        return NO_RECOVERY
    return _against_recovery(bound)


def _against_recovery(change: Paired) -> str:
    ((_, shown),) = verdicts([change])
    if shown == TOO_FEW:
        return TOO_FEW
    if shown == WORSE:
        return HURT
    return FINE if change.mean is not None and as_percent(change.mean) < _FINE_PERCENT else UNCLEAR


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
        whole = recovery is not None and _against_recovery(paired(arm.outcomes, recovery.outcomes)) == FINE
    if whole:
        return CLOSES
    if vs_random is None:
        return PART if arm.signal == "random" else NO_RANDOM
    return PART if vs_random == BETTER else TOO_FEW if vs_random == TOO_FEW else AS_RANDOM


def _names(arms: list[Arm]) -> list[str]:
    """The arms' names without their paths'; where two share one, with the controller settings that tell them apart."""
    plain = [arm.name.removeprefix(f"{arm.settings.get('paths.name')}-") for arm in arms]
    names = []
    for arm, name in zip(arms, plain, strict=True):
        keys = varying(other for other, of_other in zip(arms, plain, strict=True) if of_other == name)
        told = tell(arm, [key for key in keys if key.startswith(("controller.", "paths."))])
        names.append(" ".join([name, *told]))
    return names


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))
