"""Rows of .jsonl, .json, their .gz, and .parquet files, numbered so that messages can name a malformed one.

Memory is bounded: a line, a file that is one JSON value, or a batch of a Parquet file's rows is held at a time.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.errors import UserError

LONGEST_LINE = 2**30  # bytes
LARGEST_WHOLE = 2**32  # bytes of what cannot be read a line at a time: a list, an indented object, a .txt
PARQUET_ROWS = 1000  # decoded together


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
            raise UserError(f"{self.where}: no column {column!r}; {known} {named(self.cells)}")
        value = self.cells[column]
        if optional and value is None:
            return ""
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UserError(f"{self.where}: column {column!r} holds {kind}; it needs text")
        return whole_characters(value)


def named(columns: Iterable[str]) -> str:
    """The names of columns or files for a message: ten at the most, cut where they are long, quoted where they are
    odd."""
    names = [name if name.isprintable() else repr(name) for name in (f"{name:.60}" for name in columns)]
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def whole_characters(text: str) -> str:
    """`text` as UTF-8 can hold it: JSON can escape half of a character, which becomes U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def read_rows(file: Path, least: int = 1) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .parquet file or of a .gz of the former; a .json may be one list.

    A row's number is its line's where a row is a line. Raises `UserError` in one line for what is malformed, and for
    fewer rows than `least`.
    """
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: is no regular file")  # a pipe would be waited for
    found = 0
    try:
        for number, cells in _parquet(file) if file.name.lower().endswith(".parquet") else _json(file):
            if not isinstance(cells, dict):
                raise UserError(f"{file}: row {number} is no object with columns")
            found += 1
            yield Row(f"{file}: row {number}", cells)
    except UserError:
        raise
    except RecursionError as error:
        raise UserError(f"{file}: is nested too deeply") from error
    except Exception as error:  # gzip, Arrow: many libraries, no common base
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{file}: cannot be read ({type(error).__name__}: {reason})") from error
    if found < least:
        raise UserError(f"{file}: holds no rows")


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        batches = opened.iter_batches(PARQUET_ROWS)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    name = file.name.lower()
    if name.endswith(".txt"):
        raise UserError(f"{file}: plain text has no columns; give .jsonl, .json or .parquet")
    with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
        begun = False
        for number, line in _lines(file, stream):
            if not begun and (line[:1] == b"[" or line == b"{"):  # a list, or an object that begins in a line alone
                rest = stream.read(LARGEST_WHOLE + 1)
                if len(rest) > LARGEST_WHOLE:
                    raise UserError(f"{file}: JSON of more than {LARGEST_WHOLE} bytes must have a row a line")
                yield from enumerate(_values(_decoded(file, number, line + b"\n" + rest)), start=1)
                return
            begun = True
            text = _decoded(file, number, line)
            try:
                cells = json.loads(text)
            except RecursionError as error:
                raise UserError(f"{file}: row {number} is nested too deeply") from error
            except ValueError as error:
                raise UserError(f"{file}: row {number} is not JSON ({error})") from error
            yield number, cells


def _lines(file: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """(number, line without white space around it) of each that is not blank."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"{file}: row {number} has more than {LONGEST_LINE} bytes")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield number, line


def _decoded(file: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: row {number} is not UTF-8 ({error.reason} at byte {error.start})") from error


def _values(text: str) -> Iterator[Any]:
    """The items of the list that `text` is, or the objects that follow one another in it."""
    if text.startswith("["):
        yield from json.loads(text)
        return
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        while text[at : at + 1].isspace():
            at += 1
