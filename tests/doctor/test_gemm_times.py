"""Measured times by shape, in the form that Transformer Engine's benchmark prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plausible import diagnosis

from gnmr.conversion import PathSpec
from gnmr.conversion.cost import gemm_time
from gnmr.errors import UserError
from gnmr.formats.recipes import RECIPES
from gnmr.plan.gemm_times import read_gemm_times, without_times
from gnmr.plan.knapsack import times_of
from gnmr.plan.page import times_line

SQUARE = """
GEMM Benchmark on NVIDIA B200
*** PROFILING MODE: shape 4096x4096x4096 ***
Shape                     BF16 TFLOPS   BF16 ms  MXFP8 TFLOPS  MXFP8 ms  NVFP4 TFLOPS  NVFP4 ms  Speedup
------------------------------------------------------------------------------------------
  [64x576x1536] BF16 kernel details:
64x576x1536                       1.0     0.010           1.0     0.010           1.0     0.010    1.00x
8192x576x1536                  1000.0     4.000        2000.0     2.000        4000.0     1.000    4.00x
8192x1536x576                  1000.0     4.000           N/A       N/A        3000.0     2.000    3.00x
"""
BY_GEMM = """
Fprop Shapes:
Op                     Shape                       BF16 ms   MXFP8 ms   NVFP4 ms
MLP Up                 8192x576x1536               4.000      2.000      1.000
Dgrad Shapes:
MLP Up (Dgrad)         8192x1536x576               4.000      2.000      1.500
Fprop + Dgrad (measured):                          8.000      4.000      2.500
Wgrad Shapes:
MLP Up (Wgrad)         576x8192x1536               4.000      2.000      1.500
"""


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "times.txt").write_text(text)
    return tmp_path / "times.txt"


def test_both_tables_of_transformer_engine_are_read(tmp_path: Path) -> None:
    """By hand: the five times of 8192 tokens take 13 ms, and 4 + 2 + 1 + 4 + 1 = 12 units, where a shape takes one."""
    times = read_gemm_times(written(tmp_path, SQUARE))
    unit = 13 / 12
    assert times == {
        "bf16:fprop:576x1536": pytest.approx(4 / unit),
        "mxfp8:fprop:576x1536": pytest.approx(2 / unit),
        "nvfp4:fprop:576x1536": pytest.approx(1 / unit),
        "bf16:fprop:1536x576": pytest.approx(4 / unit),
        "nvfp4:fprop:1536x576": pytest.approx(2 / unit),
    }, "of a shape the largest number of tokens counts, and N/A is no time"
    times = read_gemm_times(written(tmp_path, BY_GEMM))
    assert {key.partition(":")[2] for key in times} == {f"{gemm}:576x1536" for gemm in ("fprop", "dgrad", "wgrad")}
    assert times["nvfp4:dgrad:576x1536"] / times["nvfp4:fprop:576x1536"] == pytest.approx(1.5)


def test_a_plan_counts_them_and_the_rest_by_bits(tmp_path: Path) -> None:
    times = PathSpec(low="nvfp4", recovery="bf16", times=read_gemm_times(written(tmp_path, SQUARE))).times
    recipes = [RECIPES[name] for name in ("nvfp4", "mxfp8", "bf16")]
    shapes = {"up": (576, 1536), "down": (1536, 576), "q": (576, 576)}
    taken, unit = times_of(shapes, recipes, times), 13 / 12
    area = 576 * 1536
    assert taken["up", "fprop"] == pytest.approx(
        {"nvfp4": area / unit, "mxfp8": 2 * area / unit, "bf16": 4 * area / unit}
    )
    assert taken["down", "fprop"] == pytest.approx(
        {"nvfp4": 2 * area / unit, "mxfp8": 2 * area, "bf16": 4 * area / unit}
    )
    assert taken["q", "fprop"] == {"nvfp4": 576**2, "mxfp8": 2 * 576**2, "bf16": 4 * 576**2}
    assert taken["up", "dgrad"]["nvfp4"] == area, "a table of shapes alone is of fprop"
    # A GEMM with the casts of a recipe has its time, whatever recipe the others are of.
    mixed = RECIPES["mxfp8"].with_gemms({"fprop": RECIPES["nvfp4"]})
    assert gemm_time(mixed, "fprop", times, shape=(576, 1536)) == times["nvfp4:fprop:576x1536"]
    own = {"nvfp4:fprop:8x8": 1.0, f"{mixed.name}:fprop:8x8": 3.0}
    assert gemm_time(RECIPES["nvfp4"], "fprop", own, {mixed.name: mixed}, (8, 8)) == 1.0
    assert gemm_time(mixed, "fprop", own, shape=(8, 8)) == 3.0, "its own comes first"
    assert without_times(shapes.values(), ("nvfp4", "mxfp8"), times) == ["1536x576", "576x576"]
    assert without_times(shapes.values(), ("nvfp4",), {"8": 1.8}) == []
    line = times_line(diagnosis(2, times=times))
    assert line == "not in the file of times on nvfp4, mxfp8, bf16, so 1 : 2 : 4 by bits: 576x576, 576x192, 1536x576"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no table\n", "has no times: a header of Shape"),
        ("Shape BF16 ms\n8x8x8 1.0 2.0\n", "line 2: has 2 values for 1 columns"),
        ("Shape FP3 ms\n8x8x8 1.0\n", "line 1: FP3 is no precision; they are BF16, "),
        ("Shape BF16 ms\n8x8x8 nan\n", "has no times"),
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UserError) as refused:
        read_gemm_times(file)
    assert str(refused.value).startswith(f"times={file}: {says}") and "\n" not in str(refused.value)
    with pytest.raises(UserError, match="there is no such file; name a table of times, or BITS:TIME"):
        read_gemm_times(tmp_path / "other.txt")
    for key in ("mxfp8:fprop", "mxfp8:fprop:0x3", "8:fprop:3x3", "lost:fprop:3x3"):
        with pytest.raises(ValueError, match="must be of 4, 8, 16, a recipe, or RECIPE:GEMM:INPUTSxOUTPUTS"):
            PathSpec(low="nvfp4", recovery="bf16", times={key: 1.0})


def test_the_script_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gemm_times

    out = tmp_path / "out.txt"
    monkeypatch.setattr(gemm_times, "CALL_SECONDS", 1e-5)
    words = [
        "gemm_times.py",
        str(out),
        "--shapes",
        "32x64,64x32",
        "--tokens",
        "32",
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    gemm_times.main()
    times = read_gemm_times(out)
    assert {f"bf16:{gemm}:{shape}" for gemm in ("fprop", "dgrad", "wgrad") for shape in ("32x64", "64x32")} <= {*times}
