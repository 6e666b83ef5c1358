"""One run's units by steps, in at most `COLUMNS` bins of steps: the unit map of the page."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from gnmr.lab.config.controller import INIT_FRAC
from gnmr.lab.report.arms import Arm
from gnmr.lab.report.recorded_run import Run, UnitMatrices

COLUMNS = 800  # about the pixels that the map has
_MOST_VERDICTS = 1000
_COSTS = ("price", "price_fprop", "true_gap", "gap_low")
"""Recorded columns by which units can be ordered, the first that is there; else the risk."""


def bin_width(last_step: int, bins: int) -> int:
    """Return the steps per bin for at most that many bins over steps 1..last_step."""
    return max(1, -(-last_step // bins))


def unit_map(arm: Arm, run: Run, matrices: UnitMatrices) -> dict[str, Any]:
    """Return the map of U units by B bins for the page. A cell shows the step of highest risk in its bin.

    Args:
        arm: the arm of the run.
        run: the run.
        matrices: its own, of at least one step.

    Returns:
        A tree for JSON; arrays of (U, B) or (B,) numbers are packed (see `packed`).
    """
    last = int(matrices.steps[-1])
    width = bin_width(last, COLUMNS)
    bins = -(-last // width)
    # Recorded steps edges[b] to edges[b + 1] lie in bin b; a risk that is unknown never wins.
    edges = np.searchsorted((matrices.steps - 1) // width, np.arange(bins + 1))
    key_SU = np.where(np.isnan(matrices.risk_SU), -np.inf, matrices.risk_SU)
    units = len(matrices.units)
    row_BU, active_BU = np.zeros((bins, units), np.int64), np.zeros((bins, units), np.uint16)
    for number in np.flatnonzero(np.diff(edges)):
        rows = slice(edges[number], edges[number + 1])
        row_BU[number] = edges[number] + key_SU[rows].argmax(axis=0)
        active_BU[number] = matrices.active_SU[rows].sum(axis=0)
    empty_B = np.diff(edges) == 0

    def cells(values_SU: np.ndarray) -> dict[str, str]:
        values_BU = values_SU[row_BU, np.arange(units)].astype(np.float32)
        values_BU[empty_B] = np.nan
        return packed(values_BU.T)

    # The shown step, counted from the first of its bin.
    step_BU = np.where(empty_B[:, None], 0, matrices.steps[row_BU] - 1 - np.arange(bins)[:, None] * width)
    cut, cut_name = limit(arm, run, matrices)
    cost_name, cost_U = costs(matrices)
    place = {unit: number for number, unit in enumerate(matrices.units)}
    return {
        "label": f"{arm.label}, seed {run.seed}" + ("" if run.status == "done" else f" ({run.status})"),
        "arm": arm.label,
        "routed": arm.always is None,
        "limit": cut,
        "limit_name": cut_name,
        "cost": [float(f"{cost:.5g}") for cost in cost_U],
        "cost_name": cost_name.replace("_", " "),
        "thresholds": thresholds(arm, run),
        "faults": [
            vars(window) | {"unit": place[window.unit]}
            for window in run.windows
            if window.unit in place and window.start <= last
        ],
        "width": width,
        "last": last,
        "bins": bins,
        "units": matrices.units,
        "step": packed(step_BU.T.astype(np.uint16)),
        "active": packed(active_BU.T),
        "recorded": packed(np.diff(edges).astype(np.uint16)),
        "values": {
            name: cells(values)
            for name, values in {"norm": matrices.norm_SU, **matrices.columns, "risk": matrices.risk_SU}.items()
        },
        "promotions": _promotions(run, place, last),
        "verdicts": verdicts(run, last),
    }


def packed(array: np.ndarray) -> dict[str, str]:
    """Return a uint16 or float32 array as deflated base64; a float32 keeps 12 bits of its mantissa, or NaN and inf."""
    if array.dtype == np.float32:
        # Rounding to nearest by adding half a unit of the last bit that stays. Zeros behind it compress well.
        bits = np.ascontiguousarray(array).view(np.uint32)
        short = (((bits + np.uint32(1 << 10)) >> 11) << 11).view(np.float32)
        array = np.where(np.isfinite(array) & np.isfinite(short), short, array)
    data = zlib.compress(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes(), 6)
    return {"type": array.dtype.name, "data": base64.b64encode(data).decode("ascii")}


def limit(arm: Arm, run: Run, matrices: UnitMatrices) -> tuple[float, str]:
    """Return the risk above which a unit is a candidate, and the name of this limit.

    The limit is the trigger. A ranking has none, so its limit is the risk that as many of the recorded unit-steps
    exceed as were on the recovery path.
    """
    if not arm.ranked:
        trigger, first_step = run.trigger
        return trigger, "trigger" if first_step == 1 else f"trigger, from step {first_step} on"
    positive = matrices.risk_SU[matrices.risk_SU > 0]  # a fixed set has risks of 0 and 1, an unobserved unit none
    share = matrices.active_SU.sum() / max(len(positive), 1)
    cut = float(np.quantile(positive, max(0.0, 1 - share), method="lower")) if len(positive) else 1.0
    return (cut if np.isfinite(cut) else 1.0), "typical cut of the ranking"


def costs(matrices: UnitMatrices) -> tuple[str, np.ndarray]:
    """Return what units are ordered by, and its mean per unit: the recorded price, else the gap, else the risk.

    It is 0 if nothing was observed. An infinite value, of a norm that is not finite, counts as the largest finite one.
    """
    names = (name for name in _COSTS if name in matrices.columns and np.isfinite(matrices.columns[name]).any())
    name = next(names, "risk")
    values_SU = (matrices.risk_SU if name == "risk" else matrices.columns[name]).astype(np.float64)
    finite = values_SU[np.isfinite(values_SU)]
    bounded = np.clip(values_SU, None, finite.max() if finite.size else 0.0)
    observed = ~np.isnan(bounded)
    return name, np.where(observed, bounded, 0.0).sum(axis=0) / np.maximum(observed.sum(axis=0), 1)


def thresholds(arm: Arm, run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return, by column, the thresholds of the paper's two ratios and the steps from which they hold.

    They are multiplied by the trigger and hold from its first step on. A ranking, or another signal, has none.
    """
    get, (trigger, first_step) = run.settings.get, run.trigger
    if arm.ranked or arm.signal != "gnmr_delta":
        return {}
    levels: dict[str, list[tuple[int, float]]] = {}
    for column, key in (("gnmr", "controller.alpha"), ("delta_gnmr", "controller.beta")):
        level, first_level = get(key), get(f"{key}_init")
        until = round(INIT_FRAC * float(get("training.steps") or run.last_step))
        if (main := get(f"{key}.main")) is not None:  # two stages of a loop of the user's own
            level, first_level, until = main, get(f"{key}.init"), int(get(f"{key}.init_steps") or 0)
        if level is not None:
            # The initial threshold holds up to step `until`, and none holds before there is a trigger.
            stages = [(1, level)] if first_level is None else [(1, first_level), (until + 1, level)]
            stages = [(max(since, first_step), trigger * float(level)) for since, level in stages]
            levels[column] = list(dict(stages).items())
    return levels


def _promotions(run: Run, place: dict[str, int], last: int) -> list[list[Any]]:
    """Return unit, step, last step in force, cause, what ended it (None: the end of the run) and risk of each."""
    promotions: list[list[Any]] = []
    unended: dict[int, list[Any]] = {}
    for event in run.events:
        unit, step, kind = place.get(str(event.get("unit"))), event.get("step"), event.get("event")
        if unit is None or not isinstance(step, int) or step > last:
            continue
        # A release ends the open promotion of its unit; a promotion without one lasts until the last step.
        if kind == "promote":
            risk = event.get("risk")
            finite = isinstance(risk, int | float) and np.isfinite(risk)
            unended[unit] = [unit, step, last, str(event.get("cause")), None, float(f"{risk:.5g}") if finite else None]
            promotions.append(unended[unit])
        elif kind == "release" and unit in unended:
            row = unended.pop(unit)
            row[2], row[4] = step, str(event.get("cause"))
    return promotions


def verdicts(run: Run, last: int) -> list[tuple[int, str, str]]:
    """Return the step, the cause and the units of each spike."""
    rows = [row for row in run.events if row.get("event") == "verdict" and isinstance(row.get("step"), int)]
    spikes = [(row["step"], str(row.get("cause")).replace("_", " "), str(row.get("unit") or "")) for row in rows]
    return [spike for spike in spikes if spike[0] <= last][:_MOST_VERDICTS]
