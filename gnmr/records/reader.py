"""Read a run folder back, also while the run is going or after it was killed.

The folder may come from somebody else (`gnmr.records.untrusted`). `Damaged`, in one line, is raised if a file is not a
regular file, is too large, or has an invalid row.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gnmr.records.schema import unit_schema
from gnmr.records.untrusted import MAX_NAME, MAX_ROW, Damaged, bounded, content, exists, opened, reading, text

UNITS = "units.arrows"  # the file of the per-unit rows (`gnmr.records.unit_stream`)
FILES = (
    *("steps.jsonl", "eval.jsonl", "events.jsonl", "faults.jsonl", "scores.jsonl", UNITS),
    *("summary.json", "header.json", "config.yaml"),
)
"""The files of a run folder, its checkpoints aside."""
_MARKER = b"\xff\xff\xff\xff"  # the first four bytes of each message of a stream
END_OF_STREAM = 8  # bytes of the marker that pyarrow's own writer appends when it is closed
MAX_STEP = 2**31 - 1
MAX_UNITS = 2**16 - 1  # the report's maps count them in 16 bits; a mixture of 64 experts in 60 layers has 12,000
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SEVERAL = {"events.jsonl": 0, "faults.jsonl": -MAX_STEP}
"""Least distance between the steps of two rows; in the other files a step occurs once."""


def decode(value: Any) -> Any:
    """Return the value with the strings nan, inf and -inf as floats, also inside mappings."""
    if type(value) is str:
        return _SPECIAL.get(value, value)
    return {key: decode(item) for key, item in value.items()} if type(value) is dict else value


def iter_jsonl(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of a .jsonl file and the offset of the byte after it; nothing if there is no file.

    A last line without its end is left out, because a kill may have cut it short.

    Raises:
        Damaged: another line is no JSON object, a row is too long or too deep, or a step cannot follow that of the row
            before.
    """
    try:
        file = opened(path)
    except FileNotFoundError:
        return
    end, step, apart = 0, -1, _SEVERAL.get(path.name, 1)
    with file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW + 1), b""), 1):
            with reading(f"{path}, line {number}"):
                if len(line) > MAX_ROW:
                    raise ValueError(f"a row of more than {MAX_ROW:,} bytes")
                # Within the bound, only the last line of a file can lack its end.
                if not line.endswith(b"\n"):
                    return
                if (row := _object(line)) is None:
                    raise ValueError("not a JSON object")
                after = row.get("step")
                # `type` and not isinstance, because True is an int.
                if type(after) is not int or not max(0, step + apart) <= after <= MAX_STEP:
                    raise ValueError(f"step {after!r:.40} comes after step {step}")
            step, end = after, end + len(line)
            yield row, end


def _object(data: bytes) -> dict[str, Any] | None:
    """Return a JSON object, decoded; None for anything else. Raises ValueError if it is nested too deeply."""
    try:
        tree = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError:  # JSONDecodeError, or the UnicodeDecodeError of a torn character
        return None
    return decode(bounded(tree)) if isinstance(tree, dict) else None


def iter_sound(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield what `iter_jsonl` yields, up to a damaged row.

    Args:
        path: a .jsonl file, which may be missing.
    """
    with suppress(Damaged):
        yield from iter_jsonl(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file; none if it is missing. A last line that a kill cut short is left out.

    Raises:
        Damaged: another row is damaged, see `iter_jsonl`.
    """
    return [row for row, _ in iter_jsonl(path)]


def check_rows(folder: Path, steps: Sequence[float], planned: int | None = None) -> None:
    """Compare the rows of a run with its summary, its length and its end.

    Args:
        folder: the run folder.
        steps: the steps of the rows of steps.jsonl.
        planned: the number of steps that the config asks for; None: unknown.

    Raises:
        Damaged: if rows are missing.
    """
    path, last, number = folder / "steps.jsonl", int(steps[-1]) if len(steps) else 0, len(steps)
    if number and last - int(steps[0]) + 1 != number:
        raise Damaged(f"{path}: {number:,} rows up to step {last:,}, so rows are missing; copy the run again")
    summarized = (read_json(folder / "summary.json") or {}).get("steps")
    if exists(path) and summarized not in (None, number):
        raise Damaged(f"{path}: {number:,} rows, and summary.json counts {summarized:,}; copy the run again")
    if exists(folder / "DONE") and planned is not None and last < planned:
        raise Damaged(
            f"{folder / 'DONE'}: the rows end after step {last:,} of {planned:,}; remove DONE, and the command that "
            "began the run continues it"
        )


@dataclass(frozen=True)
class FaultWindow:
    """One fault: the unit's low-cost path fails from step `start` to step `end`, both inclusive."""

    unit: str
    start: int
    end: int
    kind: str = ""
    magnitude: float | None = None


def read_windows(folder: Path) -> list[FaultWindow]:
    """Return the windows of a run folder's faults.jsonl, in order; none if it is missing.

    Raises:
        Damaged: a row has no unit, first or last step.
    """
    path, windows = folder / "faults.jsonl", list[FaultWindow]()
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            unit, start, end = str(row["unit"]), int(row["step"]), int(row["end"])
            magnitude = None if row.get("magnitude") is None else float(row["magnitude"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Damaged(f"{path}, line {number}: not a fault window (step, end and unit are needed)") from error
        if not start <= end <= MAX_STEP:
            raise Damaged(f"{path}, line {number}: not a fault window (it ends at {end})")
        windows.append(FaultWindow(unit, start, end, text(row.get("kind") or ""), magnitude))
    return windows


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing, cut short or holds something else.

    Raises:
        Damaged: the file is a link or no regular file, is too large, or is nested too deeply.
    """
    try:
        data = content(path)
    except FileNotFoundError:
        return None
    with reading(path):
        return _object(data)


def open_units(path: Path) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield each record batch of an Arrow IPC stream and the offset of the byte after it.

    A last message that the file cuts short is left out.

    Raises:
        Damaged: the file is not such a stream.
    """
    with opened(path) as file:
        data = pa.py_buffer(file.read())
    with reading(path):
        ends = list(_batch_ends(data))
        if ends:
            # The slice keeps pyarrow from reading into a torn message.
            stream = pa.ipc.open_stream(data.slice(0, ends[-1]))
            for end in ends:
                yield stream.read_next_batch(), end


def _batch_ends(data: pa.Buffer) -> Iterator[int]:
    """Yield the offset behind each record batch that is there as a whole.

    Raises ValueError if a message that is not whole has a whole one behind it, because a kill cuts only the last one.
    """
    start = 0
    while start + 8 <= data.size:
        if data.slice(start, 4).to_pybytes() != _MARKER:
            raise ValueError(f"no message at byte {start}")
        message, end = _message(data, start)
        # A kill cuts the last message; whole record batches after it mean that the file was damaged otherwise.
        if message is None:
            # A message begins at a multiple of 8 bytes with the marker.
            words = np.frombuffer(data, np.uint32, count=(data.size - start - 8) // 8 * 2, offset=start + 8)[::2]
            for place in start + 8 + 8 * np.flatnonzero(words == np.frombuffer(_MARKER, np.uint32)):
                with suppress(OSError, ValueError):
                    later, _ = _message(data, int(place))
                    if later is not None and later.type == "record batch":
                        break
            else:
                return
            raise ValueError(f"the message at byte {start} is damaged")
        start = end
        if message.type == "record batch":
            yield end


def _message(data: pa.Buffer, start: int) -> tuple[pa.ipc.Message | None, int]:
    """Return the message at a byte and the offset behind it; None at the end of the stream and for a torn message."""
    (length,) = struct.unpack("<i", data.slice(start + 4, 4))
    if not 0 < length <= data.size - start - 8:
        return None, start
    source = pa.BufferReader(data)
    source.seek(start)
    try:
        return pa.ipc.read_message(source), source.tell()
    except OSError as error:
        if "Expected to be able to read" in str(error):  # the body is cut short
            return None, start
        raise


def read_units(folder: Path) -> pa.Table:
    """Return the per-unit rows of a run as a table of `unit_schema`; without rows if there is no units.arrows.

    Which statistics the table has depends on the run's signal.

    Raises:
        Damaged: columns have other types or gaps, a step is below 1, or a name is not one that a unit can have.
    """
    path = folder / UNITS
    batches = []
    with suppress(FileNotFoundError):
        batches = [batch for batch, _ in open_units(path)]  # whole messages alone
    if not batches:
        return unit_schema(()).empty_table()
    with reading(path):
        table = pa.Table.from_batches(batches)
        names, fixed = table.column_names, unit_schema(()).names
        # The fixed columns, and the statistics of the run's signal.
        expected = unit_schema([name for name in names if name not in fixed])
        if not table.schema.equals(expected):
            raise ValueError(f"its columns are {', '.join(names):.200}")
        table.validate(full=True)
        if gaps := [name for name in names if table[name].null_count]:
            raise ValueError(f"column {gaps[0]!r:.60} has gaps")
        if (first := table["step"].to_numpy().min()) < 1:
            raise ValueError(f"step {first}: steps count from 1")
        check_units(table["unit"].unify_dictionaries().chunk(0).dictionary.to_pylist())
        check_names(names)
    return table


def check_units(units: object) -> list[str]:
    """Return the names of the units.

    Raises:
        ValueError: they are not a list of at most `MAX_UNITS` printable texts of 1 to `MAX_NAME` characters.
    """
    if not isinstance(units, list) or len(units) > MAX_UNITS:
        raise ValueError(f"units: not a list of at most {MAX_UNITS:,} names")
    return check_names(units)


def check_names(names: list[Any]) -> list[str]:
    """Return the names. Raises ValueError if one is not a short printable text."""
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError(f"{name!r:.60}: not a name of at most {MAX_NAME} characters")
    return names


def calibrated_trigger(header: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return the trigger that a user's own loop found by itself, from the content of header.json.

    Returns:
        The step after which it was set, and the trigger; None if there is none.
    """
    match header.get("calibrated"):
        case {"after_step": int(step), "trigger": float(trigger)} if 0 <= step <= MAX_STEP and 0 < trigger < math.inf:
            return step, trigger
    return None


def calibration_steps(header: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return when a user's own loop calibrates its trigger, from the content of header.json.

    Returns:
        The first step of the calibration, and the number of its steps; None without one.
    """
    match header.get("calibration"):
        case {"first": int(first), "steps": int(steps)} if 0 < first <= MAX_STEP and 0 < steps <= MAX_STEP:
            return first, steps
    return None
