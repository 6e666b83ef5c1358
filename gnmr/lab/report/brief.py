"""A line an arm: what a sweep ends with, and what one run is shown beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.layout import NOTHING, Table, measure, percent
from gnmr.lab.report.runs import Run, load


def brief(folders: Iterable[Path]) -> list[Table]:
    """One table for each experiment, scale and data of these runs. UserError for a folder that is no run's."""
    return [_table(comparison) for comparison in compare(load(folder) for folder in folders)]


def beside(run: Run, others: Sequence[Run]) -> Table | None:
    """The run and arms that were recorded elsewhere, of its experiment and scale and as long; None where there is none.

    Data may differ (another Python's library) and so does the commit: the notes say so.
    """
    kept = [other for other in others if other.experiment == run.experiment and other.scale == run.scale]
    kept = [other for other in kept if other.planned_steps == run.planned_steps]
    arms = [arm for comparison in compare(kept) for arm in comparison.arms]
    if not arms:
        return None
    (own,) = compare([run])[0].arms
    table = _arms(f"This run, and reference arms of {run.experiment}, scale {run.scale}", [own, *arms])
    table.rows[0][0] = f"this run: {own.name}"
    commits = ", ".join(sorted({other.commit for other in kept}))
    table.notes = [f"The reference arms are of another commit ({commits}; here {run.commit}): near, and no test."]
    if {other.data.get("fingerprint") for other in kept} != {run.data.get("fingerprint")}:
        table.notes.append(
            "They read other data (another Python's library): perplexities can be compared among themselves alone."
        )
    return table


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
