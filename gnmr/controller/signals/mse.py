"""The mean squared error of the low-cost path on a unit's input.

    R = mean (x - Q_low(x))^2 / threshold

It is in units of x^2: a layer with large activations has a large error however fine its grid.

Source: an open proposal to TransformerEngine (pull request 2883), threshold 1e-4, there without a budget or a history.
Needs mse: one pass over the inputs and their compressed copies.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal
from gnmr.controller.thresholds import Threshold


class Mse(LevelSignal):
    """Mean squared error of the inputs against a fixed level. No memory."""

    columns = ("mse",)
    needs = ("mse",)

    def __init__(self, context: Context, *, threshold: Threshold = 1e-4) -> None:
        super().__init__(context, threshold)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the error. Does not wait for the device."""
        return self.verdict(evidence, step, evidence["mse"])
