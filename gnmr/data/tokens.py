"""A corpus as token files: tokenized once, then read from the cache.

The cache folder's key covers everything that decides its content: the documents, the tokenizer and the limit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnmr.config import DataConfig
from gnmr.data import cache, corpora
from gnmr.data import tokenizer as bpe
from gnmr.data.cache import TokenCorpus
from gnmr.data.corpora import Corpus
from gnmr.data.progress import Progress
from gnmr.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_VERSION = 1  # increment it when documents, splits or tokenization change
LIMITED_VAL_TOKENS = 2_000_000  # where the training tokens are limited, validation ends here
PIECE = 1_000_000  # most characters encoded as one string; longer documents are encoded in pieces
BATCH = 2_000_000  # characters encoded in one call, about a second on one core


def prepare(config: DataConfig, needed_tokens: int, say: Callable[[str], None]) -> TokenCorpus:
    """The tokens of the corpus, from the cache or built now.

    `needed_tokens`: training tokens that the run reads; it limits a corpus from the hub unless `max_tokens` does.
    `say` receives progress lines, some of them from another thread. Raises `UserError` in one line.
    """
    if config.name == "stdlib" and config.path is not None:
        say(f"data.path={config.path} has no effect: data.name=stdlib reads this Python's library, text a path")
    corpus = corpora.open_corpus(config)
    tokenizer_file = _read_tokenizer(config)
    limit = config.max_tokens
    if limit is None and corpus.streamed:
        limit = needed_tokens + needed_tokens // 100 + 1  # + 1: the last block's last target
    folder = (
        corpora.user_path("data.cache_dir", config.cache_dir)
        / f"{config.name}-{_key(config, corpus, tokenizer_file, limit)}"
    )
    return cache.open_or_build(
        folder, lambda new, progress: _build(new, config, corpus, tokenizer_file, limit, progress), say
    )


def _key(config: DataConfig, corpus: Corpus[str], tokenizer_file: bytes | None, limit: int | None) -> str:
    """16 hex digits."""
    if tokenizer_file is not None:
        vocabulary: object = hashlib.sha256(tokenizer_file).hexdigest()
    else:
        vocabulary = [config.vocab_size, config.tokenizer_bytes]
    content = [CACHE_VERSION, config.name, corpus.identity, vocabulary, limit]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _read_tokenizer(config: DataConfig) -> bytes | None:
    if config.tokenizer is None:
        return None
    try:
        return bpe.regular_content(corpora.user_path("data.tokenizer", config.tokenizer))
    except OSError as error:
        raise UserError(
            f"data.tokenizer={config.tokenizer}: cannot be read ({error.strerror}); give a tokenizer.json or null"
        ) from error


def _build(
    folder: Path,
    config: DataConfig,
    corpus: Corpus[str],
    tokenizer_file: bytes | None,
    limit: int | None,
    progress: Progress,
) -> None:
    # Else each process forked later (data loaders, W&B) would print a warning about Rust threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    progress.begin(f"preparing {corpus.where}: {corpus.summary}")
    where = corpus.where if tokenizer_file is None else f"data.tokenizer={config.tokenizer}"
    if tokenizer_file is None:
        progress.begin(f"training the tokenizer: vocabulary of {config.vocab_size} at the most")
        tokenizer = bpe.train(_training_text(corpus, config.tokenizer_bytes, progress), config.vocab_size)
        (folder / cache.TOKENIZER).write_text(tokenizer.to_str(pretty=True))  # its own `save` has no errno
    else:
        tokenizer = bpe.load(tokenizer_file, where)
        (folder / cache.TOKENIZER).write_bytes(tokenizer_file)
    vocab_size, end = bpe.vocab_size(tokenizer), bpe.end_token(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")

    counts = {}
    for split, name, most in (
        (corpora.TRAIN, cache.TRAIN, limit),
        (corpora.VALIDATION, cache.VAL, None if limit is None else LIMITED_VAL_TOKENS),
    ):
        progress.begin(f"tokenizing {split} documents")
        counts[split] = 0
        with (folder / name).open("wb") as file:
            for ids in _encode(corpus.read(split), tokenizer, end, where):
                tokens = np.asarray(ids if most is None else ids[: most - counts[split]], dtype=dtype)
                file.write(tokens.tobytes())
                counts[split] += len(tokens)
                progress(f"tokenizing {split} documents: {counts[split]:,} tokens")
                if counts[split] == most:
                    break
        if counts[split] == 0:
            raise UserError(f"{corpus.where}: holds no {split} text")
    cache.seal(folder, vocab_size, end, dtype)
    progress.begin(
        f"{counts[corpora.TRAIN]:,} training tokens, {counts[corpora.VALIDATION]:,} validation tokens, "
        f"vocabulary {vocab_size:,}"
    )


def _training_text(corpus: Corpus[str], most: int, progress: Progress) -> Iterator[str]:
    """Training documents, up to `most` bytes of UTF-8 in all."""
    left = most
    for text in corpus.read(corpora.TRAIN):
        raw = text.encode("utf-8", errors="replace")
        yield text if len(raw) <= left else raw[:left].decode("utf-8", errors="ignore")
        left -= len(raw)
        if left <= 0:
            return
        progress(f"training the tokenizer: {(most - left) / 1e6:.1f} MB read")


def _encode(documents: Iterator[str], tokenizer: Tokenizer, end: int, where: str) -> Iterator[list[int]]:
    """Token ids, some documents at a time, the end token after each document."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece, is_last in pieces(documents):
        batch.append((piece, is_last))
        size += len(piece)
        if size >= BATCH:
            yield _encode_batch(batch, tokenizer, end, where)
            batch, size = [], 0
    yield _encode_batch(batch, tokenizer, end, where)


def _encode_batch(batch: list[tuple[str, bool]], tokenizer: Tokenizer, end: int, where: str) -> list[int]:
    encodings = bpe.encode(tokenizer, [piece for piece, _ in batch], where, offsets=False)
    ids: list[int] = []
    for encoding, (_, is_last) in zip(encodings, batch, strict=True):
        ids += encoding.ids
        if is_last:
            ids.append(end)
    return ids


def pieces(documents: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """(text, whether it ends its document); long documents are cut into pieces."""
    for text in documents:
        start = 0
        while len(text) - start > PIECE:
            stop = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
            yield text[start:stop], False
            start = stop
        yield text[start:], True
