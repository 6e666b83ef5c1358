"""Reading a run folder back; tolerant of a run that is still going or was killed while it wrote.

The folder may be anybody's (`gnmr.records.untrusted`): what is no regular file, too large for a run's, or no row of one is
`Damaged`, in one line.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gnmr.records.ratios import read_stream
from gnmr.records.schema import ratio_schema
from gnmr.records.untrusted import (
    MAX_DEPTH,
    MAX_EXPANSION,
    MAX_FILE,
    MAX_NAME,
    MAX_ROW,
    SMALL,
    Damaged,
    bounded,
    content,
    exists,
    opened,
    reading,
)

MAX_STEP = 2**31 - 1
MAX_UNITS = 2**16 - 1
"""The report's maps count them in 16 bits; a mixture of 64 experts in 60 layers has 12,000."""
MAX_RATIO_ROWS = 1 << 27
"""Of units by steps: 6 GB once they are read."""
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LEAST_APART = {"events.jsonl": 0, "faults.jsonl": -MAX_STEP}
"""Steps from a row to the next one at least; in the other files a step stands once."""


def decode(value: Any, room: int = MAX_DEPTH) -> Any:
    """The strings nan, inf and -inf back to floats, those of mappings too; anything else as it is.

    ValueError for what is nested too deeply or a number beyond 64 bits.
    """
    kind = type(value)
    if kind is float:
        return value
    if kind is str:
        return _SPECIAL.get(value, value)
    if kind is dict and room:
        return {key: decode(item, room - 1) for key, item in value.items()}
    return bounded(value, room)


def stored(path: Path) -> Path | None:
    """Where the rows of a .jsonl file are: itself, else its compressed copy (X.jsonl.gz), else None."""
    packed = path.with_name(path.name + ".gz")
    return path if exists(path) else packed if exists(packed) else None


def iter_jsonl(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row of a .jsonl file, as `stored`, and the offset of the byte after it (uncompressed); none without a file.

    Stops at the first line that is not whole: the last one, if a kill cut it short. `Damaged` for what no run writes:
    a damaged copy, one that expands without end, a row that is too long or too deep, or has no step that may follow on
    the row's before.
    """
    found = stored(path)
    if found is None:
        return
    packed, apart = found != path, _LEAST_APART.get(path.name, 1)
    end, number, step = 0, 0, -1
    with opened(found) as raw:
        most = SMALL + MAX_EXPANSION * os.fstat(raw.fileno()).st_size if packed else MAX_FILE
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            while line := file.readline(MAX_ROW + 1):
                end, number = end + len(line), number + 1
                if len(line) > MAX_ROW or end > most:
                    raise ValueError(f"a row of more than {MAX_ROW:,} bytes" if end <= most else "expands without end")
                row = _object(line)
                if row is None or not line.endswith(b"\n"):
                    return
                step = _next_step(row, step, apart)
                yield row, end
        except (EOFError, OSError, ValueError, zlib.error) as error:
            if isinstance(error, Damaged):
                raise
            where = f", line {number}" if type(error) is ValueError else ""
            raise Damaged(f"{found}{where}: damaged ({error})") from error


def _object(text: bytes) -> dict[str, Any] | None:
    """A JSON object, decoded; None for anything else. ValueError: see `decode`."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError:  # JSONDecodeError, or the UnicodeDecodeError of a torn character
        return None
    return decode(found) if isinstance(found, dict) else None


def _next_step(row: dict[str, Any], before: int, apart: int) -> int:
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ValueError(f"its step is {step!r:.40}, no whole number from 0 to {MAX_STEP}")
    if step < before + apart:
        raise ValueError(f"step {step} stands behind step {before}")
    return step


def iter_sound(path: Path, damage: list[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """`iter_jsonl` as far as rows are rows; what is wrong with the next one goes to `damage`."""
    try:
        yield from iter_jsonl(path)
    except Damaged as error:
        damage.append(str(error).removeprefix(f"{path.parent}/"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file; none if it is missing. A last line that a kill cut short is left out."""
    return [row for row, _ in iter_jsonl(path)]


def read_ratios(folder: Path) -> pa.Table:
    """The ratio rows of a run: ratios.parquet, or while it runs (or after a kill) what ratios.rows holds.

    `Damaged` for columns of other types than `ratio_schema`'s, steps below 1, and for more rows or units than a run
    has. Which columns are there is for the caller to see.
    """
    parquet, stream = folder / "ratios.parquet", folder / "ratios.rows"
    table = ratio_schema(()).empty_table()
    with suppress(FileNotFoundError):  # a run that ends deletes its stream when the Parquet file is there
        with opened(stream) as file:
            _check_head(stream, file)
        with reading(stream):
            try:
                table = read_stream(stream)
            except FileNotFoundError:
                table = ratio_schema(()).empty_table()
        table = _checked(stream, table)
    if table.num_rows or not exists(parquet):
        return table
    with opened(parquet) as file, reading(parquet):
        found = check_parquet(file)
        table = found.read()
    return _checked(parquet, table)


def _check_head(stream: Path, file: BinaryIO) -> None:
    """The stream's first line is read whole."""
    if len(file.readline(MAX_ROW + 1)) > MAX_ROW:
        raise Damaged(f"{stream}: cannot be read (its first line has more than {MAX_ROW:,} bytes)")


def check_parquet(file: BinaryIO) -> pq.ParquetFile:
    """The Parquet file, unless its end tells of more than a run writes. A measured number takes a byte at least."""
    found, size = pq.ParquetFile(file, page_checksum_verification=True), os.fstat(file.fileno()).st_size
    told = found.metadata
    if told.num_rows > min(MAX_RATIO_ROWS, 2**22 + size):
        raise ValueError(f"{told.num_rows:,} rows in {size:,} bytes")
    groups = [told.row_group(group).total_byte_size for group in range(told.num_row_groups)]
    if told.num_columns > 256 or sum(groups) > SMALL + MAX_EXPANSION * size:
        raise ValueError(f"{told.num_columns} columns of {sum(groups):,} bytes in {size:,}")
    return found


def _checked(path: Path, table: pa.Table) -> pa.Table:
    """The table in the types of `ratio_schema`."""
    if table.num_rows > MAX_RATIO_ROWS:
        raise Damaged(f"{path}: cannot be read ({table.num_rows:,} rows, {MAX_RATIO_ROWS:,} are the most)")
    if table.num_rows == 0:
        return table
    names, fixed = table.column_names, ratio_schema(())
    if wrong := [name for name in names if names.count(name) > 1 or not name.isprintable() or len(name) > MAX_NAME]:
        raise Damaged(f"{path}: cannot be read (column {wrong[0]!r:.60})")
    with reading(path):
        types = {name: fixed.field(name).type if name in fixed.names else pa.float64() for name in names}
        table = pa.table({name: table[name].cast(kind) for name, kind in types.items()})
        table.validate(full=True)
        if broken := [name for name in names if table[name].null_count]:
            raise ValueError(f"column {broken[0]!r} has gaps")
        if "step" in names and (first := pc.min(table["step"]).as_py()) < 1:
            raise ValueError(f"step {first}: steps count from 1")
        if "unit" in names:
            check_units(list({unit for chunk in table["unit"].chunks for unit in chunk.dictionary.to_pylist()}))
    return table


def check_units(units: object) -> list[str]:
    """The units' names; ValueError for anything but a list of so many short texts."""
    if not isinstance(units, list) or len(units) > MAX_UNITS:
        raise ValueError(f"units: not a list of at most {MAX_UNITS:,} names")
    for unit in units:
        if not isinstance(unit, str) or not 0 < len(unit) <= MAX_NAME or not unit.isprintable():
            raise ValueError(f"unit {unit!r:.60}: not a name of at most {MAX_NAME} characters")
    return units


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is missing, cut short or holds something else. `Damaged`: see `iter_jsonl`."""
    try:
        return _object(content(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{path}: damaged ({error})") from error


def calibrated_trigger(header: Mapping[str, Any]) -> tuple[int, float] | None:
    """(last step before it, trigger) of a loop that found its trigger itself; None where the header tells of none."""
    match header.get("calibrated"):
        case {"after_step": int(step), "trigger": float(trigger)} if 0 <= step <= MAX_STEP and 0 < trigger < math.inf:
            return step, trigger
    return None
