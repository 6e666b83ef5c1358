"""Gradient norms, all tensors in one batched call, on the device and without waiting for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from gnmr.control.ranks import Ranks
from gnmr.errors import users_level


def to_device(here: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it: a copy from pageable memory may."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def waits_for_nothing(x: Tensor) -> bool:
    """Whether its numbers may be looked at: on CPUs, where they are there already."""
    return x.device.type == "cpu"


def flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """`values` as a bool tensor on the device, without waiting for it."""
    return to_device(torch.tensor(values), device)


def gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm of each parameter's gradient, (P,) float64; accumulated in float32 (float64 if
    there are float64 gradients); 0 where there is no gradient.

    NaN and Inf pass through; squares that leave float32 show as norm Inf (elements above about 1e19) or 0 (below about
    1e-23). Does not wait for the device.
    """
    return _norms_of([p.grad for p in parameters], parameters[0].device)


def _norms_of(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """`gradient_norms` of these gradients."""
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        return torch.zeros(len(gradients), dtype=torch.float64, device=device)
    if any(gradient.is_sparse for gradient in there):  # an embedding's: the rows that are there, the others are 0
        there = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in there]
    wide = torch.float64 if torch.float64 in [gradient.dtype for gradient in there] else torch.float32
    norms = torch.stack(torch._foreach_norm(there, 2, dtype=wide)).double()
    if len(there) == len(gradients):
        return norms
    present = flags([gradient is not None for gradient in gradients], device)
    return torch.zeros(len(gradients), dtype=torch.float64, device=device).masked_scatter_(present, norms)


class Distinct:
    """The different ones of some groups of parameters, in order: what is made of each is made once.

    Units may share all their parameters (the GEMMs of an operator).
    """

    def __init__(self, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        known: dict[tuple[int, ...], int] = {}
        self.groups: list[Sequence[nn.Parameter]] = []
        self.first: list[int] = []
        """The place of each one's first occurrence."""
        places: list[int] = []
        for group in groups:
            if (place := known.setdefault(tuple(map(id, group)), len(known))) == len(self.groups):
                self.groups.append(group)
                self.first.append(len(places))
            places.append(place)
        shared = len(known) < len(places)
        self._places = torch.tensor(places, device=self.groups[0][0].device) if shared else None

    def of_each(self, values: Tensor) -> Tensor:
        """From numbers of the distinct groups (G,) to those of all groups. Does not wait for the device."""
        return values if self._places is None else values[self._places]


class UnitNorms:
    """Norms of units that own several parameters each; of one process, or with `ranks` a part of what several have."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._distinct = Distinct(groups)
        groups = self._distinct.groups
        self._parameters = [p for group in groups for p in group]
        device = self._parameters[0].device
        self._num_groups = len(groups)
        # Row u holds the places of unit u's norms, filled up with the place of a zero behind the last: summing rows has
        # one order, where adding by index has none on a GPU, and every rank must find the same set.
        ends = list(accumulate(len(group) for group in groups))
        widest = max(len(group) for group in groups)
        rows = [
            [*range(end - len(g), end), *[ends[-1]] * (widest - len(g))] for g, end in zip(groups, ends, strict=True)
        ]
        self._places = torch.tensor(rows, device=device)
        self._warned = False
        self._all_observed = torch.ones(self._num_groups, dtype=torch.bool, device=device)
        self._groups = groups
        sharded = ranks is not None and any(ranks.is_sharded(p) for p in self._parameters)
        self._local = ranks.local if ranks is not None and sharded else None
        self._counted: Tensor | None = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        """(norm (U,) float64, observed (U,) bool): a unit without any gradient is not observed."""
        gradients = self._gradients()
        norms = _norms_of(gradients, self._parameters[0].device)
        if self._num_groups < len(norms):
            norms = self._of_groups(norms.square()).sqrt()
        return self._distinct.of_each(norms), self._distinct.of_each(self._observed(gradients))

    def observed(self) -> Tensor:
        """(U,) bool: which units have a gradient in this process now."""
        return self._distinct.of_each(self._observed([p.grad for p in self._parameters]))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank adds to (square (U,), observed (U,), plain ()), float64: squared norms of the units, whether
        they had a gradient, and the square of the gradients that it has whole, which the first rank alone counts."""
        ranks, gradients = self._ranks, self._gradients()
        assert ranks is not None, "one process has no parts"
        squares = _norms_of(gradients, self._parameters[0].device).square()
        if self._counted is None:
            self._counted = flags([ranks.counts(p) for p in self._parameters], squares.device)
            self._whole = flags([not ranks.is_sharded(p) for p in self._parameters], squares.device)
        plain = torch.where(self._whole, squares, 0.0).sum()
        squares = torch.where(self._counted, squares, 0.0)
        if self._num_groups < len(squares):
            squares = self._of_groups(squares)
        return self._distinct.of_each(squares), self._distinct.of_each(self._observed(gradients)).double(), plain

    def _gradients(self) -> list[Tensor | None]:
        """This process's own."""
        if self._local is None:
            return [p.grad for p in self._parameters]
        return [None if p.grad is None else self._local(p.grad) for p in self._parameters]

    def _of_groups(self, squares: Tensor) -> Tensor:
        """Return the sums of the parameters' squares over the distinct groups."""
        return torch.cat([squares, squares.new_zeros(1)])[self._places].sum(dim=1)

    def _observed(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(U,) bool: whether each distinct group has one of the `gradients`, those of all parameters."""
        if all(gradient is not None for gradient in gradients):
            return self._all_observed
        observed = [any(p.grad is not None for p in group) for group in self._groups]
        if not any(observed) and not self._warned:
            self._warned = True
            warnings.warn(
                "no unit has a gradient in this step: call step() after backward() and before zero_grad(), on the "
                "parameters that the model had when the controller was made; where they are sharded or exchanged "
                "afterwards, or the optimizer steps in backward, use observe='input_grad'",
                stacklevel=users_level(),
            )
        return flags(observed, self._all_observed.device)
