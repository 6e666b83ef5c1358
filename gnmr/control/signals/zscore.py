"""How many standard deviations a unit's gradient norm lies above its own moving mean: ZClip's statistic, per unit.

    z[t] = (n[t] - mu[t-1]) / (sigma[t-1] + eps)        0 for the first `warmup` norms        R = z / threshold
    mu, sigma: EMAs of n[t], or where z > threshold of the clipped mu + threshold^2 / z * sigma (`clipped`)

Unlike a ratio it knows how much a unit's norm fluctuates anyway: a unit that is always noisy has to rise further. What
enters the history is clipped as published, where the gradient is clipped too; here it is not, and a unit whose norm
rises for good can stay thousands of standard deviations above a history that hardly follows. `clipped=False` follows.

Source: arXiv 2504.02507 (ZClip), there for the global norm and to clip; threshold 2.5, decay 0.97, 25 warm-up steps and
eps 1e-6 are its values. The moving variance is the exact one of the weights. Needs nothing but the norms; costs a dozen
operations on (U,) tensors a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.base import Context, Evidence, SignalBase, checked_threshold, positive, seen, whole
from gnmr.control.signals.history import LARGEST, make_history
from gnmr.control.thresholds import Threshold, at

_SMALL = 0.01


class ZScore(SignalBase):
    """z-score of the norm. For ranking, risks of z below 0.01 go on falling towards 0 instead of below it."""

    columns = ("z",)
    kept = ("history",)

    def __init__(
        self,
        context: Context,
        *,
        threshold: Threshold = 2.5,
        warmup: int = 25,
        history: str = "ema",
        decay: float = 0.97,
        window: int = 50,
        eps: float = 1e-6,
        clipped: bool = True,
    ) -> None:
        super().__init__(context)
        if not isinstance(clipped, bool):
            raise ValueError(f"clipped={clipped!r}: must be true or false")
        self.clipped = clipped
        self.threshold = checked_threshold(threshold)
        self.warmup, self.eps = whole(warmup, "warmup"), positive(eps, "eps")
        self.history = make_history(history, self.num_units, context.device, decay, window)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is z. Does not wait for the device."""
        norm, threshold = evidence["norm"], at(self.threshold, step)
        mean, std = self.history.mean, self.history.std
        z = torch.where(self.history.count >= self.warmup, ((norm - mean) / (std + self.eps)).clamp(max=LARGEST), 0.0)
        bounded = mean + threshold**2 / z * std
        self.history.update(torch.where((z > threshold) & self.clipped, bounded, norm), seen(evidence))
        # A z below 0 would be no risk at all: from 0.01 down a branch goes on, with the same slope there, towards 0.
        positive_z = torch.where(z > _SMALL, z, _SMALL**2 / (2 * _SMALL - z.clamp(max=_SMALL)))
        risk, _ = self.verdict(evidence, step, positive_z)
        return risk, (torch.where(norm.isfinite(), z, norm),)
