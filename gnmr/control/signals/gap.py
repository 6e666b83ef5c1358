"""What recovering a unit would gain: corollary 1's gap, estimated from what backward holds anyway.

The weight gradient is a sum over tokens, g = sum_t dy_t x_t^T; a path that keeps Q(x_t) changes it by
sum_t dy_t (Q(x_t) - x_t)^T. With errors of mean zero that are independent from token to token its expected square is

    E||g_Q - g||^2 = sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2

and the gap is what the recovery path takes off it:

    gap = gap_low - gap_recovery          the sum above with the low-cost, with the recovery path's Q
    R   = gap / threshold                 absolute: the squared error itself; adds up over units to the whole gain
          gap / ||g||^2 / threshold       relative: of the unit's own gradient
          gap / cost / threshold          per_byte: for each byte that recovery costs
          gap * GNMR / threshold          times_gnmr: of units that also left their own level

Only `relative` has a scale of its own (1: the error is as large as the gradient). The others are meant to be ranked, or
need a threshold calibrated to the run.

Of recipes, whose wgrad reads a cast of dy_t too, the sum has that operand's error besides (docs/signals.md).

Source: ours, from theorem 1 and corollary 1 of arXiv 2606.00539; docs/signals.md derives it and says what it drops.
Needs gap_low and gap_recovery: one pass over each input in both formats and one over the output gradients. Two ways to
make it cheap: measure a sample of the tokens (precision.probe_tokens), or only every k-th step (`every`), with the last
estimate in between; it changes slowly, for its causes (outlier channels, a layer's scale) do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.base import TINY, Context, Evidence, LevelSignal, positive, ratio, seen, whole
from gnmr.control.signals.history import LARGEST, make_history
from gnmr.control.thresholds import Threshold

_VARIANTS = ("absolute", "relative", "per_byte", "times_gnmr")


class Gap(LevelSignal):
    """The expected gain of recovery.

    `variant` as above; `every`: the gap is measured in the steps 1, 1 + every, ..., the other factors in each.
    `history`, `decay`, `window` and `eps` are GNMR's, for times_gnmr. A unit that recovery would make worse has gap 0.
    """

    columns = ("gap",)
    needs = ("gap_low", "gap_recovery")

    def __init__(
        self,
        context: Context,
        *,
        variant: str = "absolute",
        threshold: Threshold = 1.0,
        every: int = 1,
        history: str = "cumulative",
        decay: float = 0.99,
        window: int = 100,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(context, threshold)
        if variant not in _VARIANTS:
            raise ValueError(f"variant={variant!r}: must be one of {', '.join(_VARIANTS)}")
        self.variant, self.every, self.eps = variant, whole(every, "every"), positive(eps, "eps")
        self.estimate = torch.zeros(self.num_units, dtype=torch.float64, device=context.device)  # the last one
        self.history = make_history(history, self.num_units, context.device, decay, window)
        self.kept = ("estimate", "history") if variant == "times_gnmr" else ("estimate",)
        self._cost = torch.tensor(context.cost, dtype=torch.float64, device=context.device)

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the gap in its variant. Does not wait for the device."""
        norm, known = evidence["norm"], seen(evidence)
        gap = self.estimate
        if self.reads(step):
            gap = (evidence["gap_low"] - evidence["gap_recovery"]).clamp(min=0)
            self.estimate = torch.where(known & gap.isfinite(), gap, self.estimate)
        value = gap
        if self.variant == "relative":
            value = gap / norm.square().clamp(min=TINY)
        elif self.variant == "per_byte":
            value = gap / self._cost.clamp(min=TINY)
        elif self.variant == "times_gnmr":
            mean = self.history.mean
            value = gap * ratio(norm, mean, mean != 0, self.eps)
            self.history.update(norm, known)
        value = torch.where(gap.isfinite(), value.clamp(max=LARGEST), gap)
        return self.verdict(evidence, step, value)
