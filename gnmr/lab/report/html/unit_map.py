"""One run's units by steps, in so many columns that a browser draws them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gnmr.lab.report.binning import bin_width
from gnmr.lab.report.html.pack import packed
from gnmr.lab.report.runs import Ratios, Run

_PROMOTION = (("unit", "u2"), ("step", "i4"), ("end", "i4"), ("cause", "u1"), ("released", "u1"), ("risk", "f4"))
COLUMNS = 800
"""Bins of steps at the most: about the pixels that the map has."""
MOST_VERDICTS = 1000
"""That the page lists of a run."""


@dataclass(frozen=True)
class UnitMap:
    """U units by B bins of `width` steps from step 1; a cell shows one recorded step, that of its highest risk."""

    width: int
    last_step: int
    units: list[str]
    step_UB: np.ndarray  # uint16, shown step minus the bin's first
    values: dict[str, np.ndarray]  # (U, B) float32 by name: norm, the recorded columns, risk; NaN where not observed
    active_UB: np.ndarray  # uint16, steps on the recovery path among the bin's recorded ones
    recorded_B: np.ndarray  # uint16, recorded steps in the bin
    causes: list[str]  # causes of promotions and releases; "" is the first
    cause_UB: np.ndarray  # uint8, number of the cause of the last promotion decided or in force in the cell, 0: none
    promotions: dict[str, np.ndarray]  # by promotion: unit, step, end, cause, released, risk
    verdicts: list[tuple[int, str, str]]  # step, what is to blame for its spike, its units

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        whole = {"step": self.step_UB, "active": self.active_UB, "recorded": self.recorded_B, "cause": self.cause_UB}
        what = {"width": self.width, "last": self.last_step, "bins": len(self.recorded_B), "units": self.units}
        what |= {"causes": self.causes, "names": list(self.values)}
        what |= {"verdicts": self.verdicts}
        groups = {"values": self.values, "promotions": self.promotions}
        return what | _packed(whole) | {name: _packed(arrays) for name, arrays in groups.items()}


def _packed(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: packed(array) for name, array in arrays.items()}


def unit_map(run: Run, ratios: Ratios, columns: int = COLUMNS) -> UnitMap:
    """The run's map; `ratios` are its own and have at least one step."""
    last = int(ratios.steps[-1])
    width = bin_width(last, columns)
    bins = -(-last // width)
    place_S = (ratios.steps - 1) // width
    edges = np.searchsorted(place_S, np.arange(bins + 1))
    key_SU = np.where(np.isnan(ratios.risk_SU), -np.inf, ratios.risk_SU)
    units = len(ratios.units)
    shown_BU = np.zeros((bins, units), np.int64)  # rows of the matrices
    active_BU = np.zeros((bins, units), np.uint16)
    for place in np.flatnonzero(np.diff(edges)):
        rows = slice(edges[place], edges[place + 1])
        shown_BU[place] = edges[place] + key_SU[rows].argmax(axis=0)
        active_BU[place] = ratios.active_SU[rows].sum(axis=0)
    empty_B = np.diff(edges) == 0
    across = np.arange(units)

    def cells(values_SU: np.ndarray) -> np.ndarray:
        values_BU = values_SU[shown_BU, across].astype(np.float32)
        values_BU[empty_B] = np.nan
        return values_BU.T

    step_BU = ratios.steps[shown_BU] - 1 - np.arange(bins)[:, None] * width
    step_BU[empty_B] = 0
    causes, promotions = _promotions(run, ratios.units, last)
    cause_UB = np.zeros((units, bins), np.uint8)
    for unit, step, end, cause in zip(*(promotions[key] for key in ("unit", "step", "end", "cause")), strict=True):
        cause_UB[unit, max(step - 1, 0) // width : (end - 1) // width + 1] = cause
    matrices = {"norm": ratios.norm_SU, **ratios.columns, "risk": ratios.risk_SU}
    return UnitMap(
        width=width,
        last_step=last,
        units=ratios.units,
        step_UB=step_BU.T.astype(np.uint16),
        values={name: cells(values) for name, values in matrices.items()},
        active_UB=active_BU.T,
        recorded_B=np.diff(edges).astype(np.uint16),
        causes=causes,
        cause_UB=cause_UB,
        promotions=promotions,
        verdicts=_verdicts(run, last),
    )


def _promotions(run: Run, units: list[str], last: int) -> tuple[list[str], dict[str, np.ndarray]]:
    """Every promotion with the last step that it was in force in (the run's last where it was not released)."""
    place = {unit: number for number, unit in enumerate(units)}
    causes = [""]
    found: list[list[Any]] = []
    open_: dict[int, list[Any]] = {}
    for event in run.events:
        unit, step, cause = place.get(str(event.get("unit"))), event.get("step"), str(event.get("cause"))
        if unit is None or not isinstance(step, int) or step > last or event.get("event") == "verdict":
            continue
        if cause not in causes:
            causes.append(cause)
        if event.get("event") == "promote":
            risk = event.get("risk")
            open_[unit] = [unit, step, last, causes.index(cause), 0, np.nan if risk is None else risk]
            found.append(open_[unit])
        elif unit in open_:
            row = open_.pop(unit)
            row[2], row[4] = step, causes.index(cause)
    columns = zip(*found, strict=True) if found else [()] * len(_PROMOTION)
    return causes, {name: np.array(of_it, kind) for (name, kind), of_it in zip(_PROMOTION, columns, strict=True)}


def _verdicts(run: Run, last: int) -> list[tuple[int, str, str]]:
    """The first `MOST_VERDICTS` that its records have."""
    rows = [row for row in run.events if row.get("event") == "verdict" and isinstance(row.get("step"), int)]
    told = [(row["step"], str(row.get("cause")).replace("_", " "), str(row.get("unit") or "")) for row in rows]
    return [row for row in told if row[0] <= last][:MOST_VERDICTS]
