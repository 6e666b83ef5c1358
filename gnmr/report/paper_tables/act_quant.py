"""Act-quant stress (5.1, E.1, E.4, E.5): the paper's tables 1, 3, 5, 6, 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

from gnmr.config import FORMATS
from gnmr.report import published
from gnmr.report.arms import Arm, bits
from gnmr.report.comparisons import Comparison, Kind
from gnmr.report.layout import NOTHING, Table, count, measure, percent
from gnmr.report.paper_tables.common import (
    ALONG,
    GNMR,
    THEIRS,
    add_row,
    along,
    final_perplexity,
    marks,
    names,
    note,
    plain,
    shown,
    source,
    undisturbed,
)

_STATIC_BASELINE = "static_k"
_EVALUATED_AT = tuple(tokens / published.TOKENS_5_AND_6[-1] for tokens in published.TOKENS_5_AND_6)
"""Shares of the run at which tables 5 and 6 give the perplexity."""
_AT = f"{published.SCALE_5_6_11}, {count(published.TOKENS_5_AND_6[-1])} tokens"


def table_1(experiment: str, comparisons: list[Comparison]) -> Table:
    """Static and GNMR arms by scales: validation perplexity, the paper's beside it at the paper's scales."""
    title = f"{experiment}: validation perplexity by scale (the paper's table 1)"

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

    def between(arm: Arm) -> bool:
        if arm.always is not None:
            return bits(arm.always) != 16
        return arm.signal == _STATIC_BASELINE or (arm.signal == "gnmr_delta" and not arm.ranked)

    def theirs(kind: Kind, arm: Arm) -> float | None:
        asked = arm.routed and arm.signal == _STATIC_BASELINE and _of_the_paper(arm)
        return published.TABLE_10.get(kind.scale) if asked and (arm.low_bits, arm.recovery_bits) == (4, 8) else None

    return _by_scale(title, having, between, theirs)


def table_3(experiment: str, comparisons: list[Comparison]) -> Table:
    """Shares of unit-steps over the thresholds, the paper's beside them where scale and thresholds are the paper's."""
    theirs = ["paper,\nGNMR > α", "paper,\ndGNMR > β"]
    columns = ["arm", "scale", "α", "β", "GNMR > α", theirs[0], "dGNMR > β", theirs[1]]
    table = Table(f"{experiment}: shares of unit-steps over threshold (the paper's table 3)", columns)
    for comparison, name in zip(comparisons, names(comparisons), strict=True):
        for arm in comparison.arms:
            over = arm.over_fracs()
            ours = [over.get(column) for column in ("gnmr", "delta_gnmr")]
            if arm.signal not in GNMR or ours == [None, None]:
                continue
            alpha, beta = (arm.settings.get(f"controller.{key}") for key in ("alpha", "beta"))
            paper = None
            if _of_the_paper(arm) and _plain_gnmr(arm):
                paper = published.over_fracs(comparison.kind.scale, arm.low_bits, arm.recovery_bits, alpha, beta)
            shares = [percent(share) for pair in zip(ours, paper or (None, None), strict=True) for share in pair]
            thresholds = [NOTHING if value is None else str(value) for value in (alpha, beta)]
            table.rows.append([arm.label, name, *thresholds, *shares])
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
        for group in _siblings(comparison, ("controller.alpha", "controller.beta_init", "controller.init_frac"), GNMR)
        if any(arm.settings.get("controller.alpha_init") for arm in group)
        for arm in group
    ]
    columns = ["arm", "α first", "α then", *marks(comparison, _EVALUATED_AT)]
    table = Table(f"{comparison.name}: two-stage thresholds (the paper's table 5)", columns)
    for arm in sorted(arms, key=_stages):
        theirs = published.TABLE_5.get(_stages(arm)) if _of_the_paper(arm) else None
        add_row(table, [arm.label, *map(str, _stages(arm)), *along(arm, _EVALUATED_AT)], _cells(comparison, theirs))
    table.notes = [ALONG]
    return note(table, comparison, _AT)


def table_6(comparison: Comparison) -> Table:
    """Perplexity along the run by max_o; arms that differ in nothing else."""
    arms = [arm for group in _siblings(comparison, ("controller.max_o",), GNMR) for arm in group]
    columns = ["arm", "max_o", *marks(comparison, _EVALUATED_AT)]
    table = Table(f"{comparison.name}: max_o (the paper's table 6)", columns)
    for arm in sorted(arms, key=_max_o):
        theirs = published.TABLE_6.get(_max_o(arm)) if _stages(arm) == (1.5, 1.1) and _of_the_paper(arm) else None
        add_row(table, [arm.label, str(_max_o(arm)), *along(arm, _EVALUATED_AT)], _cells(comparison, theirs))
    table.notes = [ALONG]
    return note(table, comparison, _AT)


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
        table.rows.append([THEIRS, *(NOTHING if value is None else shape.format(value) for value, shape in cells)])
    table.notes = ["Means over done seeds. Peak memory: the process on a CPU, PyTorch on a GPU; 1 MB = 10⁶ B."]
    return note(table, comparison, _AT)


def _by_scale(
    title: str,
    comparisons: list[Comparison],
    fits: Callable[[Arm], bool],
    look_up: Callable[[Kind, Arm], float | None],
) -> Table:
    table = Table(title, ["arm"])
    theirs: list[str] = []
    found = sorted((arm for comp in comparisons for arm in comp.arms if fits(arm)), key=lambda arm: arm.sort_key)
    rows = {label: [label] for label in dict.fromkeys(arm.label for arm in found)}
    for comparison, name in zip(comparisons, names(comparisons), strict=True):
        arms = {arm.label: arm for arm in comparison.arms}
        scale = comparison.kind.scale
        table.columns.append(f"{name}\n{count(comparison.kind.tokens)} tokens")
        for label, cells in rows.items():
            cells.append(final_perplexity(arms.get(label)))
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


def _cells(comparison: Comparison, ppl: tuple[float, ...] | None) -> list[str] | None:
    """The paper's perplexities where the scale is theirs."""
    return None if ppl is None or comparison.kind.scale != published.SCALE_5_6_11 else [f"{one:.2f}" for one in ppl]


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
    return undisturbed(arm) and get("paths.low") in FORMATS and get("paths.site") == "saved"


def _plain_gnmr(arm: Arm) -> bool:
    """Whether the controller is the paper's: GNMR and dGNMR at the thresholds as set, one stage, no warm-up."""
    get = arm.settings.get
    one_stage = not get("controller.alpha_init") and not get("controller.warmup_frac")
    return plain(arm) and arm.signal == "gnmr_delta" and one_stage


def _matched_trigger(arm: Arm) -> bool:
    """Whether the arm is one of E.5: 4-bit and 8-bit, max_o 4, lock 1, rate 3e-3; GNMR thresholded, others ranked."""
    return (
        _of_the_paper(arm)
        and (arm.low_bits, arm.recovery_bits) == (4, 8)
        and (_max_o(arm), arm.settings.get("controller.t_lock"), arm.settings.get("optim.lr")) == (4, 1, 3e-3)
        and (arm.ranked if arm.signal not in GNMR else _plain_gnmr(arm))
    )


def _beside_the_paper(comparisons: list[Comparison], figures: bool) -> list[str]:
    notes = []
    kinds = [comparison.kind for comparison in comparisons]
    if others := sorted({kind.scale for kind in kinds if kind.scale not in published.TABLE_1_TOKENS}):
        scales, here = ", ".join(published.TABLE_1_TOKENS), ", ".join(others)
        notes.append(f"The paper's scales are {scales}; it has no figures for scale {here}, so none stand beside ours.")
    if figures:
        notes.append(source(comparisons))
    return notes
