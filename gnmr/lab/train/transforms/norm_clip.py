"""Clipping by the global norm (Pascanu et al., arXiv 1211.5063), the default of most language model recipes.

    g <- g min(1, max_norm / (||g|| + 1e-6))        ||g|| over all parameters

max_norm = 1.0 is what the neighbours compare with. The 1e-6 is PyTorch's. No state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.errors import positive
from gnmr.lab.train.transforms.base import StepContext, Transform, scale_gradients


class NormClip(Transform):
    """Clips the norm over all parameters at `max_norm`. No state, no waiting for the device."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, max_norm: float = 1.0) -> None:
        super().__init__(named_parameters)
        positive(max_norm=max_norm)
        self.max_norm = max_norm

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], context: StepContext) -> Tensor | None:
        scale_gradients(self.own(parameters), (self.max_norm / (context.grad_norm + 1e-6)).clamp(max=1.0))
        return None
