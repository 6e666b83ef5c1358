"""A line an arm: what a sweep ends with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.layout import NOTHING, Table, measure, percent
from gnmr.lab.report.runs import load


def brief(folders: Iterable[Path]) -> list[Table]:
    """One table for each experiment, scale and data of these runs. UserError for a folder that is no run's."""
    return [_table(comparison) for comparison in compare(load(folder) for folder in folders)]


def _table(comparison: Comparison) -> Table:
    return _arms(comparison.name, comparison.arms)


def _arms(title: str, arms: Sequence[Arm]) -> Table:
    table = Table(title, ["arm", "runs", "perplexity", "promoted", "spent", "sent"])
    for arm in arms:
        done, number = len(arm.done), len(arm.runs)
        table.rows.append(
            [
                arm.label,
                str(number) if done == number else f"{done} of {number}",
                measure(arm.stat("final_val_ppl"), 2),
                percent(arm.promoted) if arm.routed else NOTHING,
                percent(arm.mean("spent_gemm_frac")),
                percent(arm.mean("numbers_sent_frac")),
            ]
        )
    return table.without_empty(("promoted", "spent", "sent"))
