"""Rows of .jsonl, .json, their .gz, and .parquet files, numbered so that messages can name a malformed row.

Memory is bounded: only one line, one file with a single JSON value, or one batch of a Parquet file's rows is held at a
time.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.errors import UserError
from gnmr.records.untrusted import first_line

LARGEST = 2**32  # bytes of a unit that is read as a whole: a line, a JSON list, a .txt
PARQUET_ROWS = 1000  # number of rows that are decoded together
LOOKED_AT = 2**16  # size in bytes of the blocks in which control characters are counted
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\b\x1b"})


class _Repeating(dict[str, Any]):
    """Cells of a row that names a column more than once; the last one is in the mapping."""

    def __init__(self, pairs: Iterable[tuple[str, Any]], repeated: Iterable[str]) -> None:
        super().__init__(pairs)
        self.repeated = frozenset(repeated)


def _cells(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `json` calls this with its keys and values."""
    cells = dict(pairs)
    return cells if len(cells) == len(pairs) else _Repeating(pairs, _repeated(name for name, _ in pairs))


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, number in Counter(names).items() if number > 1]


@dataclass(frozen=True)
class Row:
    """A row of a file, with cells by column name."""

    where: str
    """File and row number, for messages."""
    cells: dict[str, Any]

    def text(self, column: str, key: str | None = None, optional: bool = False) -> str:
        """Return the text in `column`, which `key` names. Raises UserError if there is no text, or more than one."""
        if isinstance(self.cells, _Repeating) and column in self.cells.repeated:
            raise UserError(f"{self.where}: has column {column!r} more than once; rename or remove all but one")
        if column not in self.cells:
            known = f"{key} must be one of" if key is not None else "it has"
            raise UserError(f"{self.where}: no column {column!r}; {known} {named(self.cells)}")
        value = self.cells[column]
        if optional and value is None:
            return ""
        if not isinstance(value, str):
            kind = "nothing" if value is None else type(value).__name__
            raise UserError(f"{self.where}: column {column!r} holds {kind}; it needs text")
        # JSON can escape half of a surrogate pair, which becomes U+FFFD.
        return value.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def named(columns: Iterable[str]) -> str:
    """Return at most ten names of columns or files for a message. Long names are cut, unprintable ones quoted."""
    names = [name if name.isprintable() else repr(name) for name in (f"{name:.60}" for name in columns)]
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def utf8(raw: bytes, where: str, *, plain: bool = False) -> str:
    """Return the text of a file or a row, without its byte order mark.

    `plain` says that the caller reads plain files alone, whatever they are called; others read .gz and .parquet too.

    Raises UserError, which begins with `where`, for another encoding, compressed data, and binary data. UTF-16 and
    UTF-32 text of some languages is valid UTF-8 by chance, with a control character at every second position.
    """
    body = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = body.decode()
        blocks = [body[at : at + LOOKED_AT] for at in range(0, len(body), LOOKED_AT)] if b"\0" in body else []
        if all(len(block.translate(None, _CONTROLS)) >= 0.75 * len(block) for block in blocks):
            return text
        problem = "many control characters, as in UTF-16 and in binary files"
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start + len(raw) - len(body)}"
    named = "if it is compressed or a Parquet file, let its name end in .gz or .parquet, else convert it"
    right = "decompress it, or convert it" if plain else named
    raise UserError(f"{where} is not UTF-8 text ({problem}); {right}: iconv -f LATIN1 (or UTF-16) -t UTF-8 OLD > NEW")


def opened(file: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz."""
    return gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb")  # type: ignore[return-value]


def read_rows(file: Path, least: int = 1) -> Generator[Row, None, None]:
    """Yield the rows of a .jsonl, .json or .parquet file, or of a .gz of the former two. A .json file may be one list.

    If each row is a line, the row number is the line number. Raises UserError with one line for malformed data, and for
    fewer rows than `least`.
    """
    found = 0
    try:
        # Closed here: a generator that is left open after an error would be closed while Python shuts down.
        with closing(_parquet(file) if file.name.lower().endswith(".parquet") else _json(file)) as numbered:
            for number, cells in numbered:
                if not isinstance(cells, dict):
                    raise UserError(f"{file}: row {number} is not an object with columns")
                found += 1
                yield Row(f"{file}: row {number}", cells)
    except UserError:
        raise
    except Exception as error:  # gzip, JSON, Arrow: many libraries without a common base class
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error
    if found < least:
        raise UserError(f"{file}: holds no rows")


def _parquet(file: Path) -> Generator[tuple[int, Any], None, None]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        repeated = _repeated(table.schema_arrow.names)
        rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(PARQUET_ROWS))
        for number, cells in enumerate(rows, start=1):
            yield number, _Repeating(cells.items(), repeated) if repeated else cells


def _json(file: Path) -> Generator[tuple[int, Any], None, None]:
    if file.name.lower().endswith((".txt", ".txt.gz")):
        raise UserError(f"{file}: plain text has no columns; give .jsonl, .json or .parquet")
    with opened(file) as stream:
        first = True
        for number, line in enumerate(iter(lambda: stream.readline(LARGEST + 1), b""), start=1):
            if len(line) > LARGEST:
                raise UserError(f"{file}: row {number} has more than {LARGEST} bytes")
            text = utf8(line, f"{file}: row {number}").strip()
            if first and (text.startswith("[") or text == "{"):  # a list, or an object that begins on a separate line
                rest = stream.read(LARGEST + 1)
                if len(rest) > LARGEST:
                    raise UserError(f"{file}: JSON of more than {LARGEST} bytes must have a row a line")
                yield from enumerate(_values(f"{text}\n{utf8(rest, f'{file}:')}"), start=1)
                return
            if text:
                first = False
                try:
                    yield number, json.loads(text, object_pairs_hook=_cells)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}: row {number} is not JSON ({error})") from error


def _values(text: str) -> Iterator[Any]:
    """Yield the items of the list in `text`, or its consecutive objects."""
    if text.startswith("["):
        yield from json.loads(text, object_pairs_hook=_cells)
        return
    decoder, space, at = json.JSONDecoder(object_pairs_hook=_cells), re.compile(r"\s*"), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        at = space.match(text, at).end()  # type: ignore[union-attr]
