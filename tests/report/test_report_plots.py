"""The plots exist, show something, and survive short, broken and long runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gnmr.lab.records.find import find_runs
from gnmr.lab.report.binning import bin_width, binned, log_binned, shared_mean
from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.curves import loss_top, losses, losses_by_tokens, mean_gnmr, mean_of_units
from gnmr.lab.report.faults import FaultWindow
from gnmr.lab.report.plots import draw
from gnmr.lab.report.runs import load
from gnmr.lab.report.style import looks
from gnmr.lab.report.unit_plots import risk_map

pytestmark = pytest.mark.slow

Write = Callable[..., Path]


def ratios(steps: int, units: int) -> np.ndarray:
    return np.exp(0.4 * np.random.default_rng(0).standard_normal((steps, units)))


def drawn(root: Path, out: Path) -> dict[str, Path]:
    out.mkdir()
    return {path.stem: path for path in draw(compare(load(folder) for folder in find_runs([root])), out)}


def test_records_that_were_kept_without_their_steps(write_run: Write, tmp_path: Path) -> None:
    """As runs/reference has them: a summary, evaluations and maybe ratios."""
    for seed in (0, 1):
        for arm in ("bf16", "int4"):
            run = write_run(arm=arm, seed=seed, steps=30, units=7, val_loss={30: 3.5})
            (run / "steps.jsonl").unlink()
    assert not any("loss" in name for name in drawn(tmp_path / "runs", tmp_path / "out"))


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
        "stress-loss-by-tokens",
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
    assert len(drawn(tmp_path / "runs", tmp_path / "out")) == 7


def test_signals_without_gnmr_and_quality_against_promotion(write_run: Write, tmp_path: Path) -> None:
    gap = {"controller.signal": "gap", "controller.trigger": 2.0}
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
        "stress-loss-by-tokens",
    ]
    pixels = matplotlib.image.imread(images["stress-cpu-promotion"])[..., :3]
    assert pixels.std() > 0.05


def test_many_arms_get_a_panel_each_and_faults_a_frame(
    write_run: Write, comparisons: Callable[[], list[Comparison]]
) -> None:
    for number in range(9):
        write_run(steps=6, ratios=number == 8, settings={"controller.max_o": number + 1}, val_ppl=50.0 - number)
    (comparison,) = comparisons()
    figure = losses(comparison, looks(arm.label for arm in comparison.arms))
    assert figure is not None
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == [f"max_o={number}" for number in range(9, 0, -1)], "the lowest first"
    arm = next(arm for arm in comparison.arms if arm.settings["controller.max_o"] == 9)
    ratios = arm.first.ratios()
    windows = [FaultWindow(ratios.units[1], 2, 3), FaultWindow("elsewhere", 1, 2)]
    axes = risk_map(arm, arm.first, ratios, windows).axes[0]
    (frame,) = axes.patches
    assert (frame.get_x(), frame.get_width()) == (1.5, 2)


def test_the_names_of_comparisons_of_one_scale_are_numbered(write_run: Write, tmp_path: Path) -> None:
    write_run(arm="bf16", steps=2, ratios=False)
    write_run(arm="bf16", steps=3, ratios=False)
    names = [f"stress-cpu-{place}-{name}" for place in (1, 2) for name in ("loss", "saved-bytes")]
    assert list(drawn(tmp_path / "runs", tmp_path / "out")) == [*names, "stress-loss-by-tokens"]


def test_the_loss_by_tokens_has_every_arm_at_every_scale(
    write_run: Write, comparisons: Callable[[], list[Comparison]]
) -> None:
    """Bold are the means over the done seeds; an arm stands once in the legend, a scale at its lines' ends."""
    for scale in ("cpu", "60m"):
        for seed in (0, 1):
            write_run(arm="int4", scale=scale, seed=seed, steps=40, ratios=False)
        write_run(arm="bf16", scale=scale, steps=30, planned=40, status="running", ratios=False)
    found = comparisons()
    (axes,) = losses_by_tokens(found, looks(["int4", "bf16"])).axes
    bold = [line for line in axes.lines if line.get_linewidth() == 2.0 and len(line.get_xdata())]
    assert [line.get_label() for line in bold] == ["int4"] * 2
    assert bold[0].get_xdata()[[0, -1]] == pytest.approx([2048, 2048 * (39 * 40) ** 0.5]), "the last bin has two steps"
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["int4", "bf16"]
    assert [text.get_text() for text in axes.texts] == ["cpu", "60m"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_legend_counts_the_seeds_that_are_drawn(
    write_run: Write, comparisons: Callable[[], list[Comparison]]
) -> None:
    """Ratios of one seed of three, and none of an arm, as records may be kept."""
    for seed in (0, 1, 2):
        write_run(arm="int8", seed=seed, steps=30, units=7, ratios=False)
        write_run(arm="bf16", seed=seed, steps=30, units=7, gnmr=ratios(30, 7), ratios=seed == 0)
        write_run(arm="int4", seed=seed, steps=30, units=7, gnmr=ratios(30, 7))
    (comparison,) = comparisons()
    kept = [run for run in comparison.runs if (run.folder / "units.arrows").exists()]
    curves = {run.folder: means for run in kept if (means := mean_of_units(run.ratios()))}
    (axes,) = mean_gnmr(comparison, curves, looks(["bf16", "int4", "int8"])).axes
    legend = axes.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} == {"bf16 (1 of 3 seeds)", "int4 (3 seeds)"}


def test_binned() -> None:
    steps = np.array([1, 2, 3, 7])
    values = np.array([1.0, 3.0, np.nan, 5.0])
    centres, mean = binned(steps, values, 2, "mean")
    assert centres.tolist() == [1.5, 3.5, 5.5, 7.5]
    assert mean == pytest.approx([2.0, np.nan, np.nan, 5.0], nan_ok=True)
    assert binned(steps, values, 2, "max")[1] == pytest.approx([3.0, np.nan, np.nan, 5.0], nan_ok=True)
    assert binned(steps, np.array([1, np.inf, 1, 1]), 2, "mean")[1][0] == np.inf
    assert [bin_width(last, 300) for last in (0, 300, 301, 20_000)] == [1, 1, 2, 67]


def test_an_axis_of_losses_shows_what_rises_and_not_what_diverges() -> None:
    steps = np.arange(3)
    falls, rises, diverges = (np.array(one) for one in ([3.0, 2.0, 1.0], [3.0, 3.1, 3.6], [3.0, 9.0, 30.0]))
    assert loss_top([(steps, falls)]) == pytest.approx(1.03 * 3.0)
    assert loss_top([(steps, one) for one in (falls, rises, diverges)]) == pytest.approx(1.03 * 3.6)
    assert loss_top([]) is None and loss_top([(steps, np.full(3, np.nan))]) is None


def test_log_binned() -> None:
    """Edges at 1, 2, 4, 8 for seven steps in three bins; a NaN is passed over."""
    values = np.array([8.0, 4.0, 2.0, 1.0, 3.0, np.nan, 2.0])
    centres, means = log_binned(np.arange(1, 8), values, 7, 3)
    assert centres == pytest.approx([1, 6**0.5, 28**0.5])
    assert means.tolist() == [8.0, 3.0, 2.0]
    assert log_binned(np.array([1]), np.array([5.0]), 3, 150)[1] == pytest.approx([5.0, np.nan, np.nan], nan_ok=True)


def test_shared_mean() -> None:
    """At the steps that both curves have."""
    one, other = (np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), (np.array([2, 3]), np.array([4.0, 5.0]))
    steps, mean = shared_mean([one, other])
    assert (steps.tolist(), mean.tolist()) == ([2, 3], [3.0, 4.0])
    assert len(shared_mean([])[0]) == 0
