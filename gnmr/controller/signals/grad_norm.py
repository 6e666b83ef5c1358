"""The gradient's norm itself, compared between units and not with the unit's own past: R = norm / threshold.

The plainest statistic there is, and a baseline for every other: the gap of a unit is its relative error times the
square of this, so a large gradient alone makes a large gap likely. The default threshold means nothing: it is made to
be ranked, or calibrated to a run. Needs nothing but the norms.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.thresholds import Threshold


class GradNorm(LevelSignal):
    """The absolute gradient norm. `threshold`: of the norm."""

    columns = ("grad_norm",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the norm. Does not wait for the device."""
        return self.verdict(evidence, step, evidence["norm"])
