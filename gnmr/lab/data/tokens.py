"""A corpus as token files, which are tokenized once and then read from the cache.

The key of the cache folder covers everything that determines its content: the documents, the tokenizer and the limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data import cache
from gnmr.lab.data import tokenizer as bpe
from gnmr.lab.data.cache import TokenCorpus
from gnmr.lab.data.corpora import PROMPTED, TRAIN, VALIDATION, Corpus, open_corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_VERSION = 3  # increment it when documents, examples, splits or tokenization change
TOKENIZER_BYTES = 50_000_000  # bytes of UTF-8 that the tokenizer is trained on at most
LIMITED_VAL_TOKENS = 2_000_000  # number of validation tokens if training tokens are limited
PIECE = 1_000_000  # maximum characters encoded as one string; longer documents are encoded in pieces
BATCH = 2_000_000  # characters encoded per call, which takes about a second on one core
SAY_EVERY = 2.0  # minimum seconds between two progress lines


def prepare(
    config: DataConfig, needed_tokens: int, say: Callable[[str], None], checkpoint: Path | None = None
) -> TokenCorpus:
    """Return the tokens of the corpus, from the cache or newly built.

    Args:
        config: Selects the corpus, and the tokenizer unless there is a checkpoint.
        needed_tokens: Training tokens that the run reads. They limit a corpus that is streamed from the hub.
        say: Receives progress lines.
        checkpoint: A folder with the tokenizer.json of a model that is fine-tuned. The corpus then consists of
            `Documents` in its tokens, of which the last one is complete in spite of the limit.

    Raises:
        UserError: With one line, if the corpus or the tokenizer cannot be used.
    """
    if config.name == "stdlib" and config.path is not None:
        warnings.warn(
            f"data.path={config.path}: has no effect, because data.name=stdlib reads this Python's library; use "
            "data.name=text",
            stacklevel=2,
        )
    packed = checkpoint is not None
    if config.name in PROMPTED and not packed:
        raise UserError(f"data.name={config.name}: prompts and answers fine-tune a checkpoint; use text for plain text")
    needed = needed_tokens + needed_tokens // 100 + (not packed)  # the last sequence's last target is one more
    cache_folder = cache.cache_folder()
    path, where = checkpoint, str(checkpoint)
    if checkpoint is None and config.tokenizer is not None:
        path, where = Path(config.tokenizer).expanduser(), f"data.tokenizer={config.tokenizer}"
    progress = Progress(say)
    corpus = open_corpus(config, progress)
    content, end = (None, None) if path is None else bpe.read(path, where)
    limit = needed if corpus.streamed else None
    trained = [config.vocab_size, TOKENIZER_BYTES]
    vocabulary = trained if content is None else hashlib.sha256(content).hexdigest()
    # The key covers everything that determines the tokens, so a folder with this name needs no comparison.
    key = [CACHE_VERSION, config.name, packed, corpus.identity, vocabulary, end, limit, packed and config.answers_only]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        progress.begin(f"preparing {corpus.where}: {corpus.summary}")
        if content is None:
            progress.begin(f"training the tokenizer: vocabulary of {config.vocab_size} at most")
            tokenizer = bpe.train(_training_text(corpus, TOKENIZER_BYTES, progress), config.vocab_size)
        else:
            tokenizer = bpe.load(content, where)
        (folder / cache.TOKENIZER).write_bytes(content or tokenizer.to_str(pretty=True).encode())
        encoder = Encoder(tokenizer, where, bpe.end_token(tokenizer, where, end), limit, packed, config.answers_only)
        written = encoder.write(folder, corpus, progress)
        if open_corpus(config, progress).identity != corpus.identity:  # the tokens would get another corpus's key
            raise UserError(f"{corpus.where}: changed while it was read; run the command again")
        progress.begin(f"{written}, vocabulary {bpe.vocab_size(tokenizer):,}{corpus.skipped}")

    folder_name = f"{config.name}-examples-{digest}" if packed else f"{config.name}-{digest}"
    tokens = cache.open_or_build(cache_folder / folder_name, build, say)
    return replace(tokens, source=corpus.identity)


def _training_text(corpus: Corpus, most: int, progress: Progress) -> Iterator[str]:
    """Yield the text of training documents, up to `most` bytes of UTF-8 in total."""
    room = most
    for example in corpus.read(TRAIN):
        raw = example.answer.encode()
        yield raw[:room].decode("utf-8", errors="ignore")
        room -= len(raw)
        if room <= 0:
            return
        progress(f"training the tokenizer: {(most - room) / 1e6:.1f} MB read")


class Progress:
    """Reports the state of long work to `say`, at most one line every `SAY_EVERY` seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = time.monotonic()

    def begin(self, text: str) -> None:
        """Report that a new kind of work begins."""
        self._said = time.monotonic()
        self._say(text)

    def __call__(self, text: str) -> None:
        """Report the state of the work if the last line is old enough."""
        if time.monotonic() - self._said >= SAY_EVERY:
            self.begin(text)


@dataclass(frozen=True)
class Encoder:
    """Writes token files."""

    tokenizer: Tokenizer
    where: str
    """Names the tokenizer in errors."""
    end: int
    """The token after each document."""
    limit: int | None
    """Largest number of training tokens. If it is set, validation ends at `LIMITED_VAL_TOKENS`."""
    packed: bool
    """Write documents with the tokenizer's begin token and the files of `cache.DOCUMENTS`. The last one is complete."""
    answers_only: bool
    """With `packed`, the tokens of a prompt are not targets."""

    def write(self, folder: Path, corpus: Corpus, progress: Progress) -> str:
        """Write the files of both splits and meta.json, and return the numbers of documents and tokens as text."""
        # Otherwise each process that is forked later (data loaders, W&B) would print a warning about Rust threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        # The first of those that the tokenizer puts before a text: GLM has two. Its id may lie outside the vocabulary.
        begin = bpe.tokens_around(self.tokenizer)[0][:1] if self.packed else []
        vocab_size = max(bpe.vocab_size(self.tokenizer), *(number + 1 for number in begin), 0)
        dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        kind, lines = "examples" if self.packed else "documents", []
        validation = None if self.limit is None else LIMITED_VAL_TOKENS
        for split, file, most in ((TRAIN, cache.TRAIN, self.limit), (VALIDATION, cache.VAL, validation)):
            progress.begin(f"tokenizing {split} {kind}")
            borders, documents, written = array("q"), 0, 0
            with (folder / file).open("wb") as ids_file:
                for ids, before, is_last in self._encoded(corpus, split, begin):
                    ids = ids if most is None or self.packed else ids[: most - written]
                    ids_file.write(np.asarray(ids, dtype=dtype).tobytes())
                    written, documents = written + len(ids), documents + is_last
                    if is_last:
                        borders.extend([written, before if self.answers_only else 0])
                    progress(f"tokenizing {split} {kind}: {documents + (not is_last):,} with {written:,} tokens")
                    if most is not None and written >= most and (is_last or not self.packed):
                        break
            if written == 0:
                missing = "examples" if self.packed else "text"
                raise UserError(f"{corpus.where}: holds no {split} {missing}{corpus.skipped}")
            if self.packed:
                (folder / cache.DOCUMENTS[file]).write_bytes(np.array(borders, dtype="<i8").tobytes())
            lines.append(f"{documents:,} {split} {kind} with {written:,} tokens")
        cache.seal(folder, vocab_size, self.end, dtype)
        return ", ".join(lines)

    def _encoded(self, corpus: Corpus, split: str, begin: list[int]) -> Iterator[tuple[list[int], int, bool]]:
        """Yield (token ids, their number before the first target, whether they end their document).

        A document is `begin`, its ids, and the end token. A long one without a prompt arrives in pieces. Several
        documents are encoded at a time.
        """
        controls = bpe.Controls.of(self.tokenizer, self.end)
        batch: list[tuple[str, int, bool, bool]] = []  # text, characters of the prompt, begins and ends its document
        size = written = 0
        for example in corpus.read(split):
            texts = [(example.prompt + example.answer, True)] if example.prompt else pieces(example.answer)
            for number, (text, is_last) in enumerate(texts):
                if in_text := len(controls.written.findall(text)):
                    written += in_text
                    corpus.skipped.note("control token{s} in the text, read as text", split, written)
                batch.append((text, len(example.prompt), number == 0, is_last))
                size += len(text)
                if size >= BATCH:
                    yield from self._encode(batch, controls, begin)
                    batch, size = [], 0
        yield from self._encode(batch, controls, begin)

    def _encode(
        self, batch: list[tuple[str, int, bool, bool]], controls: bpe.Controls, begin: list[int]
    ) -> Iterator[tuple[list[int], int, bool]]:
        with_prompts = any(prompt for _, prompt, *_ in batch)
        texts = [text for text, *_ in batch]
        encodings = bpe.encode(self.tokenizer, texts, self.where, controls, offsets=with_prompts)
        for encoding, (_, prompt, is_first, is_last) in zip(encodings, batch, strict=True):
            before = 0
            if prompt:  # a token that contains any of the answer belongs to the answer
                stops = (place for place, (_, stop) in enumerate(encoding.offsets) if stop > prompt)
                before = next(stops, len(encoding))
                before += len(begin) if before else 0
            ids = encoding.ids
            if is_first:
                ids = [*begin, *ids]
            if is_last:
                ids = [*ids, self.end]
            yield ids, before, is_last


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a document, each with True if it is the last."""
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:stop], False
        start = stop
    yield text[start:], True
