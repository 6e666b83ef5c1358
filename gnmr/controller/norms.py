"""Gradient norms, all tensors in one batched call, on the device and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm of each parameter's gradient, (P,) float64; accumulated in float32 (float64 if
    there are float64 gradients); 0 where there is no gradient.

    NaN and Inf pass through; a gradient whose squares overflow float32 (norm above 1.8e19) has norm Inf. Does not wait
    for the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = parameters[0].device
    if not gradients:
        return torch.zeros(len(parameters), dtype=torch.float64, device=device)
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).double()
    if len(gradients) == len(parameters):
        return norms
    present = torch.tensor([p.grad is not None for p in parameters], device=device)
    return torch.zeros(len(parameters), dtype=torch.float64, device=device).masked_scatter_(present, norms)


class UnitNorms:
    """Norms of units that own several parameters each."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._parameters = [p for group in groups for p in group]
        device = self._parameters[0].device
        self._num_units = len(groups)
        self._unit_of = torch.tensor([u for u, group in enumerate(groups) for _ in group], device=device)
        self._all_observed = torch.ones(self._num_units, dtype=torch.bool, device=device)
        self._groups = groups

    def __call__(self) -> tuple[Tensor, Tensor]:
        """(norm (U,) float64, observed (U,) bool): a unit without any gradient is not observed."""
        norms = gradient_norms(self._parameters)
        if self._num_units < len(norms):
            squares = torch.zeros(self._num_units, dtype=torch.float64, device=norms.device)
            norms = squares.index_add_(0, self._unit_of, norms.square()).sqrt()
        if all(p.grad is not None for p in self._parameters):
            return norms, self._all_observed
        observed = [any(p.grad is not None for p in group) for group in self._groups]
        return norms, torch.tensor(observed, device=norms.device)
