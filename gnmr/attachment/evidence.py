"""What the paths measure for the signal: the errors of a probe, prices. Over several processes their sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnmr.control.evidence import PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.control.norms import to_device
from gnmr.control.ranks import Ranks
from gnmr.measure.errors import Probe, measure_errors
from gnmr.measure.price import PriceMeter, measure_prices
from gnmr.precision import ConvertedModel


class PathEvidence:
    """Probe and prices of a plan, of which there is what `needs` names."""

    def __init__(self, plan: ConvertedModel, needs: Sequence[str], probe_tokens: int, price_tokens: int) -> None:
        names = [name for name in needs if name in PATH_EVIDENCE]
        self.probe: Probe | None = measure_errors(plan, names, probe_tokens) if names else None
        prices = [name for name in needs if name in PRICE_EVIDENCE]
        self.prices: PriceMeter | None = measure_prices(plan, prices, price_tokens) if prices else None

    @property
    def meters(self) -> list[Probe | PriceMeter]:
        """Those that there are."""
        return [one for one in (self.probe, self.prices) if one is not None]

    @property
    def names(self) -> set[str]:
        """The evidence that they measure."""
        return {name for one in self.meters for name in one.names}

    def begin_step(self, step: int, read: bool) -> None:
        """Measured is only what is read."""
        for one in self.meters:
            one.enabled = read
        if self.prices is not None:
            self.prices.begin_step(step)

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """This process's part of the sums over all of them."""
        found = {}
        if self.probe is not None:
            found["probe"] = self.probe.parts(ranks.share)
        if self.prices is not None:
            rows = torch.tensor(self.prices.rows, dtype=torch.float64)
            found |= {"prices": self.prices.parts(ranks.share), "price_rows": to_device(rows, device)}
        return found

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The step's evidence by name, (U,) each; `sums` are those of `parts`. What comes next is measured anew."""
        found: dict[str, Tensor] = {}
        if self.probe is not None:
            # Squared gradients carry the loss scale twice.
            found |= {
                name: value / grad_scale**2 if name.startswith("gap") else value
                for name, value in self.probe.read(None if sums is None else sums["probe"]).items()
            }
        if self.prices is not None:
            found |= self.prices.read(grad_scale, None if sums is None else (sums["prices"], sums["price_rows"]))
        self.reset()
        return found

    def reset(self) -> None:
        """Forgets what was measured of the step."""
        for one in self.meters:
            one.reset()
