"""Detection of injected faults: flagged unit-steps against the windows of faults.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from gnmr.lab.report.recorded_run import Run, UnitMatrices
from gnmr.records.reader import FaultWindow, calibrated_trigger

GRACE = 1  # steps after a window in which a flag still counts as its detection


@dataclass(frozen=True)
class Detection:
    """How one run's signal detected its fault windows. A share of zero events is None."""

    windows: tuple[FaultWindow, ...]
    delays: tuple[int | None, ...]  # per window: first flagged step minus the window's first; None where it was missed
    flagged: int  # unit-steps over the trigger
    flagged_inside: int
    unit_steps_outside: int  # observed unit-steps outside every window

    @property
    def detected(self) -> int:
        return sum(delay is not None for delay in self.delays)

    @property
    def precision(self) -> float | None:
        """Flagged unit-steps inside a window over all flagged ones."""
        return self.flagged_inside / self.flagged if self.flagged else None

    @property
    def recall(self) -> float | None:
        """Detected windows over all windows."""
        return self.detected / len(self.windows) if self.windows else None

    @property
    def delay(self) -> float | None:
        """Median over the detected windows, in steps."""
        delays = [delay for delay in self.delays if delay is not None]
        return float(median(delays)) if delays else None

    @property
    def false_alarms(self) -> float | None:
        """Flagged unit-steps per 1,000 observed ones, both outside every window."""
        outside = self.unit_steps_outside
        return 1000 * (self.flagged - self.flagged_inside) / outside if outside else None


def detect(matrices: UnitMatrices, windows: Iterable[FaultWindow], trigger: float = 1.0) -> Detection:
    """Hold the flagged unit-steps (risk > `trigger`, inf included) against the windows.

    A window reaches to `end` + `GRACE` here, for the detection as for inside and outside. Windows that begin after the
    last recorded step are left out; one of a unit that was never observed is missed. An unobserved unit-step (risk NaN)
    counts nowhere.

    Args:
        matrices: the run's units, (S, U) each.
        windows: the injected faults.
        trigger: the risk above which a unit-step is flagged.
    """
    steps, risk_SU = matrices.steps, matrices.risk_SU
    place = {unit: [number] for number, unit in enumerate(matrices.units)}  # as columns: one, or none
    begun = tuple(window for window in windows if len(steps) and window.start <= steps[-1])
    flagged_SU, inside_SU = risk_SU > trigger, np.zeros(risk_SU.shape, bool)
    delays: list[int | None] = []
    for window in begun:
        unit = place.get(window.unit, [])
        # Recorded steps within the window; a flag in any of them detects it.
        rows = slice(*np.searchsorted(steps, (window.start, window.end + GRACE + 1)))
        hits = steps[rows][flagged_SU[rows, unit].any(axis=1)]
        delays.append(int(hits[0]) - window.start if len(hits) else None)
        inside_SU[rows, unit] = True
    return Detection(
        windows=begun,
        delays=tuple(delays),
        flagged=int(flagged_SU.sum()),
        flagged_inside=int((flagged_SU & inside_SU).sum()),
        unit_steps_outside=int((~np.isnan(risk_SU) & ~inside_SU).sum()),
    )


def trigger(run: Run) -> float:
    """Return the factor of all thresholds; a loop that calibrated it itself has it in its header."""
    calibrated = calibrated_trigger(run.header)
    return calibrated[1] if calibrated is not None else float(run.settings.get("controller.trigger") or 1.0)
