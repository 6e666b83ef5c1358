"""`gnmr replay RUN... detect=SHARE`: which signals would have caught the faults of recorded runs, and how soon.

Every signal reads the same recorded evidence of runs whose faults are known (faults.kind), and in each run gets the
trigger at which it raises false alarms in SHARE of the unit-steps outside the faults: what it catches then is compared.
Nothing is routed here. Signals that choose blindly have no detections to compare; of them only random is kept, as what
chance catches at that rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gnmr.console import tracked
from gnmr.control.signals import SIGNALS, BlindSignal
from gnmr.errors import UserError
from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.engine import risks
from gnmr.lab.replay.trace import Norms
from gnmr.lab.report.faults import GRACE, Detection, FaultWindow, detect, read_windows
from gnmr.lab.report.layout import NOTHING, Table
from gnmr.lab.report.runs import Ratios

_BLIND = set(BlindSignal.__subclasses__())


@dataclass(frozen=True)
class FaultyRun:
    """A run with known faults and what was recorded of it."""

    folder: Path
    norms: Norms
    settings: ControllerConfig
    windows: list[FaultWindow]


def faulty_run(folder: Path, norms: Norms, settings: ControllerConfig) -> FaultyRun | None:
    """None for a run without faults."""
    windows = read_windows(folder) if folder.is_dir() else []
    return FaultyRun(folder, norms, settings, windows) if windows else None


def detect_each(
    runs: list[FaultyRun], share: float, signals: Sequence[str], left_out: Callable[[str, UserError], None]
) -> dict[str, dict[str, Tally]]:
    """Of every signal, by kind of fault; "all" holds the kinds together. `signals`: as of `Request`."""
    names = list(signals) or [runs[0].settings.signal]
    if names == ["all"]:
        names = [name for name, cls in SIGNALS.items() if name == "random" or (cls.columns and cls not in _BLIND)]
    found: dict[str, dict[str, Tally]] = {}
    for name in tracked(names, "detecting"):
        try:
            found[name] = _of_signal(name, runs, share)
        except UserError as error:
            if len(names) == 1:
                raise
            left_out(name, error)
    return found


def tables(found: dict[str, dict[str, Tally]], runs: list[FaultyRun], share: float) -> list[Table]:
    """Over all faults, and by their kind."""
    kinds = sorted({window.kind for run in runs for window in run.windows})
    return [_overall(found, runs, share), _by_kind(found, kinds)]


def as_tree(found: dict[str, dict[str, Tally]], runs: list[FaultyRun], share: float) -> dict[str, Any]:
    """For a JSON file."""
    rows = {name: {kind: asdict(tally) for kind, tally in kinds.items()} for name, kinds in found.items()}
    return {"false_alarms": share, "runs": [str(run.folder) for run in runs], "signals": rows}


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

    def add(self, found: Detection, kind: str | None = None) -> None:
        """Adds a run's figures; with `kind` only its windows, for flags have no kind."""
        chosen = [
            delay
            for window, delay in zip(found.windows, found.delays, strict=True)
            if kind is None or window.kind == kind
        ]
        self.windows += len(chosen)
        self.delays += [delay for delay in chosen if delay is not None]
        self.detected = len(self.delays)
        if kind is None:
            self.flagged += found.flagged
            self.flagged_inside += found.flagged_inside
            self.unit_steps_outside += found.unit_steps_outside


def _of_signal(name: str, runs: list[FaultyRun], share: float) -> dict[str, Tally]:
    """By kind of fault; "all" holds them together."""
    tallies: dict[str, Tally] = {"all": Tally()}
    for run in runs:
        options = run.settings.options if name == run.settings.signal else {}
        risk = risks(run.norms, replace(run.settings, signal=name, options=options))
        found = at_false_alarms(run.norms, risk, run.windows, share)
        tallies["all"].add(found)
        for kind in {window.kind for window in run.windows}:
            tallies.setdefault(kind, Tally()).add(found, kind)
    return tallies


def _overall(found: dict[str, dict[str, Tally]], runs: list[FaultyRun], share: float) -> Table:
    table = Table(
        f"Faults of {len(runs)} runs, each signal at the trigger of {1000 * share:g} false alarms per 1,000 unit-steps",
        ["signal", "recall", "precision", "delay", "false alarms\nper 1,000"],
        notes=[
            "Recall: windows with a flag between their first step and the one after their last. Precision: flags "
            "inside a window over all flags. Delay: from a detected window's first step to its first flag, median."
        ],
    )
    for name, tallies in found.items():
        all_of = tallies["all"]
        alarms = (all_of.flagged - all_of.flagged_inside) / max(all_of.unit_steps_outside, 1)
        precision = f"{all_of.flagged_inside / all_of.flagged:.1%}" if all_of.flagged else NOTHING
        recall = f"{all_of.detected} of {all_of.windows}"
        table.rows.append([name, recall, precision, _delay(all_of), f"{1000 * alarms:.1f}"])
    return table


def _by_kind(found: dict[str, dict[str, Tally]], kinds: list[str]) -> Table:
    table = Table("Recall by kind of fault, and median delay in steps", ["signal", *kinds])
    for name, tallies in found.items():
        cells = [(tallies[kind], tallies[kind].windows) for kind in kinds]
        table.rows.append([name, *(f"{tally.detected / n:.0%} ({_delay(tally)})" for tally, n in cells)])
    return table


def _delay(tally: Tally) -> str:
    return f"{median(tally.delays):g}" if tally.delays else NOTHING


def at_false_alarms(norms: Norms, risk: np.ndarray, windows: list[FaultWindow], share: float) -> Detection:
    """What the least trigger with false alarms in at most `share` of the unit-steps outside the windows finds.

    `risk` (T, U) float64.
    """
    ratios = Ratios(
        np.arange(1, len(risk) + 1),
        norms.units,
        risk,
        {},
        np.where(norms.observed, risk, np.nan),
        np.zeros(risk.shape, bool),
    )
    outside = norms.observed.copy()
    place = {unit: index for index, unit in enumerate(norms.units)}
    for window in windows:
        outside[window.start - 1 : window.end + GRACE, place[window.unit]] = False
    highest = np.sort(risk[outside])[::-1]
    allowed = int(share * len(highest))
    return detect(ratios, windows, float(highest[allowed]) if allowed < len(highest) else 0.0)
