"""The paper's tables 1, 3, 5, 6, 10 and 11 with our runs in them: rows are found by the arms' settings.

The paper's figures stand beside ours only where scale and settings are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np

from gnmr.report import published
from gnmr.report.arms import Arm, Comparison, Kind, bits, stat
from gnmr.report.layout import NOTHING, Table, count, measure, percent

_GNMR = ("gnmr_delta", "gnmr", "delta_gnmr")
_STATIC_BASELINE = "static_k"
_THEIRS = "  the paper's"
"""First cell of the row that holds the paper's figures for the row above it."""
_EVALUATED_AT = tuple(tokens / published.TOKENS_5_AND_6[-1] for tokens in published.TOKENS_5_AND_6)
"""Shares of the run at which tables 5 and 6 give the perplexity."""


def paper_tables(experiment: str, comparisons: list[Comparison]) -> list[Table]:
    """Those of the paper's tables for which these runs have rows."""
    found = [table_1(experiment, comparisons), table_3(experiment, comparisons)]
    for comparison in comparisons:
        found += [table_5(comparison), table_6(comparison)]
    found.append(table_10(experiment, comparisons))
    return [table for table in [*found, *map(table_11, comparisons)] if table.rows]


def table_1(experiment: str, comparisons: list[Comparison]) -> Table:
    """Static and GNMR arms by scales: validation perplexity, the paper's beside it at the paper's scales."""
    title = f"{experiment}: validation perplexity by scale (the paper's table 1)"

    def shown(arm: Arm) -> bool:
        return arm.always is not None or (arm.signal in _GNMR and not arm.ranked)

    def theirs(kind: Kind, arm: Arm) -> float | None:
        get = arm.settings.get
        if _of_the_paper(arm) and arm.always is not None:
            return published.val_ppl(kind.scale, bits(arm.always), None, None, None)
        if not (_of_the_paper(arm) and _plain_gnmr(arm)):
            return None
        return published.val_ppl(
            kind.scale, arm.low_bits, arm.recovery_bits, get("controller.alpha"), get("controller.beta")
        )

    return _by_scale(title, comparisons, shown, theirs)


def table_10(experiment: str, comparisons: list[Comparison]) -> Table:
    """The static baseline (`static_k`, E.4) by scales, between the static low path and GNMR."""
    title = f"{experiment}: static baseline, validation perplexity by scale (the paper's table 10)"
    having = [comp for comp in comparisons if any(arm.signal == _STATIC_BASELINE for arm in comp.arms if arm.routed)]

    def shown(arm: Arm) -> bool:
        if arm.always is not None:
            return bits(arm.always) != 16
        return arm.signal == _STATIC_BASELINE or (arm.signal == "gnmr_delta" and not arm.ranked)

    def theirs(kind: Kind, arm: Arm) -> float | None:
        asked = arm.routed and arm.signal == _STATIC_BASELINE and _of_the_paper(arm)
        return published.TABLE_10.get(kind.scale) if asked and (arm.low_bits, arm.recovery_bits) == (4, 8) else None

    return _by_scale(title, having, shown, theirs)


def table_3(experiment: str, comparisons: list[Comparison]) -> Table:
    """Shares of unit-steps over the thresholds, the paper's beside them where scale and thresholds are the paper's."""
    theirs = ["paper,\nGNMR > α", "paper,\ndGNMR > β"]
    columns = ["arm", "scale", "α", "β", "GNMR > α", theirs[0], "dGNMR > β", theirs[1]]
    table = Table(f"{experiment}: shares of unit-steps over threshold (the paper's table 3)", columns)
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        for arm in comparison.arms:
            over = arm.over_fracs()
            ours = [over.get(column) for column in ("gnmr", "delta_gnmr")]
            if arm.signal not in _GNMR or ours == [None, None]:
                continue
            alpha, beta = (arm.settings.get(f"controller.{key}") for key in ("alpha", "beta"))
            paper = None
            if _of_the_paper(arm) and _plain_gnmr(arm):
                paper = published.over_fracs(comparison.kind.scale, arm.low_bits, arm.recovery_bits, alpha, beta)
            shown = [percent(share) for pair in zip(ours, paper or (None, None), strict=True) for share in pair]
            thresholds = [NOTHING if value is None else str(value) for value in (alpha, beta)]
            table.rows.append([arm.label, name, *thresholds, *shown])
    table = table.without_empty(theirs)
    if not set(theirs) & set(table.columns):
        table.notes.append("The paper has no shares for these scales and thresholds, so none stand beside ours.")
    else:
        table.notes += _beside_the_paper(comparisons, True)
    return table


def table_5(comparison: Comparison) -> Table:
    """Perplexity along the run by two-stage thresholds; arms that differ in nothing but alpha and its first stage."""
    arms = [
        arm
        for group in _siblings(comparison, ("controller.alpha", "controller.beta_init", "controller.init_frac"), _GNMR)
        if any(arm.settings.get("controller.alpha_init") for arm in group)
        for arm in group
    ]
    columns = ["arm", "α first", "α then", *_marks(comparison)]
    table = Table(f"{comparison.name}: two-stage thresholds (the paper's table 5)", columns)
    for arm in sorted(arms, key=_stages):
        theirs = published.TABLE_5.get(_stages(arm)) if _of_the_paper(arm) else None
        _add_row(table, comparison, [arm.label, *map(str, _stages(arm)), *_along(arm)], theirs)
    return _noted(table, comparison)


def table_6(comparison: Comparison) -> Table:
    """Perplexity along the run by max_o; arms that differ in nothing else."""
    arms = [arm for group in _siblings(comparison, ("controller.max_o",), _GNMR) for arm in group]
    table = Table(f"{comparison.name}: max_o (the paper's table 6)", ["arm", "max_o", *_marks(comparison)])
    for arm in sorted(arms, key=_max_o):
        theirs = published.TABLE_6.get(_max_o(arm)) if _stages(arm) == (1.5, 1.1) and _of_the_paper(arm) else None
        _add_row(table, comparison, [arm.label, str(_max_o(arm)), *_along(arm)], theirs)
    return _noted(table, comparison)


def table_11(comparison: Comparison) -> Table:
    """Signals on one actuator: final perplexity, promotion, steps at the cap, time of a step and peak memory."""
    columns = ["arm", "final PPL", "promotion\nratio", "hit-max_o\nrate", "step [s]", "peak [MB]"]
    table = Table(f"{comparison.name}: matched triggers (the paper's table 11)", columns)
    actuator = ("controller.max_o", "controller.t_lock", "controller.hold")
    groups = _siblings(comparison, ("controller.", "paths.probe_tokens"), None, fixed=actuator)
    for arm in [arm for group in groups if len({(arm.signal, arm.ranked) for arm in group}) > 1 for arm in group]:
        steps, peak = arm.mean("steps"), arm.mean("peak_memory_bytes")
        time = arm.mean("wall_time_s")
        numbers = (
            (arm.promoted, "{:.4f}"),
            (arm.mean("hit_max_o_frac"), "{:.4f}"),
            (time / steps if time is not None and steps else None, "{:.4f}"),
            (peak / 1e6 if peak is not None else None, "{:.0f}"),
        )
        ours = [NOTHING if value is None else shape.format(value) for value, shape in numbers]
        table.rows.append([arm.label, measure(arm.stat("final_val_ppl"), 3), *ours])
        paper = published.TABLE_11.get(arm.signal)
        if paper is None or comparison.kind.scale != published.SCALE_5_6_11 or not _matched_trigger(arm):
            continue
        shapes = ("{:.3f}", "{:.4f}", "{:.4f}", "{:.4f}", "{:.0f}")
        cells = zip(astuple(paper), shapes, strict=True)
        table.rows.append([_THEIRS, *(NOTHING if value is None else shape.format(value) for value, shape in cells)])
    table = _noted(table, comparison)
    table.notes.insert(0, "Means over done seeds. Peak memory: the process on a CPU, PyTorch on a GPU; 1 MB = 10⁶ B.")
    return table


def _by_scale(
    title: str,
    comparisons: list[Comparison],
    shown: Callable[[Arm], bool],
    look_up: Callable[[Kind, Arm], float | None],
) -> Table:
    table = Table(title, ["arm"])
    theirs: list[str] = []
    found = sorted((arm for comp in comparisons for arm in comp.arms if shown(arm)), key=lambda arm: arm.sort_key)
    rows = {label: [label] for label in dict.fromkeys(arm.label for arm in found)}
    for comparison, name in zip(comparisons, _names(comparisons), strict=True):
        arms = {arm.label: arm for arm in comparison.arms}
        scale = comparison.kind.scale
        table.columns.append(f"{name}\n{count(comparison.kind.tokens)} tokens")
        for label, cells in rows.items():
            cells.append(_perplexity(arms.get(label)))
        if scale not in published.TABLE_1_TOKENS:
            continue
        theirs.append(f"paper,\n{name}\n{count(published.TABLE_1_TOKENS[scale])}")
        table.columns.append(theirs[-1])
        for label, cells in rows.items():
            ppl = look_up(comparison.kind, arms[label]) if label in arms else None
            cells.append(NOTHING if ppl is None else "x" if math.isinf(ppl) else f"{ppl:.2f}")
    table.rows = list(rows.values())
    if any("x" in cells[1:] for cells in table.rows):
        table.notes.append("x: every run of ours failed, or the paper's failed to converge.")
    table.notes += _beside_the_paper(comparisons, bool(theirs))
    return table


def _siblings(
    comparison: Comparison, free: tuple[str, ...], signals: tuple[str, ...] | None, fixed: tuple[str, ...] = ()
) -> list[list[Arm]]:
    """Routed arms in groups of two and more that differ in settings of these keys alone; thresholded ones if `signals`
    names some. `fixed` are exceptions from `free`, which is read as beginnings of keys."""
    groups: dict[str, list[Arm]] = {}
    for arm in comparison.arms:
        if not arm.routed or (signals is not None and (arm.signal not in signals or arm.ranked)):
            continue
        kept = {
            key: value
            for key, value in arm.settings.items()
            if not (key.startswith(free) and key not in fixed)
            and key not in ("arm", "paths.name", "controller.name")
            and not key.startswith("records.")
        }
        groups.setdefault(repr(sorted(kept.items())), []).append(arm)
    return [group for group in groups.values() if len(group) > 1]


def _marks(comparison: Comparison) -> list[str]:
    """Headings of the perplexities along the run."""
    tokens = comparison.kind.tokens
    return [f"PPL at\n{count(tokens * share) if tokens else f'{share:.0%}'}" for share in _EVALUATED_AT]


def _along(arm: Arm) -> list[str]:
    """Validation perplexity over the done seeds, at the evaluations nearest to table 5's shares of the run."""
    cells = []
    for share in _EVALUATED_AT:
        values = []
        for run in arm.done:
            steps = run.evals["step"]
            if len(steps):
                values.append(run.evals["val_ppl"][np.abs(steps - share * (run.planned_steps or steps[-1])).argmin()])
        cells.append(measure(stat(values), 2))
    return cells


def _add_row(table: Table, comparison: Comparison, cells: list[str], theirs: tuple[float, ...] | None) -> None:
    table.rows.append(cells)
    if theirs is not None and comparison.kind.scale == published.SCALE_5_6_11:
        blank = [""] * (len(cells) - len(theirs) - 1)
        table.rows.append([_THEIRS, *blank, *(f"{value:.2f}" for value in theirs)])


def _noted(table: Table, comparison: Comparison) -> Table:
    shown = any(cells[0] == _THEIRS for cells in table.rows)
    if shown:
        tokens = count(published.TOKENS_5_AND_6[-1])
        table.notes.append(f"The paper's are at {published.SCALE_5_6_11}, {tokens} tokens, on its own machines.")
        table.notes += _beside_the_paper([comparison], True)
    else:
        table.notes.append(f"The paper has this table at {published.SCALE_5_6_11}; none of its rows fits these arms.")
    return table


def _stages(arm: Arm) -> tuple[float, float]:
    """alpha in the first stage and afterwards; NaN where GNMR has no threshold."""
    then = arm.settings.get("controller.alpha")
    first = arm.settings.get("controller.alpha_init")
    return tuple(math.nan if value is None else float(value) for value in (then if first is None else first, then))  # type: ignore[return-value]


def _max_o(arm: Arm) -> int:
    return int(arm.settings.get("controller.max_o") or 0)


def _of_the_paper(arm: Arm) -> bool:
    """Whether the arm quantizes what the paper's act-quant stress setting does, and nothing disturbs it."""
    get = arm.settings.get
    return get("paths.site") == "saved" and get("stress.kind") in (None, "none") and get("optim.transform.name") is None


def _plain_gnmr(arm: Arm) -> bool:
    """Whether the controller is the paper's: GNMR and dGNMR at the thresholds as set, one stage, no warm-up."""
    get = arm.settings.get
    return (
        (arm.signal == "gnmr_delta" and not arm.ranked and get("controller.trigger", 1.0) == 1.0)
        and not get("controller.alpha_init")
        and not get("controller.warmup_frac")
        and get("controller.hold", 1) == 1
    )


def _matched_trigger(arm: Arm) -> bool:
    """Whether the arm is one of E.5: 4-bit and 8-bit, max_o 4, lock 1, rate 3e-3; GNMR thresholded, others ranked."""
    return (
        _of_the_paper(arm)
        and (arm.low_bits, arm.recovery_bits) == (4, 8)
        and (_max_o(arm), arm.settings.get("controller.t_lock"), arm.settings.get("optim.lr")) == (4, 1, 3e-3)
        and (arm.ranked if arm.signal not in _GNMR else _plain_gnmr(arm))
    )


def _beside_the_paper(comparisons: list[Comparison], shown: bool) -> list[str]:
    notes = []
    kinds = [comparison.kind for comparison in comparisons]
    if others := sorted({kind.scale for kind in kinds if kind.scale not in published.TABLE_1_TOKENS}):
        scales, here = ", ".join(published.TABLE_1_TOKENS), ", ".join(others)
        notes.append(f"The paper's scales are {scales}; it has no figures for scale {here}, so none stand beside ours.")
    if shown:
        names = {comparison.runs[0].data.get("name", "unknown") for comparison in comparisons}
        data = f"; the paper's data is C4, ours {', '.join(sorted(names))}" if names != {"c4"} else ""
        notes.append(f"The paper's figures: {published.SOURCE}{data}.")
    return notes


def _perplexity(arm: Arm | None) -> str:
    if arm is None:
        return NOTHING
    if len(arm.with_status("failed")) == len(arm.runs):
        return "x"
    return measure(arm.stat("final_val_ppl"), 2)


def _names(comparisons: list[Comparison]) -> list[str]:
    """The scales; where several comparisons have one, numbered."""
    scales = [comparison.kind.scale for comparison in comparisons]
    return [
        f"{scale} ({scales[: place + 1].count(scale)})" if scales.count(scale) > 1 else scale
        for place, scale in enumerate(scales)
    ]
