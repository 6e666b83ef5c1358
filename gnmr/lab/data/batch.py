"""A step's data: inputs, targets and, where documents share a sequence, positions that mark where each begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""A target without loss; what `F.cross_entropy` ignores by default."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens."""

    tokens: Tensor
    """Inputs (B, T) int64."""
    targets: Tensor
    """The token that follows each input, (B, T) int64; `IGNORED` where there is no loss."""
    positions: Tensor | None = None
    """(B, T) int64: from 0 again at each document of a sequence. None: a sequence is one document."""
    num_targets: int = -1
    """Targets with loss; counted when the batch is made unless it is given."""

    def __post_init__(self) -> None:
        if self.num_targets < 0:
            object.__setattr__(self, "num_targets", int((self.targets != IGNORED).sum()))

    @classmethod
    def of_sequences(cls, sequence: Tensor) -> Batch:
        """The batch of `sequence` (B, T + 1) int64, one document each: every token but the first is a target."""
        return cls(sequence[:, :-1], sequence[:, 1:], num_targets=sequence[:, 1:].numel())

    def to(self, device: torch.device | str) -> Batch:
        """The same on `device`, by copies that may wait for it (pageable memory)."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), positions, self.num_targets)

    def split(self, size: int) -> list[Batch]:
        """Batches of at most `size` sequences, in order; counts their targets, so split on the CPU, before `to`."""
        count = -(-len(self) // size)
        positions = [None] * count if self.positions is None else list(self.positions.split(size))
        parts = zip(self.tokens.split(size), self.targets.split(size), positions, strict=True)
        return [Batch(tokens, targets, where) for tokens, targets, where in parts]

    def __len__(self) -> int:
        """B."""
        return len(self.tokens)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """The keyword arguments of a causal language model of transformers, under which no document sees another one.

    Positions that start anew make transformers 5 build the sequence-diagonal causal mask itself, if it gets neither an
    attention mask nor a cache of keys and values: hence `use_cache=False`. It looks at the positions once a forward
    pass, with or without documents in them, and on a GPU waits for the device there.
    """
    inputs: dict[str, Any] = {"input_ids": batch.tokens, "use_cache": False}
    return inputs if batch.positions is None else inputs | {"position_ids": batch.positions}
