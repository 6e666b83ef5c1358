"""Signals without a memory: one value of the step against a fixed level, R = value / threshold.

    grad_norm      ||g||, compared between units and not with the unit's own past. It is a baseline for every other
                   signal: a unit's gap is its relative error times the square of this. Rank it or calibrate its
                   threshold. Needs only the norms.
    mse            mean (x - Q_low(x))^2. Its unit is x^2: a layer with large activations has a large error, however
                   fine its grid. Source: an open proposal to TransformerEngine (pull request 2883), threshold 1e-4,
                   there without a budget or a history.
    oracle         ||g_low - g_high||^2, with both paths run on the batch: an upper bound for routing by the gain of one
                   step, at more than twice the cost, for small models. Source: corollary 1 of arXiv 2606.00539, whose
                   oracle set is the max_o largest gaps. Rank it, because it has no natural scale.

A value or a norm that is NaN or Inf has risk Inf. docs/signals.md gives the cost of each piece of evidence.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.control.signals.signal import Context, Evidence, LevelSignal
from gnmr.control.threshold import Threshold


class _Value(LevelSignal):
    """The evidence `value` against a fixed level; the column has the evidence's name unless `columns` names it."""

    value: str

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.verdict(evidence, step, evidence[self.value])


class GradNorm(_Value):
    """The gradient norm against a fixed level."""

    value, columns = "norm", ("grad_norm",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0) -> None:
        super().__init__(context, threshold)


class Mse(_Value):
    """The mean squared error of the low-cost path against a fixed level."""

    value, columns, needs = "mse", ("mse",), ("mse",)

    def __init__(self, context: Context, *, threshold: Threshold = 1e-4) -> None:
        super().__init__(context, threshold)


class Oracle(_Value):
    """The squared distance of both paths' gradients against a fixed level."""

    value, columns, needs = "true_gap", ("true_gap",), ("true_gap",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0) -> None:
        super().__init__(context, threshold)
