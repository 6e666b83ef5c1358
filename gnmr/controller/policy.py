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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """What `decide` returns; tensors over the U units, in unit order unless said otherwise."""

    candidate: Tensor
    """(U,) bool, C_t."""
    active: Tensor
    """(U,) bool, A_t: in force during step t + 1."""
    lock: Tensor
    """(U,) int64, locks after the decision."""
    rank: Tensor
    """(U,) int64, place of each unit by risk, 0 the riskiest; units that are no candidates come last."""


_UNOBSERVED, _NO_CANDIDATE = -1.0, -2.0  # below every risk, which is 0 or more


def decide(
    risk: Tensor,
    observed: Tensor,
    recoverable: Tensor,
    lock: Tensor,
    max_o: int,
    t_lock: int,
    trigger: float = 1.0,
) -> Choice:
    """One step of Algorithm 2.

    `risk` (U,) float64, Inf for a non-finite norm, never NaN; `observed` and `recoverable` (U,) bool; `lock` (U,)
    int64. A unit is over threshold where R > `trigger`: 1 in the paper; 0 makes every unit with a risk a candidate,
    so that the max_o largest risks are always taken (the ranked signals of table 11). Does not wait for the device.
    """
    over = (risk > trigger) & observed & recoverable
    candidate = over | ((lock > 0) & recoverable)
    key = torch.where(observed, risk, _UNOBSERVED)
    key = torch.where(candidate, key, _NO_CANDIDATE)
    order = torch.sort(key, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    active = candidate & (rank < max_o)
    kept = torch.where(over, t_lock, (lock - 1).clamp(min=0))
    return Choice(candidate, active, torch.where(active, kept, 0), rank)
