"""The step of `gnmr train`, and a batch to take it on again and again."""

from __future__ import annotations

from torch import Tensor

from gnmr.data import TrainBlocks
from gnmr.training.run import Parts
from gnmr.training.step import TrainStep


def train_step(parts: Parts) -> TrainStep:
    return TrainStep(
        parts.model,
        parts.plan,
        parts.controller,
        parts.optimizer,
        parts.config.optim.clip_norm,
        measure_saved=not parts.config.training.activation_checkpointing,
        transform=parts.transform,
        probe_tokens=parts.config.paths.probe_tokens,
    )


def batch(parts: Parts) -> list[Tensor]:
    """The micro-batches of the run's first step, on its device."""
    training = parts.config.training
    blocks = TrainBlocks(parts.corpus.train, training.seq_len, training.seed, None)
    return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]
