"""Forks of one base: the share of the gap that each arm closes, by order of the data."""

from __future__ import annotations

import math

import numpy as np

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import judge
from gnmr.lab.report.layout import NOTHING, Table, percent
from gnmr.lab.report.runs import Run
from gnmr.lab.report.statistics import gap_closed, p_text

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
    table.notes = [family.control_text(), family.assumptions_text()]
    return table


def losses_after(arm: Arm, phase: str, field: str) -> dict[int, float]:
    """By order: a validation loss of each run that is done, after that phase."""
    found = {run.seed: _loss(run, phase, field) for run in arm.done}
    return {order: loss for order, loss in found.items() if np.isfinite(loss)}


def _loss(run: Run, phase: str, field: str) -> float:
    steps, heal = run.settings.get("training.steps"), run.settings.get("fork.heal", 0)
    at = steps if phase == "low" else run.planned_steps if heal else None
    rows = np.flatnonzero(run.evals["step"] == at) if at is not None else np.zeros(0, int)
    return float(run.evals[field][rows[-1]]) if len(rows) else float("nan")
