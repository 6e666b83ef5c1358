"""The policy over time: locks, the warm-up, sets that are held, and steps in which all risks are infinite."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gnmr.control.policy import Budget, Choice, decide, may
from gnmr.control.signals.signal import TINY
from gnmr.control.spec import ControlSpec


class Routed(NamedTuple):
    """The locks, the set and the risks (U,) that a step passes to the next one; never modified in place."""

    lock: np.ndarray
    chosen: np.ndarray
    """The active set after `Controller.apply` has run."""
    risk: np.ndarray


class Routing:
    """Chooses the set of each step from its risks, on the host."""

    def __init__(self, spec: ControlSpec, recoverable: np.ndarray, budget: Budget | None) -> None:
        self._spec, self._recoverable, self.budget = spec, recoverable, budget
        lock = np.zeros(len(recoverable), dtype=np.int64)
        self.now = Routed(lock, recoverable & (spec.warmup_steps > 0), lock.astype(np.float64))

    def choose(self, risk: np.ndarray, observed: np.ndarray, step: int, trigger: float, keep: bool) -> Choice:
        """Return the choice of a step; `keep`: leave set and locks unchanged, if possible."""
        spec, now = self._spec, self.now
        if step < spec.warmup_steps:
            choice = Choice(np.zeros_like(observed), self._recoverable, now.lock, np.arange(len(risk)))
        else:
            choice = self._decide(risk, observed, trigger)
            if (step - max(spec.warmup_steps, 1)) % spec.hold:
                choice = self._held(choice, risk, observed)
            if self._stays(risk, observed, keep):
                choice = choice._replace(candidate=choice.candidate | now.chosen, active=now.chosen, lock=now.lock)
        self.now = Routed(choice.lock, choice.active, risk)
        return choice

    def promoted(self, wanted: np.ndarray) -> np.ndarray | None:
        """Lock the units `wanted` and return the set in which they replace the least risky; None if they do not fit."""
        now = self.now
        stay = np.where(now.chosen, np.maximum(np.nan_to_num(now.risk, posinf=1.0), TINY), 0.0)
        choice = self._decide(np.where(wanted, np.inf, stay), wanted | now.chosen, 0.0)
        if (wanted & ~choice.active).any():
            return None
        lock = np.where(wanted, self._spec.t_lock, now.lock * choice.active)
        self.now = Routed(lock, choice.active, now.risk)
        return choice.active

    def back_to(self, active: np.ndarray) -> None:
        """Continue from this set, which was reached when a switch raised."""
        self.now = Routed(self.now.lock * active, active, self.now.risk)

    def _decide(self, risk: np.ndarray, observed: np.ndarray, trigger: float) -> Choice:
        spec = self._spec
        return decide(risk, observed, self._recoverable, self.now.lock, spec.max_o, spec.t_lock, trigger, self.budget)

    def _held(self, choice: Choice, risk: np.ndarray, observed: np.ndarray) -> Choice:
        """Return the set in force and the units whose risk is not finite, by rank up to the cap."""
        now = self.now
        urgent = np.isinf(risk) & observed & self._recoverable
        stay = np.where(now.chosen | urgent, np.maximum(risk, TINY), 0.0)
        kept = self._decide(stay, observed | now.chosen, 0.0)
        lock = np.where(urgent, kept.lock, now.lock * kept.active)
        return kept._replace(candidate=choice.candidate | kept.candidate, lock=lock)

    def _stays(self, risk: np.ndarray, observed: np.ndarray, keep: bool) -> bool:
        """Return True if the current set stays in force.

        It stays because of `keep`, or because all observed risks are infinite (loss-scale overflow) and more than
        max_o.
        """
        if not keep and any(
            seen and math.isfinite(one) for one, seen in zip(risk.tolist(), observed.tolist(), strict=True)
        ):
            return False
        flooded = keep or not may(observed & self._recoverable, self._spec.max_o, self.budget)
        # Right after the warm-up more than max_o may be in force; then the cap comes first.
        return flooded and may(self.now.chosen, self._spec.max_o, self.budget)
