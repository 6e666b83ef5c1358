"""What the risk of a run's units is held against in its pictures."""

from __future__ import annotations

import numpy as np

from gnmr.report.arms import Arm
from gnmr.report.runs import Ratios, Run


def trigger(run: Run) -> float:
    """What multiplies all thresholds."""
    return float(run.settings.get("controller.trigger") or 1.0)


def limit(arm: Arm, run: Run, ratios: Ratios) -> tuple[float, str]:
    """The risk over which a unit is a candidate, and its name.

    The trigger; of a ranking, which has none, the risk that as many of the recorded unit-steps exceed as were on the
    recovery path.
    """
    if not arm.ranked:
        return trigger(run), "trigger"
    positive = ratios.risk_SU[ratios.risk_SU > 0]  # a fixed set has risks of 0 and 1, an unobserved unit none
    room = np.mean(ratios.active_SU) * ratios.active_SU.size / max(len(positive), 1)
    found = float(np.quantile(positive, max(0.0, 1 - room), method="lower")) if len(positive) else 1.0
    return (found if np.isfinite(found) else 1.0), "typical cut of the ranking"
