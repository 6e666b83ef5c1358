"""The share of a unit's non-zero inputs that the low-cost path turns into 0.

    R = underflow / threshold

Source: an open proposal to TransformerEngine (pull request 2883), threshold 5 %, there without a budget or a history.
Needs underflow: one pass over the inputs and their compressed copies.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.thresholds import Threshold


class Underflow(LevelSignal):
    """Share of underflown inputs against a fixed level. No memory."""

    columns = ("underflow",)
    needs = ("underflow",)

    def __init__(self, context: Context, *, threshold: Threshold = 0.05) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the share. Does not wait for the device."""
        return self.verdict(evidence, step, evidence["underflow"])
