"""Controls that a signal has to beat: they choose without reading what a step shows of its units.

    always_low     R = 0: every unit stays on the low-cost path, even one whose norm is not finite.
    always_high    R = 2: every unit is on the recovery path, up to max_o; set max_o to the number of units.
    random         In step t, active_frac * U units are drawn without replacement. The fractional rest goes to later
                   steps, so every unit-step is chosen with probability `active_frac`, and the sum over the run is the
                   budget itself. The draw depends only on the run's seed and the step number, so a resumed run
                   continues exactly, without a state.
    static_k       During a calibration the average GNMR of each unit is taken, with risk 0 for all. Then the k units
                   with the highest average are fixed for the rest of the run (ties in unit order).

static_k is the ADAPT-style baseline of arXiv 2606.00539 (appendix E.4): blocks are ranked over 500 steps in BF16, and
the top 25% of them stay. It ended far above every routed run (table 10). The signal alone calibrates on the low path,
over any units. E.4's baseline is the arm adapt of sweep=paper/table1, whose units are blocks that warm up in 16 bits
while they are ranked. static_k needs only the norms, and costs as much as GNMR while it calibrates.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gnmr.control.device import to_device
from gnmr.control.signals.history import Cumulative
from gnmr.control.signals.signal import Context, Evidence, SignalBase, ratio, seen
from gnmr.errors import warn
from gnmr.options import positive, require, whole_number, within
from gnmr.options import share as check_share


class _Always(SignalBase):
    risk: float

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._risk = torch.full((self.num_units,), self.risk, dtype=torch.float64, device=context.device)

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        return ()

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._risk, ()


class AlwaysLow(_Always):
    """The lower bound."""

    risk = 0.0


class AlwaysHigh(_Always):
    """The upper bound."""

    risk = 2.0


class BlindSignal(SignalBase):
    """A choice that reads no evidence, so a non-finite norm has no effect either: a control, not a detector.

    A chosen unit has a risk above 1, every other one 0. If `active_frac` is None, the signal chooses in every step.
    Otherwise it chooses in enough of the choices, spread evenly, to reach that mean fraction of unit-steps with R > 1.
    This depends only on the step number. A fraction above what the choice can reach warns and is reduced to it.
    """

    def __init__(self, context: Context, active_frac: float | None, most: float, limit: str) -> None:
        """Set up the choice; `most` is the share of unit-steps if every step chooses, `limit` says what limits it."""
        super().__init__(context)
        within(0, 1, or_null=True, active_frac=active_frac)
        if active_frac is not None and active_frac > most * (1 + 1e-6):
            text = f"active_frac is above {most:.4g}, the most that {limit} gives: it caps there"
            warn(text)
        self.rate = 1.0 if active_frac is None else min(active_frac / most, 1.0)
        """Share of the choices in which it chooses anything."""

    def turn(self, step: int) -> int:
        """Return the number, from 1, of the choice in force in that step; a held set keeps its number."""
        return (step - 1) // self.context.hold + 1

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        return (None,) * len(self.columns)


def due(step: int, rate: float) -> int:
    """Return the integer part of a stream of `rate` per step by the end of `step`."""
    return math.floor(step * rate + 1e-9)  # 1e-9: 3 * (1 / 3) is 1


class Random(BlindSignal):
    """A uniform draw. `active_frac`: probability of a unit-step; None: max_o units in every step.

    R is 1 + u for a chosen unit, with its u from (0, 1). For other units R is u without `active_frac`, so that any
    max_o can be filled by rank. With `active_frac` it is 0, so that the budget holds. Under a budget of costs R is
    multiplied by the unit's cost over the lowest, so that the draw does not favor cheap units.
    """

    columns = ("uniform",)

    def __init__(self, context: Context, *, active_frac: float | None = None) -> None:
        most = min(context.max_o / len(context.names), 1.0)
        super().__init__(context, active_frac, most, f"max_o={context.max_o} of {len(context.names)} units")
        self.active_frac, self._units_a_step = active_frac, self.rate * most * len(context.names)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Seeded by the step: a resumed run draws the same, and there is no state to save.
        uniform = np.random.default_rng((self.context.seed, step)).random(self.num_units).clip(min=2.0**-53)
        # The fractional rest of a stream goes to later steps, so that the sum over the run is the budget.
        turn, rate = self.turn(step), self._units_a_step
        number = due(turn, rate) - due(turn - 1, rate)
        risk = uniform.copy() if self.active_frac is None else np.zeros(self.num_units)
        chosen = np.argsort(-uniform, kind="stable")[:number]
        risk[chosen] = 1 + uniform[chosen]
        if (spend := self.context.spend) is not None and (paid := [cost for cost in spend if cost > 0]):
            risk *= np.maximum(spend, min(paid)) / min(paid)  # otherwise risk per cost would draw the cheap ones first
        risk_and_column = to_device(torch.from_numpy(np.stack([risk, uniform])), self.context.device)
        return risk_and_column[0], (risk_and_column[1],)


class StaticK(BlindSignal):
    """A set that is chosen once. `k`: its size, or `k_frac` of the units; both None: max_o.

    The calibration takes `calibration_steps`, or if that is None `calibration_frac` of the run's steps. `active_frac`
    is the mean fraction of unit-steps with R > 1, over the whole run if its length is known, else from the choice on.
    """

    columns = ("mean_gnmr",)
    state_names = ("history", "average", "chosen")

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
        whole_number(calibration_steps=calibration_steps)
        if k is None and k_frac is not None:
            check_share(k_frac=k_frac)
            k = max(1, round(k_frac * num_units))
        k = at_once if k is None else k
        whole_number(k=k)
        require(k <= at_once, "k", k, f"at most max_o={context.max_o} of {num_units} units can be in recovery at once")
        self.calibration_steps, self.k, self.eps = calibration_steps, k, eps
        after = 1.0
        if context.steps is not None:
            if calibration_steps >= context.steps:
                raise ValueError(f"calibration_steps={calibration_steps}: the run has only {context.steps} steps")
            # Nothing is over its threshold before the choice, which comes in the last step of the calibration.
            after = (context.steps - calibration_steps + 1) / context.steps
        super().__init__(context, active_frac, self.k / num_units * after, f"k={self.k} of {num_units} units")
        self.history = Cumulative(num_units, context.device)
        self.average = Cumulative(num_units, context.device)
        self.chosen = torch.zeros(num_units, dtype=torch.bool, device=context.device)

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Average GNMR of each unit during the calibration (Eq. 2)
        if step <= self.calibration_steps:
            norm, mean, entered = evidence["norm"], self.history.mean, seen(evidence)
            self.average.update(ratio(norm, mean, mean != 0, self.eps), entered)
            self.history.update(norm, entered)
        # The k highest averages stay; ties go by unit order.
        if step == self.calibration_steps:
            highest = torch.sort(self.average.mean, descending=True, stable=True).indices[: self.k]
            self.chosen = torch.zeros_like(self.chosen).index_fill_(0, highest, True)
        since = self.turn(step) - self.turn(self.calibration_steps) + 1 if step >= self.calibration_steps else 0
        on = since > 0 and due(since, self.rate) > due(since - 1, self.rate)
        return self.chosen.double() * (2.0 * on), (self.average.mean,)
