"""Statistics of casts: saturated and non-finite elements, and the largest magnitudes (amax) for delayed scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnmr.names import OPERANDS

if TYPE_CHECKING:
    from gnmr.conversion.passes import Pass

_WEIGHT, _GRADIENT = OPERANDS.index("weight"), OPERANDS.index("grad_output")
_REPLACED = 1.15
"""A weight was replaced, not trained, if its largest magnitude changes by more than this factor in one step.

That happens if another checkpoint is loaded or an average is swapped in.
"""


@dataclass(eq=False)
class CastStats:
    """Statistics of one cast of a tensor, on the device."""

    largest: Tensor
    """max|group| of every group, NaN where there is a NaN."""
    saturated: Tensor | None
    """Elements beyond the format's largest value, a scalar; None if there are none."""
    nonfinite: Tensor | None
    """Elements that were Inf or NaN before the cast or through an injected fault, a scalar; None if there are none.

    Elements that share a scale with one of these become NaN but are not counted.
    """
    operator: int | None = None
    """Index of the operator for which the cast counts: the first that ran with it."""
    counted: bool = False
    """Whether the cast is counted already: several operators may read one cast."""


class AmaxHistory:
    """Counts and largest magnitudes of a converted model's casts, on the device, by operator index.

    - `counts` (operators, operands, 2) int64: saturated and non-finite elements of this step so far.
    - `history` (operators, 3, 1 + h) float32: the largest magnitudes of input, weight and grad_output in this step and
      in the h steps before, for delayed scales. None if no recipe has delayed scales.
    - `times`: how many times larger grad_output is in this process than in a run with one process. Each of several
      processes starts backward from a larger loss than its part of the step's loss, so that the mean of their gradients
      is the step's gradient. The history holds values as in one process, so it is right for any number of processes.

    If a weight was replaced since the last step, its delayed scale would saturate it or lose its digits. From the first
    such weight of a step on, all delayed scales therefore come from the tensors themselves, and earlier steps are
    forgotten.

    An operator writes in its backward pass, so neither evaluation nor a recomputed forward pass is counted. An operator
    without a backward pass (it and everything before it is frozen) writes at the end of its forward pass.
    """

    def __init__(self, operators: int, history: int, device: torch.device) -> None:
        self.counts = torch.zeros(operators, len(OPERANDS), 2, dtype=torch.int64, device=device)
        self.history = torch.zeros(operators, 3, 1 + history, dtype=torch.float32, device=device) if history else None
        self.times = 1.0
        self._written = False
        self.replaced = torch.zeros((), dtype=torch.bool, device=device)
        """Whether a weight was replaced before this step."""

    def come(self, times: float) -> None:
        """Set `times`.

        Args:
            times: the factor from this step on; the values that were written in this step already had it.
        """
        if self.history is not None and times != self.times:
            # These values were divided by the former factor when they were written.
            self.history[:, _GRADIENT, 0] *= self.times / times
        self.times = times

    def end_step(self) -> None:
        """Advance the history and reset the counts, if anything was written since the last call."""
        if self._written:
            self.counts.zero_()
            if self.history is not None:
                self.history = self.history.roll(1, dims=2)  # a new tensor: `ConvertedModel.mark` keeps the old one
                self.history[:, :, 0] = 0
                # After a replacement only the step that has just ended is remembered.
                self.history[:, :, 2:].masked_fill_(self.replaced, 0)
                self.replaced = torch.zeros_like(self.replaced)
        self._written = False

    def begin_again(self) -> None:
        """Forget everything that was written in this step."""
        self.counts.zero_()
        if self.history is not None:
            self.history[:, :, 0] = 0
            self.replaced = torch.zeros_like(self.replaced)
        self._written = False

    def load(self, history: Tensor) -> None:
        """Continue with the magnitudes of a checkpoint.

        Args:
            history: a former `history`, (operators, 3, 1 + h) float32 on any device; copied.
        """
        assert self.history is not None
        self.history = self.history.new_empty(history.shape).copy_(history)

    def delayed(self, operator: int, operand: int, steps: int, now: Tensor, begun: Pass | None = None) -> Tensor:
        """Return the magnitude that a delayed scale is taken from.

        Args:
            operator: its index.
            operand: index among `OPERANDS`.
            steps: number of steps to look back.
            now: max|x| of the tensor itself.
            begun: the forward pass whose scales count; None: the current scales, and nothing is recorded.

        Returns:
            The largest magnitude of the steps before, a scalar. It is `now` if there are none before or a weight was
            replaced, and NaN if `now` is not finite.
        """
        history, replaced = self.history, self.replaced
        if begun is not None and begun.history is not None:
            history = begun.history
            if operand != _GRADIENT and begun.replaced is not None:
                replaced = begun.replaced  # the pass did not know of later operators
        assert history is not None
        # Column 0 is this step, which must not see itself.
        before = history[operator, operand, 1 : 1 + steps].amax()
        if operand == _GRADIENT:
            # The history holds magnitudes as in one process; the tensor to cast is this process's.
            before = before * self.times
        # A weight that jumps was replaced: from then on, every scale comes from the tensors themselves.
        if operand == _WEIGHT:
            grown = (before > 0) & (now > _REPLACED * before)
            # A maximum of some steps ago may lie far above, so only the last step shows that a weight shrank.
            shrunk = now * _REPLACED < history[operator, operand, 1]
            replaced = replaced | (grown | shrunk).any()
            if begun is not None and begun.counts:
                self.replaced = self.replaced | replaced
        # A delayed scale must not hide that the tensor is not finite.
        return torch.where(now.isfinite(), torch.where((before > 0) & ~replaced, before, now), torch.nan)

    def add(self, counts: Tensor) -> None:
        """Add counts that were made elsewhere, in graphs of torch.compile.

        Args:
            counts: (operators, operands, 2), whole numbers in any dtype.
        """
        self._written = True
        self.counts.add_(counts.long())

    def write(self, operator: int, casts: Iterable[tuple[int, CastStats]], largest: dict[int, Tensor]) -> None:
        """Record one forward and backward pass of `operator`.

        Args:
            operator: its index.
            casts: (operand, statistics) of its casts. A cast counts once, however many operators read it.
            largest: the largest magnitude by operand.
        """
        self._written = True
        for operand, stats in casts:
            if stats.counted:
                continue
            stats.counted = True  # other readers of the cast count nothing
            assert stats.operator is not None
            for kind, number in enumerate((stats.saturated, stats.nonfinite)):
                if number is not None:
                    self.counts[stats.operator, operand, kind].add_(number)
        if self.history is not None:
            for operand, now in largest.items():
                # A single bad step must not spoil the history.
                finite = now.amax().nan_to_num(nan=0.0, posinf=0.0)
                if operand == _GRADIENT:
                    finite = finite / self.times
                self.history[operator, operand, 0] = torch.maximum(self.history[operator, operand, 0], finite)
