"""A batch to take a run's step on again and again."""

from __future__ import annotations

from torch import Tensor

from gnmr.data import TrainBlocks
from gnmr.training.run import Parts


def batch(parts: Parts) -> list[Tensor]:
    """The micro-batches of the run's first step, on its device."""
    training = parts.config.training
    blocks = TrainBlocks(parts.corpus.train, training.seq_len, training.seed, None)
    return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]
