"""The per-unit rows of a run: one append-only Arrow IPC stream, `units.arrows`.

The file is what `pyarrow.ipc.new_stream` would write without its end-of-stream marker: the schema, the dictionary of
the units' names, then one record batch per recorded step. `pyarrow.ipc.open_stream` and `polars.read_ipc_stream` read
it. A killed process may leave a part of a message at the end. Our reader ignores it and a resumed run truncates it;
pyarrow yields all batches before it and then raises an error, and polars raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from gnmr.errors import RunFailed
from gnmr.records.append import AppendFile
from gnmr.records.disk import truncate
from gnmr.records.reader import UNITS, open_units
from gnmr.records.schema import UnitRows, unit_schema
from gnmr.records.untrusted import Damaged

_END_OF_STREAM = 8
"""Bytes of the marker that a writer of pyarrow's appends when it is closed."""


class UnitStream:
    """Appends to units.arrows with one system call per step; the file appears with the first row."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNITS
        self.file: AppendFile | None = AppendFile(self._path) if self._path.exists() else None
        self._units: list[str] | None = None
        self._message, self._columns = bytearray(), list[np.ndarray]()
        """The message of a batch of as many rows as the last one, and its columns, into which a step is written."""

    def write(self, rows: UnitRows) -> None:
        """Append the observed units of a step as one record batch; does nothing if there are none."""
        seen, first, begin = rows.observed.nonzero()[0], self._units is None, b""
        if not len(seen):
            return
        if first:
            self._units = rows.units
            self._schema, self._names = unit_schema(list(rows.columns)), _strings(rows.units)
        assert rows.units is self._units or rows.units == self._units, "a run's units stay"
        if first or len(self._columns[0]) != len(seen):
            batch = self._prepare(len(seen))
            begin = self._begin(batch) if first and self._is_new(batch) else b""
        values = [rows.step, seen, *(each[seen] for each in (rows.norm, *rows.columns.values(), rows.risk))]
        values += [np.packbits(rows.active[seen], bitorder="little"), rows.lock[seen]]
        for column, new in zip(self._columns, values, strict=True):
            column[...] = new
        assert self.file is not None
        self.file.append(begin + self._message)

    def _prepare(self, number: int) -> pa.RecordBatch:
        """Return a batch of `number` rows, and keep its message as a template.

        Messages of steps differ from it only in their columns, which follow each other, padded to 8 bytes (the Arrow
        IPC format).
        """
        arrays, marks = [], list[np.ndarray]()
        for kind in self._schema.types:
            coded = pa.types.is_dictionary(kind)
            of = np.dtype(np.int32 if coded else kind.to_pandas_dtype())
            mark = 0 if coded else len(marks)  # no code is behind the last unit
            marks.append(np.zeros(-(-number // 8), np.uint8) if of == np.bool_ else np.full(number, mark, of))
            column = _array(pa.int32() if coded else kind, number, marks[-1])
            arrays.append(pa.DictionaryArray.from_arrays(column, self._names) if coded else column)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._message, self._columns = bytearray(batch.serialize()), []
        at = len(self._message) - sum(-(-each.nbytes // 8) * 8 for each in marks)
        for each in marks:
            self._columns.append(np.ndarray(each.shape, each.dtype, self._message, at))
            at += -(-each.nbytes // 8) * 8
        found = all(map(np.array_equal, self._columns, marks))
        assert found, f"{self._path.name}: pyarrow {pa.__version__} pads columns in another way"
        return batch

    def _begin(self, batch: pa.RecordBatch) -> bytes:
        """Return what stands before the first batch: the schema and the units' names."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(batch)
        return sink.getvalue().to_pybytes()[: -len(self._message) - _END_OF_STREAM]

    def _is_new(self, batch: pa.RecordBatch) -> bool:
        """Open the file and return True if it is empty. Raises RunFailed if it has other units or columns."""
        if self.file is None:
            self.file = AppendFile(self._path)
        if self.file.count()[0] == 0:
            return True
        there = next((one for one, _ in open_units(self._path)), batch)
        if there.schema != batch.schema or there["unit"].dictionary != batch["unit"].dictionary:
            raise RunFailed(f"{self._path}: has other units or columns than this run")
        return False

    def close(self) -> None:
        """Close the file, if there is one."""
        if self.file is not None:
            self.file.close()


def _array(kind: pa.DataType, number: int, *buffers: np.ndarray | bytes) -> pa.Array:
    """Return an array of these buffers. `pa.array` would import pandas, which takes longer than a step."""
    return pa.Array.from_buffers(kind, number, [None, *map(pa.py_buffer, buffers)])


def _strings(words: Sequence[str]) -> pa.Array:
    texts = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return _array(pa.string(), len(words), ends, b"".join(texts))


def cut_units(folder: Path, last_step: int) -> None:
    """Truncate units.arrows after the rows of `last_step`, and with them a torn message at the end."""
    path, end = folder / UNITS, 0
    if not path.exists():
        return
    with suppress(Damaged):  # what follows is dropped
        for batch, after in open_units(path):
            if batch["step"][0].as_py() > last_step:
                break
            end = after
    truncate(path, end)


def recorded_units(folder: Path) -> Iterator[UnitRows]:
    """Yield the rows given to `UnitStream.write`, step by step, with NaN for a unit that was not observed."""
    if not (folder / UNITS).exists():
        return
    for batch, _ in open_units(folder / UNITS):
        units = batch["unit"].dictionary.to_pylist()
        at = batch["unit"].indices.to_numpy()
        columns = {name: np.full(len(units), np.nan) for name in batch.schema.names if name not in ("step", "unit")}
        columns |= {"active": np.zeros(len(units), bool), "lock": np.zeros(len(units), int)}
        for name, values in columns.items():
            values[at] = batch[name].to_numpy(zero_copy_only=False)
        known = {name: columns.pop(name) for name in ("norm", "risk", "active", "lock")}
        observed = np.isin(np.arange(len(units)), at)
        yield UnitRows(step=batch["step"][0].as_py(), units=units, observed=observed, columns=columns, **known)
