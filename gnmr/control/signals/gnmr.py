"""Algorithm 1 (section 3): the gradient-norm-to-mean ratio (GNMR) and GNMR over its mean of a short window (dGNMR).

Every unit b is compared with itself. n[b,t] is the norm of its gradient at step t, and A[b,t-1] the mean of all norms
before it:

    GNMR[b,t]  = n[b,t] / (A[b,t-1] + eps)                  1 while there is no history
    dGNMR[b,t] = GNMR[b,t] / (mean of the last delta GNMR + eps)      1 until there are delta of them

GNMR is large when a unit leaves the level of its whole past. dGNMR is large when it leaves the level of the last few
steps, so a slow drift of GNMR does not raise it. Only after both are known does the step enter the history:

    A[b,t] = A[b,t-1] + (n[b,t] - A[b,t-1]) / k             k: how many norms have entered

The risk is R[b,t] = max(GNMR / alpha_t, dGNMR / beta_t), over threshold if R > 1.

The paper leaves two cases open, which are decided here. A norm that is not finite has risk Inf and enters neither A nor
the window. A unit without a gradient in this step is not observed, and none of its state changes.

Source: arXiv 2606.00539, Eqs. 2-4; its thresholds lie between 1.1 and 3.0 (alpha) and 1.3 and 2.0 (beta). The signal
needs only the norms and costs a dozen operations on (U,) tensors per step.
"""

from __future__ import annotations

from torch import Tensor

from gnmr.control.signals.history import Cumulative, Window
from gnmr.control.signals.signal import Context, Evidence, RatioSignal, ratio
from gnmr.control.threshold import Threshold, check_threshold, threshold_at
from gnmr.options import whole_number


class GnmrSignal(RatioSignal):
    """GNMR and dGNMR of U units, as tensors (paper, Eqs. 2-4): the signal `gnmr_delta`.

    `alpha` or `beta` None switches that ratio off; with both off every finite risk is 0 and only non-finite norms
    trigger. `delta` is the window of dGNMR in steps.

    Raises:
        ValueError: if an option is invalid.
    """

    columns: tuple[str, ...] = ("gnmr", "delta_gnmr")
    state_names = ("history", "window")

    def __init__(
        self,
        context: Context,
        *,
        alpha: Threshold | None = 1.5,
        beta: Threshold | None = 1.3,
        delta: int = 5,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(context, Cumulative(len(context.names), context.device), eps)
        self.alpha = check_threshold(alpha, "alpha", or_null=True)
        self.beta = check_threshold(beta, "beta", or_null=True)
        whole_number(delta=delta)
        self.delta = delta
        self.window = Window(self.num_units, context.device, delta)  # the last values of GNMR

    def thresholds(self, step: int) -> tuple[float | None, float | None]:
        return (
            None if self.alpha is None else threshold_at(self.alpha, step),
            None if self.beta is None else threshold_at(self.beta, step),
        )

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        norm, observed = evidence["norm"], evidence["observed"]
        # Eq. 2: the norm over the mean of its past; Eq. 3: GNMR over the mean of the last delta GNMR
        mean, recent = self.history.mean, self.window.values.mean(dim=0)
        gnmr = ratio(norm, mean, mean != 0, self.eps)
        delta_gnmr = ratio(gnmr, recent, self.window.count >= self.delta, self.eps)
        # Eq. 4: only now does the step enter the history
        self.history.update(norm, observed)
        self.window.update(gnmr, observed)
        return self.verdict(evidence, step, gnmr, delta_gnmr)
