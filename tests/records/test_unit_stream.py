"""units.arrows: read by others while it grows and after a kill, cut back to a step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from made_rows import unit_rows

from gnmr.errors import RunFailed
from gnmr.records.reader import UNITS, open_units, read_units
from gnmr.records.schema import unit_schema
from gnmr.records.unit_stream import UnitStream, cut_units, recorded_units
from gnmr.records.untrusted import Damaged


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with six steps of four units, of which the second is missing in step 3."""
    stream = UnitStream(tmp_path)
    for step in range(1, 7):
        stream.write(unit_rows(step, observed=np.arange(4) != 1) if step == 3 else unit_rows(step))
    stream.close()
    return tmp_path


def test_what_is_written_is_read_by_pyarrow_too(written: Path) -> None:
    table = read_units(written)
    assert table.schema == unit_schema(["gnmr", "delta_gnmr"]) and table.num_rows == 23
    assert table.column("norm").to_pylist()[:4] == unit_rows(1).norm.tolist()
    with pa.OSFile(str(written / UNITS)) as file:
        assert pa.ipc.open_stream(file).read_all().equals(table)
    again = list(recorded_units(written))
    assert [rows.step for rows in again] == [1, 2, 3, 4, 5, 6] and not again[2].observed[1]
    for name in ("norm", "risk", "active", "lock"):
        np.testing.assert_array_equal(getattr(again[4], name), getattr(unit_rows(5), name))


@pytest.mark.parametrize("number", [1, 3, 8, 13, 64])
def test_the_bytes_are_those_of_pyarrows_writer(number: int, tmp_path: Path) -> None:
    names, sink = [f"layers.{i}.\u00fc" for i in range(number)], pa.BufferOutputStream()
    steps = [unit_rows(step, names, observed=np.arange(number) % 4 != step) for step in (1, 2, 9, 10)]
    steps = [rows for rows in steps if rows.observed.any()]
    stream, schema = UnitStream(tmp_path), unit_schema(["gnmr", "delta_gnmr"])
    with pa.ipc.new_stream(sink, schema) as theirs:
        for rows in steps:
            stream.write(rows)
            seen = np.flatnonzero(rows.observed)
            numbers = [rows.norm, *rows.columns.values(), rows.risk, rows.active, rows.lock.astype(np.int32)]
            unit = pa.DictionaryArray.from_arrays(pa.array(seen.astype(np.int32)), pa.array(names))
            first = [pa.array(np.full(len(seen), rows.step, np.int32)), unit]
            theirs.write_batch(pa.record_batch([*first, *(pa.array(each[seen]) for each in numbers)], schema=schema))
    assert (tmp_path / UNITS).read_bytes() == sink.getvalue().to_pybytes()[:-8], "all but the end-of-stream marker"


def test_a_run_does_not_import_pandas(tmp_path: Path) -> None:
    """`pa.array` does, which takes longer than a step."""
    script = (
        "import sys, pathlib, numpy as np; from gnmr.records.unit_stream import UnitStream, UnitRows;"
        "x = np.ones(2); rows = UnitRows(1, ['a', 'b'], x > 0, x, {}, x, x > 0, x.astype(int));"
        "UnitStream(pathlib.Path(sys.argv[1])).write(rows); print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_it_is_readable_while_the_run_goes_on_and_in_two_parts(tmp_path: Path, written: Path) -> None:
    whole = read_units(written)
    cut_units(written, 4)
    stream = UnitStream(written)
    for step in (5, 6):
        stream.write(unit_rows(step))
        assert read_units(written)["step"].to_pylist()[-1] == step, "nothing waits in a buffer"
    assert read_units(written).equals(whole)


def test_every_length_that_a_kill_can_leave(written: Path) -> None:
    """Our reader leaves a torn message out, pyarrow yields what is before it, and a cut ends at a whole message."""
    data, whole = (written / UNITS).read_bytes(), read_units(written)
    ends = [end for _, end in open_units(written / UNITS)]
    assert ends[-1] == len(data)
    for size in [*range(0, ends[0], 97), *range(ends[0], len(data), 61)]:
        (written / UNITS).write_bytes(data[:size])
        complete = sum(end <= size for end in ends)
        table = read_units(written)
        assert table["step"].unique().to_pylist() == list(range(1, complete + 1)), size
        assert table.num_rows == 0 or table.equals(whole.slice(0, table.num_rows))
        if complete:
            batches = pa.ipc.open_stream(pa.BufferReader(data[:size]))
            assert [batches.read_next_batch()["step"][0].as_py() for _ in range(complete)] == list(
                range(1, complete + 1)
            )
        cut_units(written, 6)
        assert (written / UNITS).stat().st_size == (ends[complete - 1] if complete else 0)


@pytest.mark.parametrize(
    "rows", [{"units": ["a", "b", "c", "d"]}, {"columns": {"price": np.ones(4)}}], ids=["units", "columns"]
)
def test_a_run_goes_on_with_the_same_units_and_columns(written: Path, rows: dict[str, Any]) -> None:
    with pytest.raises(RunFailed, match="other units or columns"):
        UnitStream(written).write(unit_rows(7, **rows))


def test_a_step_in_which_no_unit_was_observed_leaves_no_file(tmp_path: Path) -> None:
    UnitStream(tmp_path).write(unit_rows(1, observed=np.zeros(4, bool)))
    assert not (tmp_path / UNITS).exists() and read_units(tmp_path).num_rows == 0


@pytest.mark.parametrize(
    "content",
    [
        lambda data: b"PAR1" + data[4:],
        lambda data: data[:8] + bytes(200) + data[208:],
        lambda data: data.replace(b"delta_gnmr", b"delta\x00gnmr"),
        lambda data: b"x" * 1000,
    ],
)
def test_what_is_no_such_stream_is_one_line(written: Path, content: Callable[[bytes], bytes]) -> None:
    (written / UNITS).write_bytes(content((written / UNITS).read_bytes()))
    with pytest.raises(Damaged, match=UNITS):
        read_units(written)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.drop_columns("norm"), "columns"),
        (lambda t: t.set_column(0, "step", pa.array([0] * t.num_rows, pa.int32())), "step 0"),
        (lambda t: t.set_column(2, "norm", pa.array([None] * t.num_rows, pa.float64())), "gaps"),
        (lambda t: t.set_column(1, "unit", pa.array(["x\x1b"] * t.num_rows).dictionary_encode()), "not a name"),
    ],
)
def test_other_tables_are_one_line(written: Path, change: Callable[[pa.Table], pa.Table], why: str) -> None:
    table = change(read_units(written))
    with pa.ipc.new_stream(str(written / UNITS), table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(Damaged, match=why):
        read_units(written)
