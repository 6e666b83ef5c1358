"""`gnmr replay RUN... detect=SHARE`: which signals would have detected the faults of recorded runs, and how soon.

Every signal reads the same recorded evidence of runs with known faults (faults.kind). In each run, its trigger is set
for a false alarm rate of SHARE of the unit-steps outside the faults. Nothing is routed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.replay import replay
from gnmr.lab.replay.trace import Norms
from gnmr.lab.report.faults import GRACE, Detection, detect
from gnmr.lab.report.runs import UnitMatrices
from gnmr.records.reader import FaultWindow


@dataclass(frozen=True)
class FaultyRun:
    """A run with known faults, and its records."""

    folder: Path
    norms: Norms
    settings: ControllerConfig
    windows: list[FaultWindow]


def detections(name: str, runs: Sequence[FaultyRun], share: float) -> Detection:
    """Return the detections of a signal in all runs together."""
    found = []
    for run in runs:
        options = run.settings.options if name == run.settings.signal else {}
        settings = replace(run.settings, signal=name, options=options)
        risk = np.array([decision.risk for decision in replay(run.norms, settings)])
        nothing = np.zeros(risk.shape, bool)
        seen = np.where(run.norms.observed, risk, np.nan)
        matrices = UnitMatrices(np.arange(1, len(risk) + 1), run.norms.units, risk, {}, seen, nothing)
        found.append(detect(matrices, run.windows, _trigger(run, risk, share)))
    return Detection(
        windows=tuple(window for one in found for window in one.windows),
        delays=tuple(delay for one in found for delay in one.delays),
        flagged=sum(one.flagged for one in found),
        flagged_inside=sum(one.flagged_inside for one in found),
        unit_steps_outside=sum(one.unit_steps_outside for one in found),
    )


def _trigger(run: FaultyRun, risk: np.ndarray, share: float) -> float:
    """Return the smallest trigger with false alarms in at most `share` of the unit-steps outside the windows."""
    outside = run.norms.observed.copy()
    for window in run.windows:
        outside[window.start - 1 : window.end + GRACE, run.norms.units.index(window.unit)] = False
    highest = np.sort(risk[outside])[::-1]
    allowed = int(share * len(highest))
    return float(highest[allowed]) if allowed < len(highest) else 0.0


def table(found: dict[str, Detection]) -> Table:
    """Return a table with recall, precision and median delay of each signal, and its recall by kind of fault."""
    kinds = sorted({window.kind for one in found.values() for window in one.windows})
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("signal", "recall", "precision", "delay", *kinds):
        shown.add_column(column, justify="left" if column == "signal" else "right", no_wrap=True)
    for name, one in found.items():
        precision = "-" if one.precision is None else f"{one.precision:.1%}"
        delay = "-" if one.delay is None else f"{one.delay:g}"
        caught = Counter(w.kind for w, after in zip(one.windows, one.delays, strict=True) if after is not None)
        of_kind = Counter(window.kind for window in one.windows)
        recalls = [f"{caught[kind]} of {of_kind[kind]}" for kind in kinds]
        shown.add_row(name, f"{one.detected} of {len(one.windows)}", precision, delay, *recalls)
    return shown
