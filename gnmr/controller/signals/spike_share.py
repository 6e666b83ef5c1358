"""The share of a unit's coordinates whose gradient spikes.

    spike: g^2 > 5000 v, v Adam's second moment before the step          R = share of spikes / threshold

A norm adds all coordinates up; this sees a few that leave their own past while the norm hardly moves.

Source: arXiv 2501.06842 (SPAM), which clips such coordinates (5000 is its factor); a share as a unit's risk and the
threshold of one in a thousand are ours. Needs spike_share: one pass over gradients and second moments. In the first
step there is no second moment, and no spike.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.thresholds import Threshold


class SpikeShare(LevelSignal):
    """Share of spiking coordinates against a fixed level. No memory of its own."""

    columns = ("spike_share",)
    needs = ("spike_share",)

    def __init__(self, context: Context, *, threshold: Threshold = 1e-3) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the share. Does not wait for the device."""
        return self.verdict(evidence, step, evidence["spike_share"])
