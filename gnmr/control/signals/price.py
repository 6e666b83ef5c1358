"""The loss in nats that recovering a unit saves now: the price of its low path minus the price of its recovery path.

    price = geometric mean of the last prices (exponential, `decay`)      R = price / threshold

The price of a step is measured on few tokens, a handful of which dominate it, so a plain mean would follow one batch
for ten measurements. The underlying price changes slowly. If no path casts an input of fprop, the price is the squared
error that recovery removes from the weight gradient, as a share of the squared gradient of all units. This number ranks
units but is not in nats.

Source: ours; docs/price.md derives it, names prior work and compares it with the true increase of the loss. Needs
price: casts and products of one token in `precision.price_tokens`, in the first `early` steps and then in one step in
`every`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.history import Ema
from gnmr.control.signals.signal import Context, Evidence, LevelSignal, seen
from gnmr.control.spec import Threshold
from gnmr.options import whole_number


class Price(LevelSignal):
    """The mean price against a level, `threshold` nats.

    Prices are measured in the first `early` steps, so that the first choices do not depend on chance, and then in one
    step in `every`. `decay` is the decay of the mean over measurements. A price that is not finite has risk Inf in its
    step. The mean omits it, and prices of 0 or less, which have no logarithm.
    """

    columns = ("price",)
    needs = ("price",)
    kept = ("history",)

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
        now = evidence["price"] if self.reads(step) else None
        if now is not None:
            self.history.update(now.log(), seen(evidence))
        price = torch.where(self.history.count > 0, self.history.mean.exp(), 0.0)
        if now is not None:
            price = torch.where(now.isfinite() | ~evidence["observed"], price, now)
        return self.verdict(evidence, step, price)
