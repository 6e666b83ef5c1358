"""What casts find in their tensors: saturated and non-finite elements, and the largest magnitudes (amax) of the steps
so far, from which delayed scales are taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr.names import OPERANDS
from gnmr.precision.passes import Pass

_WEIGHT, _GRADIENT = OPERANDS.index("weight"), OPERANDS.index("grad_output")
_REPLACED = 1.15
"""A weight whose largest magnitude changes by more than this factor from one step to the next was replaced (another
checkpoint was loaded, an average was swapped in), not trained."""


@dataclass(eq=False)
class CastStats:
    """What one cast found in its tensor, on the device."""

    largest: Tensor
    """max|group| of every group, NaN where there is a NaN."""
    saturated: Tensor | None
    """Elements beyond the format's largest value, a scalar; None where there cannot be any."""
    nonfinite: Tensor | None
    """Elements that were Inf or NaN before the cast, a scalar (what shares a scale with one becomes NaN), and those
    that an injected fault made so; None where it is known that there are none."""
    operator: int | None = None
    """The operator (its index) for which it counts: the first that ran with it."""
    counted: bool = False
    """Whether it was added to the counts: several operators may read one cast."""


class AmaxHistory:
    """Counts and largest magnitudes of a converted model's casts, on the device, by the operators' indices.

    - `counts` (operators, operands, 2) int64: saturated and non-finite elements of this step so far;
    - `history` (operators, 3, 1 + h) float32: the largest magnitudes of input, weight and grad_output in this step and
      in the h steps before, from which delayed scales are taken. None where no recipe has any.
    - `times`: of several processes each starts backward from a larger loss than its part of the step's, so that their
      gradients' mean is the step's: how many times as large grad_output comes here as in one process. The history has
      it as in one process, so it is right under any number of them.

    A delayed scale of a weight that was replaced since the last step would saturate it or lose its digits. So from the
    first such weight of a step on all delayed scales are those of the tensors themselves, and the steps before are
    forgotten.

    An operator writes in its backward pass, so that neither evaluation nor a recomputed forward pass is counted. One
    that has no backward pass (frozen, as all before it) writes at the end of its forward pass.
    """

    def __init__(self, operators: int, history: int, device: torch.device) -> None:
        self.counts = torch.zeros(operators, len(OPERANDS), 2, dtype=torch.int64, device=device)
        self.history = torch.zeros(operators, 3, 1 + history, device=device) if history else None
        self.times = 1.0
        self._written = False
        self.replaced = torch.zeros((), dtype=torch.bool, device=device)
        """Whether a weight was replaced before this step."""

    def come(self, times: float) -> None:
        """From this step on grad_output is `times` as large as in one process; what the step saw was so already."""
        if self.history is not None and times != self.times:
            self.history[:, _GRADIENT, 0] *= self.times / times
        self.times = times

    def end_step(self) -> None:
        """Advances the history and resets the counts, if anything was written since the last time."""
        if self._written:
            self.counts.zero_()
            if self.history is not None:
                self.history = self.history.roll(1, dims=2)  # a new tensor: `ConvertedModel.mark` keeps the one before
                self.history[:, :, 0] = 0
                self.history[:, :, 2:].masked_fill_(self.replaced, 0)
                self.replaced = torch.zeros_like(self.replaced)
        self._written = False

    def begin_again(self) -> None:
        """Forgets what was written in this step."""
        self.counts.zero_()
        if self.history is not None:
            self.history[:, :, 0] = 0
            self.replaced = torch.zeros_like(self.replaced)
        self._written = False

    def load(self, history: Tensor) -> None:
        """Continue with these magnitudes."""
        assert self.history is not None
        self.history = self.history.new_empty(history.shape).copy_(history)

    def delayed(self, operator: int, operand: int, steps: int, now: Tensor, begun: Pass | None = None) -> Tensor:
        """The magnitude that a delayed scale is taken from, `now` being the tensor's own.

        The largest of the `steps` before; `now` before there are any and where a weight was replaced; NaN if `now` is
        not finite. `begun`: the forward pass whose scales count; None: those of now, and nothing is noted.
        """
        history, replaced = self.history, self.replaced
        if begun is not None and begun.history is not None:
            history = begun.history
            if operand != _GRADIENT and begun.replaced is not None:
                replaced = begun.replaced  # of later operators it did not know
        assert history is not None
        before = history[operator, operand, 1 : 1 + steps].amax()
        if operand == _GRADIENT:
            before = before * self.times
        if operand == _WEIGHT:
            grown = (before > 0) & (now > _REPLACED * before)
            shrunk = now * _REPLACED < history[operator, operand, 1]
            replaced = replaced | (grown | shrunk).any()
            if begun is not None and begun.counts:
                self.replaced = self.replaced | replaced
        return torch.where(now.isfinite(), torch.where((before > 0) & ~replaced, before, now), torch.nan)

    def add(self, counts: Tensor) -> None:
        """Adds numbers (operators, operands, 2) that were counted elsewhere."""
        self._written = True
        self.counts.add_(counts.long())

    def write(self, operator: int, found: Iterable[tuple[int, CastStats]], largest: dict[int, Tensor]) -> None:
        """Adds one forward and backward pass of `operator`: the (operand, statistics) of its casts, each cast once for
        all that read it, and the `largest` magnitude by operand."""
        self._written = True
        for operand, stats in found:
            if stats.counted:
                continue
            stats.counted = True
            assert stats.operator is not None
            for kind, number in enumerate((stats.saturated, stats.nonfinite)):
                if number is not None:
                    self.counts[stats.operator, operand, kind].add_(number)
        if self.history is not None:
            for operand, now in largest.items():
                # One bad step must not spoil the history.
                finite = now.amax().nan_to_num(nan=0.0, posinf=0.0)
                if operand == _GRADIENT:
                    finite = finite / self.times
                self.history[operator, operand, 0] = torch.maximum(self.history[operator, operand, 0], finite)
