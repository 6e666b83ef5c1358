"""Who caught the injected faults: flagged unit-steps against the windows of faults.jsonl, and spikes against spikes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from gnmr.errors import UserError
from gnmr.records.reader import read_jsonl
from gnmr.report.arms import Arm, Comparison, stat
from gnmr.report.layout import NOTHING, Table, measure
from gnmr.report.runs import Ratios, Run

GRACE = 1
"""Steps after a window in which a flag still counts as its detection."""
_HISTORY, _LEAST_HISTORY = 50, 5


@dataclass(frozen=True)
class Window:
    """One fault: the unit's low-cost path fails from step `start` to step `end`, both inclusive."""

    unit: str
    start: int
    end: int
    kind: str = ""
    magnitude: float | None = None


@dataclass(frozen=True)
class Detection:
    """What a signal made of the fault windows of one run. Shares of nothing are None."""

    windows: tuple[Window, ...]
    delays: tuple[int | None, ...]
    """Per window: first flagged step minus the window's first; None where it was missed."""
    covered: tuple[bool, ...]
    """Per window: the unit was on the recovery path throughout, so that the fault had nothing to act on."""
    flagged: int
    """Unit-steps over the trigger."""
    flagged_inside: int
    unit_steps_outside: int
    """Observed unit-steps outside every window."""

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
        known = [delay for delay in self.delays if delay is not None]
        return float(median(known)) if known else None

    @property
    def false_alarms(self) -> float | None:
        """Flagged unit-steps per 1,000 observed ones, both outside every window."""
        outside = self.unit_steps_outside
        return 1000 * (self.flagged - self.flagged_inside) / outside if outside else None


def detect(ratios: Ratios, windows: Iterable[Window], trigger: float = 1.0, grace: int = GRACE) -> Detection:
    """Holds the flagged unit-steps (risk > `trigger`, inf included) against the windows.

    A window reaches to `end` + `grace` here, for the detection as for inside and outside. Windows that begin after the
    last recorded step are left out; one of a unit that was never observed is missed. An unobserved unit-step (risk NaN)
    counts nowhere.
    """
    steps, risk_SU = ratios.steps, ratios.risk_SU
    place = {unit: number for number, unit in enumerate(ratios.units)}
    begun = tuple(window for window in windows if len(steps) and window.start <= steps[-1])
    flagged_SU = risk_SU > trigger
    inside_SU = np.zeros(risk_SU.shape, bool)
    delays: list[int | None] = []
    covered = []
    for window in begun:
        rows = slice(*np.searchsorted(steps, (window.start, window.end + grace + 1)))
        unit = place.get(window.unit)
        hits = np.zeros(0, int) if unit is None else steps[rows][flagged_SU[rows, unit]]
        delays.append(int(hits[0]) - window.start if len(hits) else None)
        fault = slice(*np.searchsorted(steps, (window.start, window.end + 1)))
        covered.append(unit is not None and fault.stop > fault.start and bool(ratios.active_SU[fault, unit].all()))
        if unit is not None:
            inside_SU[rows, unit] = True
    return Detection(
        windows=begun,
        delays=tuple(delays),
        covered=tuple(covered),
        flagged=int(flagged_SU.sum()),
        flagged_inside=int((flagged_SU & inside_SU).sum()),
        unit_steps_outside=int((~np.isnan(risk_SU) & ~inside_SU).sum()),
    )


def read_windows(folder: Path) -> list[Window]:
    """The windows of a run folder's faults.jsonl, in order; none without the file.

    Raises `UserError` for a row without a unit, a first or a last step.
    """
    path = folder / "faults.jsonl"
    found = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            unit, start, end = str(row["unit"]), int(row["step"]), int(row["end"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}, line {number}: not a fault window (step, end and unit are needed)") from error
        magnitude = row.get("magnitude")
        found.append(
            Window(unit, start, end, str(row.get("kind") or ""), None if magnitude is None else float(magnitude))
        )
    return found


def run_detection(run: Run, ratios: Ratios | None = None, grace: int = GRACE) -> Detection | None:
    """The detection figures of a run by its own signal and trigger; None without faults.jsonl or recorded ratios.

    `ratios`: the run's, where they are read already.
    """
    if not (windows := read_windows(run.folder)):
        return None
    ratios = run.ratios() if ratios is None else ratios
    if len(ratios.steps) == 0:
        return None
    return detect(ratios, windows, float(run.settings.get("controller.trigger") or 1.0), grace)


def spikes(values_S: np.ndarray, history: int = _HISTORY) -> np.ndarray:
    """How far each value stands above the median of the `history` values before it: max(0, ln ratio), (S,).

    NaN where the value is not finite and positive, and where fewer than five known values stand before it.
    """
    known = np.where(np.isfinite(values_S) & (values_S > 0), values_S, np.nan)
    if len(known) == 0:
        return known
    before = np.lib.stride_tricks.sliding_window_view(np.concatenate([np.full(history, np.nan), known[:-1]]), history)
    usual = np.full(len(known), np.nan)
    enough = (~np.isnan(before)).sum(axis=1) >= _LEAST_HISTORY
    usual[enough] = np.nanmedian(before[enough], axis=1)
    return np.maximum(np.log(known / usual), 0.0)


def lead_lag(series_a: np.ndarray, series_b: np.ndarray, max_lag: int) -> tuple[int, float] | None:
    """The lag in -max_lag..max_lag with the highest correlation of a[t] and b[t + lag], and that correlation.

    Positive: a leads b by so many steps. Pairs with a number that is not finite are left out. Of equals the shortest
    lag; None where no lag has three pairs that vary.
    """
    if len(series_a) != len(series_b):
        raise ValueError(f"lead_lag: series of {len(series_a)} and {len(series_b)} steps, not of one length")
    best: tuple[int, float] | None = None
    for lag in sorted(range(-max_lag, max_lag + 1), key=lambda lag: (abs(lag), -lag)):
        length = len(series_a) - abs(lag)
        if length < 3:
            continue
        a, b = series_a[max(-lag, 0) :][:length], series_b[max(lag, 0) :][:length]
        both = np.isfinite(a) & np.isfinite(b)
        a, b = a[both], b[both]
        if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
            continue
        correlation = float(np.corrcoef(a, b)[0, 1])
        if best is None or correlation > best[1] + 1e-12:
            best = lag, correlation
    return best


def run_lead_lags(run: Run, ratios: Ratios, max_lag: int = 20) -> dict[str, tuple[int, float]]:
    """`lead_lag` of gradient-norm and update-norm spikes against loss spikes, by name; only what was recorded.

    The update's norm is that of all units together, from the evidence `update_norm` of ratios.parquet.
    """
    loss = run.steps["loss"]
    series = {"gradient norm": run.steps["grad_norm_pre_clip"]}
    if (updates_SU := ratios.columns.get("update_norm")) is not None:
        at = dict(zip(ratios.steps.tolist(), np.sqrt(np.nansum(updates_SU**2, axis=1)).tolist(), strict=True))
        series["update norm"] = np.array([at.get(int(step), np.nan) for step in run.steps["step"]])
    found = {name: lead_lag(spikes(values), spikes(loss), max_lag) for name, values in series.items()}
    return {name: value for name, value in found.items() if value is not None}


def fault_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Who was caught, for the comparisons that had faults; none elsewhere."""
    tables = []
    for comparison in comparisons:
        found = {run.folder: run_detection(run) for run in comparison.runs if (run.folder / "faults.jsonl").exists()}
        known = {folder: detection for folder, detection in found.items() if detection is not None}
        if known:
            tables += [detection_table(comparison, known), windows_table(comparison, known)]
    return [table for table in tables if table.rows]


def detection_table(comparison: Comparison, found: Mapping[Path, Detection]) -> Table:
    """Precision, recall, delay and false alarms of each arm, mean ± sample standard deviation over its seeds.

    `found`: the detection of each run that has one, by folder. No rows where there is none.
    """
    columns = ["arm", "seeds", "windows", "recall", "precision", "delay\n[steps]", "false alarms\nper 1,000", "covered"]
    table = Table(f"{comparison.name}: injected faults", columns)
    for arm in comparison.arms:
        if not (mine := [found[run.folder] for run in arm.runs if run.folder in found]):
            continue
        windows, covered = sum(len(d.windows) for d in mine), sum(sum(d.covered) for d in mine)
        figures = [
            measure(stat(_percent(d.recall) for d in mine), 1, unit=" %"),
            measure(stat(_percent(d.precision) for d in mine), 1, unit=" %"),
            measure(stat(d.delay for d in mine), 1),
            measure(stat(d.false_alarms for d in mine), 2),
        ]
        table.rows.append([arm.label, str(len(mine)), str(windows), *figures, str(covered)])
    table.notes = [
        "A window is caught where its unit's risk is over the trigger from its first step to one after its last. "
        "Precision: unit-steps over the trigger that lie in a window; false alarms: those that do not, per 1,000 "
        "unit-steps outside. Delay: median. Covered: windows that the unit spent on the recovery path, where no fault "
        "could act."
    ]
    return table


def windows_table(comparison: Comparison, found: Mapping[Path, Detection]) -> Table:
    """Every fault window, one row, and which arm caught it after how many steps, one column each."""
    by_arm = {arm.label: _outcomes(arm, found) for arm in comparison.arms}
    by_arm = {label: outcomes for label, outcomes in by_arm.items() if outcomes}
    table = Table(f"{comparison.name}: who caught which fault", ["unit", "steps", "kind", "magnitude", "seed", *by_arm])
    for window, seed in sorted(
        {key for outcomes in by_arm.values() for key in outcomes}, key=lambda key: (key[0].start, key[0].unit, key[1])
    ):
        what = [
            window.unit,
            f"{window.start}-{window.end}",
            window.kind or NOTHING,
            NOTHING if window.magnitude is None else f"{window.magnitude:g}",
            str(seed),
        ]
        table.rows.append([*what, *(outcomes.get((window, seed), NOTHING) for outcomes in by_arm.values())])
    return table


def _outcomes(arm: Arm, found: Mapping[Path, Detection]) -> dict[tuple[Window, int], str]:
    """In words, by window and seed."""
    outcomes = {}
    for run in arm.runs:
        if detection := found.get(run.folder):
            for window, delay, covered in zip(detection.windows, detection.delays, detection.covered, strict=True):
                told = f"after {delay}" if delay is not None else "covered" if covered else "missed"
                outcomes[window, run.seed] = told
    return outcomes


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
