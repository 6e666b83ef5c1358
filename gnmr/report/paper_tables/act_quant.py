"""Act-quant stress (5.1, E.1, E.4, E.5): the paper's tables 1, 3, 5, 6, 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

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
        if _of_the_paper(kind, arm) and arm.always is not None:
            return published.val_ppl(kind.scale, bits(arm.always), None, None, None)
        if not (_of_the_paper(kind, arm) and _plain_gnmr(arm)):
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
        asked = _of_the_paper(kind, arm, unit="block") and _four_eight(arm) and _adapt(kind, arm)
        return published.TABLE_10.get(kind.scale) if asked else None

    table = _by_scale(title, having, between, theirs)
    chosen_once = [arm for comp in having for arm in comp.arms if arm.routed and arm.signal == _STATIC_BASELINE]
    if others := dict.fromkeys(arm.label for arm in chosen_once if not _of_blocks_in_16_bits(arm)):
        table.notes.append(
            f"The paper's baseline is {100 * published.K_FRAC_10:.0f} % of the blocks for good, ranked over a warm-up "
            f"in 16 bits (variant=adapt). Another one, chosen of other units or on another path: {', '.join(others)}."
        )
    return table


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
            trigger = arm.settings.get("controller.trigger", 1.0)  # a share is of what exceeds trigger times threshold
            paper = None
            if _of_the_paper(comparison.kind, arm) and _plain_gnmr(arm):
                paper = published.over_fracs(comparison.kind.scale, arm.low_bits, arm.recovery_bits, alpha, beta)
            shares = [percent(share) for pair in zip(ours, paper or (None, None), strict=True) for share in pair]
            thresholds = [NOTHING if value is None else str(round(value * trigger, 3)) for value in (alpha, beta)]
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
        fits = _two_stages(comparison.kind, arm) and _max_o(arm) == published.MAX_O
        theirs = published.TABLE_5.get(_stages(arm)) if fits else None
        add_row(table, [arm.label, *map(str, _stages(arm)), *along(arm, _EVALUATED_AT)], _cells(theirs))
    table.notes = [ALONG]
    return note(table, comparison, _AT)


def table_6(comparison: Comparison) -> Table:
    """Perplexity along the run by max_o; arms that differ in nothing else."""
    arms = [arm for group in _siblings(comparison, ("controller.max_o",), GNMR) for arm in group]
    columns = ["arm", "max_o", *marks(comparison, _EVALUATED_AT)]
    table = Table(f"{comparison.name}: max_o (the paper's table 6)", columns)
    for arm in sorted(arms, key=_max_o):
        fits = _two_stages(comparison.kind, arm) and _stages(arm) == (1.5, 1.1)
        theirs = published.TABLE_6.get(_max_o(arm)) if fits else None
        add_row(table, [arm.label, str(_max_o(arm)), *along(arm, _EVALUATED_AT)], _cells(theirs))
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
        if paper is None or not _matched_trigger(comparison.kind, arm):
            continue
        shapes = ("{:.3f}", "{:.4f}", "{:.4f}", "{:.4f}", "{:.0f}")
        cells = zip(astuple(paper), shapes, strict=True)
        table.rows.append([THEIRS, *(NOTHING if value is None else shape.format(value) for value, shape in cells)])
    table.notes = [
        "Means over done seeds, promotion over diverged ones too. Peak memory: the process on a CPU, PyTorch on a GPU; "
        "1 MB = 10⁶ B."
    ]
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


def _cells(ppl: tuple[float, ...] | None) -> list[str] | None:
    return None if ppl is None else [f"{one:.2f}" for one in ppl]


def _stages(arm: Arm) -> tuple[float, float]:
    """alpha in the first stage and afterwards; NaN where GNMR has no threshold."""
    then = arm.settings.get("controller.alpha")
    first = arm.settings.get("controller.alpha_init")
    return tuple(math.nan if value is None else float(value) for value in (then if first is None else first, then))  # type: ignore[return-value]


def _max_o(arm: Arm) -> int:
    return int(arm.settings.get("controller.max_o") or 0)


def _of_the_paper(kind: Kind, arm: Arm, rate: float | None = None, unit: str = "operator") -> bool:
    """Whether the arm quantizes and trains as the paper's act-quant stress does, and nothing disturbs it.

    `rate`: where it is not table 8's of the scale. `unit`: E.4 has its own. Integer and floating-point grids both
    count: the paper has either.
    """
    get = arm.settings.get
    return (
        undisturbed(arm)
        and get("paths.low") in FORMATS
        and get("paths.site") == "saved"
        and get("paths.rounding", "nearest") == "nearest"
        and get("paths.unit", "operator") == unit
        and get("paths.targets", ["*_proj"]) == ["*_proj"]
        and get("optim.lr") == (rate or published.RATES.get(kind.scale))
    )


def _four_eight(arm: Arm) -> bool:
    return (arm.low_bits, arm.recovery_bits) == (4, 8)


def _steady_gnmr(arm: Arm) -> bool:
    """Whether the controller is the paper's and controls from the first step on; its cap and thresholds aside."""
    get = arm.settings.get
    lock = get("controller.t_lock", published.T_LOCK) == published.T_LOCK
    return plain(arm) and lock and not get("controller.warmup_frac")


def _plain_gnmr(arm: Arm) -> bool:
    """Whether the controller is the paper's, cap and lock too: GNMR and dGNMR at the thresholds as set, one stage."""
    get = arm.settings.get
    one_stage = not get("controller.alpha_init") and not get("controller.beta_init")
    return _steady_gnmr(arm) and arm.signal == "gnmr_delta" and one_stage and _max_o(arm) == published.MAX_O


def _two_stages(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is one of tables 5 and 6, alpha and max_o aside: 4 and 8 bits, dGNMR off, 2.5 % first stage."""
    get = arm.settings.get
    off = arm.signal == "gnmr" or (get("controller.beta") is None and get("controller.beta_init") is None)
    one_length = get("controller.init_frac", 0.025) == 0.025
    own = kind.scale == published.SCALE_5_6_11 and _of_the_paper(kind, arm) and _four_eight(arm)
    return own and _steady_gnmr(arm) and off and one_length


def _adapt(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is the static baseline of E.4: its share of the blocks, ranked over its steps, for good."""
    steps = kind.steps or 0

    def option(name: str) -> Any:
        return arm.settings.get(f"controller.options.{name}")

    calibration = option("calibration_steps") or round(steps * (option("calibration_frac") or 0.05))
    warmup = round(steps * (arm.settings.get("controller.warmup_frac") or 0))
    return (
        arm.routed
        and arm.signal == _STATIC_BASELINE
        and _of_blocks_in_16_bits(arm)
        and option("k_frac") == published.K_FRAC_10
        and option("k") is None
        and option("share") is None
        and calibration == warmup == published.CALIBRATION_10
    )


def _of_blocks_in_16_bits(arm: Arm) -> bool:
    """Whether its units are blocks and it warms up in 16 bits."""
    get = arm.settings.get
    in_16_bits = get("controller.warmup_path") == "16bit" or arm.recovery_bits == 16
    return get("paths.unit") == "block" and bool(get("controller.warmup_frac")) and in_16_bits


def _matched_trigger(kind: Kind, arm: Arm) -> bool:
    """Whether the arm is one of E.5, cap and lock too: GNMR over a pair of table 1's thresholds, others ranked."""
    get = arm.settings.get
    own = kind.scale == published.SCALE_5_6_11 and _of_the_paper(kind, arm, published.RATE_11) and _four_eight(arm)
    if arm.signal in GNMR:
        thresholds = get("controller.alpha"), get("controller.beta")
        return own and _plain_gnmr(arm) and thresholds in {(row.alpha, row.beta) for row in published.TABLE_1}
    actuator = (_max_o(arm), get("controller.t_lock"), arm.hold) == (published.MAX_O, published.T_LOCK, 1)
    return own and arm.ranked and actuator and not get("controller.warmup_frac")


def _beside_the_paper(comparisons: list[Comparison], figures: bool) -> list[str]:
    notes = []
    kinds = [comparison.kind for comparison in comparisons]
    if others := sorted({kind.scale for kind in kinds if kind.scale not in published.TABLE_1_TOKENS}):
        scales, here = ", ".join(published.TABLE_1_TOKENS), ", ".join(others)
        notes.append(f"The paper's scales are {scales}; it has no figures for scale {here}, so none stand beside ours.")
    if figures:
        notes.append(source(comparisons))
    return notes
