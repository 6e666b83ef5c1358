"""GradientStabilizer (arXiv 2502.17055v4): keeps a gradient's direction, replaces its norm by a stable one.

For each tensor, with R = ||g||:

    m <- gamma1 m + (1 - gamma1) R;     v <- gamma2 v + (1 - gamma2) R^2
    m^ = m / (1 - gamma1^t);            v^ = v / (1 - gamma2^t)
    g <- m^ / (sqrt(v^) + eps) * g / R

So the norm handed on is about 1 while R is steady, whatever R is; the optimizer behind has to be one that does not care
for the gradient's scale. Defaults: gamma1 0.6, gamma2 0.999 (paper); bias correction and eps 1e-12 (public code).
Signals must read the norms before this transform: behind it they hardly move.

A tensor with no gradient or an exactly zero one is passed over, as in the public code: t counts the gradients that
entered m and v.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnmr.errors import fraction, positive
from gnmr.lab.train.transforms.transform import StepContext, Transform, scale_gradients, tensor_norms


class GradientStabilizer(Transform):
    """Gives each tensor's gradient a steady norm (see above). Its state is three (tensors,) float64; no waiting."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        gamma1: float = 0.6,
        gamma2: float = 0.999,
        eps: float = 1e-12,
    ) -> None:
        super().__init__(named_parameters)
        fraction(gamma1=gamma1, gamma2=gamma2)
        positive(eps=eps)
        self.gamma1, self.gamma2, self.eps = gamma1, gamma2, eps
        zeros = torch.zeros(len(self.parameters), dtype=torch.float64, device=self.parameters[0].device)
        self.state = {"mean": zeros, "square": zeros, "count": zeros}

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        norms = tensor_norms(self.parameters)
        seen = (norms > 0) & ~context.nonfinite
        count = self.state["count"] + 1
        mean = self.gamma1 * self.state["mean"] + (1 - self.gamma1) * norms
        square = self.gamma2 * self.state["square"] + (1 - self.gamma2) * norms.square()
        target = mean / (1 - self.gamma1**count) / ((square / (1 - self.gamma2**count)).sqrt() + self.eps)
        scale_gradients(self.parameters, torch.where(seen, target / norms, 1.0))
        self.remember(seen, mean=mean, square=square, count=count)
        return None
