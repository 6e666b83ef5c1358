"""Units chosen at random: what a signal has to beat at the same mean budget.

In step t, active_frac * U units (whole units; what is left over goes to later steps) are drawn without putting back.
So every unit-step is chosen with probability `active_frac`, and the sum over the run is the budget itself. The draw
depends on the run's seed and the step number alone: a resumed run goes on exactly, with no state.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnmr.control.norms import to_device
from gnmr.control.signals.signal import BlindSignal, Context, Evidence


class Random(BlindSignal):
    """A uniform draw. `active_frac`: probability of a unit-step; None: max_o units in every step.

    R is 1 + u for a chosen unit, with its u from (0, 1). Without `active_frac` it is u for the others, so that any
    max_o can be filled by rank; with it it is 0, so that the budget holds. Under a budget of costs R is that times
    the unit's cost over the lowest, so that the draw does not favor cheap units.
    """

    columns = ("uniform",)

    def __init__(self, context: Context, *, active_frac: float | None = None) -> None:
        most = min(context.max_o / len(context.names), 1.0)
        super().__init__(context, active_frac, most, f"max_o={context.max_o} of {len(context.names)} units")
        self.active_frac, self._units_a_step = active_frac, self.rate * most * len(context.names)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is u. Does not wait for the device."""
        uniform = np.random.default_rng((self.context.seed, step)).random(self.num_units).clip(min=2.0**-53)
        number = self.falls_due(step, self._units_a_step)
        risk = uniform.copy() if self.active_frac is None else np.zeros(self.num_units)
        chosen = np.argsort(-uniform, kind="stable")[:number]
        risk[chosen] = 1 + uniform[chosen]
        if (spend := self.context.spend) is not None and (paid := [cost for cost in spend if cost > 0]):
            risk *= np.maximum(spend, min(paid)) / min(paid)  # or risk per cost would draw the cheap ones first
        both = to_device(torch.from_numpy(np.stack([risk, uniform])), self.context.device)
        return both[0], (both[1],)
