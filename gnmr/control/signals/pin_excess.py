"""Lasting and transient risk from one measurement: a slow mean of the logarithm is the pin, its excess a transient.

With v_b the unit's `evidence` (nats that recovery saves, or any other that is 0 or more) in the steps that measure it

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
from gnmr.control.spec import Threshold
from gnmr.options import one_of, positive, require, whole_number


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
    kept = ("history", "pin", "value", "on")

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
            now = evidence[self.evidence]
            entered = seen(evidence) & now.isfinite()
            known = entered & (self.history.count > 0)
            level = self.history.mean.exp()
            stays = (now > self.up * level) | (self.on & (now >= self.down * level))
            self.pin = torch.where(known & self.on & ~stays, torch.minimum(now, level), self.pin)
            self.on = torch.where(known, stays, self.on)
            self.value = torch.where(entered, now, self.value)
            logarithm = now.clamp(min=TINY).log()
            cut = torch.minimum(logarithm, self.history.mean + math.log(self.up))
            self.history.update(torch.where(known, cut, logarithm), entered & (now > 0))
            if self._chooses(step):
                self.pin = torch.where(self.history.count > 0, self.history.mean.exp(), 0.0)
            passing = torch.where(self.on, self.value, 0.0)
            passing = torch.where(now.isfinite() | ~evidence["observed"], passing, now)
        return self.verdict(evidence, step, self.pin, passing)

    def _chooses(self, step: int) -> bool:
        """Return whether pins are chosen in this step, which is one that measures."""
        done = step - 1
        number = done // self.every
        early = done < self.pin_every and number & (number - 1) == 0
        return early or done // self.pin_every > (done - self.every) // self.pin_every
