"""What a loop should know of how it calls `step`, each said once.

zeros   all gradients are 0, and no unit has had another one yet    step() after zero_grad(set_to_none=False)
idle    half of the units never have a gradient, or a unit that     a part of the model that the loss does not
        had one has none in some step                               depend on; experts may be idle
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from gnmr.control.decision import Decision
from gnmr.control.units import Unit
from gnmr.errors import users_level

_SEEN = 3
"""Steps after which a unit that never had a gradient counts as one without."""


class Hints:
    """Looks at the steps of one controller."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._ever = np.zeros(len(units), dtype=bool)
        """Which units had a gradient in any step."""
        self._told: set[str] = set()
        self._steps = 0
        self.look(units)

    def look(self, units: Sequence[Unit]) -> None:
        """Take the units' parameters as they are now."""
        trained = [[p for p in unit.parameters if p.requires_grad] for unit in units]
        self._first = [own[0] for own in trained if own]
        expected = [bool(own) and "expert" not in unit.name for unit, own in zip(units, trained, strict=True)]
        self._expected = np.array(expected, dtype=bool)
        """Which units are to have a gradient in every step."""

    def say(self, decision: Decision, advice: str = "") -> None:
        """Warn of what there is to say of a step, and of the `advice` of the caller, each once."""
        found = {"zeros": self._zeros(decision)}
        self._steps += bool(decision.observed.any())
        found |= {"idle": self._idle(decision), "advice": advice}
        self._ever |= decision.observed
        new = {kind: text for kind, text in found.items() if text and kind not in self._told}
        self._told |= new.keys()
        for text in new.values():
            warnings.warn(text, stacklevel=users_level())

    def _zeros(self, decision: Decision) -> str:
        nothing = not decision.observed.any() and not self._ever.any()
        if nothing and any(p.grad is not None for p in self._first):
            return "every gradient norm is 0 in this step: call step() before zero_grad()"
        return ""

    def _idle(self, decision: Decision) -> str:
        there, step = decision.observed, decision.step
        if not there.any():
            return ""
        never = self._expected & ~self._ever & ~there
        if self._steps == _SEEN and 2 * never.sum() >= self._expected.sum() > 0:
            first = decision.units[int(never.argmax())]
            return (
                f"{never.sum()} of {self._expected.sum()} units had no gradient in the first {_SEEN} steps (the first "
                f"is {first}): the loss does not depend on them, so they are never routed; leave them out of the "
                "targets, or call step() after the backward pass that reaches them"
            )
        gone = np.flatnonzero(self._expected & self._ever & ~there)
        if not len(gone):
            return ""
        more = f", nor have {len(gone) - 1} others" if len(gone) > 1 else ""
        return (
            f"{decision.units[gone[0]]}: has no gradient in step {step}, but had one before{more}: it did not run, or "
            "its part of the loss was masked; such steps do not count for it"
        )
