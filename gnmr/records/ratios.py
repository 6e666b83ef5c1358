"""The ratio rows of a run: an Arrow stream that can be appended to and cut, and its Parquet file.

An Arrow stream is a sequence of messages: the schema, a dictionary (the unit names), then record batches that hold
indices into it. A reader takes the end of the file for the end of the stream, so a file without the optional end
marker can be appended to message by message, and cut by truncating it after any batch. A later dictionary message
replaces the earlier one; each process writes its own once, so a resumed run need not know the old one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gnmr.records.reader import iter_stream
from gnmr.records.schema import RATIO_SCHEMA, RatioRows

_SCHEMA_MESSAGE = RATIO_SCHEMA.serialize().to_pybytes()
_END_MARKER = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_ROWS_PER_GROUP = 1 << 17  # of Parquet; about 6 MB in memory


class RatioStream:
    """Appends to ratios.arrows, one batch a step; the file appears with the first row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._units: list[str] = []
        self._column: pa.Array = None  # the units of all rows, made with the first

    def write(self, rows: RatioRows) -> None:
        """One batch with the observed units of a step, in one write to the file; nothing if there are none."""
        seen = np.asarray(rows.observed, bool)
        if not seen.any():
            return
        if self._file is None:
            self._file = self._path.open("ab")
        new_units = rows.units != self._units
        if new_units:
            self._units = list(rows.units)
            indices = np.arange(len(self._units), dtype=np.int32)
            self._column = pa.DictionaryArray.from_arrays(indices, pa.array(self._units, pa.string()))
        batch = self._batch(rows, seen)
        if new_units:
            self._file.write(_with_dictionary(batch, with_schema=self._file.tell() == 0))
        else:
            self._file.write(batch.serialize())
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _batch(self, rows: RatioRows, seen: np.ndarray) -> pa.RecordBatch:
        units: pa.Array = self._column
        columns = [rows.norm, rows.gnmr, rows.delta_gnmr, rows.risk, rows.active, rows.lock]
        if not seen.all():
            units = units.filter(pa.array(seen))
            columns = [column[seen] for column in columns]
        *numbers, active, lock = columns
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.full(len(units), rows.step, np.int32)),
                units,
                *(pa.array(column) for column in numbers),
                pa.array(active),
                pa.array(lock.astype(np.int32)),
            ],
            schema=RATIO_SCHEMA,
        )


def cut_stream(path: Path, last_step: int) -> None:
    """Drops the rows after `last_step` and a torn last batch. Rows stand in order of their step."""
    if not path.exists():
        return
    end, rest = 0, None
    for batch, after in iter_stream(path):
        steps = batch.column("step")
        if steps[-1].as_py() > last_step:
            rest = batch.filter(pc.less_equal(steps, last_step))  # only batches that came from Parquet mix steps
            break
        end = after
    os.truncate(path, end)
    if rest is not None and rest.num_rows:
        with path.open("ab") as file:
            file.write(_with_dictionary(rest, with_schema=end == 0))


def stream_to_parquet(stream: Path, parquet: Path) -> None:
    """Copies what the stream holds, a row group at a time; written beside and renamed."""
    beside = parquet.with_name(parquet.name + ".tmp")
    try:
        with pq.ParquetWriter(beside, RATIO_SCHEMA, compression="zstd", use_dictionary=["step", "unit"]) as writer:
            for table in _grouped(batch for batch, _ in iter_stream(stream)):
                writer.write_table(table)
        os.replace(beside, parquet)
    finally:
        beside.unlink(missing_ok=True)


def parquet_to_stream(parquet: Path, stream: Path) -> None:
    """The inverse of `stream_to_parquet`, for a run that goes on after its stream was deleted."""
    beside = stream.with_name(stream.name + ".tmp")
    with pq.ParquetFile(parquet) as source, beside.open("wb") as file:
        for batch in source.iter_batches():
            file.write(_with_dictionary(batch.cast(RATIO_SCHEMA), with_schema=file.tell() == 0))
    os.replace(beside, stream)


def _with_dictionary(batch: pa.RecordBatch, with_schema: bool) -> bytes:
    """The messages of a batch and of its dictionary, without the end marker."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, RATIO_SCHEMA) as stream:
        stream.write_batch(batch)
    return sink.getvalue()[0 if with_schema else len(_SCHEMA_MESSAGE) :].removesuffix(_END_MARKER)


def _grouped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of single steps gathered to tables of one row group each."""
    group: list[pa.RecordBatch] = []
    num_rows = 0
    for batch in batches:
        group.append(batch)
        num_rows += batch.num_rows
        if num_rows >= _ROWS_PER_GROUP:
            yield pa.Table.from_batches(group, RATIO_SCHEMA).combine_chunks()
            group, num_rows = [], 0
    if group:
        yield pa.Table.from_batches(group, RATIO_SCHEMA).combine_chunks()
