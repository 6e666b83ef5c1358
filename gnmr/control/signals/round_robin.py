"""Each unit in turn, max_o at a time: the budget spread evenly over units, where `random` spreads it by chance.

The places move on by max_o units after every `every` steps in which it chooses, in unit order and around the end, so
that all units are visited equally often.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.base import BlindSignal, Context, Evidence, due, whole


class RoundRobin(BlindSignal):
    """max_o units in turn; `share` as in `BlindSignal`."""

    def __init__(self, context: Context, *, every: int = 1, share: float | None = None) -> None:
        num_units, self.at_once = len(context.names), min(context.max_o, len(context.names))
        super().__init__(context, share, self.at_once / num_units, f"max_o={context.max_o} of {num_units} units")
        self.every = whole(every, "every")
        self._units = torch.arange(num_units, device=context.device)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; there are no columns. Does not wait for the device."""
        times, on = due(self.turn(step), self.rate), self.falls_due(step, self.rate)
        start = (times - 1) // self.every * self.at_once  # by times chosen: by steps, an even share could skip units
        chosen = (self._units - start) % self.num_units < self.at_once
        return chosen.double() * (2.0 * on), ()
