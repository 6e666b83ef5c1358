"""AGC, adaptive gradient clipping (Brock et al., arXiv 2102.06171): bounds each unit's gradient by its weights.

    G_u <- G_u min(1, clip max(||W_u||, floor) / max(||G_u||, 1e-6))

A unit u is a row of a matrix (one output of a linear, one token of an embedding); a parameter with one dimension is
one unit. Defaults: clip 0.01, floor 1e-3 (so that weights at zero can leave it). No state.

As in the paper, the final linear layer (a parameter below a module `lm_head`) is not clipped. A head that is tied to
the embedding is clipped as an embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import is_sharded, local
from gnmr.errors import positive
from gnmr.lab.train.transforms.transform import StepContext, Transform, norms_of, scale_gradient


class AGC(Transform):
    """Bounds the gradient of each row by the norm of its weights (see above). No state, no waiting for the device."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        clip: float = 0.01,
        floor: float = 1e-3,
    ) -> None:
        named = list(named_parameters)
        super().__init__(named)
        positive(clip=clip, floor=floor)
        self.clip, self.floor = clip, floor
        self._free = {id(p) for name, p in named if "lm_head" in name.split(".")}

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        clipped = [p for p in self.parameters if p.grad is not None and id(p) not in self._free]
        weights, gradients = _unit_norms(clipped, clipped), _unit_norms([p.grad for p in clipped], clipped)
        for p, of_weight, of_gradient in zip(clipped, weights, gradients, strict=True):
            assert p.grad is not None
            bound = self.clip * of_weight.clamp(min=self.floor)
            scale_gradient(p.grad, (bound / of_gradient.clamp(min=1e-6)).clamp(max=1.0))
        return None


def _unit_norms(tensors: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Norm of each row of these, keeping dimensions; of the whole where there is one dimension. float32.

    FSDP2 shards by rows, so each rank has those of its own; of one dimension they are summed over ranks.
    """
    of_whole = {}
    if vectors := [i for i, p in enumerate(parameters) if p.ndim == 1 and is_sharded(p)]:
        norms = norms_of([tensors[i] for i in vectors], [parameters[i] for i in vectors])
        of_whole = dict(zip(vectors, norms.float().unbind(), strict=True))
    found = []
    for i, tensor in enumerate(tensors):
        assert tensor is not None
        dims = tuple(range(1, tensor.ndim)) or None
        rows = torch.linalg.vector_norm(local(tensor), dim=dims, keepdim=True, dtype=torch.float32)
        found.append(of_whole.get(i, rows))
    return found
