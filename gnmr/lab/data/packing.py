"""Pack examples into sequences of seq_len tokens whose documents do not attend to each other. Only answers are targets.

A document is [begin token] prompt answer [end token]. The begin token is present if the checkpoint's tokenizer puts one
before a text. Prompt and answer are encoded as one text, in the form that the model will read and write. A token that
contains any of the answer belongs to the answer.

    document     <s>  2   +   2   =   4  </s>      prompt "2 + 2 =", answer " 4"
    inputs       <s>  2   +   2   =   4            the end token is only a target,
    targets       _   _   _   _   4  </s>          the first token only an input
    positions     0   1   2   3   4   5

The paper does not specify the following choices:
- Best fit in the order of the corpus: a document goes into the sequence with the least sufficient room. Ties go to the
  sequence that reached this room first. If no sequence has room, a new one begins. The packing depends only on the
  documents' lengths and seq_len, so a resumed run packs the same sequences.
- A document of more than seq_len + 1 tokens is cut into pieces. A piece begins with the last target of the previous
  piece, so every token but the document's first is a target once. Pieces do not attend to each other. A piece without
  targets (from a long prompt) is skipped, so every sequence has a target.
- If a model ignores positions (`Documents.alone`), each piece is a sequence, and there are no positions.
- The rest of a sequence is padding: the end token, positions from 0, no targets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from gnmr.errors import UserError
from gnmr.lab.data.batch import IGNORED, Batch
from gnmr.lab.data.cache import Documents
from gnmr.lab.data.sequences import Branch, SequenceOrder


class Packing:
    """Assigns the pieces of documents to sequences by the rules above."""

    def __init__(self, documents: Documents, seq_len: int, split: str = "training", least: int = 0) -> None:
        """Pack `documents`. Raises UserError if the examples of `split` have fewer than `least` inputs."""
        ends = np.asarray(documents.borders[:, 0])
        begins = np.concatenate([[0], ends[:-1]])
        # A document of n tokens has n - 1 targets, which are cut into pieces of at most seq_len.
        targets = np.maximum(ends - begins - 1, 0)
        counts = -(-targets // seq_len)
        owner = np.repeat(np.arange(len(ends)), counts)
        place = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)  # index of a piece in its document
        start = begins[owner] + place * seq_len
        size = np.minimum(seq_len, targets[owner] - place * seq_len)
        first = np.asarray(documents.borders[:, 1])[owner] + begins[owner]  # the first token with loss
        has_target = start + size >= first

        self.cut = int((counts > 1).sum())
        """Number of documents in more than one piece."""
        self.left_out = int((~has_target).sum())
        """Number of pieces without a target."""
        self.examples = len(np.unique(owner[has_target]))
        self.size = int(size[has_target].sum())
        """Number of inputs that are not padding."""
        if self.size < least:
            raise UserError(
                f"training.seq_len={seq_len}: the {split} examples have {self.size} tokens, {least} are needed; "
                "use more examples or a smaller training.seq_len"
            )
        # A piece of a prompt alone has no target, so it gets no place in a sequence.
        sequence = [*range(has_target.sum())] if documents.alone else _best_fit(size[has_target].tolist(), seq_len)
        self.num_sequences = max(sequence, default=-1) + 1
        # Pieces are sorted by sequence; sequence s has those from _bounds[s] to _bounds[s + 1].
        order = np.argsort(sequence, kind="stable")
        self._pieces = np.stack([start[has_target], size[has_target], first[has_target]], axis=1)[order]
        self._bounds = np.searchsorted(np.asarray(sequence)[order], np.arange(self.num_sequences + 1))
        self._documents = documents
        self._seq_len = seq_len

    @property
    def summary(self) -> str:
        """One line for the user."""
        padding = 1 - self.size / (self.num_sequences * self._seq_len)
        line = (
            f"{self.examples:,} examples in {self.num_sequences:,} sequences of {self._seq_len}, {padding:.1%} padding"
        )
        if self._documents.alone:
            line += " of an example each, because this model would mix those of a sequence"
        if self.cut:
            line += f"; {self.cut:,} longer than a sequence and cut"
        return line + (f", {self.left_out:,} pieces without any answer left out" if self.left_out else "")

    def batch(self, sequences: Iterable[int]) -> Batch:
        """Return the sequences with these numbers, on the CPU."""
        sequences = list(sequences)
        shape = len(sequences), self._seq_len
        inputs = np.full(shape, self._documents.end_token, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        for row, sequence in enumerate(sequences):
            at = 0
            for start, size, first in self._pieces[self._bounds[sequence] : self._bounds[sequence + 1]].tolist():
                ids = self._documents.tokens[start : start + size + 1]
                without = max(first - start - 1, 0)  # inputs before the first one whose target has a loss
                inputs[row, at : at + size] = ids[:-1]
                targets[row, at + without : at + size] = ids[1 + without :]
                positions[row, at : at + size] = np.arange(size)
                at += size
            # Padding counts from 0 again, so that it is a document of its own.
            positions[row, at:] = np.arange(self._seq_len - at)
        begun = None if self._documents.alone else torch.from_numpy(positions)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), begun)


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the sequence of each piece. Sequences are numbered in the order in which they are opened."""
    chosen: list[int] = []
    number = 0
    waiting: dict[int, deque[int]] = {}  # room -> sequences with this room, in the order in which they reached it
    rooms: list[int] = []  # the sorted keys of `waiting`
    for size in sizes:
        # The least room that suffices.
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, sequence, number = capacity, number, number + 1
        else:
            room = rooms[at]
            sequence = waiting[room].popleft()
            if not waiting[room]:
                del waiting[room], rooms[at]
        chosen.append(sequence)
        if room > size:
            if room - size not in waiting:
                waiting[room - size] = deque()
                insort(rooms, room - size)
            waiting[room - size].append(sequence)
    return chosen


class PackedSequences(SequenceOrder):
    """Sequences of packed training examples in random order, each once per epoch; used like `TrainSequences`.

    Raises UserError if there are fewer tokens than one sequence holds.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, branch: Branch | None = None) -> None:
        self.packing = Packing(documents, seq_len, "training", seq_len)
        super().__init__(self.packing.num_sequences, seed, branch)
        self._seq_len = seq_len

    def next(self, n: int) -> Batch:
        """Return the next n sequences on the CPU."""
        return self.packing.batch(self.take(n, self._seq_len))


def packed_validation(documents: Documents, seq_len: int, n: int) -> Batch:
    """Return min(n, available) padded sequences on the CPU, evenly spaced and equal in every run of a corpus.

    Raises UserError if there is no target.
    """
    packing = Packing(documents, seq_len, "validation", 1)
    count = min(n, packing.num_sequences)
    return packing.batch(number * packing.num_sequences // count for number in range(count))
