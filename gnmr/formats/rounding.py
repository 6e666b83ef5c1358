"""Random numbers of stochastic rounding, determined by (seed, step, micro-batch, operator, operand) alone.

If an operator changes its path, the noise of all others is therefore unchanged. A repeated step draws the same numbers.
Several processes together draw the numbers of a single process: process r of n has the micro-batches r, r + n, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Key: TypeAlias = tuple[int, ...]
Mark: TypeAlias = tuple[int, tuple[int, int] | None, dict[tuple[int, int], int]]


class Rounding:
    """The random numbers of a converted model's stochastic casts, on one device.

    `rank` and `ranks` are the r and n of the module: this process, and the number of processes with own micro-batches.

    Args:
        seed: any whole number; taken modulo 2^64.
        device: the device of the casts.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.rank, self.ranks = seed % 2**64, 0, 1
        self.step, self._micro_batch = 1, None
        self._passes: dict[tuple[int, int], int] = {}
        """Number of passes that drew, by step and operator, in the current micro-batch if one was named."""
        self._device = device
        self._generator: torch.Generator | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, deepcopy and other processes, to which a generator cannot be sent."""
        return {**self.__dict__, "_generator": None}

    _micro_batch: tuple[int, int] | None

    def begin_step(self, step: int) -> None:
        """Start a step with its first micro-batch; passes that began in the step before may still draw.

        Args:
            step: number of the optimizer step, from 1.
        """
        self.step = step
        # Older counts cannot be read again and would only grow.
        self._passes = {key: count for key, count in self._passes.items() if key[0] == step - 1}

    @contextmanager
    def micro_batch(self, number: int, evaluation: bool = False) -> Iterator[None]:
        """Assign the passes inside this context to a micro-batch; outside it is counted.

        Args:
            number: index among the micro-batches of all processes in the step, from 0.
            evaluation: whether it belongs to an evaluation after the step, which draws other numbers.
        """
        before = self.mark()
        # Counting starts anew, so that the noise depends on the number of the micro-batch and not on what ran before.
        self._micro_batch, self._passes = (number, int(evaluation)), {}
        try:
            yield
        finally:
            self.back_to(before)

    def next_pass(self, operator: int, step: int) -> Key:
        """Return the key of a pass of `operator` (its index) that began in `step`, and count the pass.

        Returns: four whole numbers, with which a key of `generator` begins.
        """
        # Without a named micro-batch, passes are counted as if all ranks took turns in one process.
        count = self._passes.get((step, operator), 0)
        self._passes[step, operator] = count + 1
        if self._micro_batch is None:
            return step, count * self.ranks + self.rank, 0, 0
        return step, *self._micro_batch, count

    def generator(self, *key: int) -> torch.Generator:
        """Return the generator, seeded for the numbers of `key`; it is the same object each time.

        Args:
            key: whole numbers of at least 0, such as step, micro-batch, operator and operand.
        """
        # SeedSequence mixes the numbers, so that neighboring keys draw unrelated noise.
        words = np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)
        if self._generator is None:
            self._generator = torch.Generator(self._device)
        return self._generator.manual_seed(int(words[0]))

    def mark(self) -> Mark:
        """Return the current position, for `back_to`."""
        return self.step, self._micro_batch, dict(self._passes)

    def back_to(self, mark: Mark) -> None:
        """Return to a former position, so that the same numbers are drawn again.

        Args:
            mark: the result of `mark`, which may be used several times.
        """
        self.step, self._micro_batch, passes = mark
        # A copy, because one mark may be used several times.
        self._passes = dict(passes)

    def state(self) -> Tensor:
        """Return (seed, step), (2,) int64."""
        # PyTorch has no unsigned 64-bit numbers in checkpoints: the seed wraps around.
        return torch.tensor([self.seed - 2**64 if self.seed >= 2**63 else self.seed, self.step], device="cpu")

    def load(self, state: Tensor) -> None:
        """Continue at the position of `state`, (seed, step).

        Raises:
            ValueError: `state` is not (2,) int64.
        """
        if not isinstance(state, Tensor) or state.shape != (2,) or state.dtype != torch.int64:
            raise ValueError("the state of stochastic rounding must be (seed, step), two whole numbers")
        seed, step = state.tolist()
        # Undo the wrap-around of `state`.
        self.seed = seed % 2**64
        self.begin_step(step)
