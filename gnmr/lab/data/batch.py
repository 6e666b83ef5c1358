"""The data of a step: inputs, targets and, if documents share a sequence, positions that restart at each document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Marks a target without loss. `F.cross_entropy` ignores it by default."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens."""

    tokens: Tensor
    """Inputs, (B, T) int64."""
    targets: Tensor
    """The token after each input, (B, T) int64, or `IGNORED` for inputs without loss."""
    positions: Tensor | None = None
    """(B, T) int64, restarting from 0 at each document of a sequence. If None, each sequence is one document."""
    num_targets: int = -1
    """Number of targets with loss. If it is not given, it is counted at construction."""
    inputs: Mapping[str, Any] | None = None
    """All arguments of a model that is no causal language model; its logits are those of `tokens`."""

    def __post_init__(self) -> None:
        if self.num_targets < 0:
            object.__setattr__(self, "num_targets", int((self.targets != IGNORED).sum()))

    @classmethod
    def of_sequences(cls, sequence: Tensor) -> Batch:
        """Return the batch of `sequence` (B, T + 1) int64, one document each. All tokens but the first are targets."""
        # The number is known from the shape; counting the targets would wait for a GPU.
        return cls(sequence[:, :-1], sequence[:, 1:], num_targets=sequence[:, 1:].numel())

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to `device`. The copies are from pageable memory, so they may wait for the device."""
        positions = None if self.positions is None else self.positions.to(device)
        inputs = self.inputs
        if inputs is not None:
            inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        return Batch(self.tokens.to(device), self.targets.to(device), positions, self.num_targets, inputs)

    def split(self, size: int) -> list[Batch]:
        """Split into batches of at most `size` sequences, in order. Call it on the CPU, because it counts targets."""
        assert self.inputs is None, "other arguments than tokens are made batch by batch"
        count = -(-len(self) // size)
        positions = [None] * count if self.positions is None else list(self.positions.split(size))
        batches = zip(self.tokens.split(size), self.targets.split(size), positions, strict=True)
        return [Batch(tokens, targets, where) for tokens, targets, where in batches]

    def __len__(self) -> int:
        """Return B."""
        return len(self.tokens)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of a language model of transformers, such that documents stay separate.

    If positions restart, transformers 5 builds the block-diagonal causal mask. It does so only without an attention
    mask and without a cache of keys and values: hence `use_cache=False`. It inspects the positions once per forward
    pass, with or without documents in them, and waits for a GPU there.
    """
    if batch.inputs is not None:
        return dict(batch.inputs)
    inputs: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": False}
    return inputs if batch.positions is None else inputs | {"position_ids": batch.positions}
