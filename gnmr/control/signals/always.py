"""The two bounds: nothing is ever at risk, everything always is. Neither reads the evidence."""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.signal import Context, Evidence, SignalBase


class _Always(SignalBase):
    risk: float

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._risk = torch.full((self.num_units,), self.risk, dtype=torch.float64, device=context.device)

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        return ()

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; there are no columns. Does not wait for the device."""
        return self._risk, ()


class AlwaysLow(_Always):
    """R = 0: every unit stays on the low-cost path, even one whose norm is not finite."""

    risk = 0.0


class AlwaysHigh(_Always):
    """R = 2: every unit on the recovery path, as far as max_o goes; set it to the number of units."""

    risk = 2.0
