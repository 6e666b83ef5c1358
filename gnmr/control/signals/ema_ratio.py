"""The gradient norm over its exponential moving mean: AdaGC's statistic, used to route instead of to clip.

    ratio[t] = n[t] / (M[t-1] + eps)                                     R = ratio / threshold
    M[t]     = EMA of min(n[t], clip * M[t-1])

What enters the history is clipped, so that one spike does not raise the level it is judged by. A lasting rise is
followed by (1 - decay)(clip - 1) a step at most, 0.1 % as published, where the gradient is clipped too and cannot run
away. Here nothing is: a unit whose norm rises tenfold stays above the threshold for 2,300 steps. `clip=None` follows.

Source: arXiv 2502.11034 (AdaGC), which multiplies the gradient by min(1, 1.05 M / n); decay 0.98 and 1.05 are its
values. It starts from the least norm of 100 globally clipped steps, this signal from the plain mean of the first
1 / (1 - decay) values. Needs nothing but the norms; costs a few operations on (U,) tensors a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.base import Context, Evidence, RatioSignal, checked_threshold, positive, seen
from gnmr.control.thresholds import Threshold


class EmaRatio(RatioSignal):
    """Norm over its clipped moving mean. `clip`: what enters is at most `clip` times the mean; None: not clipped."""

    columns = ("ema_ratio",)

    def __init__(
        self,
        context: Context,
        *,
        threshold: Threshold = 1.05,
        clip: float | None = 1.05,
        history: str = "ema",
        decay: float = 0.98,
        window: int = 50,
        two_sided: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(context, history, decay, window, two_sided, eps)
        self.threshold = checked_threshold(threshold)
        self.clip = None if clip is None else positive(clip, "clip")
        if clip is not None and clip < 1:
            raise ValueError(f"clip={clip!r}: must be 1 or more, or the mean could only fall")

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the ratio. Does not wait for the device."""
        norm, mean, remembered = evidence["norm"], self.history.mean, None
        if self.clip is not None:
            remembered = torch.where(mean != 0, torch.minimum(norm, self.clip * mean), norm)
        return self.verdict(evidence, step, self.compare(norm, seen(evidence), remembered))
