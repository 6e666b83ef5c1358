"""What the risk of a run's units is held against in its pictures."""

from __future__ import annotations

import numpy as np

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.routability import OF
from gnmr.lab.report.runs import Ratios, Run
from gnmr.records.reader import calibrated_trigger

Thresholds = dict[str, list[tuple[int, float]]]
"""By column of the ratios: the threshold from each of these steps on."""


def trigger(run: Run) -> float:
    """What multiplies all thresholds; one that the run found itself was in force behind `calibrated_trigger`'s step."""
    found = calibrated_trigger(run.header)
    return found[1] if found is not None else float(run.settings.get("controller.trigger") or 1.0)


def limit(arm: Arm, run: Run, ratios: Ratios) -> tuple[float, str]:
    """The risk over which a unit is a candidate, and its name.

    The trigger; of a ranking, which has none, the risk that as many of the recorded unit-steps exceed as were on the
    recovery path.
    """
    if not arm.ranked:
        calibrated = calibrated_trigger(run.header)
        return trigger(run), "trigger" if calibrated is None else f"trigger, from step {calibrated[0] + 1} on"
    positive = ratios.risk_SU[ratios.risk_SU > 0]  # a fixed set has risks of 0 and 1, an unobserved unit none
    room = np.mean(ratios.active_SU) * ratios.active_SU.size / max(len(positive), 1)
    found = float(np.quantile(positive, max(0.0, 1 - room), method="lower")) if len(positive) else 1.0
    return (found if np.isfinite(found) else 1.0), "typical cut of the ranking"


def costs(ratios: Ratios) -> tuple[str, np.ndarray]:
    """What units are ordered by, and its mean of each unit (U,): the recorded price, else the gap, else the risk.

    0 where nothing was observed; an infinite one, of a norm that is not finite, counts as the largest finite one.
    """
    names = (name for name in OF if name in ratios.columns and np.isfinite(ratios.columns[name]).any())
    name = next(names, "risk")
    values_SU = (ratios.risk_SU if name == "risk" else ratios.columns[name]).astype(np.float64)
    finite = values_SU[np.isfinite(values_SU)]
    bounded = np.clip(values_SU, None, finite.max() if finite.size else 0.0)
    known = ~np.isnan(bounded)
    return name, np.where(known, bounded, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)


def thresholds(arm: Arm, run: Run) -> Thresholds:
    """Of the paper's two ratios, times the trigger, from its first step on; none of a ranking, or another signal."""
    get = run.settings.get
    if arm.ranked or arm.signal != "gnmr_delta":
        return {}
    found: Thresholds = {}
    change = round(float(get("controller.init_frac") or 0) * float(run.planned_steps or run.last_step)) + 1
    first_step = (calibrated_trigger(run.header) or (0, 1.0))[0] + 1
    for name, key in (("gnmr", "controller.alpha"), ("delta_gnmr", "controller.beta")):
        if (level := get(key)) is None:
            continue
        stages = [(1, level)] if (first := get(f"{key}_init")) is None else [(1, first), (change, level)]
        stages = [(max(since, first_step), level) for since, level in stages]
        found[name] = [(since, trigger(run) * float(level)) for since, level in dict(stages).items()]
    return found
