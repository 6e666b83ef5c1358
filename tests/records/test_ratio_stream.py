from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gnmr.errors import RunFailed
from gnmr.records import ratios as ratios_module
from gnmr.records.ratios import RatioStream, cut_stream, parquet_to_stream, stream_to_parquet
from gnmr.records.reader import read_stream
from gnmr.records.schema import RatioRows, ratio_schema

MakeRatios = Callable[..., RatioRows]
SCHEMA = ratio_schema(["gnmr", "delta_gnmr"])


def test_rows_round_trip_and_unobserved_units_are_left_out(tmp_path: Path, ratio_rows: MakeRatios) -> None:
    path = tmp_path / "ratios.rows"
    stream = RatioStream(path)
    stream.write(ratio_rows(1, observed=np.zeros(4, bool)))
    assert not path.exists()
    rows = ratio_rows(
        2,
        observed=np.array([True, False, True, True]),
        norm=np.array([math.inf, 1.0, math.nan, 0.1 + 0.2]),
        risk=np.array([math.inf, 1.0, math.inf, -math.inf]),
    )
    stream.write(rows)
    stream.write(ratio_rows(3))
    table = read_stream(path)  # while the run goes on
    assert table.schema.equals(SCHEMA)
    assert table["step"].to_pylist() == [2] * 3 + [3] * 4
    assert table["unit"].to_pylist()[:3] == [rows.units[i] for i in (0, 2, 3)]
    seen = rows.observed
    for name in ("norm", "risk", "active", "lock"):
        np.testing.assert_array_equal(table[name].to_numpy()[:3], getattr(rows, name)[seen])
    for name, values in rows.columns.items():
        np.testing.assert_array_equal(table[name].to_numpy()[:3], values[seen])
    assert sum(column.null_count for column in table.columns) == 0  # NaN is a number here, nothing is missing


def test_every_cut_of_the_bytes_leaves_the_whole_rows_before_it(tmp_path: Path, ratio_rows: MakeRatios) -> None:
    path, torn = tmp_path / "ratios.rows", tmp_path / "torn.rows"
    stream = RatioStream(path)
    ends = []
    for step in (1, 2, 3):
        stream.write(ratio_rows(step))
        ends.append(path.stat().st_size)
    stream.close()
    data = path.read_bytes()
    head = data.index(b"\n") + 1
    row = (len(data) - head) // 12
    assert ends == [head + 4 * row * step for step in (1, 2, 3)]
    for length in range(0, len(data) + 1, 7):
        torn.write_bytes(data[:length])
        whole = max(length - head, 0) // row
        assert read_stream(torn).num_rows == whole
        cut_stream(torn, 2)
        assert torn.stat().st_size == (0 if length < head else head + min(whole, 8) * row)


def test_a_resumed_run_finds_its_units_by_name(tmp_path: Path, ratio_rows: MakeRatios) -> None:
    path = tmp_path / "ratios.rows"
    for step, units in ((1, ["a", "b"]), (2, ["b", "a"])):
        stream = RatioStream(path)
        stream.write(ratio_rows(step, units))
        stream.close()
    assert read_stream(path)["unit"].to_pylist() == ["a", "b", "b", "a"]
    with pytest.raises(RunFailed, match="its first line names other units or columns"):
        RatioStream(path).write(ratio_rows(3, ["c"]))


def test_a_large_run_writes_its_names_once(tmp_path: Path, ratio_rows: MakeRatios) -> None:
    path = tmp_path / "ratios.rows"
    stream = RatioStream(path)
    units = [f"experts.{i}" for i in range(10_000)]
    for step in (1, 2, 3):
        stream.write(ratio_rows(step, units))
    stream.close()
    assert path.read_bytes().count(b"experts.9999") == 1
    table = read_stream(path)
    assert table.num_rows == 30_000 and table["unit"][-1].as_py() == "experts.9999"


def test_parquet_equals_the_stream_and_back(
    tmp_path: Path, ratio_rows: MakeRatios, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratios_module, "_ROWS_PER_GROUP", 10)  # several row groups
    path, parquet, back = tmp_path / "ratios.rows", tmp_path / "ratios.parquet", tmp_path / "back.rows"
    stream = RatioStream(path)
    for step in range(1, 8):
        stream.write(ratio_rows(step, observed=np.arange(4) != step % 5))
    stream.close()
    stream_to_parquet(path, parquet)
    assert pq.ParquetFile(parquet).num_row_groups > 1
    assert pq.read_schema(parquet).equals(SCHEMA)
    assert pq.read_table(parquet).equals(read_stream(path))
    parquet_to_stream(parquet, back)
    assert read_stream(back).equals(read_stream(path))
