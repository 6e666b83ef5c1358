"""Saturated and non-finite elements in recipes' casts, and the norms of monitored modules that stay in 16 bits."""

from __future__ import annotations

from typing import Any

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import NOTHING, Table, average
from gnmr.lab.report.runs import Run

OPERANDS = ("input", "weight", "grad_output", "result")


def casts(comparison: Comparison) -> Table:
    """Saturated, Inf and NaN elements a step, by operand; no rows where nothing was cast."""
    columns = [f"{operand}\n{what}" for operand in OPERANDS for what in ("saturated", "Inf, NaN")]
    table = Table(f"{comparison.name}: what the casts met", ["arm", *columns])
    for arm in comparison.arms:
        cells = [average(_a_step(arm, operand, kind), ",.3g") for operand in OPERANDS for kind in (0, 1)]
        if set(cells) != {NOTHING}:
            table.rows.append([arm.label, *cells])
    table.notes = [
        "Elements a step, all units together, each cast counted once; means over steps and done seeds. Saturated: more "
        "than the format can say under the scale of its group; Inf, NaN: there before the cast."
    ]
    return table


def watched(comparison: Comparison) -> Table:
    """The modules of records.monitor; no rows where none was named."""
    names = dict.fromkeys(name for arm in comparison.arms for run in arm.done for name in _of(run, "monitored"))
    heads = [f"{name}\n{what}" for name in names for what in ("mean norm", "largest GNMR")]
    table = Table(f"{comparison.name}: modules that are watched and never routed", ["arm", *heads])
    for arm in comparison.arms if names else []:
        cells = [arm.label]
        for name in names:
            for key, digits in (("mean", 4), ("largest_gnmr", 2)):
                told = [_of(run, "monitored")[name][key] for run in arm.done if name in _of(run, "monitored")]
                cells.append(average(told, f".{digits}f"))
        if set(cells[1:]) != {NOTHING}:
            table.rows.append(cells)
    table.notes = [
        "Gradient norms before clipping; GNMR as the units' (Eq. 2), its largest in the run; means over done seeds."
    ]
    return table


def _a_step(arm: Arm, operand: str, kind: int) -> list[float]:
    """Of each done run the elements a step."""
    return [
        counts[kind] / run.summary["steps"]  # which met something, so it had steps
        for run in arm.done
        if (counts := _of(run, "saturation_total").get(operand)) is not None
    ]


def _of(run: Run, field: str) -> dict[str, Any]:
    """A table of its summary; runs of older versions have none."""
    return run.summary.get(field) or {}
