"""Examples for fine-tuning: a prompt and the answer that is learned.

gsm8k has the form of lm-evaluation-harness' task of that name, so that a model is scored as it was trained; the answer
is the whole solution. instructions are rows of the user's. Documents of a plain corpus (stdlib, text, c4, wikitext2)
are answers without a prompt, split as gnmr/data/corpora.py says.

Rows are split like documents: by the files' names, else every 20th is for validation; of fewer than 20 the last one.
Rows with a blank answer are passed over.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from gnmr.config import DataConfig
from gnmr.data import corpora
from gnmr.data.corpora import ONE_IN, TRAIN, VALIDATION
from gnmr.errors import UserError


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text."""

    prompt: str
    """Read, not learned; empty for plain text."""
    answer: str
    """Learned; follows the prompt as it stands, so it brings its own white space."""


@dataclass(frozen=True)
class Examples:
    """Examples that can be read any number of times, a split at a time."""

    where: str
    """The key and value that chose them, as messages name it."""
    summary: str
    """What is read, for the progress line."""
    identity: str
    """Changes with anything that changes the examples."""
    read: Callable[[str], Iterator[Example]]
    """Split ("train" or "validation") -> its examples. Raises `UserError` for what cannot be read."""
    streamed: bool = False
    """From the hub: of no known length, so a limit is needed."""


def open_examples(config: DataConfig) -> Examples:
    """The examples that `config` names; raises `UserError` if there are none."""
    if config.name not in ("gsm8k", "instructions"):
        corpus = corpora.open_corpus(config)
        return Examples(
            corpus.where,
            corpus.summary,
            corpus.identity,
            lambda split: (Example("", text) for text in corpus.documents(split)),
            corpus.streamed,
        )
    make = _gsm8k if config.name == "gsm8k" else _instruction
    if config.path is None:
        hub = corpora.HUBS[config.name]
        where, summary, source = f"data={config.name}", f"{hub.name} {hub.config}", f"{hub.name}/{hub.config}"

        def read(split: str) -> Iterator[Example]:
            rows = enumerate(corpora.hub_rows(config.name, TRAIN), start=1)  # its only other split is the test split
            return _of_split((make(Row(f"{hub.name} on the hub: row {n}", row), config) for n, row in rows), split)
    else:
        local = corpora.local_files(config)
        where, summary, source = local.where, local.summary, local.identity

        def read(split: str) -> Iterator[Example]:
            def of(names: list[str]) -> Iterator[Example]:
                rows = chain.from_iterable(read_rows(local.files[name]) for name in names)
                return (make(row, config) for row in rows)

            return of(local.splits[split]) if local.splits[VALIDATION] else _of_split(of(local.splits[TRAIN]), split)

    columns = [config.prompt_column, config.input_column, config.response_column]
    identity = hashlib.sha256(json.dumps([config.name, columns, source]).encode()).hexdigest()
    return Examples(where, summary, identity, lambda split: (each for each in read(split) if each.answer.strip()))


def _of_split(examples: Iterator[Example], split: str) -> Iterator[Example]:
    """Every 20th for validation; of fewer than 20 the last."""
    head = list(islice(examples, ONE_IN))
    for number, example in enumerate(chain(head, examples), start=1):
        if (VALIDATION if number % ONE_IN == 0 or number == len(head) else TRAIN) == split:
            yield example


# ---- rows to examples ----


@dataclass(frozen=True)
class Row:
    """A row of a file, by the names of its columns."""

    where: str
    """File and number, as messages name them."""
    cells: dict[str, Any]

    def text(self, column: str, key: str | None = None, optional: bool = False) -> str:
        """The text in `column`, which `key` names; raises `UserError` if there is none."""
        if column not in self.cells:
            known = f"{key} must be one of" if key is not None else "it has"
            raise UserError(f"{self.where}: no column {column!r}; {known} {', '.join(self.cells)}")
        value = self.cells[column]
        if optional and value is None:
            return ""
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UserError(f"{self.where}: column {column!r} holds {kind}; it needs text")
        return value


def _gsm8k(row: Row, config: DataConfig) -> Example:
    return Example(f"Question: {row.text('question')}\nAnswer:", f" {row.text('answer')}")


def _instruction(row: Row, config: DataConfig) -> Example:
    prompt = row.text(config.prompt_column, "data.prompt_column")
    if config.input_column is not None:
        prompt += _spaced(prompt, row.text(config.input_column, "data.input_column", optional=True))
    return Example(prompt, _spaced(prompt, row.text(config.response_column, "data.response_column")))


def _spaced(before: str, text: str) -> str:
    """`text` with a blank line in front, unless it is blank or there is white space between the two already."""
    if not before or not text.strip() or before[-1].isspace() or text[0].isspace():
        return text
    return f"\n\n{text}"


# ---- files to rows ----


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .parquet file or of a .gz of the former; a .json may be one list.

    A row's number is its line's where a row is a line. Unlike the `datasets` library, which reads corpora, this can
    tell which row is malformed (`UserError`).
    """
    row = None
    try:
        for number, cells in _parquet(file) if file.name.lower().endswith(".parquet") else _json(file):
            row = Row(f"{file}: row {number}", cells)
            if not isinstance(cells, dict):
                raise UserError(f"{row.where} is no object with columns")
            yield row
    except UserError:
        raise
    except Exception as error:  # gzip, UTF-8, Arrow: many libraries, no common base
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {reason})") from error
    if row is None:
        raise UserError(f"{file}: holds no rows")


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    batches = pq.ParquetFile(file).iter_batches()
    return enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    name = file.name.lower()
    if name.endswith(".txt"):
        raise UserError(f"{file}: plain text has no columns; give .jsonl, .json or .parquet")
    with (
        gzip.open(file, "rt", encoding="utf-8-sig")
        if name.endswith(".gz")
        else file.open(encoding="utf-8-sig") as stream
    ):
        lines = ((number, line) for number, line in enumerate(stream, start=1) if line.strip())
        for place, (number, line) in enumerate(lines):
            if place == 0 and line.lstrip().startswith("["):
                yield from enumerate(json.loads("".join([line, *(rest for _, rest in lines)])), start=1)
                return
            try:
                cells = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}: row {number} is not JSON ({error})") from error
            yield number, cells
