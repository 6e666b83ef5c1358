"""The policy over time: locks, the warm-up, sets that are held, and what is done if all risks are infinite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr.control.device import all_finite
from gnmr.control.policy import Budget, Choice, decide, may
from gnmr.control.signals.signal import TINY
from gnmr.control.spec import ControlSpec


@dataclass(frozen=True)
class Routed:
    """The locks, the set and the risks (U,) that a step leaves to the next one."""

    lock: Tensor
    chosen: Tensor
    """The active set after `Controller.apply` has run."""
    risk: Tensor


class Routing:
    """Chooses the set of each step from its risks. Does not wait for the device, but for `promoted`."""

    def __init__(self, spec: ControlSpec, recoverable: Tensor, budget: Budget | None) -> None:
        self._spec, self._recoverable, self.budget = spec, recoverable, budget
        lock = torch.zeros(len(recoverable), dtype=torch.int64, device=recoverable.device)
        self.now = Routed(lock, recoverable & (spec.warmup_steps > 0), lock.double())

    def choose(self, risk: Tensor, observed: Tensor, step: int, trigger: float, keep: bool) -> Choice:
        """Return the choice of a step; `keep`: set and locks stay as they are, if they may."""
        spec, now = self._spec, self.now
        if step < spec.warmup_steps:
            nothing = torch.zeros_like(self._recoverable)
            choice = Choice(nothing, self._recoverable, now.lock, torch.arange(len(risk), device=risk.device))
        else:
            choice = self._decide(risk, observed, trigger)
            if (step - max(spec.warmup_steps, 1)) % spec.hold:
                choice = self._held(choice, risk, observed)
            if keep or not all_finite(risk):
                choice = self._unless_all_infinite(choice, risk, observed, keep)
        self.now = Routed(choice.lock, choice.active, risk.double())
        return choice

    def promoted(self, wanted: Tensor) -> Tensor | None:
        """Return the set with the units `wanted` (U,) bool, in the places of the least risky ones, and lock them; None,
        and nothing changes, if they do not fit. Waits for the device."""
        now = self.now
        stay = torch.where(now.chosen, now.risk.nan_to_num(posinf=1.0).clamp(min=TINY), 0.0)
        choice = self._decide(torch.where(wanted, torch.inf, stay), wanted | now.chosen, 0.0)
        if bool((wanted & ~choice.active).any()):
            return None
        lock = torch.where(wanted, self._spec.t_lock, now.lock * choice.active)
        self.now = Routed(lock, choice.active, now.risk)
        return choice.active

    def back_to(self, active: Tensor) -> None:
        """Go on from this set, of which a switch raised."""
        self.now = Routed(self.now.lock * active, active, self.now.risk)

    def _decide(self, risk: Tensor, observed: Tensor, trigger: float) -> Choice:
        spec = self._spec
        return decide(risk, observed, self._recoverable, self.now.lock, spec.max_o, spec.t_lock, trigger, self.budget)

    def _held(self, choice: Choice, risk: Tensor, observed: Tensor) -> Choice:
        """Return the set in force and the units whose risk is not finite, by rank up to the cap."""
        now = self.now
        urgent = risk.isinf() & observed & self._recoverable
        stay = torch.where(now.chosen | urgent, risk.clamp(min=TINY), 0.0)
        kept = self._decide(stay, observed | now.chosen, 0.0)
        lock = torch.where(urgent, kept.lock, now.lock * kept.active)
        return kept._replace(candidate=choice.candidate | kept.candidate, lock=lock)

    def _unless_all_infinite(self, choice: Choice, risk: Tensor, observed: Tensor, keep: bool) -> Choice:
        """Keep the current set if all observed risks are infinite (loss-scale overflow) and more than max_o, or to
        `keep` it."""
        now, max_o = self.now, self._spec.max_o
        # Right after the warm-up more than max_o may be in force; then the cap comes first.
        stays = may(now.chosen, max_o, self.budget)
        if not keep:
            all_infinite = (risk.isinf() | ~observed).all()
            stays = all_infinite & ~may(observed & self._recoverable, max_o, self.budget) & stays
        return choice._replace(
            candidate=choice.candidate | (stays & now.chosen),
            active=torch.where(stays, now.chosen, choice.active),
            lock=torch.where(stays, now.lock, choice.lock),
        )
