"""The inverse gradient signal-to-noise ratio: high if noise between micro-batches dominates a unit's gradient.

With g_d the gradient of micro-batch d of the step's D:

    GSNR[t]  = ||mean_d g_d||^2 / (mean_d ||g_d||^2 - ||mean_d g_d||^2)
    ratio[t] = H[t-1] / (GSNR[t] + eps)          R = ratio / threshold          H: moving mean of the GSNR

The unit form has two scalars per unit instead of the source's per-coordinate variances. With D micro-batches ||mean
g||^2 contains 1/D of the noise itself, the same in every step. The ratio is therefore less sensitive the fewer
micro-batches there are.

Source: arXiv 2309.13681 defines the per-coordinate ratio; the unit form and the decay are ours, and arXiv 2606.00539
ranks it without a threshold (table 11). The signal needs micro_square: two or more micro-batches per step, and one pass
over a copy of the gradients for each (its table 11: 28% more step time, 7% more memory).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.history import Ema
from gnmr.control.signals.signal import TINY, Context, Evidence, RatioSignal, ratio, seen
from gnmr.control.spec import Threshold, check


class Gsnr(RatioSignal):
    """Mean of the past GSNR over this step's. If the micro-batches agree entirely, GSNR is 1 / eps.

    A step in which fewer than two micro-batches contribute (a micro_square of 0) has none, and its ratio is 1.
    """

    columns = ("inverse_gsnr",)
    needs = ("micro_square",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.5, decay: float = 0.99, eps: float = 1e-8) -> None:
        super().__init__(context, Ema(len(context.names), context.device, decay), eps)
        self.threshold = check(threshold, "threshold")

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        micro, square = evidence["micro_square"], evidence["norm"].square()
        noise = torch.maximum(micro - square, self.eps * micro)  # rounding may make it negative for equal gradients
        gsnr = square / noise.clamp(min=TINY)
        mean, entered = self.history.mean, seen(evidence) & (micro > 0)
        column = torch.where(gsnr.isfinite() | (micro == 0), ratio(mean, gsnr, (mean != 0) & entered, self.eps), gsnr)
        self.history.update(gsnr, entered)
        return self.verdict(evidence, step, column)
