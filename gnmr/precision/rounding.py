"""What stochastic rounding draws: the numbers of (seed, step, micro-batch, operator, operand), whatever else draws.

So an operator that changes its path leaves the noise of all others as it was, a step that is taken again draws what it
drew, and several processes draw together what one process draws: process r of n has the micro-batches r, r + n, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Key: TypeAlias = tuple[int, ...]
Mark: TypeAlias = tuple[int, tuple[int, int] | None, dict[tuple[int, int], int]]


class Rounding:
    """The random numbers of a converted model's stochastic casts, on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.rank, self.ranks = seed % 2**64, 0, 1
        self._step, self._micro_batch = 1, None
        self._passes: dict[tuple[int, int], int] = {}
        """By step and operator, those that drew (in the micro-batch that was named, if one was)."""
        self._generator = torch.Generator(device)

    _micro_batch: tuple[int, int] | None

    @property
    def step(self) -> int:
        """The step whose passes come next."""
        return self._step

    def begin_step(self, step: int) -> None:
        """The next passes are those of `step`, from its first micro-batch on. What began in the step before may still
        draw."""
        self._step = step
        self._passes = {key: count for key, count in self._passes.items() if key[0] == step - 1}

    @contextmanager
    def micro_batch(self, number: int, evaluation: bool = False) -> Iterator[None]:
        """Inside, passes are those of micro-batch `number` of the step, or of an `evaluation` behind it; outside they
        are counted."""
        before = self.mark()
        self._micro_batch, self._passes = (number, int(evaluation)), {}
        try:
            yield
        finally:
            self.back_to(before)

    def next_pass(self, operator: int, step: int) -> Key:
        """Return what a pass of `operator` that began in `step` draws from, besides the seed and the operand."""
        count = self._passes.get((step, operator), 0)
        self._passes[step, operator] = count + 1
        if self._micro_batch is None:
            return step, count * self.ranks + self.rank, 0, 0
        return step, *self._micro_batch, count

    def generator(self, *key: int) -> torch.Generator:
        """Return the generator, about to draw the numbers of `key`. It is the same one each time."""
        words = np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)
        return self._generator.manual_seed(int(words[0]))

    def mark(self) -> Mark:
        """Return the place in the step, for `back_to`."""
        return self._step, self._micro_batch, dict(self._passes)

    def back_to(self, mark: Mark) -> None:
        """Draw again what was drawn since `mark`."""
        self._step, self._micro_batch, passes = mark
        self._passes = dict(passes)

    def state(self) -> Tensor:
        """Return (seed, step), (2,) int64."""
        return torch.tensor([self.seed - 2**64 if self.seed >= 2**63 else self.seed, self._step])

    def load(self, state: Tensor) -> None:
        """Continue at what `state` gave. Raises ValueError if it is something else."""
        if not isinstance(state, Tensor) or state.shape != (2,) or state.dtype != torch.int64:
            raise ValueError("the state of stochastic rounding must be (seed, step), two whole numbers")
        seed, step = state.tolist()
        self.seed = seed % 2**64
        self.begin_step(step)
