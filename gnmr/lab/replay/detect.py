"""`gnmr replay RUN... detect=SHARE`: which signals would have caught the faults of recorded runs, and how soon.

Every signal reads the same recorded evidence of runs whose faults are known (faults.kind). In each run it gets the
trigger at which it raises false alarms in SHARE of the unit-steps outside the faults. Nothing is routed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.replay import replay
from gnmr.lab.replay.trace import Norms
from gnmr.lab.report.faults import GRACE, FaultWindow, detect
from gnmr.lab.report.runs import Ratios


@dataclass(frozen=True)
class FaultyRun:
    """A run with known faults and what was recorded of it."""

    folder: Path
    norms: Norms
    settings: ControllerConfig
    windows: list[FaultWindow]


@dataclass
class Tally:
    """Detections of one signal, summed over runs."""

    windows: int = 0
    detected: int = 0
    flagged: int = 0
    flagged_inside: int = 0
    unit_steps_outside: int = 0
    delays: list[int] = field(default_factory=list)
    """Steps from a detected window's first step to its first flag."""

    def add(self, delays: Sequence[int | None]) -> None:
        """Count windows by their delays, None for a missed one."""
        self.windows += len(delays)
        self.delays += [delay for delay in delays if delay is not None]
        self.detected = len(self.delays)


def tally(name: str, runs: Sequence[FaultyRun], share: float) -> dict[str, Tally]:
    """Return the detections of a signal by kind of fault; "all" holds the kinds together, and alone counts flags."""
    tallies: dict[str, Tally] = {"all": Tally()}
    for run in runs:
        options = run.settings.options if name == run.settings.signal else {}
        settings = replace(run.settings, signal=name, options=options)
        risk = np.array([decision.risk for decision in replay(run.norms, settings)])
        nothing = np.zeros(risk.shape, bool)
        seen = np.where(run.norms.observed, risk, np.nan)
        ratios = Ratios(np.arange(1, len(risk) + 1), run.norms.units, risk, {}, seen, nothing)
        found = detect(ratios, run.windows, _trigger(run, risk, share))
        every = tallies["all"]
        every.add(found.delays)
        every.flagged += found.flagged
        every.flagged_inside += found.flagged_inside
        every.unit_steps_outside += found.unit_steps_outside
        for kind in {window.kind for window in run.windows}:
            of_kind = [d for window, d in zip(found.windows, found.delays, strict=True) if window.kind == kind]
            tallies.setdefault(kind, Tally()).add(of_kind)
    return tallies


def _trigger(run: FaultyRun, risk: np.ndarray, share: float) -> float:
    """Return the least trigger with false alarms in at most `share` of the unit-steps outside the windows."""
    outside = run.norms.observed.copy()
    for window in run.windows:
        outside[window.start - 1 : window.end + GRACE, run.norms.units.index(window.unit)] = False
    highest = np.sort(risk[outside])[::-1]
    allowed = int(share * len(highest))
    return float(highest[allowed]) if allowed < len(highest) else 0.0


def as_tree(found: dict[str, dict[str, Tally]]) -> dict[str, dict[str, object]]:
    """Return the tallies for a JSON file."""
    return {name: {kind: asdict(one) for kind, one in kinds.items()} for name, kinds in found.items()}


def table(found: dict[str, dict[str, Tally]]) -> Table:
    """Return recall, precision and median delay of each signal, then its recall by kind of fault."""
    kinds = sorted({kind for kinds in found.values() for kind in kinds} - {"all"})
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("signal", "recall", "precision", "delay", *kinds):
        shown.add_column(column, justify="left" if column == "signal" else "right", no_wrap=True)
    for name, tallies in found.items():
        every = tallies["all"]
        precision = f"{every.flagged_inside / every.flagged:.1%}" if every.flagged else "-"
        delay = f"{median(every.delays):g}" if every.delays else "-"
        recalls = [f"{tallies[kind].detected} of {tallies[kind].windows}" for kind in ("all", *kinds)]
        shown.add_row(name, recalls[0], precision, delay, *recalls[1:])
    return shown
