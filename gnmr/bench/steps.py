"""A run's step, taken on one batch again and again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gnmr.data import Batch
from gnmr.training.parts import Parts, train_step, training_blocks
from gnmr.training.step import StepResult


def batch(parts: Parts) -> list[Tensor | Batch]:
    """The micro-batches of the run's first step, on its device."""
    training = parts.config.training
    blocks = training_blocks(parts.config, parts.corpus, None)
    return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]


def same_step(parts: Parts) -> Callable[[], StepResult]:
    """One step of `gnmr train` without records, on that batch each time."""
    take_step, micro_batches = train_step(parts), batch(parts)
    return lambda: take_step(micro_batches, parts.config.optim.lr)
