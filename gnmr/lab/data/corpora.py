"""Corpora: the sources of their documents and examples, and the validation split.

An example is a prompt, which is read, and an answer, which is learned. A document of plain text is an answer without a
prompt. Examples of gsm8k have the format of the task in lm-evaluation-harness, so that a model is scored on the format
that it was trained on. The answer is the whole solution. Examples of instructions are the user's rows. Rows with a
blank answer are skipped and counted.

A local corpus is identified by the contents of its files, so opening it reads them once (one to two seconds per GB). A
data set on the hub is identified by its name. `datasets` is imported only when rows are read.

The split never depends on the order of execution. File names determine it if possible (`gnmr/lab/data/files.py`).
Otherwise every 20th document is for validation. With fewer than 20 documents, validation is the last 5% of their text.
It is split off before tokenization, so that the tokenizer never sees it. With fewer than 20 rows of prompts and
answers, validation is the last row.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.config import DataConfig
from gnmr.lab.data.files import HUBS, ONE_IN, TRAIN, VALIDATION, library_files, local_files
from gnmr.lab.data.rows import LARGEST, Row, named, opened, read_rows, utf8
from gnmr.records.untrusted import first_line

PROMPTED = ("gsm8k", "instructions")  # values of data.name with prompts and answers
HUB_TIMEOUT = 10.0  # seconds to wait for the hub
Rows = Generator[Row, None, None]
COLUMN_WITHIN = 1000  # the text column must appear within this number of rows


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text."""

    prompt: str
    """Read but not learned. Empty for plain text."""
    answer: str
    """Learned. It is appended to the prompt without additional white space."""


class Skipped:
    """Counts the items that a corpus skips while it is read."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, what: str, place: str, number: int) -> None:
        """Record `number` items ("row{s} without text") of a file or split, which may be read again or in part."""
        self._counts[what, place] = max(number, self._counts.get((what, place), 0))

    def __str__(self) -> str:
        """Return the end of a line: "; 270 rows without text"."""
        found = Counter[str]()
        for (what, _), number in self._counts.items():
            found[what] += number
        return "".join(f"; {number:,} {what.format(s='s' * (number > 1))}" for what, number in found.items())


@dataclass(frozen=True)
class Corpus:
    """Examples that can be read any number of times, one split at a time."""

    where: str
    """The key and value that select the corpus, for messages."""
    summary: str
    """What is read, for the progress line."""
    identity: str
    """Changes whenever the examples change."""
    read: Callable[[str], Iterator[Example]]
    """Split ("train" or "validation") -> its examples with non-blank answers. Raises UserError for unreadable data."""
    streamed: bool = False
    """Read from the hub: the length is unknown, so a limit is needed."""
    skipped: Skipped = field(default_factory=Skipped)
    """The items that `read` has skipped so far."""


def open_corpus(config: DataConfig, tell: Callable[[str], None] = lambda _: None) -> Corpus:
    """Return the corpus that `config` names, and report progress to `tell`. Raises UserError if there is none."""
    skipped, prompted = Skipped(), config.name in PROMPTED
    rows: Callable[[str], Rows]
    texts: Callable[[str], Iterator[str]]
    if config.path is None and config.name in HUBS:
        hub = HUBS[config.name]
        where, summary, source = f"data.name={config.name}", f"{hub.name} {hub.config}", f"{hub.name}/{hub.config}"
        by_name, streamed = not prompted, config.name == "c4"  # the other data sets are small
        # The other split of gsm8k is the test split.
        rows = lambda split: hub_rows(config.name, TRAIN if prompted else split)
        texts = lambda split: _texts(config, rows(split), f"{hub.name} on the hub: {split}", skipped)
    else:
        local = library_files(tell) if config.name == "stdlib" else local_files(config, tell)
        where, summary, source, by_name, streamed = local.where, local.summary, local.identity, local.by_name, False
        rows = lambda split: _rows_of(local.of(split))
        texts = lambda split: chain.from_iterable(_texts_of(config, file, skipped) for file in local.of(split))

    def examples(split: str) -> Iterator[Example]:
        if prompted:
            make = _gsm8k if config.name == "gsm8k" else _instruction
            return _made(make, rows(split), config)
        return (Example("", text) for text in texts(split))

    def read(split: str) -> Iterator[Example]:
        found = examples(split)
        if not by_name:
            found = (example for place, example in every_twentieth(found, by_text=not prompted) if place == split)
        blank = 0
        for example in found:
            if prompted and not example.answer.strip():
                blank += 1
                skipped.note("row{s} without an answer", split, blank)
            else:
                yield example

    columns = [config.prompt_column, config.input_column, config.response_column] if prompted else [config.text_column]
    identity = hashlib.sha256(json.dumps([config.name, columns, source]).encode()).hexdigest()
    return Corpus(where, summary, identity, read, streamed, skipped)


def _rows_of(files: Iterable[Path]) -> Rows:
    for file in files:
        with closing(read_rows(file)) as rows:
            yield from rows


def _made(make: Callable[[Row, DataConfig], Example], rows: Rows, config: DataConfig) -> Iterator[Example]:
    with closing(rows):
        for row in rows:
            yield make(row, config)


def hub_rows(name: str, split: str) -> Rows:
    """Yield the rows of a split of the data set that data.name=`name` reads from the hub."""
    hub = HUBS[name]
    try:
        # Send one request without retries, because the library retries for half a minute and logs each attempt.
        import datasets
        from huggingface_hub import HfApi

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        HfApi().dataset_info(hub.name, timeout=HUB_TIMEOUT, expand=["sha"])
        rows = datasets.load_dataset(hub.name, hub.config, split=split, streaming=True)
        for number, cells in enumerate(rows, start=1):
            yield Row(f"{hub.name} on the hub: row {number}", cells)
    except Exception as error:  # network, gzip, JSON, Arrow: many libraries without a common base class
        raise UserError(
            f"data.name={name}: {hub.name} cannot be read from the hub ({first_line(error)}); check the network, "
            f"HF_ENDPOINT and the proxy, or download its {hub.config}/{hub.files} and pass data.path=FOLDER"
        ) from error
    finally:  # Arrow threads of a stream that outlives its reader may abort Python at exit (apache/arrow#45214)
        gc.collect()


def _texts_of(config: DataConfig, file: Path, skipped: Skipped) -> Iterator[str]:
    if not file.name.lower().endswith((".txt", ".txt.gz", ".py")):
        yield from _texts(config, read_rows(file, least=0), str(file), skipped)
        return
    try:
        with opened(file) as stream:
            raw = stream.read(LARGEST + 1)
    except Exception as error:  # OSError, EOFError, zlib.error
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error
    if len(raw) > LARGEST:
        raise UserError(f"{file}: a document of more than {LARGEST} bytes; split it into several files")
    text = raw.decode("utf-8-sig", errors="replace") if config.name == "stdlib" else utf8(raw, f"{file}:")
    if text.strip():
        yield text
    elif config.name != "stdlib":
        skipped.note("file{s} without text", str(file), 1)


def _texts(config: DataConfig, rows: Rows, where: str, skipped: Skipped) -> Iterator[str]:
    """Yield the text of each row and count the rows without text. Closes `rows`, also after an error.

    Raises UserError unless one of the first rows has the text column.
    """
    column, seen, lacking, row = config.text_column, False, 0, None
    with closing(rows):
        for number, row in enumerate(rows, start=1):
            seen = seen or column in row.cells
            if not seen and number == COLUMN_WITHIN:
                break
            text = row.text(column, optional=True) if column in row.cells else ""
            if text.strip():
                yield text
            else:
                lacking += 1
                skipped.note("row{s} without text", where, lacking)
    if row is not None and not seen:
        raise UserError(f"{where}: no column {column!r}; data.text_column must be one of {named(row.cells)}")


def every_twentieth(examples: Iterator[Example], by_text: bool) -> Iterator[tuple[str, Example]]:
    """Yield (split, example), where every 20th example is for validation.

    If there are fewer than 20, the last one is for validation, or with `by_text` the last 5% of all characters.
    """
    head = list(islice(examples, ONE_IN))
    if len(head) < ONE_IN and by_text:
        left = sum(len(example.answer) for example in head) * (ONE_IN - 1) // ONE_IN
        for example in head:
            cut, left = example.answer[:left], max(left - len(example.answer), 0)
            if cut:
                yield TRAIN, Example("", cut)
            if rest := example.answer[len(cut) :]:
                yield VALIDATION, Example("", rest)
        return
    for number, example in enumerate(chain(head, examples), start=1):
        yield (VALIDATION if number % ONE_IN == 0 or number == len(head) else TRAIN), example


# ---- prompts and answers ----


def _gsm8k(row: Row, config: DataConfig) -> Example:
    return Example(f"Question: {row.text('question')}\nAnswer:", f" {row.text('answer')}")


def _instruction(row: Row, config: DataConfig) -> Example:
    prompt = row.text(config.prompt_column, "data.prompt_column")
    if config.input_column is not None:
        prompt += _spaced(prompt, row.text(config.input_column, "data.input_column", optional=True))
    return Example(prompt, _spaced(prompt, row.text(config.response_column, "data.response_column")))


def _spaced(before: str, text: str) -> str:
    """Put a blank line before `text`, unless it is blank or white space already separates the texts."""
    if not before or not text.strip() or before[-1].isspace() or text[0].isspace():
        return text
    return f"\n\n{text}"
