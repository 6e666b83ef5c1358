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
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_PACKED = {
    b"\x1f\x8b": "compressed by gzip; let its name end in .gz (.txt.gz, .jsonl.gz), or decompress it: gunzip",
    b"PAR1\x15": "a Parquet file; let its name end in .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it: zstd -d",
    b"PK\x03\x04": "a zip archive; unpack it: unzip",
    b"BZh": "compressed by bzip2; decompress it: bunzip2",
    b"\xfd7zXZ\0": "compressed by xz; decompress it: unxz",
}
"""What files that are no text begin with."""
_BZIP2 = b"1AY&SY"  # from byte 4 on; a text may begin as the rest of the mark
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\b\x1b"})
_NO_TEXT = bytes({*range(32), 127} - {*b"\t\n\f\r"})
_LOOKED_AT = 2**16  # bytes in which `_wide` counts control characters


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
        try:
            value.encode()
            return value
        except UnicodeEncodeError:  # JSON can escape half of a character, which becomes U+FFFD
            return value.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def named(columns: Iterable[str]) -> str:
    """The names of columns or files for a message: ten at the most, cut where they are long, quoted where they are
    odd."""
    names = [name if name.isprintable() else repr(name) for name in (f"{name:.60}" for name in columns)]
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def utf8(raw: bytes, where: str) -> str:
    """Return the text of a file or a row, without its byte order mark.

    Raises `UserError`, which begins with `where`, for another encoding, naming the first wrong byte, and for what is no
    text.
    """
    refuse_packed(raw, where)
    body = raw.removeprefix(codecs.BOM_UTF8)
    for mark, name in _MARKS.items():
        if raw.startswith(mark):
            raise UserError(f"{where} is {name}, as its byte order mark says; convert it: {_convert(name)}")
    wrong, before = None, len(raw) - len(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = error
    if (found := _wide(body)) is not None:
        at, encoding = found
        raise UserError(
            f"{where} is {encoding} without a byte order mark (from byte {at + before} on); convert it: "
            f"{_convert(encoding)}"
        )
    if wrong is not None:
        reason = f"is not UTF-8 ({wrong.reason} at byte {wrong.start + before})"
        if len(body.translate(None, _NO_TEXT)) < len(body):
            raise UserError(f"{where} is a binary file: it {reason} and holds control characters") from wrong
        raise UserError(f"{where} {reason}; convert it, for example from Latin-1: {_convert('LATIN1')}") from wrong
    return text


def refuse_packed(raw: bytes, where: str) -> None:
    """UserError, which begins with `where`, for the beginning of a file that is compressed or Parquet."""
    for mark, kind in _PACKED.items():
        if raw.startswith(mark) and (mark != b"BZh" or raw[4:10] == _BZIP2):
            raise UserError(f"{where} is {kind}")


def _convert(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 OLD > NEW"


def _wide(raw: bytes) -> tuple[int, str] | None:
    """Return where bytes begin that are UTF-16 or UTF-32, UTF-8 by chance at most, and which of them.

    UTF-16 of Latin, Cyrillic, ... has a NUL or another control character in every second place, UTF-32 of any language
    NULs in two neighbouring places of four.
    """
    if b"\0" not in raw:
        return None
    for at in range(0, len(raw), _LOOKED_AT):
        block = raw[at : at + _LOOKED_AT]
        nuls = [block[place::4].count(0) for place in range(4)]
        enough = max(8, 0.9 * (len(block) // 4))
        for encoding, places in (("UTF-32LE", nuls[2:]), ("UTF-32BE", nuls[:2])):
            if min(places) >= enough and sum(nuls) < 0.9 * len(block):  # a run of NULs is neither
                return at, encoding
        even, odd = (len(half) - len(half.translate(None, _CONTROLS)) for half in (block[::2], block[1::2]))
        few, most = sorted((even, odd))
        if most >= 8 and most > len(block) / 4 and few < 0.75 * most:
            return at, "UTF-16LE" if odd > even else "UTF-16BE"
    return None


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
        batches = (batch.to_pylist() for batch in opened.iter_batches(PARQUET_ROWS))
        yield from enumerate(chain.from_iterable(batches), start=1)


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    name = file.name.lower()
    if name.endswith((".txt", ".txt.gz")):
        raise UserError(f"{file}: plain text has no columns; give .jsonl, .json or .parquet")
    with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
        for place, (number, line) in enumerate(_lines(file, stream)):
            where = f"{file}: row {number}"
            if place == 0:
                refuse_packed(line, f"{file}:")
                if line[:1] == b"[" or line == b"{":  # a list, or an object that begins in a line alone
                    rest = stream.read(LARGEST_WHOLE + 1)
                    if len(rest) > LARGEST_WHOLE:
                        raise UserError(f"{file}: JSON of more than {LARGEST_WHOLE} bytes must have a row a line")
                    yield from enumerate(_values(utf8(line + b"\n" + rest, where)), start=1)
                    return
            text = utf8(line, where)
            try:
                cells = json.loads(text)
            except RecursionError as error:
                raise UserError(f"{where} is nested too deeply") from error
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error})") from error
            yield number, cells


def _lines(file: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """(number, line without white space around it) of each that is not blank."""
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), start=1):
        if len(line) > LONGEST_LINE:
            raise UserError(f"{file}: row {number} has more than {LONGEST_LINE} bytes")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield number, line


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
