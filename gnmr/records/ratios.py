"""The ratio rows of a run: a file of rows of fixed size that can be appended to and cut, and its Parquet file.

ratios.rows begins with one line of JSON, the units and the names of the signal's columns. Behind it stands one packed
little-endian record per observed unit and recorded step. A step costs one small write, a file that a kill cut short
ends in a part of a record that readers leave out, and cutting a run back to a step is a truncation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gnmr.errors import RunFailed
from gnmr.records.appending import AppendFile
from gnmr.records.disk import replacing, truncate
from gnmr.records.schema import RatioRows, ratio_schema
from gnmr.records.untrusted import Damaged, opened

_ROWS_PER_GROUP = 1 << 17  # of Parquet; about 6 MB in memory
_UNITS = b"gnmr.units"  # in the Parquet file's metadata: the units in their order
_HEAD_BYTES = 1 << 26  # far more than the names of any model's units
_Head = tuple[list[str], tuple[str, ...], int]  # units, columns, offset of the first row


def _row_type(columns: Sequence[str]) -> np.dtype:
    numbers = [(name, "<f8") for name in ("norm", *columns, "risk")]
    return np.dtype([("step", "<i4"), ("unit", "<i4"), *numbers, ("active", "?"), ("lock", "<i4")])


class RatioStream:
    """Appends to ratios.rows, one write a step; the file appears with the first row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file: AppendFile | None = AppendFile(path) if path.exists() else None
        self._names: tuple[list[str], tuple[str, ...]] | None = None
        self._rows: Any = None  # (U,) of `_row_type`, filled anew in every step

    def write(self, rows: RatioRows) -> None:
        """The observed units of a step, in one write to the file; nothing if there are none."""
        seen = rows.observed
        if not seen.any():
            return
        if self._names is None:
            self._open(rows)
        assert self.file is not None and self._names == (rows.units, tuple(rows.columns)), "a run's units stay"
        table = self._rows
        table["step"] = rows.step
        table["norm"], table["risk"], table["active"], table["lock"] = rows.norm, rows.risk, rows.active, rows.lock
        for name, values in rows.columns.items():
            table[name] = values
        self.file.append(table.tobytes() if seen.all() else table[seen].tobytes())

    def count(self) -> dict[str, Any] | None:
        """As `AppendFile.count`; None while there is no file."""
        if self.file is None:
            return None
        count, head = self.file.count(), _read_head(self._path)
        rows = 0 if head is None else (count["bytes"] - head[2]) // _row_type(head[1]).itemsize
        return count | {"rows": rows}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _open(self, rows: RatioRows) -> None:
        units, columns = list(rows.units), tuple(rows.columns)
        if self.file is None:
            self.file = AppendFile(self._path)
        if self.file.count()["bytes"] == 0:
            self.file.append(_head(units, columns))
        else:
            units, columns, _ = _read_head(self._path) or (units, columns, 0)
        if columns != tuple(rows.columns) or not set(rows.units) <= set(units):
            raise RunFailed(f"{self._path}: damaged (its first line names other units or columns than this run has)")
        place = {unit: index for index, unit in enumerate(units)}
        self._names = list(rows.units), columns
        self._rows = np.empty(len(rows.units), _row_type(columns))
        self._rows["unit"] = [place[unit] for unit in rows.units]


def _head(units: Sequence[str], columns: Sequence[str]) -> bytes:
    return json.dumps({"units": list(units), "columns": list(columns)}).encode() + b"\n"


def _read_head(path: Path) -> _Head | None:
    """None for a file that is missing or ends within its first line; `Damaged` for a line that is no head."""
    try:
        with opened(path) as file:
            line = file.readline(_HEAD_BYTES)
    except FileNotFoundError:
        return None
    if not line.endswith(b"\n"):
        return None
    try:
        head = json.loads(line)
        units, columns = head["units"], tuple(head["columns"])
        sound = isinstance(units, list) and all(isinstance(name, str) for name in (*units, *columns))
        _row_type(columns)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise Damaged(f"{path}: damaged (its first line)")
    return units, columns, len(line)


def read_stream(path: Path) -> pa.Table:
    """All whole rows of ratios.rows; none if it is missing, FileNotFoundError if it is deleted meanwhile."""
    head = _read_head(path)
    if head is None:
        return ratio_schema(()).empty_table()
    units, columns, _ = head
    return pa.Table.from_batches(list(_batches(path, head)), ratio_schema(columns, _metadata(units)))


def _batches(path: Path, head: _Head) -> Iterator[pa.RecordBatch]:
    """A file's whole rows, a row group at a time. Read, not mapped: a resumed run may cut it meanwhile."""
    units, columns, offset = head
    kind = _row_type(columns)
    schema = ratio_schema(columns, _metadata(units))
    dictionary = pa.array(units, pa.string())
    with opened(path) as file:
        file.seek(offset)
        while len(data := file.read(_ROWS_PER_GROUP * kind.itemsize)) >= kind.itemsize:
            rows = np.frombuffer(data, kind, count=len(data) // kind.itemsize)
            if not _sound(rows, len(units)).all():
                raise Damaged(f"{path}: damaged (a row's step or unit)")
            arrays: list[pa.Array] = [pa.array(np.ascontiguousarray(rows[name])) for name in kind.names or ()]
            arrays[1] = pa.DictionaryArray.from_arrays(arrays[1], dictionary)
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _sound(rows: np.ndarray, num_units: int) -> np.ndarray:
    """Which rows have a step and a unit."""
    sound: np.ndarray = (rows["step"] >= 1) & (rows["unit"] >= 0) & (rows["unit"] < num_units)
    return sound


def cut_stream(path: Path, last_step: int) -> None:
    """Drops the rows after `last_step`, the first without a step or unit and what follows it, and a torn last row.

    Rows stand in order of their step. A file without a head is emptied.
    """
    if not path.exists():
        return
    try:
        head = _read_head(path)
    except Damaged:
        head = None
    if head is None:
        truncate(path, 0)
        return
    kind, offset = _row_type(head[1]), head[2]
    whole = (path.stat().st_size - offset) // kind.itemsize
    kept = 0
    if whole:
        rows = np.memmap(path, kind, "r", offset, (whole,))
        wrong = ~_sound(rows, len(head[0])) | (rows["step"] > last_step)
        wrong[1:] |= np.diff(rows["step"]) < 0
        kept = int(wrong.argmax()) if wrong.any() else whole
    truncate(path, offset + kept * kind.itemsize)


def stream_to_parquet(stream: Path, parquet: Path) -> None:
    """Copies what the stream holds, a row group at a time; written beside, synced and renamed."""
    head = _read_head(stream)
    schema = ratio_schema(()) if head is None else ratio_schema(head[1], _metadata(head[0]))
    how: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["step", "unit"], "write_page_checksum": True}
    with replacing(parquet) as file, pq.ParquetWriter(file, schema, **how) as writer:
        for batch in () if head is None else _batches(stream, head):
            writer.write_batch(batch)


def parquet_to_stream(parquet: Path, stream: Path) -> None:
    """The inverse of `stream_to_parquet`, to the byte, for a run that goes on after its stream was deleted."""
    with pq.ParquetFile(parquet, page_checksum_verification=True) as source, replacing(stream) as file:
        schema = source.schema_arrow
        units = json.loads(schema.metadata[_UNITS])
        columns = [name for name in schema.names if name not in ratio_schema(()).names]
        place = {unit: index for index, unit in enumerate(units)}
        file.write(_head(units, columns))
        for batch in source.iter_batches():
            rows = np.empty(batch.num_rows, _row_type(columns))
            for name in schema.names:
                if name != "unit":
                    rows[name] = batch.column(name).to_numpy(zero_copy_only=False)
            unit = batch.column("unit")
            rows["unit"] = np.array([place[name] for name in unit.dictionary.to_pylist()])[unit.indices.to_numpy()]
            file.write(rows.tobytes())


def _metadata(units: Sequence[str]) -> dict[bytes, bytes]:
    return {_UNITS: json.dumps(list(units)).encode()}


def rows_of_steps(table: pa.Table, units: Sequence[str] = ()) -> Iterator[RatioRows]:
    """A table of `ratio_schema` step by step, in the order of `units`, further ones behind; NaN where not observed."""
    table = table.unify_dictionaries()
    if table.num_rows == 0:
        return
    unit = table["unit"].combine_chunks()
    names = unit.dictionary.to_pylist()
    places = {name: place for place, name in enumerate(dict.fromkeys([*units, *names]))}
    column = np.array([places[name] for name in names])[unit.indices.to_numpy()]
    steps = table["step"].to_numpy()
    order = np.argsort(steps, kind="stable")
    fixed = ratio_schema(()).names
    signals = [name for name in table.column_names if name not in fixed]
    arrays = {name: table[name].to_numpy() for name in (*signals, "norm", "risk", "active", "lock")}
    for rows in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
        at = column[rows]

        def spread(name: str, empty: float, kind: type, rows: np.ndarray = rows, at: np.ndarray = at) -> np.ndarray:
            found: np.ndarray = np.full(len(places), empty, kind)
            found[at] = arrays[name][rows]
            return found

        observed = np.zeros(len(places), bool)
        observed[at] = True
        yield RatioRows(
            int(steps[rows[0]]),
            list(places),
            observed,
            spread("norm", np.nan, float),
            {name: spread(name, np.nan, float) for name in signals},
            spread("risk", np.nan, float),
            spread("active", 0, bool),
            spread("lock", 0, int),
        )
