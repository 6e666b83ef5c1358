"""SkipStep (OLMo-core's skip-step optimizer; no paper of its own): leaves out updates that look like spikes.

    skip  where  loss - mean > sigmas std   or   ||g|| - mean > sigmas std

mean and std (n - 1 in the denominator) are those of the last `window` steps, the present one not among them; ||g|| is
the global norm. Nothing is skipped before `min_values` steps were seen, the present one included. Only large values
count, not small ones. Defaults: window 128, min_values 64, sigmas 6.

As in the source, a value that was skipped enters the window too; otherwise no update would be made any more once the
level of the loss moves for good. A value that is not finite never enters: it would blind the window for `window` steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnmr.errors import positive, require, whole
from gnmr.lab.train.transforms.transform import StepContext, Transform


class SkipStep(Transform):
    """Returns which steps to leave out, a bool scalar on the device (see above). Does not wait for it."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        window: int = 128,
        min_values: int = 64,
        sigmas: float = 6.0,
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
        self.window, self.min_values, self.sigmas = window, min_values, sigmas
        device = self.parameters[0].device
        # A ring: the value of the n-th step that entered (from 0) lies at place n mod window. Rows: loss, norm.
        self.state = {
            "values": torch.zeros(2, window, dtype=torch.float64, device=device),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        self._places = torch.arange(window, device=device)

    @torch.no_grad()
    def __call__(self, context: StepContext) -> Tensor | None:
        values, count = self.state["values"], self.state["count"]
        now = torch.stack([context.loss.detach().double(), context.grad_norm.double()])
        filled = self._places < count
        n = filled.sum()
        mean = values.sum(dim=1) / n  # places not filled hold zeros
        variance = torch.where(filled, (values - mean[:, None]).square(), 0.0).sum(dim=1) / (n - 1)
        spike = (now - mean > self.sigmas * variance.sqrt()).any()
        skip = spike & (count + 1 >= self.min_values) & ~context.nonfinite
        ring = torch.where(self._places == count % self.window, now[:, None], values)
        self.remember(~context.nonfinite, values=ring, count=count + 1)
        return skip
