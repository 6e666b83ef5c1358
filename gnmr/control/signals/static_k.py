"""The k units that one calibration found most at risk, recovered ever after: the ADAPT-style baseline.

During a calibration the average GNMR of each unit is taken, with risk 0 for all. Then the k units with the
highest average are fixed for the rest of the run (ties in unit order).

Source: arXiv 2606.00539, appendix E.4: blocks are ranked over 500 steps in BF16, and the top 25 % of them stay; it
ended far above every routed run (table 10). The signal by itself calibrates on the low path, over any units: E.4's
baseline is the arm adapt of sweep=paper/table1, whose units are blocks and which warms up in 16 bits while they are
ranked. Needs nothing but the norms; costs as much as GNMR while it calibrates and nothing afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.control.signals.history import Cumulative
from gnmr.control.signals.signal import BlindSignal, Context, Evidence, due, ratio, seen
from gnmr.errors import positive, require, whole
from gnmr.errors import share as check_share


class StaticK(BlindSignal):
    """A set that is chosen once. `k`: its size, or `k_frac` of the units; both None: max_o.

    The calibration takes `calibration_steps`, or where that is None `calibration_frac` of the run's steps.

    `active_frac`: mean fraction of unit-steps with R > 1, over the whole run where its length is known, else from the
    choice on.
    """

    columns = ("mean_gnmr",)
    kept = ("history", "average", "chosen")

    def __init__(
        self,
        context: Context,
        *,
        calibration_steps: int | None = None,
        calibration_frac: float = 0.05,
        k: int | None = None,
        k_frac: float | None = None,
        active_frac: float | None = None,
        eps: float = 1e-8,
    ) -> None:
        num_units, at_once = len(context.names), min(context.max_o, len(context.names))
        check_share(calibration_frac=calibration_frac)
        positive(eps=eps)
        if calibration_steps is None:
            if context.steps is None:
                raise ValueError("static_k: the run's length is not known: give steps, or the option calibration_steps")
            calibration_steps = max(1, round(calibration_frac * context.steps))
        whole(calibration_steps=calibration_steps)
        if k is None and k_frac is not None:
            check_share(k_frac=k_frac)
            k = max(1, round(k_frac * num_units))
        k = at_once if k is None else k
        whole(k=k)
        require(k <= at_once, "k", k, f"at most max_o={context.max_o} of {num_units} units can be in recovery at once")
        self.calibration_steps, self.k, self.eps = calibration_steps, k, eps
        after = 1.0
        if context.steps is not None:
            if calibration_steps >= context.steps:
                raise ValueError(f"calibration_steps={calibration_steps}: the run has only {context.steps} steps")
            after = (context.steps - calibration_steps + 1) / context.steps
        super().__init__(context, active_frac, self.k / num_units * after, f"k={self.k} of {num_units} units")
        self.history = Cumulative(num_units, context.device)
        self.average = Cumulative(num_units, context.device)
        self.chosen = torch.zeros(num_units, dtype=torch.bool, device=context.device)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Signal.observe`; the column is the average GNMR so far. Does not wait for the device."""
        if step <= self.calibration_steps:
            norm, mean, entered = evidence["norm"], self.history.mean, seen(evidence)
            self.average.update(ratio(norm, mean, mean != 0, self.eps), entered)
            self.history.update(norm, entered)
        if step == self.calibration_steps:
            place = torch.sort(self.average.mean, descending=True, stable=True).indices[: self.k]
            self.chosen = torch.zeros_like(self.chosen).index_fill_(0, place, True)
        since = self.turn(step) - self.turn(self.calibration_steps) + 1 if step >= self.calibration_steps else 0
        on = since > 0 and due(since, self.rate) > due(since - 1, self.rate)
        return self.chosen.double() * (2.0 * on), (self.average.mean,)
