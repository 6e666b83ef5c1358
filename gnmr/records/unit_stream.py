"""The per-unit rows of a run: one append-only Arrow IPC stream, `units.arrows`.

The file is what `pyarrow.ipc.new_stream` would write without its end-of-stream marker: the schema, the dictionary of
the units' names, then one record batch per recorded step. `pyarrow.ipc.open_stream` and `polars.read_ipc_stream` read
it. A killed process may leave a part of a message at the end. Our reader ignores it and a resumed run truncates it;
pyarrow yields all batches before it and then raises an error, and polars raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from gnmr.errors import RunFailed
from gnmr.records.append import AppendFile
from gnmr.records.disk import truncate
from gnmr.records.reader import END_OF_STREAM, UNITS, open_units
from gnmr.records.schema import UnitRows, unit_schema


class UnitStream:
    """Appends to units.arrows with one system call per step; the file appears with the first row."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / UNITS
        self.file: AppendFile | None = AppendFile(self._path) if self._path.exists() else None
        self._units: list[str] | None = None

    def write(self, rows: UnitRows) -> None:
        """Append the observed units of a step as one record batch; does nothing if there are none.

        Raises:
            RunFailed: the file has other units or columns than this run.
        """
        observed_units = np.flatnonzero(rows.observed)
        if not len(observed_units):
            return
        first = self._units is None
        if first:
            self._units = rows.units
            self._schema, self._names = unit_schema(list(rows.columns)), _strings(rows.units)
        assert rows.units is self._units or rows.units == self._units, "a run's units stay"
        batch = self._batch(rows, observed_units)
        # A message for each step, so that a kill can cut no more than the last one.
        message = batch.serialize().to_pybytes()
        if first:
            message = self._start(batch, len(message)) + message
        assert self.file is not None
        self.file.append(message)

    def _batch(self, rows: UnitRows, observed_units: np.ndarray) -> pa.RecordBatch:
        number = len(observed_units)
        # The units are codes of a dictionary of their names, which stands at the beginning of the file once.
        units = _array(pa.int32(), number, observed_units.astype(np.int32))
        floats = [rows.norm, *rows.columns.values(), rows.risk]
        arrays = [
            _array(pa.int32(), number, np.full(number, rows.step, np.int32)),
            pa.DictionaryArray.from_arrays(units, self._names),
            *(_array(pa.float64(), number, column[observed_units].astype(np.float64)) for column in floats),
            _array(pa.bool_(), number, np.packbits(rows.active[observed_units], bitorder="little")),
            _array(pa.int32(), number, rows.lock[observed_units].astype(np.int32)),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _start(self, batch: pa.RecordBatch, message_bytes: int) -> bytes:
        """Open the file and return what a new one begins with: the schema and the units' names."""
        if self.file is None:
            self.file = AppendFile(self._path)
        if self._path.stat().st_size:
            recorded = next((recorded for recorded, _ in open_units(self._path)), batch)
            if recorded.schema != batch.schema or recorded["unit"].dictionary != batch["unit"].dictionary:
                raise RunFailed(f"{self._path}: has other units or columns than this run")
            return b""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(batch)
        return sink.getvalue().to_pybytes()[: -message_bytes - END_OF_STREAM]

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
    """Truncate units.arrows after the rows of `last_step`, and with them a torn message at the end.

    Raises `Damaged` if another message is not whole.
    """
    path, end = folder / UNITS, 0
    if not path.exists():
        return
    for batch, after in open_units(path):
        if batch["step"][0].as_py() > last_step:
            break
        end = after
    truncate(path, end)


def recorded_units(folder: Path) -> Iterator[UnitRows]:
    """Yield the rows that `UnitStream.write` was given, step by step.

    A unit that was not observed has NaN in its columns, and is neither active nor locked.

    Raises:
        Damaged: units.arrows is not such a stream; a last message that a kill cut short is only left out.
    """
    if not (folder / UNITS).exists():
        return
    for batch, _ in open_units(folder / UNITS):
        units = batch["unit"].dictionary.to_pylist()
        observed_units = batch["unit"].indices.to_numpy()
        columns = {name: np.full(len(units), np.nan) for name in batch.schema.names if name not in ("step", "unit")}
        columns |= {"active": np.zeros(len(units), bool), "lock": np.zeros(len(units), int)}
        for name, values in columns.items():
            values[observed_units] = batch[name].to_numpy(zero_copy_only=False)
        fixed = {name: columns.pop(name) for name in ("norm", "risk", "active", "lock")}
        observed = np.isin(np.arange(len(units)), observed_units)
        yield UnitRows(step=batch["step"][0].as_py(), units=units, observed=observed, columns=columns, **fixed)
