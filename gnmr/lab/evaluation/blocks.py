"""Batches of token blocks for a subject, which `gnmr diagnose` reads."""

from __future__ import annotations

import codecs
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gnmr.errors import UserError, plural
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.cache import Documents
from gnmr.lab.data.corpora import utf8
from gnmr.lab.data.packing import packed_validation
from gnmr.lab.data.sequences import validation_sequences
from gnmr.lab.evaluation.inputs import Examples, examples_in_folder, examples_of_text
from gnmr.lab.evaluation.subjects import Subject, run_corpus
from gnmr.lab.models.kinds import CAUSAL, IMAGE_TEXT
from gnmr.lab.train.build import apart
from gnmr.measure.kl import IGNORED

MOST_TEXT = 1 << 26
"""Largest number of bytes of a text that is read."""
TOKENS = 1024
"""Default tokens per batch of a run. A batch of a checkpoint has half of it."""
_SHORTEST = 32
"""Tokens of the shortest blocks that a message advises."""
LONGEST = 128
"""Default tokens per block of a Hugging Face checkpoint. An estimate by sequence gets one sample per sequence, so many
short sequences are more informative than a few long ones."""


@dataclass(frozen=True)
class TextBlocks:
    """Disjoint batches of equal size."""

    batches: list[Batch]
    held_out: list[Batch]
    length: int
    """Tokens per block."""
    size: int
    """TextBlocks per batch."""


def blocks_of(
    subject: Subject,
    data: Path | None,
    *,
    batches: int,
    held_out: int,
    length: int | None = None,
    size: int | None = None,
) -> TextBlocks:
    """Return `batches` and `held_out` batches of blocks that are spread over the text and then permuted.

    The result is the same in every call.

    Args:
        subject: The model; it determines the tokenizer and the longest block.
        data: A text file in the subject's tokens, a folder of sound or pictures with a text each (`inputs`), or None
            for the validation data of a run.
        batches: The number of batches.
        held_out: The number of further batches, which share no block with the former.
        length: Tokens per block. By default the run's training length, or for a checkpoint at most `LONGEST`.
        size: TextBlocks per batch. By default enough for `TOKENS`, or fewer if the text is short.

    Raises:
        UserError: The text is missing or too short, a block is too long, or a checkpoint has no text.
    """
    run = subject.facts["kind"] == "run"
    if data is None and not run:
        raise UserError(f"{subject.name}: a checkpoint brings no text: give data=FILE.txt")
    longest = subject.max_length
    if length is not None and length > longest:
        raise UserError(f"block={length}: the model reads at most {longest} tokens")
    length = length or (longest if run else min(longest, LONGEST))
    blocks_wanted = size or max(1, (TOKENS if run else TOKENS // 2) // length)
    num_batches = batches + held_out
    pool, where = _pool(subject, data, length, num_batches * blocks_wanted)
    # A short text makes smaller batches, unless the user has named a size.
    blocks_per_batch = min(blocks_wanted, pool.number // num_batches)
    if blocks_per_batch == 0 or (size is not None and blocks_per_batch < size):
        needed = num_batches * (size or 1)
        # The blocks of this length that the text has, cut into as many as are needed.
        shorter = pool.number * length // needed
        remedy = f"block={shorter}" if shorter >= _SHORTEST else "fewer batches"
        raise UserError(
            f"{where}: has {pool.number} blocks of {length} tokens and needs {needed}: batches={batches} and "
            f"{held_out} held out, of {size or 1} each; use more text, or {remedy}"
        )
    # The seed is fixed: every diagnosis of a subject reads the same batches.
    order = torch.randperm(pool.number, generator=torch.Generator().manual_seed(0))[: num_batches * blocks_per_batch]
    all_batches = [pool.batch(places) for places in order.split(blocks_per_batch)]
    empty = sum(batch.num_targets == 0 for batch in all_batches)
    if empty:
        raise UserError(f"{where}: {plural(empty, 'batch')} without targets; use larger ones (batch_size)")
    all_batches = [batch.to(subject.device) for batch in all_batches]
    return TextBlocks(all_batches[:batches], all_batches[batches:], length, blocks_per_batch)


def _pool(subject: Subject, data: Path | None, length: int, number: int) -> tuple[Examples, str]:
    """Return the sequences, at most `number` of a causal language model, and their source for messages."""
    if data is not None and data.is_dir():
        return examples_in_folder(subject, data, length), f"data={data}"
    if data is not None and subject.kind not in (CAUSAL, IMAGE_TEXT):
        return examples_of_text(subject, _encoded(subject, data), length), f"data={data}"
    blocks, where = _blocks(subject, data, length, number)

    def batch(places: torch.Tensor) -> Batch:
        positions = None if blocks.positions is None else blocks.positions[places]
        return Batch(blocks.tokens[places], blocks.targets[places], positions)

    return Examples(len(blocks), batch), where


def _blocks(subject: Subject, data: Path | None, length: int, number: int) -> tuple[Batch, str]:
    """Return at most `number` blocks, which may be none, and their source for messages.

    A block of a given text begins with the tokens that the tokenizer puts before a text, if it does so: many models
    predict badly without them, and their largest activations are there. None of them is a target.
    """
    tokens = _encoded(subject, data) if data is not None else apart(run_corpus(Path(subject.name)), subject.model).val
    where = f"data={data}" if data is not None else f"{subject.name}: its validation data"
    if isinstance(tokens, Documents):
        return packed_validation(tokens, length, number), where
    begin = subject.text.begin() if data is not None else []
    new_tokens = length - max(len(begin) - 1, 0)  # the first is in place of the last target of the sequence before it
    if new_tokens < 1:
        raise UserError(f"block={length}: {subject.name} puts {len(begin)} tokens before a text; use longer blocks")
    if len(tokens) <= new_tokens:
        return Batch.of_sequences(torch.empty((0, length + 1), dtype=torch.int64)), where
    blocks = validation_sequences(tokens, new_tokens, number)
    if not begin:
        return blocks, where
    _check_token(subject, max(begin))
    sequences = torch.cat([torch.tensor(begin).expand(len(blocks), -1), blocks.targets], dim=1)
    targets = sequences[:, 1:].clone()
    targets[:, : len(begin) - 1] = IGNORED
    return Batch(sequences[:, :-1], targets), where


def _encoded(subject: Subject, data: Path) -> np.ndarray:
    """Return the file's tokens."""
    try:
        if not data.is_file():  # reading a pipe would block
            raise UserError(f"data={data}: {'is not a file' if data.exists() else 'there is no such file'}")
        with data.open("rb") as file:
            raw = file.read(MOST_TEXT)
    except OSError as error:
        raise UserError(f"data={data}: cannot be read ({error.strerror or error})") from error
    if len(raw) == MOST_TEXT:
        warnings.warn(f"data={data}: {MOST_TEXT / 2**20:.0f} MiB of it are read, the first", stacklevel=2)
        ends = codecs.getincrementaldecoder("utf-8")("ignore")
        ends.decode(raw[-3:])
        raw = raw[: len(raw) - len(ends.getstate()[0])]  # drop a partial character
    ids = np.array(subject.text.plain(utf8(raw, f"data={data}:", plain=True), subject.name), dtype=np.int64)
    _check_token(subject, int(ids.max(initial=0)))
    return ids


def _check_token(subject: Subject, token: int) -> None:
    """Raise UserError if the model has no such token."""
    if token >= subject.vocab_size:
        raise UserError(f"{subject.name}: its tokenizer has token {token}, the model {subject.vocab_size}")
