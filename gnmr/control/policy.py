"""Algorithm 2 (section 3): which units run on the recovery path in the next step, as a pure function of host arrays.

    C_t = {b : R[b,t] > 1} + {b : Lock_b > 0}                candidates
    A_t = the max_o candidates with the largest R[b,t]
    b in A_t:      Lock_b = t_lock if R[b,t] > 1 else max(Lock_b - 1, 0)
    b not in A_t:  Lock_b = 0

R[b,t] is the risk of unit b in step t, computed by a signal; the set A_t chosen from step t is in force in step t + 1.
The lock keeps a unit a candidate for t_lock steps after its risk exceeded 1; it never lifts the cap. An unobserved unit
has no risk: only its lock can keep it, and it ranks below every observed unit.

A non-finite norm reaches this function as R = Inf, so its unit exceeds every threshold and ranks first; NaN does not
occur. Equal risks, Inf included, are ranked by unit order, so that every rank of a distributed run chooses the same
set. The controller decides what to do if all risks are Inf (`Controller`).

With a `Budget` (ours, not the paper's) candidates are taken by risk per cost, the largest first, up to max_o. A
candidate that does not fit the budget is skipped, and cheaper ones after it may still be taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np


class Budget(NamedTuple):
    """The most that the units of a set may cost together, and the cost of each, in any common unit of measure."""

    most: float
    cost: np.ndarray
    """(U,) float64, 0 or more."""

    @classmethod
    def of(cls, most: float, costs: Sequence[float]) -> Budget:
        """Return a budget with a tolerance for rounding: sums of costs may exceed it by a part in a billion."""
        return cls(most * (1 + 1e-9), np.array(costs, dtype=np.float64))


class Choice(NamedTuple):
    """The result of `decide`; arrays over the U units, in unit order unless stated otherwise."""

    candidate: np.ndarray
    """(U,) bool, C_t."""
    active: np.ndarray
    """(U,) bool, A_t: in force during step t + 1."""
    lock: np.ndarray
    """(U,) int64, locks after the decision."""
    rank: np.ndarray
    """(U,) int64, rank by risk (under a budget by risk per cost); 0 is the riskiest, non-candidates are last."""


_UNOBSERVED, _NO_CANDIDATE = -1.0, -np.inf  # a risk is 0 or more, but for signals that break the rule
_TINY, _LARGEST = np.finfo(np.float64).tiny, np.finfo(np.float64).max


def decide(
    risk: np.ndarray,
    observed: np.ndarray,
    recoverable: np.ndarray,
    lock: np.ndarray,
    max_o: int,
    t_lock: int,
    trigger: float = 1.0,
    budget: Budget | None = None,
) -> Choice:
    """Take one step of Algorithm 2.

    Args:
        risk: (U,) float64, Inf for a non-finite norm, never NaN.
        observed: (U,) bool.
        recoverable: (U,) bool.
        lock: (U,) int64.
        max_o: the most units on the recovery path.
        t_lock: steps for which a unit over its threshold stays a candidate.
        trigger: a unit is over its threshold if R > `trigger`, which is 1 in the paper. 0 makes every unit with a risk
            a candidate, so that the max_o largest risks are always taken (the ranked signals of table 11).
        budget: limit on the cost of the set; None: no limit.
    """
    # Most steps end here; `device.at_hand` explains why NumPy is slower.
    if not any(one > trigger for one in risk.tolist()) and not any(lock.tolist()):
        return _nobody(len(lock))
    over = (risk > trigger) & observed & recoverable
    candidate = over | ((lock > 0) & recoverable)
    if budget is not None:
        with np.errstate(over="ignore"):
            worth = np.minimum(risk / np.maximum(budget.cost, _TINY), _LARGEST)
        risk = np.where(np.isfinite(risk), worth, risk)
    rank = np.arange(len(lock))
    key = np.where(candidate, np.where(observed, risk, _UNOBSERVED), _NO_CANDIDATE)
    order = np.argsort(-key, kind="stable")
    rank[order] = rank.copy()
    active = candidate & (rank < max_o) if budget is None else _filled(candidate, order, max_o, budget)
    kept = np.where(over, t_lock, np.maximum(lock - 1, 0))
    return Choice(candidate, active, np.where(active, kept, 0), rank)


@cache
def _nobody(number: int) -> Choice:
    """Return the choice among so many units without a candidate; its arrays are read-only."""
    none, lock, rank = np.zeros(number, dtype=bool), np.zeros(number, dtype=np.int64), np.arange(number)
    for one in (none, lock, rank):
        one.setflags(write=False)
    return Choice(none, none, lock, rank)


def _filled(candidate: np.ndarray, order: np.ndarray, max_o: int, budget: Budget) -> np.ndarray:
    """Return the candidates, in `order`, that fit the budget together, at most max_o of them, (U,) bool."""
    taken, spent = list[int](), 0.0
    for unit in order[: np.count_nonzero(candidate)].tolist():
        if len(taken) < max_o and spent + budget.cost[unit] <= budget.most:
            taken.append(unit)
            spent += budget.cost[unit]
    active = np.zeros_like(candidate)
    active[taken] = True
    return active


def may(chosen: np.ndarray, max_o: int, budget: Budget | None) -> bool:
    """Return whether these units (U,) bool may be on the recovery path together."""
    fits = budget is None or budget.cost[chosen].sum() <= max(budget.most, 0)  # pins may take all of an estimate
    return bool(fits and np.count_nonzero(chosen) <= max_o)
