"""The steps of a converted model: measurements for the signal, random draws and delayed scales, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.attachment.ranks import world
from gnmr.attachment.repeat import Start
from gnmr.control.evidence import GAPS, PATH_EVIDENCE, PRICE_EVIDENCE
from gnmr.control.ranks import Ranks
from gnmr.conversion import ConvertedModel
from gnmr.conversion.converting import tensor_parallel
from gnmr.measure.operand_errors import Probe, measure_errors
from gnmr.measure.price import PriceMeter, measure_prices


class PathSteps:
    """Begins and ends the steps of the paths; a `Source` (`gnmr.control.measurements`) of the evidence in `needs`."""

    def __init__(
        self,
        converted: ConvertedModel,
        model: nn.Module,
        ranks: Ranks | None,
        needs: Sequence[str],
        probe_tokens: int,
        price_tokens: int,
    ) -> None:
        self._converted, self._model, self._ranks = converted, model, ranks
        names = [name for name in needs if name in PATH_EVIDENCE]
        self._probe: Probe | None = measure_errors(converted, names, probe_tokens) if names else None
        prices = [name for name in needs if name in PRICE_EVIDENCE]
        self._prices: PriceMeter | None = measure_prices(converted, prices, price_tokens) if prices else None

    @property
    def meters(self) -> list[Probe | PriceMeter]:
        """The probe and the price meter, if present."""
        return [meter for meter in (self._probe, self._prices) if meter is not None]

    @property
    def names(self) -> set[str]:
        """The evidence that they measure."""
        return {name for meter in self.meters for name in meter.names}

    def share_meters(self) -> None:
        """Connect the meters to the converted model: a copy of the model alone has none."""
        self._converted.shared.probe, self._converted.shared.prices = self._probe, self._prices

    def begin(self, step: int, read: bool) -> None:
        """Begin a step; it is measured if it is `read`, and runs in 16 bits during a 16-bit warm-up."""
        self._scale_histories()
        self._share_draws()
        self._converted.begin_step(step)
        # Marked once the step has begun, so that a repetition draws the step's numbers.
        self.start = Start.of(self._converted, self._converted.operators[0].weight.device)
        """State before the first pass of the step."""
        for meter in self.meters:
            meter.enabled = read
        if self._prices is not None:
            self._prices.begin_step(step)

    def end(self) -> None:
        """End the passes of the step."""
        self._scale_histories()  # the process group may have been initialized since the step began
        amax = self._converted.shared.amax
        if self._ranks is not None and amax is not None and amax.history is not None:
            self._ranks.take_largest(amax.history[:, :, 0])  # delayed scales are those of the whole step
        self._converted.end_step()

    def never_ran(self, observed: np.ndarray) -> list[str]:
        """Return the operators of `observed` units that have a gradient and never ran."""
        return [
            operator.operator_name
            for unit, is_observed in zip(self._converted.units, observed, strict=True)
            for operator in (unit.operators if is_observed else ())
            # Graphs do not show whether it ran.
            if operator.read is None and operator.in_graphs is None and operator.weight.grad is not None
        ]

    def undo(self) -> None:
        """Forget the draws and records of the step's passes; `begin` comes next."""
        self._converted.begin_again(self.start.paths)

    def _scale_histories(self) -> None:
        """Set the factor by which gradients in this process are larger, for delayed scales."""
        if self._ranks is not None and self._converted.shared.amax is not None:
            self._converted.shared.amax.come(1 / self._ranks.share)

    def _share_draws(self) -> None:
        """Let rounding draw for this process's micro-batches; under tensor parallelism all ranks have the same."""
        rounding, ranks = self._converted.shared.rounding, self._ranks
        if rounding is None or ranks is None or ranks.size == 1 or rounding.ranks == world.size():
            return
        if tensor_parallel(self._model) is None:
            rounding.rank, rounding.ranks = world.rank(), world.size()

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this process's terms of the sums over all of them."""
        terms = {}
        if self._probe is not None:
            terms["probe"] = self._probe.parts(ranks.share)
        if self._prices is not None:
            terms |= {"prices": self._prices.parts(ranks.share), "price_terms": self._prices.terms.reshape(1)}
        return terms

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence by name, (U,) each, from the `sums` of `parts`; start new measurements."""
        evidence: dict[str, Tensor] = {}
        if self._probe is not None:
            errors = self._probe.read(None if sums is None else sums["probe"])
            # Squared gradients carry the loss scale twice.
            evidence |= {name: errors[name] / grad_scale**2 if name in GAPS else errors[name] for name in errors}
        if self._prices is not None:
            terms = None if sums is None else (sums["prices"], sums["price_terms"][0])
            evidence |= self._prices.read(grad_scale, terms)
        self.reset()
        return evidence

    def reset(self) -> None:
        """Forget the measurements of the step."""
        for meter in self.meters:
            meter.reset()
