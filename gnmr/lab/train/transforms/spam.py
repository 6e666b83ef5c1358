"""SPAM, spike-aware Adam with momentum reset (arXiv 2501.06842), around torch's AdamW.

    g <- sign(g) sqrt(threshold v)  where g^2 > threshold v; per coordinate, v: Adam's second moment before the step
    every reset_every steps         m = v = 0, before the step's gradient enters
    k < warmup steps after that     rate x 1 - 0.99 (1 + cos(pi k / (warmup + 1))) / 2, which is 0.01 at k = 0

Defaults: threshold 5000, reset_every 500, warmup 150, grace 20: steps with `step mod reset_every < grace` are not
clipped, because v has to form first (so the run's first 19 steps and 20 after each reset).

v is the raw second moment, without bias correction, as in the public code.

**Choice 61**: a coordinate with v = 0 has no history and is not clipped. The public code sets its gradient to 0, and so
v stays 0 until the next reset; with the authors' large batches no coordinate is left after the grace, with small ones
the embeddings of all tokens that did not occur in it would stand still. A reset also sets Adam's own step count to 0,
so that its bias correction fits the new moments; the public code lets it run on, which makes the first update after a
reset (1 - 0.9) / sqrt(1 - 0.999) = 3.2 times the usual one and leaves it to the warm-up to hide that. A reset falls due
by the step's number alone, also in a skipped step. The sparse momentum of the memory-saving variant is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import local
from gnmr.errors import positive, require, whole
from gnmr.lab.train.transforms.base import StepContext, Transform


class SPAM(Transform):
    """ValueError at the first call unless the optimizer is torch's Adam or AdamW. No state of its own."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        threshold: float = 5000.0,
        reset_every: int = 500,
        warmup: int = 150,
        grace: int = 20,
    ) -> None:
        super().__init__(named_parameters)
        positive(threshold=threshold)
        whole(reset_every=reset_every, warmup=warmup, grace=grace)
        require(grace < reset_every, "grace", grace, f"must be less than reset_every={reset_every}")
        self.threshold, self.reset_every, self.warmup, self.grace = threshold, reset_every, warmup, grace

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], context: StepContext) -> Tensor | None:
        reset_moments(context, self.reset_every)
        if context.step % self.reset_every >= self.grace:
            for p in self.own(parameters):
                state = context.optimizer.state.get(p, {})
                if p.grad is not None and "exp_avg_sq" in state:
                    v, gradient = local(state["exp_avg_sq"]).float(), local(p.grad)
                    bound = torch.where(v > 0, self.threshold * v, torch.inf).sqrt_()
                    gradient.copy_(gradient.float().clamp_(-bound, bound))
        return None

    def lr_factor(self, step: int) -> float:
        """What the rate is multiplied by in step `step` (from 1): the warm-up after each reset."""
        since = step % self.reset_every
        if step < self.reset_every or since >= self.warmup:
            return 1.0
        return 1 - 0.99 * (1 + math.cos(math.pi * since / (self.warmup + 1))) / 2


def reset_moments(context: StepContext, every: int) -> None:
    """Zeroes moments and step count of torch's Adam or AdamW in every `every`-th step; ValueError for others."""
    if not isinstance(context.optimizer, torch.optim.Adam):
        kind = type(context.optimizer).__name__
        raise ValueError(f"spam and stable_spam reset Adam's moments: they need optim.name=adamw, not {kind}")
    if context.step % every == 0:
        states = context.optimizer.state.values()
        tensors = [local(t) for state in states for t in state.values() if isinstance(t, Tensor)]
        if tensors:
            torch._foreach_zero_(tensors)
