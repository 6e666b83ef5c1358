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

`ActiveSet` applies the function from step to step, with a warm-up and held sets, and switches the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from gnmr.control.decision import Decision, Event
from gnmr.control.spec import ControlSpec
from gnmr.control.unit import Unit


class Budget(NamedTuple):
    """The most that the units of a set may cost together, and the cost of each, in any common unit of measure."""

    most: float
    cost: np.ndarray
    """(U,) float64, 0 or more."""

    @classmethod
    def of(cls, most: float, costs: Sequence[float]) -> Budget:
        """Return a budget with a tolerance for rounding: sums of costs may exceed it by a part in a billion."""
        return cls(most * (1 + 1e-9), np.array(costs, dtype=np.float64))


class SetChoice(NamedTuple):
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
) -> SetChoice:
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

    Returns:
        Candidates, set, locks and ranks after the step.
    """
    # Most steps end here; `device.at_hand` explains why NumPy is slower.
    if not any(value > trigger for value in risk.tolist()) and not any(lock.tolist()):
        return _nobody(len(lock))
    # C_t: units over their threshold, and units whose lock has not run out
    over = (risk > trigger) & observed & recoverable
    candidate = over | ((lock > 0) & recoverable)
    # Under a budget the order is by risk per cost; a free unit comes first, but not before an infinite risk.
    if budget is not None:
        with np.errstate(over="ignore"):
            worth = np.minimum(risk / np.maximum(budget.cost, _TINY), _LARGEST)
        risk = np.where(np.isfinite(risk), worth, risk)
    # A_t: by rank. The sort is stable, so that equal risks keep the order of the units on every rank.
    rank = np.arange(len(lock))
    key = np.where(candidate, np.where(observed, risk, _UNOBSERVED), _NO_CANDIDATE)
    order = np.argsort(-key, kind="stable")
    rank[order] = rank.copy()
    active = candidate & (rank < max_o) if budget is None else _filled(candidate, order, max_o, budget)
    # Lock_b starts anew over the threshold and counts down below it; a unit outside of A_t loses its lock.
    next_lock = np.where(over, t_lock, np.maximum(lock - 1, 0))
    return SetChoice(candidate, active, np.where(active, next_lock, 0), rank)


@cache
def _nobody(number: int) -> SetChoice:
    """Return the choice among so many units without a candidate; its arrays are read-only."""
    none, lock, rank = np.zeros(number, dtype=bool), np.zeros(number, dtype=np.int64), np.arange(number)
    for array in (none, lock, rank):
        array.setflags(write=False)
    return SetChoice(none, none, lock, rank)


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


class ActiveSet:
    """The units on the recovery path, from step to step: the policy over time, and the switches.

    Args:
        units: the units, which are put on the low-cost path, or for a warm-up on the recovery path.
        spec: the settings of the controller.
        budget: limit on the cost of the set; None: no limit.
    """

    def __init__(self, units: Sequence[Unit], spec: ControlSpec, budget: Budget | None) -> None:
        # Keep only the switches of the units: their parameters may be exchanged and are then released.
        self._names, self._switches = [unit.name for unit in units], [unit.switch for unit in units]
        self._spec, self.budget = spec, budget
        self.recoverable = np.array([unit.recoverable for unit in units])
        self.active = np.zeros(len(units), dtype=bool)
        """(U,) bool: units on the recovery path now. Never modified in place: decisions hold the previous array."""
        self.lock = np.zeros(len(units), dtype=np.int64)
        self._risk = np.zeros(len(units))
        """(U,) float64: risks of the last decision."""
        self.events: list[Event] = []
        """Events since the last decision."""
        if spec.warmup_steps > 0:
            # Step 0: in force from the start, before any norm was seen.
            self._switch(self.recoverable, 0, None)
        else:
            for switch in filter(None, self._switches):
                switch(False)

    def choose(
        self, risk: np.ndarray, observed: np.ndarray, step: int, trigger: float, keep: bool = False
    ) -> SetChoice:
        """Return the choice of a step; `move` puts it into force.

        Args:
            risk: (U,) float64, the units' risks.
            observed: (U,) bool, units with a gradient.
            step: number of the step, from 1.
            trigger: see `decide`.
            keep: leave set and locks unchanged, if possible.
        """
        spec = self._spec
        # The warm-up ends with the decision of its last step.
        if step < spec.warmup_steps:
            return SetChoice(np.zeros_like(observed), self.recoverable, self.lock, np.arange(len(risk)))
        choice = self._decide(risk, observed, trigger)
        # Between two choices the set in force is held.
        if (step - max(spec.warmup_steps, 1)) % spec.hold:
            choice = self._held(choice, risk, observed)
        if self._stays(risk, observed, keep):
            choice = choice._replace(candidate=choice.candidate | self.active, active=self.active, lock=self.lock)
        return choice

    def move(self, decision: Decision) -> None:
        """Put the decision's set into force, and add its events to `events`.

        If a switch raises, the error propagates, and the set is the one that was reached.
        """
        self._risk = decision.risk
        try:
            self._switch(decision.active, decision.step, decision)
        finally:
            # If a switch failed, units that were not reached must have no lock.
            self.lock = decision.lock * self.active

    def promote(self, wanted: np.ndarray, step: int) -> bool:
        """Put the units `wanted`, (U,) bool, on the recovery path now, replacing the least risky; False: no room."""
        # The units in force compete by their last risks; the wanted ones have an infinite risk and so come first.
        stay = np.where(self.active, np.maximum(np.nan_to_num(self._risk, posinf=1.0), _TINY), 0.0)
        choice = self._decide(np.where(wanted, np.inf, stay), wanted | self.active, 0.0)
        if (wanted & ~choice.active).any():
            return False
        self.lock = np.where(wanted, self._spec.t_lock, self.lock * choice.active)
        first, displaced = len(self.events), self._cause_of_displacement(self.active)
        self._switch(choice.active, step, None)
        self.events[first:] = [
            replace(event, cause="retry" if event.event == "promote" else displaced) for event in self.events[first:]
        ]
        return True

    def restore(self, active: np.ndarray) -> None:
        """Put every unit on the path of a checkpoint; if a switch raises, the units keep their paths."""
        switched = []
        try:
            for switch, on, was_on in zip(self._switches, active, self.active, strict=True):
                if switch is not None:
                    # Noted before the call: a switch may fail halfway.
                    switched.append((switch, bool(was_on)))
                    switch(bool(on))
        except BaseException:
            # Undo what can be undone; the first error is the one to report.
            for switch, was_on in switched:
                with suppress(Exception):
                    switch(was_on)
            raise
        self.active = active

    def _decide(self, risk: np.ndarray, observed: np.ndarray, trigger: float) -> SetChoice:
        spec = self._spec
        return decide(risk, observed, self.recoverable, self.lock, spec.max_o, spec.t_lock, trigger, self.budget)

    def _held(self, choice: SetChoice, risk: np.ndarray, observed: np.ndarray) -> SetChoice:
        """Return the set in force and the units whose risk is not finite, by rank up to the cap."""
        # Between two decisions only a risk that is not finite may enter, in place of the least risky unit.
        urgent = np.isinf(risk) & observed & self.recoverable
        stay = np.where(self.active | urgent, np.maximum(risk, _TINY), 0.0)
        held = self._decide(stay, observed | self.active, 0.0)
        lock = np.where(urgent, held.lock, self.lock * held.active)
        return held._replace(candidate=choice.candidate | held.candidate, lock=lock)

    def _stays(self, risk: np.ndarray, observed: np.ndarray, keep: bool) -> bool:
        """Return True if the current set stays in force.

        It stays because of `keep`, or because all observed risks are infinite (loss-scale overflow) and more than
        max_o.
        """
        if not keep and any(
            seen and math.isfinite(value) for value, seen in zip(risk.tolist(), observed.tolist(), strict=True)
        ):
            return False
        flooded = keep or not may(observed & self.recoverable, self._spec.max_o, self.budget)
        # Right after the warm-up more than max_o may be in force; then the cap comes first.
        return flooded and may(self.active, self._spec.max_o, self.budget)

    def _switch(self, active: np.ndarray, step: int, decision: Decision | None) -> None:
        """Switch the units that change, leaving units first, and add their events in unit order.

        `decision` is the decision behind it; None: a warm-up, or a retry, whose causes `promote` sets.
        """
        if (coming := active.tolist()) == (current := self.active.tolist()):
            return
        changed = [i for i, (on, was_on) in enumerate(zip(coming, current, strict=True)) if on != was_on]
        self.active = self.active.copy()
        moved: dict[int, Event] = {}
        try:
            # Leaving units come first, so that the set never exceeds max_o.
            for index in sorted(changed, key=lambda i: bool(active[i])):
                switch, promoted = self._switches[index], bool(active[index])
                assert switch is not None
                switch(promoted)
                self.active[index] = promoted
                cause = self._cause(index, promoted, step, decision)
                risk = float(decision.risk[index]) if decision is not None and decision.observed[index] else None
                moved[index] = Event(step, self._names[index], "promote" if promoted else "release", cause, risk)
        finally:
            self.events.extend(moved[index] for index in sorted(moved))

    def _cause_of_displacement(self, active: np.ndarray) -> str:
        """Return the cause of a release whose place another unit took."""
        return "max_o" if self._spec.budget is None or int(active.sum()) >= self._spec.max_o else "budget"

    def _cause(self, index: int, promoted: bool, step: int, decision: Decision | None) -> str:
        if step < self._spec.warmup_steps or decision is None:
            return "warmup"
        if not promoted:
            if step == self._spec.warmup_steps:
                return "warmup"
            return self._cause_of_displacement(decision.active) if decision.candidate[index] else "lock"
        if not np.isfinite(decision.norm[index]):
            return "nonfinite"
        ratios = {
            name: values[index] / threshold
            for (name, values), threshold in zip(decision.columns.items(), decision.thresholds, strict=True)
            if threshold is not None
        }
        # R is the maximum of these ratios, so the largest one is the cause.
        highest = max(ratios, key=lambda name: ratios[name], default="risk")
        over = ratios and ratios[highest] > 1
        return "rank" if self._spec.ranked and not over else highest
