"""Detection of injected faults: flagged unit-steps against the windows of faults.jsonl, and the table of it."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import numpy as np

from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import Table, measure
from gnmr.lab.report.recorded_run import UnitMatrices
from gnmr.lab.report.statistics import stat
from gnmr.records.reader import FaultWindow

GRACE = 1  # steps after a window in which a flag still counts as its detection


class Detection(NamedTuple):
    """How one run's signal detected its fault windows. A figure over nothing is None."""

    windows: int  # that began before the last recorded step
    recall: float | None  # detected windows over all windows
    precision: float | None  # flagged unit-steps inside a window over all flagged ones
    delay: float | None  # steps from the start of a window to its first flag, median over the detected windows
    false_alarms: float | None  # flagged unit-steps per 1,000 observed ones, both outside every window


def detect(matrices: UnitMatrices, windows: Iterable[FaultWindow], trigger: float = 1.0) -> Detection:
    """Hold the flagged unit-steps (risk > `trigger`, inf included) against the windows.

    A window reaches to `end` + `GRACE` here, for the detection as for inside and outside. Windows that begin after the
    last recorded step are left out; one of a unit that was never observed is missed. An unobserved unit-step (risk NaN)
    counts nowhere.

    Args:
        matrices: the run's units, (S, U) each, of at least one step.
        windows: the injected faults.
        trigger: the risk above which a unit-step is flagged.
    """
    steps, flagged_SU = matrices.steps, matrices.risk_SU > trigger
    inside_SU = np.zeros_like(flagged_SU)
    column = {unit: [number] for number, unit in enumerate(matrices.units)}  # as columns: one, or none
    begun = [window for window in windows if window.start <= steps[-1]]
    delays: list[int] = []
    for window in begun:
        # Recorded steps within the window; a flag in any of them detects it.
        rows, unit = slice(*np.searchsorted(steps, (window.start, window.end + GRACE + 1))), column.get(window.unit, [])
        inside_SU[rows, unit] = True
        flagged_steps = steps[rows][flagged_SU[rows, unit].any(axis=1)]
        delays += [int(step) - window.start for step in flagged_steps[:1]]
    flagged, flagged_inside = int(flagged_SU.sum()), int((flagged_SU & inside_SU).sum())
    outside = int((~np.isnan(matrices.risk_SU) & ~inside_SU).sum())
    return Detection(
        windows=len(begun),
        recall=len(delays) / len(begun) if begun else None,
        precision=flagged_inside / flagged if flagged else None,
        delay=float(median(delays)) if delays else None,
        false_alarms=1000 * (flagged - flagged_inside) / outside if outside else None,
    )


def fault_table(comparison: Comparison) -> Table:
    """Return how the arms' signals detected the injected faults: precision, recall, delay and false alarms.

    They are the mean ± sample standard deviation over the seeds. Without injected faults the table is empty.
    """
    columns = ["recall", "precision", "delay\n[steps]", "false alarms\nper 1,000"]
    table = Table(f"{comparison.name}: injected faults", ["arm", "seeds", "windows", *columns])
    for arm in comparison.arms:
        # Detection is judged by the risks, which a run without rows of units does not have.
        units_of_runs = ((run, run.units()) for run in arm.runs if run.windows)
        detections = [detect(units, run.windows, run.trigger[0]) for run, units in units_of_runs if len(units.steps)]
        if detections:
            windows, recalls, precisions, delays, false_alarms = zip(*detections, strict=True)
            in_percent = [stat(share and 100 * share for share in shares) for shares in (recalls, precisions)]
            cells = [measure(share, 1, "%") for share in in_percent]
            cells += [measure(stat(delays), 1), measure(stat(false_alarms), 2)]
            table.rows.append([arm.label, str(len(detections)), str(sum(windows)), *cells])
    table.notes = [
        "A window is detected if its unit's risk exceeds the trigger between its first step and the step after its "
        "last. Precision: the share of (unit, step) pairs over the trigger that lie in a window. False alarms: pairs "
        "over the trigger outside all windows, per 1,000 such pairs. Delay: the median."
    ]
    return table
