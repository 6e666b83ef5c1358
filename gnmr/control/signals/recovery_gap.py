"""Gain of recovering a unit: corollary 1's recovery gap, estimated from tensors that backward holds anyway.

The weight gradient is a sum over tokens, g = sum_t dy_t x_t^T; a path that keeps Q(x_t) changes it by sum_t dy_t
(Q(x_t) - x_t)^T. If the errors have mean zero and are independent between tokens, the expected square is

    E||g_Q - g||^2 = sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2

and the gap is the part that the recovery path removes:

    gap = gap_low - gap_recovery          the sum above with the low-cost, with the recovery path's Q
    R   = gap / threshold

The gaps of all units add up to the total gain. The gap has no natural scale: rank it, or calibrate its threshold to the
run. Under recipes, whose wgrad reads a cast of dy_t too, the sum also includes that operand's error (docs/signals.md).

Source: ours, from theorem 1 and corollary 1 of arXiv 2606.00539; docs/signals.md derives it and lists the neglected
terms. Needs gap_low and gap_recovery: one pass over each input in both formats and one over the output gradients. Two
options reduce the cost: measure a sample of the tokens (precision.probe_tokens), or only every k-th step (`every`),
with the last estimate in between. The gap changes slowly, because its causes (outlier channels, a layer's scale) do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.signal import Context, Evidence, LevelSignal, seen
from gnmr.control.spec import Threshold
from gnmr.options import whole_number


class RecoveryGap(LevelSignal):
    """The expected gain of recovery, measured in the steps 1, 1 + every, ...; 0 if recovery would make a unit worse."""

    columns = ("recovery_gap",)
    needs = ("gap_low", "gap_recovery")
    kept = ("estimate",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0, every: int = 1) -> None:
        super().__init__(context, threshold)
        whole_number(every=every)
        self.every = every
        self.estimate = torch.zeros(self.num_units, dtype=torch.float64, device=context.device)  # the last estimate

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        gap = self.estimate
        if self.reads(step):
            gap = (evidence["gap_low"] - evidence["gap_recovery"]).clamp(min=0)
            self.estimate = torch.where(seen(evidence) & gap.isfinite(), gap, self.estimate)
        return self.verdict(evidence, step, gap)
