"""Token files as sequences of seq_len + 1 tokens, in a random order whose position a checkpoint restores.

Sequence i holds tokens[i * seq_len : (i + 1) * seq_len + 1]. Its last token is the first token of the next sequence, so
every token but the first is a target exactly once per epoch.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gnmr.errors import UserError
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.cache import TokenFile

MOST_EPOCHS = 10_000  # in one batch, because every epoch draws an order


@dataclass(frozen=True)
class Branch:
    """The position where a fork leaves the order of its base, and the continuation that it takes."""

    seed: int
    """Seed of the base, which replaces the fork's seed."""
    epoch: int
    position: int
    order: int
    """0 continues the order of the base. Other values draw a new order for the rest of the epoch and later epochs."""


class SequenceOrder(ABC):
    """Draws the numbers of `num_sequences` sequences in random order, each once per epoch.

    The order of an epoch depends only on the seed, the epoch and `num_sequences`. A `branch` begins at its position, in
    the order of its seed.
    """

    def __init__(self, num_sequences: int, seed: int, branch: Branch | None = None) -> None:
        self.num_sequences = num_sequences
        self._branch = branch or Branch(seed, 0, 0, 0)
        self._order: np.ndarray | None = None
        self._epoch = self._position = 0
        self._place(self._branch.epoch, self._branch.position)

    @abstractmethod
    def next(self, n: int) -> Batch:
        """Return the next n sequences on the CPU, across epoch boundaries."""

    def take(self, n: int, seq_len: int) -> list[int]:
        """Return the numbers of the next n sequences of `seq_len` tokens, across epoch boundaries.

        Raises UserError if `check` does, before an order is drawn.
        """
        self.check(n, seq_len)
        chosen: list[int] = []
        while len(chosen) < n:
            numbers = self._current()[self._position :][: n - len(chosen)].tolist()
            chosen += numbers
            self._position += len(numbers)
            if self._position == self.num_sequences:
                self._epoch, self._position, self._order = self._epoch + 1, 0, None
        return chosen

    def check(self, n: int, seq_len: int) -> None:
        """Raise UserError if n sequences do not fit in memory or read the corpus more than `MOST_EPOCHS` times."""
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (8 * seq_len)
        if n > min(room, MOST_EPOCHS * self.num_sequences):
            raise UserError(
                f"training.batch_size={n}: this machine has memory for {room} sequences of {seq_len} tokens, and the "
                f"corpus has {self.num_sequences}, each read {MOST_EPOCHS} times at most; use a smaller batch"
            )

    def state_dict(self) -> dict[str, int | str]:
        """Return the epoch of the next sequence, its position in this epoch's order, and a digest of this order."""
        return {"epoch": self._epoch, "position": self._position, "order": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises UserError if the position is outside of this corpus, or if this NumPy draws another order.
        """
        self._place(state["epoch"], state["position"])
        # In another order, the rest of the epoch would repeat some sequences and leave out others, unnoticed.
        drawn = self._digest()
        if state.get("order", drawn) != drawn:
            raise UserError(
                f"checkpoint: training.seed={self._branch.seed} drew another order of the data than this NumPy "
                f"({np.__version__}) draws; continue with the version that the run began with"
            )

    def _place(self, epoch: int, position: int) -> None:
        if epoch < 0 or not 0 <= position < self.num_sequences:
            raise UserError(
                f"checkpoint at sequence {position} of epoch {epoch} of {self.num_sequences} sequences: the run folder "
                "belongs to other data"
            )
        self._epoch, self._position, self._order = epoch, position, None

    def _current(self) -> np.ndarray:
        """Return the permutation of this epoch, (num_sequences,) int64."""
        if self._order is None:
            branch, seed = self._branch, self._branch.seed
            order = np.random.default_rng([seed, self._epoch]).permutation(self.num_sequences)
            if branch.order and self._epoch >= branch.epoch:
                begin = branch.position if self._epoch == branch.epoch else 0
                # A fork draws a new order of the sequences that the base has not read in this epoch.
                generator = np.random.default_rng([seed, self._epoch, branch.order])
                order[begin:] = generator.permutation(order[begin:])
            self._order = order
        return self._order

    def _digest(self) -> str:
        return hashlib.sha256(self._current().astype("<i8").tobytes()).hexdigest()[:16]


class TrainSequences(SequenceOrder):
    """Training sequences in random order, each once per epoch.

    `tokens` are (n,) unsigned integers, in memory or in a file. See `SequenceOrder` for `branch`. Raises UserError if
    there is less than one sequence.
    """

    def __init__(self, tokens: np.ndarray | TokenFile, seq_len: int, seed: int, branch: Branch | None = None) -> None:
        super().__init__(_num_sequences(tokens, seq_len, "training"), seed, branch)
        self._tokens = tokens
        self._seq_len = seq_len

    def next(self, n: int) -> Batch:
        """Return the next n sequences on the CPU."""
        return _gather(self._tokens, self.take(n, self._seq_len), self._seq_len)


def validation_sequences(tokens: np.ndarray | TokenFile, seq_len: int, n: int) -> Batch:
    """Return min(n, available) sequences on the CPU, evenly spaced in `tokens` and equal in every run of a corpus.

    Raises UserError if there is less than one sequence.
    """
    available = _num_sequences(tokens, seq_len, "validation")
    count = min(n, available)
    return _gather(tokens, (number * available // count for number in range(count)), seq_len)


def _num_sequences(tokens: np.ndarray | TokenFile, seq_len: int, split: str) -> int:
    available = (len(tokens) - 1) // seq_len
    if available < 1:
        raise UserError(
            f"training.seq_len={seq_len}: the corpus has {len(tokens)} {split} tokens, a sequence needs {seq_len + 1}; "
            "use more text or a smaller training.seq_len"
        )
    return available


def _gather(tokens: np.ndarray | TokenFile, sequences: Iterable[int], seq_len: int) -> Batch:
    rows = [tokens[sequence * seq_len : (sequence + 1) * seq_len + 1] for sequence in sequences]
    return Batch.of_sequences(torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(rows), seq_len + 1)))
