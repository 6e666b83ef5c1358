"""Signals without a memory: one value of the step against a fixed level, R = value / threshold.

    grad_norm      ||g||, compared between units and not with the unit's own past. A baseline for every other: a unit's
                   gap is its relative error times the square of this. Its threshold is made to be ranked or
                   calibrated. Needs nothing but the norms.
    grad_to_noise  sqrt(3) sqrt(gap_low) / (||g|| + eps): the quantization noise of a unit's weight gradient over the
                   gradient. Training on a quantized gradient stalls once ||g|| falls below sqrt(3) sigma_q sqrt(d), d
                   coordinates with noise of standard deviation sigma_q each; sqrt(gap_low) is the expected norm of that
                   noise on the low-cost path (docs/signals.md derives it). Source: arXiv 2505.19115, there global and
                   the cue to leave FP4 for good; its threshold is the 1 here.
    underflow      the share of the inputs x != 0 that the low-cost path turns into 0. Source: an open proposal to
                   TransformerEngine (pull request 2883), threshold 5 %, there without a budget or a history.
    mse            mean (x - Q_low(x))^2. It is in units of x^2: a layer with large activations has a large error,
                   however fine its grid. Source: the same proposal, threshold 1e-4.
    spike_share    the share of coordinates with g^2 > 5000 v, v Adam's second moment before the step: it sees a few
                   coordinates that leave their own past while the norm hardly moves. Source: arXiv 2501.06842 (SPAM),
                   which clips such coordinates (5000 is its factor); a share as a unit's risk and the threshold of one
                   in a thousand are ours. In the first step there is no second moment, and no spike.
    oracle         ||g_low - g_high||^2, both paths run on the batch: an upper bound for what routing by one step's gain
                   can do, at twice the cost and more, for small models. Source: corollary 1 of arXiv 2606.00539, whose
                   oracle set is the max_o largest gaps: rank it, for it has no scale of its own.

A value or a norm that is NaN or Inf is risk Inf. docs/signals.md says what each piece of evidence costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from gnmr.control.signals.base import Context, Evidence, LevelSignal
from gnmr.control.signals.history import LARGEST
from gnmr.control.thresholds import Threshold


def _level(
    name: str, column: str, level: float, *, needs: tuple[str, ...] = (), value: Callable[[Evidence], Tensor]
) -> type[LevelSignal]:
    """A class of that name: `value` against `level`, its option `threshold`."""

    def init(self: LevelSignal, context: Context, *, threshold: Threshold = level) -> None:
        LevelSignal.__init__(self, context, threshold)

    def observe(self: LevelSignal, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`. Does not wait for the device."""
        return self.verdict(evidence, step, value(evidence))

    doc = f"The column `{column}` against a fixed level. No memory."
    own = {"columns": (column,), "needs": needs, "__init__": init, "observe": observe, "__doc__": doc}
    return type(name, (LevelSignal,), own | {"__module__": __name__})


def _noise_ratio(evidence: Evidence) -> Tensor:
    noise = math.sqrt(3) * evidence["gap_low"].sqrt()
    return (noise / (evidence["norm"] + 1e-30)).clamp(max=LARGEST)


GradNorm = _level("GradNorm", "grad_norm", 1.0, value=lambda e: e["norm"])
GradToNoise = _level("GradToNoise", "noise_ratio", 1.0, needs=("gap_low",), value=_noise_ratio)
Underflow = _level("Underflow", "underflow", 0.05, needs=("underflow",), value=lambda e: e["underflow"])
Mse = _level("Mse", "mse", 1e-4, needs=("mse",), value=lambda e: e["mse"])
SpikeShare = _level("SpikeShare", "spike_share", 1e-3, needs=("spike_share",), value=lambda e: e["spike_share"])
Oracle = _level("Oracle", "true_gap", 1.0, needs=("true_gap",), value=lambda e: e["true_gap"])
