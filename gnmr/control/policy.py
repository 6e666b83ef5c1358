"""Algorithm 2 (section 3): which units run on the recovery path in the next step. A pure function of tensors.

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

import torch
from torch import Tensor

from gnmr.control.device import waits_for_nothing


class Budget(NamedTuple):
    """What the units of a set may cost together, and what each costs, in any unit that is the same for all."""

    most: float
    cost: Tensor
    """(U,) float64, 0 or more."""
    kinds: int
    """How many different costs there are."""

    @classmethod
    def of(cls, most: float, costs: Sequence[float], device: torch.device) -> Budget:
        """A budget is kept up to rounding: sums of costs may exceed it by a part in a billion."""
        return cls(most * (1 + 1e-9), torch.tensor(costs, dtype=torch.float64, device=device), len(set(costs)))


class Choice(NamedTuple):
    """What `decide` returns; tensors over the U units, in unit order unless said otherwise."""

    candidate: Tensor
    """(U,) bool, C_t."""
    active: Tensor
    """(U,) bool, A_t: in force during step t + 1."""
    lock: Tensor
    """(U,) int64, locks after the decision."""
    rank: Tensor
    """(U,) int64, place of each unit by risk (under a budget by risk per cost), 0 the riskiest; units that are no
    candidates come last."""


_UNOBSERVED, _NO_CANDIDATE = -1.0, -2.0  # below every risk, which is 0 or more
_TINY, _LARGEST = torch.finfo(torch.float64).tiny, torch.finfo(torch.float64).max


def decide(
    risk: Tensor,
    observed: Tensor,
    recoverable: Tensor,
    lock: Tensor,
    max_o: int,
    t_lock: int,
    trigger: float = 1.0,
    budget: Budget | None = None,
) -> Choice:
    """One step of Algorithm 2.

    `risk` (U,) float64, Inf for a non-finite norm, never NaN; `observed` and `recoverable` (U,) bool; `lock` (U,)
    int64. A unit is over threshold where R > `trigger`: 1 in the paper; 0 makes every unit with a risk a candidate,
    so that the max_o largest risks are always taken (the ranked signals of table 11). Does not wait for the device.
    """
    over = (risk > trigger) & observed & recoverable
    candidate = over | ((lock > 0) & recoverable)
    if waits_for_nothing(candidate) and not candidate.numpy().any():
        return Choice(candidate, candidate, torch.zeros_like(lock), torch.arange(len(lock)))
    if budget is not None:
        risk = (risk / budget.cost.clamp(min=_TINY)).clamp(max=_LARGEST).where(risk.isfinite(), risk)
    key = torch.where(observed, risk, _UNOBSERVED)
    key = torch.where(candidate, key, _NO_CANDIDATE)
    order = torch.sort(key, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    active = candidate & (rank < max_o) if budget is None else _filled(candidate, order, max_o, budget)
    kept = torch.where(over, t_lock, (lock - 1).clamp(min=0))
    return Choice(candidate, active, torch.where(active, kept, 0), rank)


def _filled(candidate: Tensor, order: Tensor, max_o: int, budget: Budget) -> Tensor:
    """(U,) bool: the candidates in that order, each that fits the budget beside those before it, max_o at the most."""
    taken, cost = candidate[order], budget.cost[order]
    for _ in range(budget.kinds):
        over = taken & (torch.where(taken, cost, 0.0).cumsum(0) > budget.most)
        # The first unit that does not fit, and none behind it that costs as much or more: so each round ends a cost.
        taken = taken & ~(over & (cost >= cost[over.int().argmax()]))
    taken = taken & (taken.cumsum(0) <= max_o)
    return torch.zeros_like(candidate).scatter_(0, order, taken)


def may(chosen: Tensor, max_o: int, budget: Budget | None) -> Tensor:
    """Return whether these units (U,) bool may be on the recovery path at once: a scalar bool on the device."""
    fits = chosen.sum() <= max_o
    return fits if budget is None else fits & (torch.where(chosen, budget.cost, 0.0).sum() <= budget.most)
