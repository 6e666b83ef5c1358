"""ZClip (arXiv 2504.02507): clips the global norm where it is an outlier of its own recent history.

The first `warmup` norms n give the mean mu and the (population) standard deviation sigma. From then on

    z = (n - mu) / (sigma + eps)
    n' = mu + z_threshold^2 sigma / z  where z > z_threshold, else n        the further out, the closer to mu
    g <- g n' / (n + 1e-6)             where z > z_threshold
    mu <- decay mu + (1 - decay) n';   sigma^2 <- decay sigma^2 + (1 - decay) (n' - mu)^2, with the new mu

Defaults of the public code: z_threshold 2.5, decay 0.97, warmup 25, eps 1e-6, the reciprocal clipping above ("adaptive
scaling") of its three. That code also clips at 1.0 unless told otherwise; that is not part of the method and left out.

**Choice 63**: the warm-up counts finite norms, not steps; its mean and variance are kept by recursion, which is the
same number without a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.errors import fraction, positive, whole
from gnmr.lab.train.transforms.base import StepContext, Transform, scale_gradients


class ZClip(Transform):
    """Clips outliers of the norm over all parameters (see above). Its state is three float64 scalars; no waiting."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        z_threshold: float = 2.5,
        decay: float = 0.97,
        warmup: int = 25,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(named_parameters)
        positive(z_threshold=z_threshold, eps=eps)
        fraction(decay=decay)
        whole(warmup=warmup)
        self.z_threshold, self.decay, self.warmup, self.eps = z_threshold, decay, warmup, eps
        zero = torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)
        self.state = {"mean": zero, "variance": zero, "count": zero}

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], context: StepContext) -> Tensor | None:
        norm, mean, variance = context.grad_norm, self.state["mean"], self.state["variance"]
        warming = self.state["count"] < self.warmup
        z = (norm - mean) / (variance.sqrt() + self.eps)
        clip = (z > self.z_threshold) & ~warming
        bound = mean + self.z_threshold**2 * variance.sqrt() / z
        scale_gradients(self.own(parameters), torch.where(clip, bound / (norm + 1e-6), 1.0))

        count = self.state["count"] + 1
        weight = torch.where(warming, 1 / count, 1 - self.decay)
        seen = torch.where(clip, bound, norm)
        new_mean = mean + weight * (seen - mean)
        # While all norms weigh the same, the exact recursion has one deviation from each of the two means.
        deviation = torch.where(warming, seen - mean, seen - new_mean)
        new_variance = variance + weight * (deviation * (seen - new_mean) - variance)
        self.remember(~context.nonfinite, mean=new_mean, variance=new_variance, count=count)
        return None
