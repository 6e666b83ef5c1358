"""What recovering a unit saves, in nats of the loss now: the price of its low path less that of its recovery path.

    price = mean of the last prices (exponential, `decay`)      R = price / threshold

The price of a step is measured on few tokens, so it is noisy; what it is the price of changes slowly. Where no path
casts what fprop reads it is the squared error that recovery takes off the weight gradient, as a share of the squared
gradient of all units: a number to rank by, and no nats.

Source: ours; docs/price.md derives it, names prior art and holds it against the true increase of the loss. Needs
price: casts and products of one token in `paths.price_tokens`, in one step in `every`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.controller.signals.base import Context, Evidence, LevelSignal, seen, whole
from gnmr.controller.signals.history import make_history
from gnmr.controller.thresholds import Threshold


class Price(LevelSignal):
    """The mean price against a level, `threshold` nats.

    `every`: prices are measured in the steps 1, 1 + every, ... `decay`: of the mean over measurements. A price that is
    not finite is risk Inf in its step and does not enter the mean.
    """

    columns = ("price",)
    needs = ("price",)
    kept = ("history",)

    def __init__(self, context: Context, *, threshold: Threshold = 1e-3, every: int = 10, decay: float = 0.8) -> None:
        super().__init__(context, threshold)
        self.every = whole(every, "every")
        self.history = make_history("ema", self.num_units, context.device, decay, window=1)

    def reads(self, step: int) -> bool:
        return (step - 1) % self.every == 0

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`. Does not wait for the device."""
        price = self.history.mean
        if self.reads(step):
            now = evidence["price"]
            self.history.update(now, seen(evidence))
            price = torch.where(now.isfinite(), self.history.mean, now)
        return self.verdict(evidence, step, price)
