"""Algorithm 1: the gradient-norm-to-mean ratio (GNMR) and its short-window sister (dGNMR).

Every unit b is compared with itself. n[b,t] is the norm of its gradient at step t, and A[b,t-1] the mean of all norms
before it:

    GNMR[b,t]  = n[b,t] / (A[b,t-1] + eps)                  1 while there is no history
    dGNMR[b,t] = GNMR[b,t] / (mean of the last delta GNMR + eps)      1 until there are delta of them

GNMR is large when a unit leaves the level of its whole past; dGNMR when it leaves the level of the last few steps, so a
slow drift of GNMR itself does not count for it. Only after both are known does the step enter the history:

    A[b,t] = A[b,t-1] + (n[b,t] - A[b,t-1]) / k             k: how many norms have entered

The risk is R[b,t] = max(GNMR / alpha_t, dGNMR / beta_t), over threshold where R > 1.

Two cases that the paper leaves open are decided here. A norm that is not finite has risk Inf and enters neither A nor
the window. A unit without a gradient in this step is not observed: nothing of it changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.controller.thresholds import Threshold, at, check


class GnmrSignal:
    """GNMR and dGNMR of U units, as tensors (paper, Eqs. 2-4).

    `alpha` or `beta` None switches that ratio off; with both off every finite risk is 0 and only non-finite norms
    trigger. `delta` is the window of dGNMR in steps. ValueError for a value that is not positive.
    """

    columns: tuple[str, ...] = ("gnmr", "delta_gnmr")

    def __init__(
        self,
        num_units: int,
        alpha: Threshold | None = 1.5,
        beta: Threshold | None = 1.3,
        delta: int = 5,
        eps: float = 1e-8,
        device: torch.device | str = "cpu",
    ) -> None:
        check(alpha, "alpha")
        check(beta, "beta")
        if isinstance(delta, bool) or not isinstance(delta, int) or delta < 1:
            raise ValueError(f"delta={delta!r}: must be a positive whole number of steps")
        if not eps > 0:
            raise ValueError(f"eps={eps!r}: must be a positive number")
        self.alpha, self.beta, self.delta, self.eps = alpha, beta, delta, eps
        # float64: U numbers, and a running mean over 100,000 steps keeps its digits.
        self.mean = torch.zeros(num_units, dtype=torch.float64, device=device)
        self.count = torch.zeros(num_units, dtype=torch.int64, device=device)
        self.window = torch.zeros(delta, num_units, dtype=torch.float64, device=device)  # newest last

    def thresholds(self, step: int) -> tuple[float | None, float | None]:
        return (
            None if self.alpha is None else at(self.alpha, step),
            None if self.beta is None else at(self.beta, step),
        )

    def observe(self, norm: Tensor, observed: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See `Signal.observe`; the statistics are (GNMR, dGNMR). Does not wait for the device."""
        finite = norm.isfinite()
        # Clamped: a ratio of finite norms may leave float64, and Inf must not enter the window.
        gnmr = torch.where(self.mean == 0, 1.0, (norm / (self.mean + self.eps)).clamp(max=torch.finfo(norm.dtype).max))
        gnmr = torch.where(finite, gnmr, norm)
        full = self.count >= self.delta
        delta_gnmr = torch.where(full, gnmr / (self.window.mean(dim=0) + self.eps), 1.0)
        delta_gnmr = torch.where(finite, delta_gnmr, norm)

        alpha, beta = self.thresholds(step)
        risk = torch.zeros_like(norm)
        if alpha is not None:
            risk = gnmr / alpha
        if beta is not None:
            risk = torch.maximum(risk, delta_gnmr / beta)
        risk = torch.where(finite, risk, torch.inf)

        entered = observed & finite
        self.count = self.count + entered
        # Selected, never multiplied: 0 * NaN is NaN and would poison the history.
        self.mean = torch.where(entered, self.mean + (norm - self.mean) / self.count.clamp(min=1), self.mean)
        self.window = torch.where(entered, torch.cat([self.window[1:], gnmr[None]]), self.window)
        return risk, (gnmr, delta_gnmr)

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "count": self.count, "window": self.window}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """ValueError if the state belongs to another number of units or another delta."""
        for name, own in self.state_dict().items():
            if state[name].shape != own.shape:
                raise ValueError(
                    f"signal state {name!r} has shape {tuple(state[name].shape)}, this signal needs {tuple(own.shape)}"
                )
        for name, own in self.state_dict().items():
            setattr(self, name, state[name].to(device=own.device, dtype=own.dtype).clone())
