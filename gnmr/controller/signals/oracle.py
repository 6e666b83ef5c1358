"""The gap that the others estimate: both paths are run and their gradients compared.

    R = ||g_low - g_high||^2 / threshold

An upper bound for what routing by one step's gain can do, at twice the cost and more: for small models.

Source: corollary 1 of arXiv 2606.00539, whose oracle set is the max_o largest gaps: rank it, for it has no scale of its
own. Needs true_gap: a forward and backward pass of the batch on each path.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.thresholds import Threshold


class Oracle(LevelSignal):
    """The measured gap. No memory."""

    columns = ("true_gap",)
    needs = ("true_gap",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the gap. Does not wait for the device."""
        return self.verdict(evidence, step, evidence["true_gap"])
