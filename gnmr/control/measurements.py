"""The norms of a step and its other evidence, still on the device: nothing here waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.control.device import to_device
from gnmr.control.norms import Distinct, UnitNorms
from gnmr.control.output_norms import OutputGradients
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Slice, Unit

Norms = tuple[Tensor, Tensor]
"""(norm (U,) float64, observed (U,) bool) of the units."""


class Source(Protocol):
    """Measures evidence of a step that does not come from the units' parameters."""

    @property
    def names(self) -> Collection[str]:
        """Names of the evidence."""

    def parts(self, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return this rank's terms of sums over ranks."""

    def read(self, grad_scale: float, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the step's evidence, (U,) each, from the sums of `parts` over several ranks; start a new step."""

    def reset(self) -> None:
        """Forget the measurements of the step."""


class Measurements:
    """Norms and evidence of the units, step by step.

    Args:
        units: the units that are measured.
        needs: names of the evidence that every step has to bring.
        norms: see `Controller`.
        ranks: see `Controller`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        needs: Collection[str],
        norms: Callable[[], Norms] | None,
        ranks: Ranks | None,
    ) -> None:
        self.ranks, self.norms, self.sources = ranks, norms, list[Source]()
        self._needs, self._device = needs, units[0].parameters[0].device
        self.check_ranks(units)
        self.exchange(units)

    @property
    def together(self) -> bool:
        """True if several processes train this model."""
        return self.ranks is not None and self.ranks.size > 1

    @property
    def names(self) -> set[str]:
        """The evidence that `read` returns."""
        names = {"norm", "observed"} | ({"micro_square", "weight_std"} & set(self._needs))
        return names.union(*(source.names for source in self.sources))

    def exchange(self, units: Sequence[Unit]) -> None:
        """Measure other parameters of the same units.

        Raises:
            ValueError: if they are sharded and something is read of them.
        """
        self._units = units
        self.check_ranks(units if self.norms is None or "weight_std" in self._needs else ())
        # Made on first use: a loop that computes the norms itself has no need of them.
        self._unit_norms: UnitNorms | None = None
        self.micro = MicroNorms(units) if "micro_square" in self._needs else None
        # GEMMs of one operator are units with the same parameters, and the norm of everything counts these once.
        first = Distinct(unit.parameters for unit in units).first if self.norms is None else range(len(units))
        if isinstance(self.norms, OutputGradients):
            first = self.norms.first
        self.own_norm: np.ndarray | None = None
        """(U,) bool: False for a unit whose norm is also an earlier unit's; None: all True."""
        if len(first) < len(units):
            self.own_norm = np.zeros(len(units), dtype=bool)
            self.own_norm[first] = True

    def check_ranks(self, units: Sequence[Unit] = ()) -> None:
        """Raise ValueError if ranks could choose different units, although each decides from equal sums."""
        ranks = self.ranks
        sharded = [unit.name for unit in units if any(hasattr(p, "device_mesh") for p in unit.parameters)]
        if sharded and ranks is None:
            raise ValueError(
                f"{sharded[0]} has sharded parameters (DTensor), of whose gradients each rank has a part: give the "
                "controller ranks=gnmr.attachment.ranks.reduce.DistributedRanks(), as gnmr.attach does"
            )
        if ranks is None or ranks.size == 1:
            return
        if not ranks.tells_own and "micro_square" in self._needs:
            raise ValueError(
                f"micro_square: needs each micro-batch's own gradient, and {ranks.size} processes have the mean of "
                "theirs alone; use a signal of gradient norms, of the paths' errors or of their prices "
                "(docs/distributed.md)"
            )
        if not isinstance(self.norms, OutputGradients | None):
            raise ValueError(
                f"norms: of one's own are those of one process, here are {ranks.size}; reduce them, and hand "
                "them to observe()"
            )

    def unit_norms(self) -> UnitNorms:
        """Return the norms of the units' parameters, for a loop that does not compute them itself."""
        if self._unit_norms is None:
            self._unit_norms = UnitNorms([unit.parameters for unit in self._units], ranks=self.ranks)
        return self._unit_norms

    def parts(self, plain: Tensor | None, agreement: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return this rank's terms of sums over ranks; see `Controller.parts` and `Ranks.agreement`."""
        ranks = self.ranks
        assert ranks is not None, "one process has no parts"
        self.check_ranks()  # earlier there may have been fewer ranks
        terms: dict[str, Tensor] = {}
        if isinstance(self.norms, OutputGradients):
            square, observed = self.norms.parts()
            # The step's loss is the sum of share * (loss of a rank), so that squares carry the share twice.
            terms = {"output_square": square * ranks.share**2, "output_observed": observed}
        elif plain is None:
            terms, plain = self.unit_norms().parts()
        if plain is None:
            # Nothing unsharded was measured that ranks could compare.
            plain = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.micro is not None:
            terms["micro"] = self.micro.parts()
        for source in self.sources:
            terms |= source.parts(ranks, self._device)
        return terms | {"agreement": agreement(plain)}

    def read(
        self,
        grad_scale: float,
        loss_scale: float | None,
        norms: Norms | None,
        sums: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Return the step's evidence; see `Controller.measure`. `sums`: of `parts` over ranks, if there are several."""
        # What was measured during the passes carries the loss scale of the passes, gradients the one they still have.
        passes_scale = grad_scale if loss_scale is None else loss_scale
        norms_scale = passes_scale if isinstance(self.norms, OutputGradients) else grad_scale
        # The norms come from the loop, from sums over ranks, or are measured here.
        if self.norms is not None:
            if sums is not None and "output_square" in sums:
                norm, observed = sums["output_square"].sqrt(), sums["output_observed"] > 0
            else:
                with torch.no_grad():
                    norm, observed = self.norms()
        elif norms is not None:
            norm, observed = norms
        elif sums is not None:
            _, norm, observed = self.unit_norms().of_sums(sums["squares"], sums["present"])
        else:
            with torch.no_grad():
                _, norm, observed = self.unit_norms()()
        evidence = {"norm": norm.detach() / norms_scale, "observed": observed}  # a new tensor: the loop uses the other
        # A square carries the scale twice.
        if sums is not None and "micro" in sums:
            # The last number counts the micro-batches of all ranks.
            evidence["micro_square"] = sums["micro"][:-1] / sums["micro"][-1] / passes_scale**2
        elif self.micro is not None:
            evidence["micro_square"] = self.micro.take() / passes_scale**2
        if "weight_std" in self._needs:
            evidence["weight_std"] = weight_std(self._units, self.ranks)
        for source in self.sources:
            evidence |= source.read(passes_scale, sums)
        return evidence

    def reset(self) -> None:
        """Forget the backward passes since the last `read`."""
        for measurement in (self.micro, self.norms, *self.sources):
            if callable(reset := getattr(measurement, "reset", None)):
                reset()

    def close(self) -> None:
        """Remove the hooks of `OutputGradients` from the model."""
        if isinstance(self.norms, OutputGradients):
            self.norms.close()

    def check_call(self, grad_scale: float, loss_scale: float | None) -> None:
        """Raise ValueError if a scale is not valid, or if the model has moved to another device."""
        for name, scale in (("grad_scale", grad_scale), ("loss_scale", 1.0 if loss_scale is None else loss_scale)):
            number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
            if not (number and 0 < scale < math.inf):
                raise ValueError(
                    f"{name}={scale!r}: must be a positive number; of a GradScaler it is scaler.get_scale()"
                )
        if (device := self._units[0].parameters[0].device) != self._device:
            raise ValueError(
                f"the model is on {device} by now, its controller on {self._device}: move it before attaching"
            )


class MicroNorms:
    """Squared gradient norms of single micro-batches, from gradients that accumulate. Keeps one copy of these."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._distinct = Distinct(unit.parameters for unit in units)
        self.reset()

    def reset(self) -> None:
        """Forget the micro-batches since the last `take`."""
        self._before: list[list[Tensor | None]] = [[None] * len(group) for group in self._distinct.groups]
        """Gradients as they were before the newest micro-batch."""
        self._sum: Tensor | None = None
        self._weighted = False
        self._num_batches = self._num_empty = 0

    @torch.no_grad()
    def add(self, fraction: float | None = None, gradients: Mapping[int, Tensor] | None = None) -> None:
        """Record a micro-batch; call it after each micro-batch's backward pass.

        Args:
            fraction: the part of the step's mean loss that the micro-batch contributes; None: equal parts. With 0 (all
                of its labels are masked) it is in no mean.
            gradients: this process's own gradients by parameter id, if the parameters already hold the mean over
                processes.

        Raises:
            ValueError: if some micro-batches of a step have a fraction and others have none.
        """
        if self._num_batches and self._weighted is not (fraction is not None):
            raise ValueError("micro_step: give all micro-batches of a step their fraction of the loss, or none of them")
        # A micro-batch without labels has no gradient of its own and is in no mean.
        self._weighted = fraction is not None
        self._num_batches += 1
        if fraction == 0:
            self._num_empty += 1
            return
        squares = []
        for group, before in zip(self._distinct.groups, self._before, strict=True):
            square = torch.zeros((), dtype=torch.float64, device=group[0].device)
            for i, parameter in enumerate(group):
                gradient = parameter.grad if gradients is None else _gradient_in(gradients, parameter)
                if gradient is None:
                    continue
                # Gradients accumulate, so this micro-batch's is the difference from the one before.
                earlier = before[i]
                increment = gradient.float() if earlier is None else gradient.float() - earlier.float()
                square = square + increment.square().sum(dtype=torch.float64)
                # The next backward pass adds to this gradient in place.
                before[i] = gradient.clone()
            # The gradient is `fraction` times the micro-batch's own.
            squares.append(square if fraction is None else square / fraction**2)
        stacked = torch.stack(squares)
        self._sum = stacked if self._sum is None else self._sum + stacked

    def parts(self) -> Tensor:
        """Return (U + 1,): this process's terms of the sum, and its number of micro-batches; start a new step.

        All micro-batches must have been added with their `fraction`.
        """
        total, count = self._sum, float(self._num_batches - self._num_empty)
        assert total is not None and self._weighted
        self.reset()
        return torch.cat([self._distinct.of_each(total), torch.full_like(total[:1], count)])

    def take(self) -> Tensor:
        """Return the step's mean square (U,) float64 and start a new step.

        It is 0 if fewer than two micro-batches contribute to the loss, because nothing can be compared then.

        Raises:
            ValueError: after fewer than two micro-batches.
        """
        total, weighted, num_batches = self._sum, self._weighted, self._num_batches
        count = num_batches - self._num_empty
        self.reset()
        if num_batches < 2:
            raise ValueError(
                f"micro_square needs two or more micro-batches a step, {num_batches} came: call micro_step() after "
                "each backward"
            )
        if count < 2 or total is None:
            groups = self._distinct.groups
            return self._distinct.of_each(torch.zeros(len(groups), dtype=torch.float64, device=groups[0][0].device))
        # Each backward pass ran on a part of the mean loss, so its gradient is 1/count of the micro-batch's own.
        return self._distinct.of_each(total / count if weighted else total * count)


def _gradient_in(gradients: Mapping[int, Tensor], parameter: nn.Parameter | Slice) -> Tensor | None:
    if not isinstance(parameter, Slice):
        return gradients.get(id(parameter))
    gradient = gradients.get(id(parameter.parameter))
    return None if gradient is None else parameter.of(gradient)


def of_shards(groups: Sequence[Sequence[Tensor | Slice]], ranks: Ranks | None) -> Ranks | None:
    """Return `ranks` if they hold parts of these parameters, which sums must then be reduced over.

    Returns: None if each parameter of the groups is complete here, or `ranks` is None.
    """
    return ranks if ranks is not None and any(ranks.is_sharded(p) for group in groups for p in group) else None


def part_of(x: Tensor, of: Tensor | Slice, ranks: Ranks | None) -> Tensor:
    """Return this rank's term in a sum over the elements of a tensor.

    Args:
        x: a gradient or weight in the shape of the parameter `of`.
        of: decides which rank counts the elements.
        ranks: the result of `of_shards`; None: x is complete here.

    Returns:
        The part of x that this rank holds; empty if another rank adds the same.
    """
    if ranks is None:
        return x
    local = ranks.local(x)
    return local if ranks.counts(of) else local.flatten()[:0]


def summed(values: Tensor, ranks: Ranks | None) -> Tensor:
    """Return the sum of `values` over ranks: one collective.

    Returns: float64 in the shape of `values`; `values` itself if `ranks` is None.
    """
    return values if ranks is None else ranks.sum({"values": values})["values"]


@torch.no_grad()
def weight_std(units: Sequence[Unit], ranks: Ranks | None = None) -> Tensor:
    """Return the standard deviation (U,) of each unit's weights: its parameters of at least two dimensions, else all.

    If `ranks` hold parts of the weights, sums and squares are reduced over ranks in a separate collective.
    """
    distinct = Distinct(unit.parameters for unit in units)
    weights = [[p for p in group if p.ndim >= 2] or list(group) for group in distinct.groups]
    if (holders := of_shards(weights, ranks)) is None:
        elements = [torch.cat([p.detach().float().flatten() for p in group]) for group in weights]
        return distinct.of_each(torch.stack([values.std(correction=0).double() for values in elements]))
    # Var = E[w^2] - E[w]^2, of sums that ranks can add
    sums = []
    for group in weights:
        local = torch.cat([part_of(p.detach(), p, holders).double().flatten() for p in group])
        sums.append(torch.stack([local.sum(), local.square().sum()]))
    # The number of elements is known without communication: a DTensor tells its global size.
    numbers = torch.tensor([sum(p.numel() for p in group) for group in weights], dtype=torch.float64, device="cpu")
    mean, square = (summed(torch.stack(sums), holders) / to_device(numbers, sums[0].device)[:, None]).unbind(1)
    # Rounding may make a variance near 0 negative.
    return distinct.of_each((square - mean.square()).clamp(min=0).sqrt())
