"""The per-unit rows of a run: one append-only Arrow IPC stream, `units.arrows`.

The file is what `pyarrow.ipc.new_stream` would write without its end-of-stream marker: the schema, the dictionary of
the units' names, then one record batch per recorded step. `pyarrow.ipc.open_stream` and `polars.read_ipc_stream` read
it. A killed process may leave a part of a message at the end. Our reader ignores it and a resumed run truncates it;
pyarrow yields all batches before it and then raises an error, and polars raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from gnmr.errors import RunFailed
from gnmr.records.disk import truncate
from gnmr.records.files import AppendFile
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
        self._schema: pa.Schema | None = None

    def write(self, rows: UnitRows) -> None:
        """Append the observed units of a step as one record batch; does nothing if there are none."""
        seen = np.flatnonzero(rows.observed)
        if not len(seen):
            return
        first = self._schema is None
        if first:
            self._schema, self._names = unit_schema(list(rows.columns)), pa.array(rows.units, pa.string())
        assert self._schema is not None and self._names.to_pylist() == rows.units, "a run's units stay"
        arrays = [
            pa.array(np.full(len(seen), rows.step, np.int32)),
            pa.DictionaryArray.from_arrays(pa.array(seen.astype(np.int32)), self._names),
            *(pa.array(values[seen].astype(np.float64)) for values in (rows.norm, *rows.columns.values(), rows.risk)),
            pa.array(rows.active[seen].astype(bool)),
            pa.array(rows.lock[seen].astype(np.int32)),
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if first and self._is_new(batch):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self._schema) as stream:
                stream.write_batch(batch)
            data = sink.getvalue().slice(0, sink.getvalue().size - _END_OF_STREAM)
        else:
            data = batch.serialize()
        assert self.file is not None
        self.file.append(data.to_pybytes())

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
    """Yield what `UnitStream.write` was given, step by step, with NaN for a unit that was not observed."""
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
