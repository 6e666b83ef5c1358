"""The norm of the update that the optimizer applied to a unit, over its own past.

    ratio[t] = u[t] / (H[t-1] + eps)          R = ratio / threshold          H: mean of the past u, as `history` says

An adaptive optimizer may enlarge a gradient that is small (a second moment that decayed), so an update can leave its
level before or without the gradient: users report update norms that spiked first (marin, issue 1368).

Source: that report; the ratio is GNMR's, with its threshold. Needs update_norm: a copy of the weights over the
optimizer's step and one pass over both. An update of exactly 0 is one that did not happen (no step yet, or a skipped
one): it has ratio 1 and does not enter.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.control.signals.base import Context, Evidence, RatioSignal, checked_threshold, seen
from gnmr.control.thresholds import Threshold


class UpdateNorm(RatioSignal):
    """Norm of the update over its own past."""

    columns = ("update_ratio",)
    needs = ("update_norm",)

    def __init__(
        self,
        context: Context,
        *,
        threshold: Threshold = 1.5,
        history: str = "cumulative",
        decay: float = 0.99,
        window: int = 100,
        two_sided: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(context, history, decay, window, two_sided, eps)
        self.threshold = checked_threshold(threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the ratio. Does not wait for the device."""
        update = evidence["update_norm"]
        return self.verdict(evidence, step, self.compare(update, seen(evidence) & (update != 0)))
