"""The gap of corollary 1 itself, from one backward pass: what recovery takes off the weight gradient's squared error.

Where only the saved copy differs between the paths (site=saved), dy is the same on both, and

    g_low - g_recovery = sum_t dy_t (Q_low(x_t) - Q_recovery(x_t))^T        R = ||g_low - g_recovery||^2 / threshold

is one product more of wgrad's size a unit, where the oracle runs the model twice more. The estimate of `gap.py` leaves
the pairs of tokens in this sum out. With site=forward dy differs too, and this is the saved copy's part of the gap; of
recipes it is the part of both operands of wgrad and of its result's cast.

The default threshold means nothing: it is made to be ranked, or calibrated to a run. Needs gap_exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.base import Context, Evidence, LevelSignal, seen, whole
from gnmr.control.thresholds import Threshold


class GapExact(LevelSignal):
    """The gain of recovery, pairs of tokens included. `every`: as in `Gap`."""

    columns = ("gap_exact",)
    needs = ("gap_exact",)
    kept = ("estimate",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0, every: int = 1) -> None:
        super().__init__(context, threshold)
        self.every = whole(every, "every")
        self.estimate = torch.zeros(self.num_units, dtype=torch.float64, device=context.device)

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the gap. Does not wait for the device."""
        gap = self.estimate
        if self.reads(step):
            gap = evidence["gap_exact"]
            self.estimate = torch.where(seen(evidence) & gap.isfinite(), gap, self.estimate)
        return self.verdict(evidence, step, gap)
