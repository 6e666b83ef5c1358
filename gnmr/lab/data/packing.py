"""Examples as blocks of seq_len tokens: documents that share a block do not see each other, only answers are targets.

A document is [begin token] prompt answer [end token]; the begin token stands there if the checkpoint's tokenizer puts
one before a text itself. Prompt and answer are encoded as one text, as the model will read and write it; a token that
holds any of the answer belongs to the answer.

    document     <s>  2   +   2   =   4  </s>      prompt "2 + 2 =", answer " 4"
    inputs       <s>  2   +   2   =   4            the end token is a target alone,
    targets       _   _   _   _   4  </s>          the first token none
    positions     0   1   2   3   4   5

**Choice 45** (what the paper leaves open):
- Best fit in the order of the corpus: a document goes into the block with the least room that holds it, of equal ones
  into the one that had this room first, else into a new block. Nothing but the documents' lengths and seq_len decides,
  in integers, so a resumed run packs the same blocks.
- A document of more than seq_len + 1 tokens is cut into pieces as a text is cut into blocks: a piece begins with the
  last target of the piece before, every token but the document's first is a target once, and no piece sees another. A
  piece without any target (a long prompt's) is left out; so no block is without one.
- What is left of a block is padding: the end token, positions from 0, no targets.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import cache, corpora, tokens
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.data.batch import IGNORED, Batch
from gnmr.lab.data.blocks import BlockOrder
from gnmr.lab.data.cache import Documents, TokenCorpus
from gnmr.lab.data.examples import open_examples
from gnmr.lab.data.progress import Progress

CACHE_VERSION = 2  # increment it when examples, splits or tokenization change


def prepare_packed(
    config: DataConfig, needed_tokens: int, say: Callable[[str], None], checkpoint: Path | None = None
) -> TokenCorpus:
    """The tokenized examples (`Documents`), from the cache or made now.

    `checkpoint` is a folder with a tokenizer.json; `data.tokenizer`, such a file or folder, comes first.
    `needed_tokens`: training tokens that the run reads; it limits a corpus from the hub without an end, unless
    `max_tokens` limits any. The document that reaches the limit is kept whole. `say` receives progress lines, some of
    them from another thread. Raises `UserError` in one line.
    """
    with Progress(say) as progress:
        examples = open_examples(config, progress)
    if config.tokenizer is not None:
        path, where = corpora.user_path("data.tokenizer", config.tokenizer), f"data.tokenizer={config.tokenizer}"
    elif checkpoint is not None:
        path, where = checkpoint, str(checkpoint)
    else:
        raise UserError(f"data.tokenizer=null: {config.name} needs a tokenizer.json or a checkpoint's folder here")
    content, end = bpe.read(path, where)
    limit = tokens.limit_of(config, examples, needed_tokens + needed_tokens // 100)
    key = [CACHE_VERSION, examples.identity, hashlib.sha256(content).hexdigest(), end, limit, config.answers_only]

    def build(folder: Path, progress: Progress) -> None:
        tokenizer = bpe.load(content, where, end)
        (folder / cache.TOKENIZER).write_bytes(content)
        progress.begin(f"preparing {examples.where}: {examples.summary}")
        encoder = tokens.Encoder(
            tokenizer, where, bpe.end_token(tokenizer, end), limit, borders=True, answers_only=config.answers_only
        )
        found = encoder.write(folder, examples, progress).items()
        tokens.unchanged(examples, open_examples(config, progress))
        told = ", ".join(f"{number:,} {split} examples with {size:,} tokens" for split, (number, size) in found)
        progress.begin(f"{told}{examples.skipped}")

    return cache.open_or_build(tokens.cache_folder(config, f"{config.name}-examples", key), build, say)


# ---- documents to blocks ----


class Packing:
    """Which pieces of which documents lie in which block; see the module's text for the rule."""

    def __init__(self, documents: Documents, seq_len: int) -> None:
        ends = np.asarray(documents.borders[:, 0])
        begins = np.concatenate([[0], ends[:-1]])
        targets = np.maximum(ends - begins - 1, 0)
        counts = -(-targets // seq_len)
        owner = np.repeat(np.arange(len(ends)), counts)
        place = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)  # of a piece in its document
        start = begins[owner] + place * seq_len
        size = np.minimum(seq_len, targets[owner] - place * seq_len)
        first = np.asarray(documents.borders[:, 1])[owner] + begins[owner]  # the first token with loss
        kept = start + size >= first

        self.cut = int((counts > 1).sum())
        """Documents in more than one piece."""
        self.left_out = int((~kept).sum())
        """Pieces without a target."""
        self.examples = len(np.unique(owner[kept]))
        self.size = int(size[kept].sum())
        """Inputs that are no padding."""
        block = _best_fit(size[kept].tolist(), seq_len)
        self.num_blocks = max(block, default=-1) + 1
        order = np.argsort(block, kind="stable")
        self._pieces = np.stack([start[kept], size[kept], first[kept]], axis=1)[order]
        self._bounds = np.searchsorted(np.asarray(block)[order], np.arange(self.num_blocks + 1))
        self._documents = documents
        self._seq_len = seq_len

    @property
    def summary(self) -> str:
        """One line for the user."""
        padding = 1 - self.size / (self.num_blocks * self._seq_len)
        line = f"{self.examples:,} examples in {self.num_blocks:,} blocks of {self._seq_len}, {padding:.1%} padding"
        if self.cut:
            line += f"; {self.cut:,} longer than a block and cut"
        return line + (f", {self.left_out:,} pieces without any answer left out" if self.left_out else "")

    def batch(self, blocks: Iterable[int]) -> Batch:
        """The blocks of these numbers, on the CPU."""
        blocks = list(blocks)
        shape = len(blocks), self._seq_len
        inputs = np.full(shape, self._documents.end_token, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        for row, block in enumerate(blocks):
            at = 0
            for start, size, first in self._pieces[self._bounds[block] : self._bounds[block + 1]].tolist():
                ids = self._documents.tokens[start : start + size + 1]
                without = max(first - start - 1, 0)  # inputs before the one whose target is the first with loss
                inputs[row, at : at + size] = ids[:-1]
                targets[row, at + without : at + size] = ids[1 + without :]
                positions[row, at : at + size] = np.arange(size)
                at += size
            positions[row, at:] = np.arange(self._seq_len - at)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(positions))


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    """The block of each piece; blocks are numbered in the order in which they are opened."""
    chosen: list[int] = []
    number = 0
    waiting: dict[int, deque[int]] = {}  # room -> blocks that have it, in the order in which they came to have it
    rooms: list[int] = []  # the keys of `waiting`, sorted
    for size in sizes:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, block, number = capacity, number, number + 1
        else:
            room = rooms[at]
            block = waiting[room].popleft()
            if not waiting[room]:
                del waiting[room], rooms[at]
        chosen.append(block)
        if room > size:
            if room - size not in waiting:
                waiting[room - size] = deque()
                insort(rooms, room - size)
            waiting[room - size].append(block)
    return chosen


class PackedBlocks(BlockOrder):
    """Blocks of packed training examples in random order, each once an epoch; used as `TrainBlocks` is.

    `packing.summary` says how many examples were cut. Raises `UserError` for fewer tokens than one block holds.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int) -> None:
        self.packing = _packing(documents, seq_len, "training", seq_len)
        super().__init__(self.packing.num_blocks, seed)
        self._seq_len = seq_len

    def next(self, n: int) -> Batch:
        """The next n blocks, on the CPU; crosses epoch borders."""
        return self.packing.batch(self.take(n, self._seq_len))


def packed_validation(documents: Documents, seq_len: int, n: int) -> Batch:
    """min(n, available) blocks on the CPU, spread evenly over the blocks; the same in every run of a corpus.

    They are padded where the examples do not fill them. Raises `UserError` if there is no target.
    """
    packing = _packing(documents, seq_len, "validation", 1)
    count = min(n, packing.num_blocks)
    return packing.batch(number * packing.num_blocks // count for number in range(count))


def _packing(documents: Documents, seq_len: int, split: str, least: int) -> Packing:
    packing = Packing(documents, seq_len)
    if packing.size < least:
        raise UserError(
            f"training.seq_len={seq_len}: the {split} examples have {packing.size} tokens, {least} are needed; "
            "use more examples or a smaller training.seq_len"
        )
    return packing
