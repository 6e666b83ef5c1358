"""Forks of one base: the share of the gap that each arm closes, order by order, and what the table could have shown.

The orders of the data are what arms have in common. The noise is what is left of the losses beside an effect of the
arm and one of the order, pooled over all arms (`family.fit`). The smallest effect is the difference of two arms' means
over the orders that 80 of 100 such tables show. Each arm is tested against never by that model, the positive control
first (`gnmr.lab.report.family`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import fit, judge
from gnmr.lab.report.family_notes import assumptions, p_text, positive_control
from gnmr.lab.report.layout import NOTHING, Table, percent
from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import POWER, gap_closed, smallest_effect

_PHASES = {"low": "after the arm's steps", "healed": "after healing in 16 bits"}


def fork_tables(comparison: Comparison) -> list[Table]:
    """One for each phase of the forks and each pair of bounds; none for runs without a base."""
    if comparison.kind.base is None:
        return []
    pairs: dict[tuple[int, int], list[Arm]] = {}
    for arm in comparison.arms:
        low, recovery = comparison.low(arm), comparison.recovery(arm)
        if low is not None and recovery is not None and low is not recovery:
            pairs.setdefault((id(low), id(recovery)), []).append(arm)
    arms = {id(arm): arm for arm in comparison.arms}
    return [
        table
        for (low, high), members in pairs.items()
        for phase in _PHASES
        if (table := _table(comparison, phase, arms[low], arms[high], members)).rows
    ]


def _table(comparison: Comparison, phase: str, low: Arm, high: Arm, arms: list[Arm]) -> Table:
    title = f"{comparison.name}: gap closed {_PHASES[phase]}"
    table = Table(title, ["arm", "spent", "orders", "gap\nclosed", "by order", "p\n(Holm)", "verdict"])
    table.columns += ["loss\n16 bits", "loss\nlow path"]
    arms = [low, *(arm for arm in arms if arm is not low and arm is not high), high]
    losses = {id(arm): losses_after(arm, phase, "val_loss") for arm in arms}
    never, always = losses[id(low)], losses[id(high)]
    values = {str(id(arm)): losses[id(arm)] | dict.fromkeys(arm.diverged, math.inf) for arm in arms}
    first, *others = values
    family = judge(values, [(arm, first) for arm in others], low=first, high=others[-1])
    tested = {row.arm: [p_text(row.p), row.verdict] for row in family.rows}
    for arm in arms:
        mine, beside = losses[id(arm)], losses_after(arm, phase, "val_loss_low").values()
        if not mine and not (arm.diverged and never):
            continue
        closed = gap_closed(never, mine, always)
        by_order = [gap_closed(never, {order: mine[order]}, always) for order in sorted(mine)]
        table.rows.append(
            [
                arm.label,
                percent(arm.spend) if arm.routed else NOTHING,
                str(len(mine)),
                NOTHING if closed is None else f"{100 * closed[0]:z.0f} %",
                ", ".join(NOTHING if one is None else f"{100 * one[0]:.0f}" for one in by_order),
                *tested.get(str(id(arm)), [NOTHING, NOTHING]),
                f"{np.mean(list(mine.values())):.4f}" if mine else NOTHING,
                f"{np.mean(list(beside)):.4f}" if beside else NOTHING,
            ]
        )
    table.notes = _power({key: found for key, found in losses.items() if found}, never, always)
    if family.fit is not None:
        table.notes += [positive_control(family, low.label, high.label), *assumptions(family.fit)]
    return table


def _power(
    losses: Mapping[int, Mapping[int, float]], never: Mapping[int, float], always: Mapping[int, float]
) -> list[str]:
    """The gap, the noise, and the smallest effect that the table could have shown."""
    orders = never.keys() & always.keys()
    if not orders:
        return []
    gap = float(np.mean([never[order] - always[order] for order in orders]))
    told = [
        f"Gap: {gap:.4f} nats, from never to always on the recovery path, mean over orders {_list(orders)}. The first "
        "row is never (0 %), the last always (100 %)."
    ]
    found = fit(losses)
    if found is None or gap <= 0:
        return [*told, "No noise can be told: that takes two arms over two orders and a gap."]
    sd, freedom = found.sd, found.freedom
    least = smallest_effect(sd, freedom, len(orders))
    return [
        *told,
        f"Noise beside arm and order: sd {sd:.2g} nats, {100 * sd / gap:.1f} % of the gap, {freedom} degrees of "
        "freedom. "
        f"Smallest difference of two arms over {len(orders)} orders that is shown at 5 % with {100 * POWER:.0f} % "
        f"power: {least:.2g} nats, {100 * least / gap:.1f} % of the gap (one comparison, not adjusted for many).",
    ]


def losses_after(arm: Arm, phase: str, field: str) -> dict[int, float]:
    """By order: a validation loss of each run that is done, after that phase."""
    found = {run.seed: _loss(run, phase, field) for run in arm.done}
    return {order: loss for order, loss in found.items() if np.isfinite(loss)}


def _loss(run: Run, phase: str, field: str) -> float:
    steps, heal = run.settings.get("training.steps"), run.settings.get("fork.heal", 0)
    at = steps if phase == "low" else run.planned_steps if heal else None
    rows = np.flatnonzero(run.evals["step"] == at) if at is not None else np.zeros(0, int)
    return float(run.evals[field][rows[-1]]) if len(rows) else float("nan")


def _list(orders: object) -> str:
    return ", ".join(map(str, sorted(orders)))  # type: ignore[call-overload]
