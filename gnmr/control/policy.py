"""Algorithm 2 (section 3): which units run on the recovery path in the next step. A pure function of
arrays on the host.

    C_t = {b : R[b,t] > 1} + {b : Lock_b > 0}                candidates
    A_t = the max_o candidates with the largest R[b,t]
    b in A_t:      Lock_b = t_lock if R[b,t] > 1 else max(Lock_b - 1, 0)
    b not in A_t:  Lock_b = 0

R[b,t] is the risk of unit b in step t, made by a signal; the set A_t chosen from step t is in force in step t + 1. The
lock keeps a unit a candidate for t_lock steps after its risk exceeded 1; it never lifts the cap. An unobserved unit has
no risk: its lock alone can keep it, and it ranks below every observed unit.

A non-finite norm reaches this function as R = Inf, so its unit is over every threshold and ranks first; NaN does not
occur. Equal risks, two of Inf too, are ranked by unit order, so that every rank of a distributed run picks the same
set. What is done where all risks are Inf is the controller's choice (`Controller`).

With a `Budget` (ours, not the paper's) candidates are taken by risk per cost, the largest first, each that still fits
the budget, up to max_o; one that does not fit is passed over, and cheaper ones behind it may still be taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Budget(NamedTuple):
    """What the units of a set may cost together, and what each costs, in any unit that is the same for all."""

    most: float
    cost: np.ndarray
    """(U,) float64, 0 or more."""

    @classmethod
    def of(cls, most: float, costs: Sequence[float]) -> Budget:
        """A budget is kept up to rounding: sums of costs may exceed it by a part in a billion."""
        return cls(most * (1 + 1e-9), np.array(costs, dtype=np.float64))


class Choice(NamedTuple):
    """What `decide` returns; arrays over the U units, in unit order unless said otherwise."""

    candidate: np.ndarray
    """(U,) bool, C_t."""
    active: np.ndarray
    """(U,) bool, A_t: in force during step t + 1."""
    lock: np.ndarray
    """(U,) int64, locks after the decision."""
    rank: np.ndarray
    """(U,) int64, place of each unit by risk (under a budget by risk per cost), 0 the riskiest; units that are no
    candidates come last."""


_UNOBSERVED, _NO_CANDIDATE = -1.0, -2.0  # below every risk, which is 0 or more
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

    `risk` (U,) float64, Inf for a non-finite norm, never NaN; `observed` and `recoverable` (U,) bool; `lock` (U,)
    int64. A unit is over threshold where R > `trigger`: 1 in the paper; 0 makes every unit with a risk a candidate,
    so that the max_o largest risks are always taken (the ranked signals of table 11).
    """
    over = (risk > trigger) & observed & recoverable
    candidate = over | ((lock > 0) & recoverable)
    rank = np.arange(len(lock))
    if not candidate.any():
        return Choice(candidate, candidate, np.zeros_like(lock), rank)
    if budget is not None:
        with np.errstate(over="ignore"):
            worth = np.minimum(risk / np.maximum(budget.cost, _TINY), _LARGEST)
        risk = np.where(np.isfinite(risk), worth, risk)
    key = np.where(candidate, np.where(observed, risk, _UNOBSERVED), _NO_CANDIDATE)
    order = np.argsort(-key, kind="stable")
    rank[order] = rank.copy()
    active = candidate & (rank < max_o) if budget is None else _filled(candidate, order, max_o, budget)
    kept = np.where(over, t_lock, np.maximum(lock - 1, 0))
    return Choice(candidate, active, np.where(active, kept, 0), rank)


def _filled(candidate: np.ndarray, order: np.ndarray, max_o: int, budget: Budget) -> np.ndarray:
    """(U,) bool: the candidates in that order, each that fits the budget beside those before it, at most max_o."""
    taken, spent = list[int](), 0.0
    for unit in order[: np.count_nonzero(candidate)].tolist():
        if len(taken) < max_o and spent + budget.cost[unit] <= budget.most:
            taken.append(unit)
            spent += budget.cost[unit]
    active = np.zeros_like(candidate)
    active[taken] = True
    return active


def may(chosen: np.ndarray, max_o: int, budget: Budget | None) -> bool:
    """Return whether these units (U,) bool may be on the recovery path at once."""
    fits = budget is None or budget.cost[chosen].sum() <= budget.most
    return bool(fits and np.count_nonzero(chosen) <= max_o)
