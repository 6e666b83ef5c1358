"""Detection of injected faults: flagged unit-steps against the windows of faults.jsonl, spikes against the loss's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.layout import NOTHING, Table, measure, percent
from gnmr.lab.report.risk import trigger
from gnmr.lab.report.runs import Ratios, Run
from gnmr.lab.report.statistics import stat
from gnmr.records.reader import MAX_STEP, read_jsonl
from gnmr.records.untrusted import Damaged, text

GRACE = 1
"""Steps after a window in which a flag still counts as its detection."""
WITHIN = 10
"""Steps between two spikes that are seen as belonging together."""
_HISTORY, _LEAST_HISTORY, _SPIKE = 50, 10, 4.0
_COUNTED = ("spikes", "loss_spikes", "preceded", "steps", "steps_preceded")
"""What is summed of `Leads` over the seeds."""


@dataclass(frozen=True)
class FaultWindow:
    """One fault: the unit's low-cost path fails from step `start` to step `end`, both inclusive."""

    unit: str
    start: int
    end: int
    kind: str = ""
    magnitude: float | None = None


@dataclass(frozen=True)
class Detection:
    """How one run's signal detected its fault windows. A share of zero events is None."""

    windows: tuple[FaultWindow, ...]
    delays: tuple[int | None, ...]
    """Per window: first flagged step minus the window's first; None where it was missed."""
    covered: tuple[bool, ...]
    """Per window: the unit was on the recovery path throughout, so that the fault had nothing to act on."""
    broken: int
    """Recorded unit-steps in which the low-cost path was broken."""
    recovered: int
    """Of these, those that the unit spent on the recovery path."""
    flagged: int
    """Unit-steps over the trigger."""
    flagged_inside: int
    unit_steps_outside: int
    """Observed unit-steps outside every window."""

    @property
    def detected(self) -> int:
        return sum(delay is not None for delay in self.delays)

    @property
    def spared(self) -> float | None:
        """Share of the broken unit-steps that were on the recovery path."""
        return self.recovered / self.broken if self.broken else None

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


def detect(ratios: Ratios, windows: Iterable[FaultWindow], trigger: float = 1.0, grace: int = GRACE) -> Detection:
    """Holds the flagged unit-steps (risk > `trigger`, inf included) against the windows.

    A window reaches to `end` + `grace` here, for the detection as for inside and outside. Windows that begin after the
    last recorded step are left out; one of a unit that was never observed is missed. An unobserved unit-step (risk NaN)
    counts nowhere.
    """
    steps, risk_SU = ratios.steps, ratios.risk_SU
    place = {unit: [number] for number, unit in enumerate(ratios.units)}  # as columns: one, or none
    begun = tuple(window for window in windows if len(steps) and window.start <= steps[-1])
    flagged_SU, inside_SU = risk_SU > trigger, np.zeros(risk_SU.shape, bool)
    delays: list[int | None] = []
    active: list[np.ndarray] = []
    for window in begun:
        unit = place.get(window.unit, [])
        rows = slice(*np.searchsorted(steps, (window.start, window.end + grace + 1)))
        hits = steps[rows][flagged_SU[rows, unit].any(axis=1)]
        delays.append(int(hits[0]) - window.start if len(hits) else None)
        inside_SU[rows, unit] = True
        fault = slice(*np.searchsorted(steps, (window.start, window.end + 1)))
        active.append(ratios.active_SU[fault, unit])
    return Detection(
        windows=begun,
        delays=tuple(delays),
        covered=tuple(bool(one.size and one.all()) for one in active),
        broken=sum(one.size for one in active),
        recovered=sum(int(one.sum()) for one in active),
        flagged=int(flagged_SU.sum()),
        flagged_inside=int((flagged_SU & inside_SU).sum()),
        unit_steps_outside=int((~np.isnan(risk_SU) & ~inside_SU).sum()),
    )


def read_windows(folder: Path) -> list[FaultWindow]:
    """The windows of a run folder's faults.jsonl, in order; none without the file.

    Raises `UserError` for a row without a unit, a first or a last step.
    """
    path = folder / "faults.jsonl"
    found = []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            unit, start, end = str(row["unit"]), int(row["step"]), int(row["end"])
            magnitude = None if row.get("magnitude") is None else float(row["magnitude"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Damaged(f"{path}, line {number}: not a fault window (step, end and unit are needed)") from error
        if not start <= end <= MAX_STEP:
            raise Damaged(f"{path}, line {number}: not a fault window (it ends at {end})")
        found.append(FaultWindow(unit, start, end, text(row.get("kind") or ""), magnitude))
    return found


@dataclass(frozen=True)
class Leads:
    """How the spikes of one series of a run stand to those of its training loss."""

    spikes: int
    loss_spikes: int
    lags: tuple[int, ...]
    """Of the loss spikes with one of the series at most `WITHIN` steps away: their step minus that of the nearest,
    above 0 where the series came first."""
    preceded: int
    """Loss spikes with a spike of the series in the `WITHIN` steps before."""
    steps: int
    steps_preceded: int
    """Steps of the run, and those with a spike of the series in the `WITHIN` steps before: what chance would find."""


def spikes(values_S: np.ndarray) -> np.ndarray:
    """The places at which spikes begin, ascending.

    A spike is where ln(value) stands more than four standard deviations above the median of the 50 values before; the
    standard deviation is 1.4826 times the median distance to that median. Places in a row are one spike. Values that
    are not finite and positive are left out, and no spike is seen before ten values are known.
    """
    known = np.where(np.isfinite(values_S) & (values_S > 0), values_S, np.nan)
    if len(known) <= _LEAST_HISTORY:
        return np.zeros(0, np.int64)
    logs = np.log(known)
    before = np.lib.stride_tricks.sliding_window_view(np.concatenate([np.full(_HISTORY, np.nan), logs[:-1]]), _HISTORY)
    enough = (~np.isnan(before)).sum(axis=1) >= _LEAST_HISTORY
    usual, spread = np.full(len(logs), np.nan), np.full(len(logs), np.nan)
    usual[enough] = np.nanmedian(before[enough], axis=1)
    spread[enough] = 1.4826 * np.nanmedian(np.abs(before[enough] - usual[enough, None]), axis=1)
    above = logs > usual + _SPIKE * spread
    return np.flatnonzero(above & ~np.concatenate([[False], above[:-1]]))


def leads(series_S: np.ndarray, loss_S: np.ndarray, within: int = WITHIN) -> Leads:
    """Holds the spikes of a series against those of the loss; both have a value for each step."""
    if len(series_S) != len(loss_S):
        raise ValueError(f"leads: series of {len(series_S)} and {len(loss_S)} steps, not of one length")
    mine, losses = spikes(series_S), spikes(loss_S)
    apart = losses[:, None] - mine[None, :]
    lags = [int(row[np.lexsort((-row, np.abs(row)))[0]]) for row in apart if len(mine)]
    before = np.zeros(len(series_S), bool)
    for place in mine:
        before[place + 1 : place + 1 + within] = True
    return Leads(
        spikes=len(mine),
        loss_spikes=len(losses),
        lags=tuple(lag for lag in lags if abs(lag) <= within),
        preceded=int(before[losses].sum()),
        steps=len(before),
        steps_preceded=int(before.sum()),
    )


def run_leads(run: Run, ratios: Ratios) -> dict[str, Leads]:
    """`leads` of the norms of gradient and update, by name; only what was recorded.

    The update's norm is that of all units together, from the evidence `update_norm` of ratios.parquet.
    """
    loss = run.steps["loss"]
    if len(loss) == 0:
        return {}
    series = {"gradient norm": run.steps["grad_norm_pre_clip"]}
    if (updates_SU := ratios.columns.get("update_norm")) is not None:
        at = dict(zip(ratios.steps.tolist(), np.sqrt(np.nansum(updates_SU**2, axis=1)).tolist(), strict=True))
        series["update norm"] = np.array([at.get(int(step), np.nan) for step in run.steps["step"]])
    return {name: leads(values, loss) for name, values in series.items()}


class Findings:
    """Detections and leads of a comparison that had injected faults, gathered run by run."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.faulty = any((run.folder / "faults.jsonl").exists() for run in comparison.runs)
        self.detections: dict[Path, Detection] = {}
        self.leads: dict[Path, dict[str, Leads]] = {}

    def windows(self, run: Run) -> list[FaultWindow]:
        """Of the run, in order."""
        return read_windows(run.folder) if self.faulty else []

    def add(self, run: Run, ratios: Ratios) -> None:
        """The figures of a run by its own signal and trigger; no detection without windows or recorded ratios."""
        if self.faulty:
            self.leads[run.folder] = run_leads(run, ratios)
            if len(ratios.steps) and (windows := self.windows(run)):
                self.detections[run.folder] = detect(ratios, windows, trigger(run))

    def tables(self) -> list[Table]:
        """Those that have rows."""
        one, found = self.comparison, self.detections
        made = [detection_table(one, found), windows_table(one, found), lead_table(one, self.leads)]
        return [table for table in made if table.rows]


def fault_tables(comparisons: Iterable[Comparison]) -> list[Table]:
    """Detections and leads of the comparisons that had injected faults."""
    tables = []
    for found in map(Findings, comparisons):
        for run in found.comparison.runs if found.faulty else []:
            found.add(run, run.ratios())
        tables += found.tables()
    return tables


def lead_table(comparison: Comparison, found: Mapping[Path, Mapping[str, Leads]]) -> Table:
    """Lead or lag of each arm's spikes against those of the loss, over its seeds. `found`: by run folder."""
    columns = ["arm", "spikes of", "number", "loss\nspikes", "median lead\n[steps]", "loss spikes\npreceded", "chance"]
    table = Table(f"{comparison.name}: spikes before the loss's", columns)
    for arm in comparison.arms:
        mine = [found[run.folder] for run in arm.runs if run.folder in found]
        for name in dict.fromkeys(name for of_run in mine for name in of_run):
            runs = [of_run[name] for of_run in mine if name in of_run]
            total = {key: sum(getattr(run, key) for run in runs) for key in _COUNTED}
            lags = [lag for run in runs for lag in run.lags]
            shares = [(total["preceded"], total["loss_spikes"]), (total["steps_preceded"], total["steps"])]
            cells = [str(total["spikes"]), str(total["loss_spikes"]), f"{median(lags):+g}" if lags else NOTHING]
            cells += [percent(part / whole if whole else None) for part, whole in shares]
            table.rows.append([arm.label, name, *cells])
    table.notes = [
        f"A spike: the logarithm is more than {_SPIKE:g} standard deviations (1.4826 times the median distance to the "
        f"median) above the median of the {_HISTORY} steps before; steps in a row are one. Lead: steps from the "
        f"nearest spike of the norm to a spike of the training loss, of those at most {WITHIN} apart; above 0: the "
        f"norm's came first. Preceded: with a spike of the norm in the {WITHIN} steps before; chance: the share of all "
        "steps that have one there."
    ]
    return table


def detection_table(comparison: Comparison, found: Mapping[Path, Detection]) -> Table:
    """Precision, recall, delay and false alarms of each arm, mean ± sample standard deviation over its seeds.

    `found`: the detection of each run that has one, by folder. No rows where there is none.
    """
    columns = ["recall", "precision", "delay\n[steps]", "false alarms\nper 1,000", "covered", "recovered"]
    table = Table(f"{comparison.name}: injected faults", ["arm", "seeds", "windows", *columns])
    for arm in comparison.arms:
        if not (mine := [found[run.folder] for run in arm.runs if run.folder in found]):
            continue

        def share(of: str, mine: list[Detection] = mine) -> str:
            return measure(stat(None if (one := getattr(d, of)) is None else 100 * one for d in mine), 1, unit=" %")

        delay, alarms = measure(stat(d.delay for d in mine), 1), measure(stat(d.false_alarms for d in mine), 2)
        windows, covered = sum(len(d.windows) for d in mine), sum(sum(d.covered) for d in mine)
        counted = [arm.label, str(len(mine)), str(windows)]
        table.rows.append([*counted, share("recall"), share("precision"), delay, alarms, str(covered), share("spared")])
    table.notes = [
        "A window is caught where its unit's risk is over the trigger from its first step to one after its last. "
        "Precision: unit-steps over the trigger that lie in a window; false alarms: those that do not, per 1,000 "
        "unit-steps outside. Delay: median. Covered: windows that the unit spent on the recovery path, where no fault "
        "could act. Recovered: share of the broken unit-steps that were spent there."
    ]
    return table


def windows_table(comparison: Comparison, found: Mapping[Path, Detection]) -> Table:
    """Every fault window, one row, and after how many steps each arm detected it, one column an arm."""
    by_arm = {arm.label: told for arm in comparison.arms if (told := _outcomes(arm, found))}
    table = Table(f"{comparison.name}: who caught which fault", ["unit", "steps", "kind", "magnitude", "seed", *by_arm])
    faults = {key for outcomes in by_arm.values() for key in outcomes}
    for window, seed in sorted(faults, key=lambda key: (key[0].start, key[0].unit, key[1])):
        magnitude = NOTHING if window.magnitude is None else f"{window.magnitude:g}"
        what = [window.unit, f"{window.start}-{window.end}", window.kind or NOTHING, magnitude, str(seed)]
        table.rows.append([*what, *(outcomes.get((window, seed), NOTHING) for outcomes in by_arm.values())])
    return table


def _outcomes(arm: Arm, found: Mapping[Path, Detection]) -> dict[tuple[FaultWindow, int], str]:
    """In words, by window and seed."""
    return {
        (window, run.seed): f"after {delay}" if delay is not None else "covered" if covered else "missed"
        for run in arm.runs
        if (one := found.get(run.folder))
        for window, delay, covered in zip(one.windows, one.delays, one.covered, strict=True)
    }
