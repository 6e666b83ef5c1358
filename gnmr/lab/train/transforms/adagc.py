"""AdaGC (arXiv 2502.11034): clips each tensor against a moving average of its own clipped norms.

    steps 1 .. warmup:  h = min(1, warmup_norm / ||g||), ||g|| over all parameters (one h for all tensors)
                        gamma = the smallest ||h g_i|| seen so far
    after:              h_i = min(1, ratio gamma / ||g_i||);  gamma <- decay gamma + (1 - decay) ||h_i g_i||
    both:               g_i <- h_i g_i

Defaults: ratio 1.05, decay 0.98, warmup 100, warmup_norm 1.0.

**Choice 60**: a tensor with no gradient, or an exactly zero one, leaves its gamma (a zero in the warm-up would freeze
the tensor for good); a tensor that is first seen after the warm-up is not clipped then and starts with its own norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.errors import fraction, positive, whole
from gnmr.lab.train.transforms.base import StepContext, Transform, scale_gradients, tensor_norms


class AdaGC(Transform):
    """Clips each tensor against its own past (see above). State: (tensors,) float64. Does not wait."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        ratio: float = 1.05,
        decay: float = 0.98,
        warmup: int = 100,
        warmup_norm: float = 1.0,
    ) -> None:
        super().__init__(named_parameters)
        positive(ratio=ratio, warmup_norm=warmup_norm)
        fraction(decay=decay)
        whole(warmup=warmup)
        self.ratio, self.decay, self.warmup, self.warmup_norm = ratio, decay, warmup, warmup_norm
        first = self.parameters[0]
        # Inf: not seen yet.
        self.state = {"gamma": torch.full((len(self.parameters),), torch.inf, dtype=torch.float64, device=first.device)}

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], context: StepContext) -> Tensor | None:
        parameters = self.own(parameters)
        norms, gamma = tensor_norms(parameters), self.state["gamma"]
        if context.step <= self.warmup:
            factors = (self.warmup_norm / context.grad_norm).clamp(max=1.0).expand_as(norms)
            new = torch.minimum(gamma, factors * norms)
        else:
            factors = torch.where(norms > 0, self.ratio * gamma / norms, 1.0).clamp(max=1.0)
            clipped = factors * norms
            new = torch.where(gamma.isinf(), clipped, self.decay * gamma + (1 - self.decay) * clipped)
        scale_gradients(parameters, factors)
        self.remember((norms > 0) & ~context.nonfinite, gamma=new)
        return None
