"""What there is to route: the share of the risk that sets chosen in every step meet, less that of a fixed set.

    routability = mean over steps of (share of the total in that step's k largest units)
                  - the same mean of the best fixed k units

of what a run recorded of every unit: a price where it did, else the gap, else the risk. Near 0 a pin does as well as
any controller could; large, a controller that sees it in time pays. The best fixed set has the largest mean shares.
"""

from __future__ import annotations

import numpy as np

from gnmr.lab.report.runs import Run

OF = ("price", "price_fprop", "true_gap", "recovery_gap", "gap_low")
"""Recorded columns that a share can be taken of, the first that is there; else risk."""


def routability(value_SU: np.ndarray, k: int) -> tuple[float, float] | None:
    """(mean share in each step's k largest, mean share in the best fixed k) of values of S steps by U units.

    A unit that was not observed (NaN) has none of it; steps with an infinite value, or with nothing in total, are left
    out. None where no step is left.
    """
    value = np.nan_to_num(value_SU.astype(np.float64), nan=0.0, posinf=np.inf).clip(min=0)
    value = value[np.isfinite(value).all(axis=1) & (value.sum(axis=1) > 0)]
    if not len(value):
        return None
    share = value / value.sum(axis=1, keepdims=True)
    each = np.sort(share, axis=1)[:, -k:].sum(axis=1).mean()
    return float(each), float(np.sort(share.mean(axis=0))[-k:].sum())


def routability_of(run: Run) -> tuple[str, int, float, float] | None:
    """(what it is of, k, and as `routability`) of a run; None where it recorded nothing, or k is no choice.

    k: max_o where that is less than all units, else as many as were on the recovery path in the mean.
    """
    ratios = run.ratios()
    units = len(ratios.units)
    name = next((name for name in OF if name in ratios.columns), "risk")
    k = int(run.settings.get("controller.max_o") or units)
    if k >= units:
        k = round((run.summary.get("promotion_frac") or 0) * units)
    if not 0 < k < units:
        return None
    found = routability(ratios.risk_SU if name == "risk" else ratios.columns[name], k)
    return None if found is None else (name, k, *found)
