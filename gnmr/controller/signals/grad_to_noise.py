"""The quantization noise of a unit's weight gradient over the gradient itself.

    ratio[t] = sqrt(3) * sqrt(gap_low) / (||g|| + eps)          R = ratio / threshold

Training on a quantized gradient stalls once ||g|| falls below sqrt(3) sigma_q sqrt(d), d coordinates with noise of
standard deviation sigma_q each. sigma_q sqrt(d) is the norm of the noise, and sqrt(gap_low) is its expected value for
the weight gradient of the low-cost path (docs/signals.md derives it).

Source: arXiv 2505.19115, there global and the cue to leave FP4 for good; its threshold is the 1 here. Needs gap_low:
one pass over the inputs and output gradients (a sample of the tokens is enough: paths.probe_tokens).
"""

from __future__ import annotations

import math

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.signals.history import LARGEST
from gnmr.controller.thresholds import Threshold


class GradToNoise(LevelSignal):
    """Noise over gradient. No memory."""

    columns = ("noise_ratio",)
    needs = ("gap_low",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the ratio. Does not wait for the device."""
        noise = math.sqrt(3) * evidence["gap_low"].sqrt()
        return self.verdict(evidence, step, (noise / (evidence["norm"] + 1e-30)).clamp(max=LARGEST))
