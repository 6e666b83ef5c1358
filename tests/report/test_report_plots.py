"""The plots exist, show something, and survive short, broken and long runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gnmr.report.arms import compare
from gnmr.report.binning import bin_width, binned
from gnmr.report.plots import draw
from gnmr.report.runs import find_runs, load

Write = Callable[..., Path]


def ratios(steps: int, units: int) -> np.ndarray:
    return np.exp(0.4 * np.random.default_rng(0).standard_normal((steps, units)))


def drawn(root: Path, out: Path) -> dict[str, Path]:
    out.mkdir()
    return {path.stem: path for path in draw(compare(load(folder) for folder in find_runs([root])), out)}


def test_every_plot_of_a_sweep_shows_something(write_run: Write, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(arm="bf16", seed=seed, steps=30, units=7, gnmr=ratios(30, 7), val_loss={10: 5.0, 20: 4.0, 30: 3.5})
        write_run(arm="int4_int8", seed=seed, steps=30, units=7, gnmr=ratios(30, 7), val_loss={10: 5.1, 30: 3.6})
    images = drawn(tmp_path / "runs", tmp_path / "out")
    assert sorted(images) == [
        "stress-cpu-gnmr-bf16",
        "stress-cpu-gnmr-int4_int8-gnmr",
        "stress-cpu-loss",
        "stress-cpu-mean-gnmr",
        "stress-cpu-risk-int4_int8-gnmr",
        "stress-cpu-saved-bytes",
    ]
    for path in images.values():
        pixels = matplotlib.image.imread(path)[..., :3]
        assert min(pixels.shape[:2]) > 100
        assert pixels.std() > 0.05, f"{path.name} is blank"


def test_runs_that_broke_are_drawn(write_run: Write, tmp_path: Path) -> None:
    gnmr = ratios(12, 3)
    gnmr[5:, 1] = np.inf
    gnmr[:, 2] = np.nan
    loss = np.r_[np.linspace(8, 7, 6), np.full(6, math.nan)]
    write_run(steps=12, planned=50, units=3, gnmr=gnmr, loss=loss, status="failed", reason="nan", val_loss={})
    write_run(arm="int8", steps=1, planned=50, status="running", val_loss={})
    write_run(arm="bf16", steps=0, planned=50, status="running", val_loss={}, loss=np.zeros(0))
    assert len(drawn(tmp_path / "runs", tmp_path / "out")) == 6


def test_signals_without_gnmr_and_quality_against_promotion(write_run: Write, tmp_path: Path) -> None:
    gap = {"controller.signal.name": "gap", "controller.trigger": 2.0}
    write_run(steps=12, gnmr=ratios(12, 2), settings=gap, columns=("gap",), summary={"promotion_frac": 0.01})
    write_run(steps=12, ratios=False, summary={"promotion_frac": 0.1})
    write_run(steps=12, ratios=False, arm="int8")
    write_run(steps=12, ratios=False, arm="int4")
    images = drawn(tmp_path / "runs", tmp_path / "out")
    assert sorted(images) == [
        "stress-cpu-loss",
        "stress-cpu-promotion",
        "stress-cpu-risk-int4_int8-gap",
        "stress-cpu-risk-trace-int4_int8-gap",
        "stress-cpu-saved-bytes",
    ]
    pixels = matplotlib.image.imread(images["stress-cpu-promotion"])[..., :3]
    assert pixels.std() > 0.05


def test_the_names_of_comparisons_of_one_scale_are_numbered(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16", steps=2, ratios=False)
    write_run(arm="bf16", steps=3, ratios=False)
    names = [f"stress-cpu-{place}-{name}" for place in (1, 2) for name in ("loss", "saved-bytes")]
    assert list(drawn(tmp_path / "runs", tmp_path / "out")) == names


def test_binned() -> None:
    steps = np.array([1, 2, 3, 7])
    values = np.array([1.0, 3.0, np.nan, 5.0])
    centres, mean = binned(steps, values, 2, "mean")
    assert centres.tolist() == [1.5, 3.5, 5.5, 7.5]
    assert mean == pytest.approx([2.0, np.nan, np.nan, 5.0], nan_ok=True)
    assert binned(steps, values, 2, "max")[1] == pytest.approx([3.0, np.nan, np.nan, 5.0], nan_ok=True)
    assert binned(steps, np.array([1, np.inf, 1, 1]), 2, "mean")[1][0] == np.inf
    assert [bin_width(last, 300) for last in (0, 300, 301, 20_000)] == [1, 1, 2, 67]
