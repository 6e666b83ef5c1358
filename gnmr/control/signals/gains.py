"""Signals of what recovering a unit gains: an expected error, its price in nats, and pins with transients.

# recovery_gap: corollary 1's recovery gap, estimated from tensors that backward holds anyway

The weight gradient is a sum over tokens, g = sum_t dy_t x_t^T; a path that keeps Q(x_t) changes it by sum_t dy_t
(Q(x_t) - x_t)^T. If the errors have mean zero and are independent between tokens, the expected square is

    E||g_Q - g||^2 = sum_t ||dy_t||^2 ||x_t - Q(x_t)||^2

and the gap is the part that the recovery path removes:

    gap = gap_low - gap_recovery          the sum above with the low-cost, with the recovery path's Q
    R   = gap / threshold

The gaps of all units add up to the total gain. The gap has no natural scale: rank it, or calibrate its threshold to the
run. Under recipes, whose wgrad reads a cast of dy_t too, the sum also includes that operand's error (docs/signals.md).

Source: ours, from theorem 1 and corollary 1 of arXiv 2606.00539; docs/signals.md lists the neglected terms. Needs
gap_low and gap_recovery: one pass over each input in both formats and one over the output gradients. Two options reduce
the cost: measure a sample of the tokens (`probe_tokens`), or only every k-th step (`every`), with the last estimate in
between. The gap changes slowly, because its causes (outlier channels, a layer's scale) do.

# price: the loss in nats that recovering a unit saves now

It is the price of the unit's low path minus the price of its recovery path.

    price = geometric mean of the last prices (exponential, `decay`)      R = price / threshold

The price of a step is measured on few tokens, a handful of which dominate it, so a plain mean would follow one batch
for ten measurements. The underlying price changes slowly. If no path casts an input of fprop, the price is the squared
error that recovery removes from the weight gradient, as a share of the squared gradient of all units. This number ranks
units but is not in nats.

Source: ours; docs/price.md derives it, names prior work and compares it with the true increase of the loss. Needs
price: casts and products of one token in `price_tokens`, in the first `early` steps and then in one step in
`every`.

# pin_excess: lasting and transient risk from one measurement

A slow mean of the logarithm is the pin, its excess a transient. With v_b the unit's `evidence` (nats that recovery
saves, or any other that is 0 or more) in the steps that measure it

    m_b    slow mean of log v_b, each value cut at m_b + log up           the level that lasts
    on_b   from v_b > up * exp m_b on, until v_b < down * exp m_b         a transient, with hysteresis
    pin_b  exp m_b when pins were last chosen, every few hundred steps; min(v_b, exp m_b) when a transient ended
    R_b    max(pin_b, v_b while on_b) / threshold

max_o or the budget is filled with the units of the highest level, per cost if there is one. A transient replaces the
cheapest pin at the first measurement that shows it, if it is worth more. Both are in the unit of the evidence, so
neither needs a reserve. A lasting rise is followed: the cut mean grows by at most log up times 1 - decay per
measurement. When the mean has caught up, the transient ends as a pin.

Source: ours. On our models, 96% of the variance of the log price was between units, which pins mostly capture.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnmr.control.evidence import EVIDENCE
from gnmr.control.signals.history import Ema
from gnmr.control.signals.signal import TINY, Context, Evidence, LevelSignal, seen
from gnmr.control.threshold import Threshold
from gnmr.options import one_of, positive, require, whole_number


class RecoveryGap(LevelSignal):
    """The expected gain of recovery, measured in the steps 1, 1 + every, ...; 0 if recovery would make a unit worse."""

    columns = ("recovery_gap",)
    needs = ("gap_low", "gap_recovery")
    state_names = ("estimate",)

    def __init__(self, context: Context, *, threshold: Threshold = 1.0, every: int = 1) -> None:
        super().__init__(context, threshold)
        whole_number(every=every)
        self.every = every
        self.estimate = torch.zeros(self.num_units, dtype=torch.float64, device=context.device)  # the last estimate

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        # The gap changes slowly, so that the last estimate serves between two measurements.
        gap = self.estimate
        if self.reads(step):
            gap = (evidence["gap_low"] - evidence["gap_recovery"]).clamp(min=0)
            self.estimate = torch.where(seen(evidence) & gap.isfinite(), gap, self.estimate)
        return self.verdict(evidence, step, gap)


class Price(LevelSignal):
    """The mean price against a level, `threshold` nats.

    Prices are measured in the first `early` steps, so that the first choices do not depend on chance, and then in one
    step in `every`. `decay` is the decay of the mean over measurements. A price that is not finite has risk Inf in its
    step. The mean omits it, and prices of 0 or less, which have no logarithm.
    """

    columns = ("price",)
    needs = ("price",)
    state_names = ("history",)

    def __init__(
        self,
        context: Context,
        *,
        threshold: Threshold = 1e-3,
        early: int = 10,
        every: int = 20,
        decay: float = 0.9,
    ) -> None:
        super().__init__(context, threshold)
        whole_number(early=early, every=every)
        self.early, self.every = early, every
        self.history = Ema(self.num_units, context.device, decay)

    def reads(self, step: int) -> bool:
        return step <= self.early or (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        measured = evidence["price"] if self.reads(step) else None
        if measured is not None:
            # The mean of the logarithm is a geometric mean, which a single batch cannot dominate.
            self.history.update(measured.log(), seen(evidence))
        price = torch.where(self.history.count > 0, self.history.mean.exp(), 0.0)
        if measured is not None:
            # A price that is not finite shows in its own step only.
            price = torch.where(measured.isfinite() | ~evidence["observed"], price, measured)
        return self.verdict(evidence, step, price)


class PinExcess(LevelSignal):
    """Pins and transients of one piece of evidence, against `threshold` in its unit.

    A value that is not finite has risk Inf in its step and is not added to the mean. A value of 0 has no logarithm and
    is not added either.

    Args:
        every: the evidence is measured in the steps 1, 1 + every, ...
        pin_every: steps between two choices of pins. Before the first such interval is over, pins are also chosen after
            1, 2, 4, ... measurements.
        decay: decay of the mean over measurements.
        up: factor over the level at which a transient begins; infinite: pins only.
        down: factor over the level at which a transient ends.
    """

    columns = ("pin", "transient")
    state_names = ("history", "pin", "value", "on")

    def __init__(
        self,
        context: Context,
        *,
        evidence: str = "price",
        threshold: Threshold = 1e-3,
        every: int = 5,
        pin_every: int = 200,
        decay: float = 0.95,
        up: float = 4.0,
        down: float = 1.25,
    ) -> None:
        super().__init__(context, threshold)
        one_of(EVIDENCE, evidence=evidence)
        whole_number(every=every, pin_every=pin_every)
        positive(down=down)
        if up != math.inf:
            positive(up=up)
        require(up >= 1, "up", up, "must be 1 or more")
        require(1 <= down <= up, "down", down, f"must lie between 1 and up={up!r}")
        self.evidence, self.needs = evidence, (evidence,)
        self.every, self.pin_every, self.up, self.down = every, pin_every, up, down
        self.history = Ema(self.num_units, context.device, decay)
        self.pin = torch.zeros(self.num_units, dtype=torch.float64, device=context.device)
        self.value = torch.zeros_like(self.pin)  # the last value
        self.on = torch.zeros_like(self.pin, dtype=torch.bool)

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        return super().thresholds(step) * 2

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        passing = torch.where(self.on, self.value, 0.0)
        if self.reads(step):
            measured = evidence[self.evidence]
            entered = seen(evidence) & measured.isfinite()
            # The first value of a unit has no level to be compared with.
            comparable = entered & (self.history.count > 0)
            level = self.history.mean.exp()
            # A transient begins above `up` times the level and ends below `down` times; then it is a pin.
            stays = (measured > self.up * level) | (self.on & (measured >= self.down * level))
            self.pin = torch.where(comparable & self.on & ~stays, torch.minimum(measured, level), self.pin)
            self.on = torch.where(comparable, stays, self.on)
            self.value = torch.where(entered, measured, self.value)
            # The level follows the logarithm, cut so that a transient hardly moves it.
            logarithm = measured.clamp(min=TINY).log()
            cut = torch.minimum(logarithm, self.history.mean + math.log(self.up))
            self.history.update(torch.where(comparable, cut, logarithm), entered & (measured > 0))
            if self._chooses(step):
                self.pin = torch.where(self.history.count > 0, self.history.mean.exp(), 0.0)
            passing = torch.where(self.on, self.value, 0.0)
            # A value that is not finite shows in its own step only.
            passing = torch.where(measured.isfinite() | ~evidence["observed"], passing, measured)
        return self.verdict(evidence, step, self.pin, passing)

    def _chooses(self, step: int) -> bool:
        """Return whether pins are chosen in this step, which is one that measures."""
        # Before the first interval is over, pins are chosen after 1, 2, 4, ... measurements.
        done = step - 1
        number = done // self.every
        early = done < self.pin_every and number & (number - 1) == 0
        return early or done // self.pin_every > (done - self.every) // self.pin_every
