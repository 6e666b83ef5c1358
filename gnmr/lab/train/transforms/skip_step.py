"""SkipStep (OLMo-core's skip-step optimizer; no paper of its own): leaves out updates that look like spikes.

    skip  where  loss - mean > sigmas std   or   ||g|| - mean > sigmas std

mean and std (n - 1 in the denominator) are those of the last `window` steps, the present one not among them; ||g|| is
the global norm. Nothing is skipped before `min_values` steps were seen, the present one included. Only large values
count, not small ones. Defaults: window 128, min_values 64, sigmas 6.

What enters the window: in the source every value does, also one that was skipped, and so it is here by default. It
costs sensitivity: four equal outliers among 128 widen the std so far that the fifth passes (outliers with a share p of
the window lie sqrt((1 - p) / p) std above the mean, less than 6 from p = 1/37 on). The other choice has a worse end: if
the level of the loss moves for good, the window never learns of it and no update is made any more.
`remember_skipped=false` takes that choice, for runs whose spikes come in rows. A value that is not finite never enters:
it would blind the window for `window` steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnmr.errors import positive, require, true_or_false, whole
from gnmr.lab.train.transforms.base import StepContext, Transform


class SkipStep(Transform):
    """Returns which steps to leave out, a bool scalar on the device (see above). Does not wait for it."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        window: int = 128,
        min_values: int = 64,
        sigmas: float = 6.0,
        remember_skipped: bool = True,
    ) -> None:
        super().__init__(named_parameters)
        whole(window=window, min_values=min_values)
        positive(sigmas=sigmas)
        require(
            3 <= min_values <= window + 1,
            "min_values",
            min_values,
            f"must be at least 3 (a spread needs two earlier values) and at most window + 1 = {window + 1}",
        )
        true_or_false(remember_skipped=remember_skipped)
        self.window, self.min_values, self.sigmas = window, min_values, sigmas
        self.remember_skipped = remember_skipped
        device = self.parameters[0].device
        # A ring: the value of the n-th step that entered (from 0) lies at place n mod window. Rows: loss, norm.
        self.state = {
            "values": torch.zeros(2, window, dtype=torch.float64, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        self._places = torch.arange(window, device=device)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter], context: StepContext) -> Tensor | None:
        values, count = self.state["values"], self.state["count"]
        now = torch.stack([context.loss.detach().double(), context.grad_norm.double()])
        filled = self._places < count
        n = filled.sum()
        mean = values.sum(dim=1) / n  # places not filled hold zeros
        variance = torch.where(filled, (values - mean[:, None]).square(), 0.0).sum(dim=1) / (n - 1)
        spike = (now - mean > self.sigmas * variance.sqrt()).any()
        skip = spike & (count + 1 >= self.min_values) & ~context.nonfinite

        enters = ~context.nonfinite if self.remember_skipped else ~(context.nonfinite | skip)
        ring = torch.where(self._places == count % self.window, now[:, None], values)
        self.remember(enters, values=ring, count=count + 1)
        return skip
