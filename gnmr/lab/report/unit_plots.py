"""Plots of one run's units: GNMR or risk of single units (the paper's figure 2), risk of all."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.binning import bin_width, binned
from gnmr.lab.report.faults import FaultWindow
from gnmr.lab.report.risk import costs, limit, thresholds
from gnmr.lab.report.runs import Ratios, Run
from gnmr.lab.report.style import BAND, COLOURS, FAINT, INK, head, log_ticks, new_figure, of_steps, step_axis

_MOST = 4.0
"""Where the risk map's colours end; they begin at 1."""
_RISK = ("#FDD9A8", "#FDBB84", "#FC8D59", "#E34A33", "#B30000", "#7A0000")
"""Orange to red, darker and darker, as on the page."""
_TALLEST = 90.0
"""Inches: a picture of more than 65,535 pixels cannot be drawn."""


def traces(arm: Arm, run: Run, ratios: Ratios) -> Figure:
    """The four units with the highest peaks, each before the band of all, as in the paper's figure 2.

    GNMR, or under a signal without it the risk R.
    """
    figure, grid = new_figure(10, 6.0, rows=2, columns=2, share=True)
    what, values = ("GNMR", ratios.columns["gnmr"]) if "gnmr" in ratios.columns else ("risk R", ratios.risk_SU)
    values = np.where(np.isfinite(values), values, np.nan)
    width = bin_width(int(ratios.steps[-1]), 300)
    steps, highest = binned(ratios.steps, values, width, "max")
    lowest_all, median_all, highest_all = _band(highest)
    peaks = np.nan_to_num(values, nan=-np.inf).max(axis=0)
    cut, cut_name = limit(arm, run, ratios)
    for axes, unit in zip(grid, np.argsort(-peaks, kind="stable"), strict=False):
        axes.fill_between(steps, lowest_all, highest_all, color=BAND, lw=0, label="all units")
        axes.plot(steps, median_all, color=FAINT, lw=0.8, label="their median")
        axes.plot(steps, highest[:, unit], color=COLOURS[0], lw=0.9, label="this unit")
        if what != "GNMR":
            axes.axhline(cut, color=COLOURS[1], lw=1.3, ls="--", label=cut_name)
        elif stages := thresholds(arm, run).get("gnmr"):
            since, levels = zip(*stages, strict=True)
            ends = [*since, int(ratios.steps[-1]) + 1]
            axes.step(ends, [*levels, levels[-1]], where="post", color=COLOURS[1], lw=1.3, ls="--", label="α")
        if arm.routed:
            _rug(axes, ratios.steps[ratios.active_SU[:, unit]], 0.03, "|", INK, "on the recovery path")
        if np.isinf(ratios.risk_SU).any():
            _rug(axes, ratios.steps[np.isinf(ratios.risk_SU[:, unit])], 0.97, "x", COLOURS[1], "norm not finite")
        axes.set_title(ratios.units[unit])
        step_axis(axes)
        axes.label_outer()
    for axes in grid[len(ratios.units) :]:
        axes.set_visible(False)
    for axes in grid[::2]:
        axes.set_ylabel(f"{what}{of_steps('highest', width)}")
    grid[0].set_yscale("log")
    log_ticks(grid[0].yaxis, (1, 2, 5))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower left", ncols=6)
    head(figure, f"{what} of the units with the highest peaks (as the paper's figure 2)\n{_of_run(arm, run)}")
    return figure


def risk_map(arm: Arm, run: Run, ratios: Ratios, windows: Iterable[FaultWindow] = ()) -> Figure:
    """Risk of every unit by step: blank below its `limit`, orange to red above; those that cost most first.

    A blue strip in the lower part of a row: the unit was on the recovery path; a frame: a fault was injected.
    """
    number, (name, values_U) = len(ratios.units), costs(ratios)
    order = np.argsort(-values_U, kind="stable")
    height = min(number * float(np.clip(9.0 / number, 0.085, 0.19)), _TALLEST)
    figure = Figure(figsize=(11, 1.9 + height), layout="constrained")
    axes, side = figure.subplots(1, 2, width_ratios=(12, 1), sharey=True)
    width = bin_width(int(ratios.steps[-1]), 600)
    cut, cut_name = limit(arm, run, ratios)
    _, risk = binned(ratios.steps, ratios.risk_SU[:, order] / cut, width, "max")
    _, active = binned(ratios.steps, ratios.active_SU[:, order].astype(float), width, "max")
    extent = (0.5, len(risk) * width + 0.5, number - 0.5, -0.5)
    image = axes.imshow(
        np.clip(risk, None, _MOST).T,  # inf, a non-finite norm, has the last colour
        norm=LogNorm(1.0, _MOST),
        cmap=LinearSegmentedColormap.from_list("risk", _RISK).with_extremes(under="white", bad="#E4E4E4"),
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    axes.imshow(_strips(active.T), extent=extent, aspect="auto", interpolation="nearest")
    for window in windows:
        if window.unit in ratios.units and window.start <= ratios.steps[-1]:
            row = int(np.flatnonzero(order == ratios.units.index(window.unit))[0])
            corner, length = (window.start - 0.5, row - 0.5), window.end - window.start + 1
            axes.add_patch(Rectangle(corner, length, 1, fill=False, ec=INK, lw=1.0))
    axes.grid(False)
    axes.set_xlim(0.5, float(ratios.steps[-1]) + 0.5)
    step_axis(axes)
    framed = "; framed: injected faults" if axes.patches else ""
    axes.set_title(f"blank below the {cut_name}{of_steps('highest risk', width)}; blue: on the recovery path{framed}")
    every = max(1, math.ceil(number / 60))
    axes.set_yticks(range(0, number, every), [ratios.units[unit] for unit in order[::every]], fontsize=6.5)
    side.barh(range(number), 100 * ratios.active_SU.mean(axis=0)[order], color=COLOURS[0], height=0.7)
    side.set_xlabel("on recovery\npath [% of steps]", fontsize=8)
    side.tick_params(left=False, labelleft=False)
    side.xaxis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
    bar = figure.colorbar(image, ax=[axes, side], fraction=0.02, pad=0.01, extend="both", label=f"risk R / {cut_name}")
    bar.ax.minorticks_off()
    bar.set_ticks([1, 2, _MOST], labels=["1", "2", "4"])
    head(figure, f"Risk of every unit, highest mean {name.replace('_', ' ')} first: {_of_run(arm, run)}")
    return figure


def _band(values_BU: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest, median and highest over the units, per bin; NaN where a bin has nothing."""
    found = np.full((3, len(values_BU)), np.nan)
    known = ~np.isnan(values_BU).all(axis=1)
    found[:, known] = np.nanpercentile(values_BU[known], (0, 50, 100), axis=1)
    return found[0], found[1], found[2]


def _rug(axes: Axes, steps: np.ndarray, height: float, marker: str, colour: str, label: str) -> None:
    """A mark for each of the steps, at a share of the axes' height."""
    where = axes.get_xaxis_transform()
    axes.plot(steps, np.full(len(steps), height), marker, color=colour, ms=6, mew=0.6, transform=where, label=label)


def _strips(active_UB: np.ndarray) -> np.ndarray:
    """An image (3 U, B, 4): the lower third of a unit's row blue where it was in any of the bin's steps."""
    units, bins = active_UB.shape
    image = np.zeros((3 * units, bins, 4))
    image[..., :3] = to_rgb(COLOURS[0])
    image[2::3, :, 3] = np.nan_to_num(active_UB) > 0
    return image


def _of_run(arm: Arm, run: Run) -> str:
    text = f"{arm.label}, {run.experiment}, scale {run.scale}, seed {run.seed}"
    return text if run.status == "done" else f"{text} ({run.status})"
