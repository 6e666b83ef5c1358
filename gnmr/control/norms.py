"""Norms of gradients: all tensors in one batched call, on the device and without waiting for it.

The norm n[b,t] of a unit is taken over the gradients of its parameters together (section 2, theta_b). A loop that needs
the norm of all gradients too takes both from one `UnitNorms`.

    U units    G distinct groups of parameters: first those of the units, then each other parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gnmr.control.device import flags
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Slice, identity
from gnmr.errors import warn


def gradient_norms(parameters: Sequence[nn.Parameter | Slice]) -> Tensor:
    """Return the 2-norm of each parameter's gradient.

    Norms accumulate in float32, or in float64 if there are float64 gradients. NaN and Inf pass through. Squares outside
    of float32's range give a norm of Inf (elements above about 1e19) or 0 (below about 1e-23). Does not wait for the
    device.

    Args:
        parameters: P parameters or slices of them, on one device.

    Returns:
        (P,) float64 on their device; 0 without a gradient.
    """
    return _norms_of([p.grad for p in parameters], parameters[0].device)


def _norms_of(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    existing = [gradient for gradient in gradients if gradient is not None]
    if not existing:
        return torch.zeros(len(gradients), dtype=torch.float64, device=device)
    kinds = {*map(attrgetter("dtype", "is_sparse"), existing)}
    if any(sparse for _, sparse in kinds):  # an embedding's: only some rows are stored, the others are 0
        existing = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in existing]
    dtype = torch.float64 if any(dtype == torch.float64 for dtype, _ in kinds) else torch.float32
    norms = batched_norms(existing, 2.0, dtype)
    if len(existing) == len(gradients):
        return norms
    present = flags([gradient is not None for gradient in gradients], device)
    # The norms keep the order of the parameters; those without a gradient stay 0.
    return torch.zeros(len(gradients), dtype=torch.float64, device=device).masked_scatter_(present, norms)


def batched_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Tensor:
    """Return the norms of all tensors by one batched call.

    Args:
        tensors: P tensors of any shapes, on one device.
        order: 2 or Inf.
        dtype: dtype in which a norm is accumulated.

    Returns:
        (P,) float64 on their device.
    """
    # Private, because torch has no public batched norm: torch.nn.utils.get_total_norm calls the same kernel and returns
    # one number for all tensors. A public call that returns each norm would replace it.
    return torch.stack(torch._foreach_norm(list(tensors), order, dtype=dtype)).double()


class Distinct:
    """The distinct groups among groups of parameters, in order; units may share all (the GEMMs of an operator)."""

    def __init__(self, groups: Iterable[Sequence[nn.Parameter | Slice]]) -> None:
        index_of: dict[tuple[object, ...], int] = {}
        self.groups: list[Sequence[nn.Parameter | Slice]] = []
        self.first: list[int] = []
        """Index of the first occurrence of each distinct group."""
        indices: list[int] = []
        for group in groups:
            index = index_of.setdefault(tuple(map(identity, group)), len(index_of))
            if index == len(self.groups):
                self.groups.append(group)
                self.first.append(len(indices))
            indices.append(index)
        shared = len(index_of) < len(indices)
        # If no group is shared, `of_each` returns its argument and costs nothing.
        self._indices = torch.tensor(indices, device=self.groups[0][0].device) if shared else None

    def of_each(self, values: Tensor) -> Tensor:
        """Expand numbers of the distinct groups to all groups. Does not wait for the device.

        Args:
            values: (G, ...) on the device of the parameters.

        Returns:
            (number of groups, ...); `values` itself if no group is shared.
        """
        return values if self._indices is None else values[self._indices]


class GradientNorms(NamedTuple):
    """Norms of the gradients of one step, on the device."""

    groups: Tensor
    """(G,) float64: norm of each distinct group of parameters."""
    norm: Tensor
    """(U,) float64: norm of each unit."""
    observed: Tensor
    """(U,) bool: whether the unit has a gradient."""

    @property
    def total(self) -> Tensor:
        """The norm of all gradients together, () float64."""
        return self.groups.square().sum().sqrt()


class UnitNorms:
    """Norms of units with several parameters each, of one process or, with `ranks`, as parts of a sum.

    Args:
        units: the parameters of each unit.
        other_parameters: further parameters, each of which is a group of its own.
        ranks: the processes that may hold parts of the parameters.
    """

    def __init__(
        self,
        units: Iterable[Sequence[nn.Parameter | Slice]],
        other_parameters: Iterable[nn.Parameter | Slice] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks, self._units = ranks, Distinct(units)
        self.groups = [*self._units.groups, *((parameter,) for parameter in other_parameters)]
        """The G distinct groups of parameters."""
        self.first = self._units.first
        """Index of the first unit of each of the units' groups."""
        self._parameters = [parameter for group in self.groups for parameter in group]
        device = self._parameters[0].device
        # Row g holds the indices of group g's norms, padded with the index of a zero after the last one. Summing rows
        # has a fixed order, unlike adding by index on a GPU, and every rank must choose the same set.
        ends = list(accumulate(len(group) for group in self.groups))
        longest = max(len(group) for group in self.groups)
        rows = [
            [*range(end - len(group), end), *[ends[-1]] * (longest - len(group))]
            for group, end in zip(self.groups, ends, strict=True)
        ]
        self._rows = torch.tensor(rows, device=device)
        # In nearly every step all are observed; this answer needs no upload.
        self._all_observed = torch.ones(len(self.groups), dtype=torch.bool, device=device)
        self._warned = False
        sharded = ranks is not None and any(ranks.is_sharded(p) for p in self._parameters)
        self._local = ranks.local if ranks is not None and sharded else None
        self._masks: tuple[Tensor, Tensor] | None = None
        """(P,) bool each: parameters that this rank counts in a sum, and those that every rank holds completely."""

    def __call__(self) -> GradientNorms:
        """Return the norms of this process's gradients; a unit without any gradient is not observed."""
        gradients = self._gradients()
        # ||g_unit||^2 is the sum of its parameters' squares.
        norms = _norms_of(gradients, self._parameters[0].device)
        if len(self.groups) < len(gradients):
            norms = self._sums_of_groups(norms.square()).sqrt()
        return self._of_groups(norms, self._observed(gradients))

    def parts(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return this rank's terms of the sums that `of_sums` takes, and the square of the unsharded gradients.

        The terms are the squared norms of the groups and whether they had a gradient, (G,) float64 each. Only one rank
        counts a gradient that several hold.
        """
        ranks, gradients = self._ranks, self._gradients()
        assert ranks is not None, "one process has no parts"
        squares = _norms_of(gradients, self._parameters[0].device).square()
        # Which rank counts a parameter depends on its sharding alone, so it is found out once.
        if self._masks is None:
            counted = flags([ranks.counts(p) for p in self._parameters], squares.device)
            unsharded = flags([not ranks.is_sharded(p) for p in self._parameters], squares.device)
            self._masks = counted, unsharded
        counted, unsharded = self._masks
        plain = torch.where(unsharded, squares, 0.0).sum()
        # A gradient that every rank holds is counted by one of them.
        squares = torch.where(counted, squares, 0.0)
        if len(self.groups) < len(gradients):
            squares = self._sums_of_groups(squares)
        return {"squares": squares, "present": self._observed(gradients).double()}, plain

    def of_sums(self, squares: Tensor, present: Tensor) -> GradientNorms:
        """Return the norms of gradients of which ranks hold parts.

        Args:
            squares: (G,) float64, the squared norms of the groups, summed over ranks.
            present: (G,) float64, how many ranks have a gradient of the group.
        """
        return self._of_groups(squares.sqrt(), present > 0)

    def observed(self) -> Tensor:
        """Return which units have a gradient in this process now, (U,) bool."""
        return self._of_units(self._observed([p.grad for p in self._parameters]))

    def _of_groups(self, norms: Tensor, observed: Tensor) -> GradientNorms:
        return GradientNorms(norms, self._of_units(norms), self._of_units(observed))

    def _of_units(self, values: Tensor) -> Tensor:
        return self._units.of_each(values[: len(self._units.groups)])

    def _gradients(self) -> list[Tensor | None]:
        if self._local is None:
            return [p.grad for p in self._parameters]
        return [None if p.grad is None else self._local(p.grad) for p in self._parameters]

    def _sums_of_groups(self, squares: Tensor) -> Tensor:
        """Return the sums of the parameters' squares (P,) over the groups, (G,)."""
        return torch.cat([squares, squares.new_zeros(1)])[self._rows].sum(dim=1)

    def _observed(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return whether each group has one of the `gradients`, those of all parameters, (G,) bool."""
        if all(gradient is not None for gradient in gradients):
            return self._all_observed
        observed = [any(p.grad is not None for p in group) for group in self.groups]
        if not any(observed) and not self._warned:
            self._warned = True
            warn(
                "no unit has a gradient in this step: call step() after backward() and before zero_grad(), on the "
                "parameters that the model had when the controller was made; where they are sharded or exchanged "
                "afterwards, or the optimizer steps in backward, use observe='input_grad'"
            )
        return flags(observed, self._all_observed.device)
