"""Stable-SPAM (arXiv 2502.17055v1): adaptive clipping of elements, then a stable norm, then momentum resets.

AdaClip, for each tensor:

    T <- theta T + (1 - theta) max|g|;   T^ = T / (1 - theta^t)
    elements with |g| > T^ become g T^ / max|g|

AdaGN: `GradientStabilizer` on the result, with its own rates. Every `reset_every` steps Adam's moments and its
step count are zeroed, also in a skipped step, so that the bias correction fits the new moments.

Defaults of the public code: gamma1 0.7, gamma2 0.9 (the choice for 4 bits; its BF16 runs take 0.85 and 0.99999),
theta 0.999, reset_every 1000 (its BF16 runs: 500), eps 1e-8. Its optional cosine on gamma1 and beta1 is off by default
and left out.

t counts the gradients of a tensor and is never reset. The public code divides by Adam's step count,
which a reset sets back to 1: T^ comes out several hundred times too large then and nothing is clipped. Tensors without
a gradient or with a zero one are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import local
from gnmr.errors import fraction, whole
from gnmr.lab.train.transforms.gradient_stabilizer import GradientStabilizer
from gnmr.lab.train.transforms.transform import StepContext, tensor_norms


class StableSPAM(GradientStabilizer):
    """ValueError at the first call unless the optimizer is torch's Adam or AdamW."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        theta: float = 0.999,
        reset_every: int = 1000,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(named_parameters, gamma1=gamma1, gamma2=gamma2, eps=eps)
        fraction(theta=theta)
        whole(reset_every=reset_every)
        self.theta, self.reset_every = theta, reset_every
        self.state["largest"] = torch.zeros_like(self.state["mean"])

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        self._reset_moments(context)
        top = tensor_norms(self.parameters, torch.inf)
        largest = self.theta * self.state["largest"] + (1 - self.theta) * top
        bounds = largest / (1 - self.theta ** (self.state["count"] + 1))
        for p, bound, factor in zip(self.parameters, bounds.float(), (bounds / top).float(), strict=True):
            if p.grad is not None:
                own = local(p.grad)
                wide = own.float()
                own.copy_(torch.where(wide.abs() > bound, wide * factor, wide))
        self.remember((top > 0) & ~context.nonfinite, largest=largest)
        return super().__call__(context)

    def _reset_moments(self, context: StepContext) -> None:
        if not isinstance(context.optimizer, torch.optim.Adam):
            kind = type(context.optimizer).__name__
            raise ValueError(f"stable_spam resets Adam's moments: it needs optim.name=adamw, not {kind}")
        if context.step % self.reset_every == 0:
            states = context.optimizer.state.values()
            tensors = [local(t) for state in states for t in state.values() if isinstance(t, Tensor)]
            if tensors:
                torch._foreach_zero_(tensors)
