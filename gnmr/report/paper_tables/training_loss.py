"""Training loss along the run: the paper's tables 13 (mixture of experts, E.6) and 15 (PanGu-1B, E.7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from gnmr.report import published
from gnmr.report.arms import Arm, bits, stat
from gnmr.report.comparisons import Comparison
from gnmr.report.layout import NOTHING, Table, count, measure
from gnmr.report.paper_tables.common import add_row, note, plain, shown, size_of, undisturbed
from gnmr.report.runs import Run

SMOOTHED = 0.01
"""Share of the run over which a training loss at a step is the mean."""
_SHARES_13 = tuple(step / published.STEPS_13[-1] for step in published.STEPS_13)
_SHARES_15 = tuple(tokens / published.TOKENS_15[-1] for tokens in published.TOKENS_15)


def table_13(comparison: Comparison) -> Table:
    """A mixture of experts, by steps."""
    steps = comparison.kind.steps
    headings = [f"step\n{share * steps:,.0f}" if steps else f"at\n{share:.0%}" for share in _SHARES_13]
    table = Table(f"{comparison.name}: training loss by steps (the paper's table 13)", ["arm", *headings])

    def fits(arm: Arm) -> bool:
        get = arm.settings.get
        return arm.recovery_bits == 16 and (get("controller.alpha"), get("controller.warmup_frac")) == (0.9, 0.05)

    _fill(table, comparison, _SHARES_13, published.TABLE_13, published.SCALE_13, fits)
    return note(table, comparison, f"{published.SCALE_13}, {published.STEPS_13[-1]:,.0f} steps")


def table_15(comparison: Comparison) -> Table:
    """PanGu, by tokens."""
    tokens = comparison.kind.tokens
    headings = [f"at\n{count(share * tokens) if tokens else f'{share:.0%}'}" for share in _SHARES_15]
    table = Table(f"{comparison.name}: training loss by tokens (the paper's table 15)", ["arm", *headings])

    def fits(arm: Arm) -> bool:
        return arm.settings.get("controller.alpha") == 0.4 and not arm.settings.get("controller.warmup_frac")

    _fill(table, comparison, _SHARES_15, published.TABLE_15, published.SCALE_15, fits)
    return note(table, comparison, f"{published.SCALE_15}, {count(published.TOKENS_15[-1])} tokens")


def loss_at(run: Run, share: float) -> float | None:
    """Training loss at a share of the run: the mean of the finite ones within half of `SMOOTHED` of it, at 0 that of
    the first step. None where there are none."""
    steps, losses = run.steps["step"], run.steps["loss"]
    planned = run.planned_steps or run.last_step
    around = np.abs(steps - max(1, round(share * planned))) <= (SMOOTHED / 2 * planned if share > 0 else 0)
    found = losses[around & np.isfinite(losses)]
    return float(found.mean()) if len(found) else None


def _fill(
    table: Table,
    comparison: Comparison,
    shares: Sequence[float],
    paper: dict[published.Control, tuple[float, ...]],
    scale: str,
    fits: Callable[[Arm], bool],
) -> None:
    """The rows. `scale`: the paper's. `fits`: whether an arm under GNMR has the paper's thresholds."""
    other = None if size_of(comparison) == scale else scale
    for arm in filter(shown, comparison.arms):
        theirs = paper.get(_control(arm, fits)) if undisturbed(arm, outliers=other is not None) else None
        cells = None if theirs is None else ["x" if math.isinf(loss) else f"{loss:.3f}" for loss in theirs]
        add_row(table, [arm.label, *(_cell(arm, share) for share in shares)], cells, other)
    table.notes = [
        f"Mean over the steps within {SMOOTHED / 2:.1%} of the run, at 0 the first step alone; then over the seeds "
        "that are done or not yet diverged. x: diverged before."
    ]


def _control(arm: Arm, fits: Callable[[Arm], bool]) -> published.Control:
    """That of the arm, (None, True) of one under other control than the paper's."""
    if arm.always is not None:
        return bits(arm.always), False
    one_stage = not arm.settings.get("controller.alpha_init")
    return (arm.low_bits, True) if plain(arm) and one_stage and fits(arm) else (None, True)


def _cell(arm: Arm, share: float) -> str:
    losses = {run.seed: loss_at(run, share) for run in arm.runs if run.status == "done" or run.seed in arm.diverged}
    known = [loss for loss in losses.values() if loss is not None]
    lost = sum(losses.get(seed) is None for seed in arm.diverged)
    if not known:
        return "x" if lost else NOTHING
    return measure(stat(known), 3) + (f", {lost} x" if lost else "")
