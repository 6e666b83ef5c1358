"""Random numbers of a step that do not depend on how many processes take it: of dropout and of stochastic rounding.

Stochastic rounding draws from (seed, step, micro-batch, operator) in every run.
Dropout of a run of parallel=none draws in the order of its micro-batches, from PyTorch's generators, which its
checkpoints keep. Under any other `parallel` a micro-batch's dropout draws from (seed, step, its number in the step)
alone, whichever process has it, and be there one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from gnmr.precision import ConvertedModel

_EVALUATION = 1


class Draws:
    """What the micro-batches of a run draw, each by itself. Call `begin_step` before a step's first."""

    def __init__(self, seed: int, converted: ConvertedModel, device: torch.device) -> None:
        self._seed, self._converted = seed, converted
        self._devices = [device] if device.type == "cuda" else []
        self._step = 0

    def begin_step(self, step: int) -> None:
        """The next micro-batches are those of step `step` (from 1)."""
        self._step = step

    @contextmanager
    def of(self, number: int, *, evaluation: bool = False) -> Iterator[None]:
        """Around the passes of micro-batch `number` (from 0) of the step, or of an `evaluation` behind it: PyTorch's
        generators and stochastic rounding draw its own numbers, and are afterwards as they were."""
        words = [self._seed, self._step, number, _EVALUATION if evaluation else 0]
        seeds = np.random.SeedSequence(words).generate_state(1, np.uint64).tolist()
        rounding = self._converted.shared.rounding
        named = nullcontext() if rounding is None else rounding.micro_batch(number, evaluation)
        with torch.random.fork_rng(self._devices), named:
            torch.manual_seed(seeds[0])
            yield
