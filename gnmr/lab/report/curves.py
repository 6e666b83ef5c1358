"""Curves of all arms: losses, by tokens too (the paper's figure 4), saved bytes, mean GNMR (figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.binning import bin_width, binned, log_binned, shared_mean
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.headline import high_precision, short_names
from gnmr.lab.report.layout import count
from gnmr.lab.report.runs import Ratios
from gnmr.lab.report.style import (
    BAND,
    COLOURS,
    FAINT,
    INK,
    Looks,
    Series,
    head,
    legend_beside,
    log_ticks,
    new_figure,
    of_steps,
    step_axis,
)

Curves = dict[Path, Series]
"""By run folder: steps and values."""
RelativeCurves = dict[str, tuple[Curves, Curves]]
"""By label of the arm: of training and of validation loss."""
MANY = 8
"""Arms that one picture of curves can show."""


def losses(comparison: Comparison, looks: Looks) -> Figure | None:
    """Training and validation loss, below them the same minus the 16-bit arm's of the same seed where there is one.

    None where no run has kept any. More than `MANY` arms get a panel each (`many_losses`).
    """
    width = bin_width(last_step(comparison), 120)
    relative, _ = relative_losses(comparison, width)
    plain = {arm.label: loss_curves(arm, width) for arm in comparison.arms}
    rows = [("cross-entropy [nats per token]", plain)]
    rows += [("minus 16 bits, same seed [nats]", relative)] if relative else []
    columns = [
        (name, place)
        for place, name in enumerate(("Training loss", "Validation loss"))
        if any(_drawn(found[place]) for found in plain.values())
    ]
    if not columns:
        return None
    if len(comparison.arms) > MANY:
        return many_losses(comparison, relative or plain, rows[-1][0], columns[-1][1], columns[-1][0])
    figure, grid = new_figure(4.6 * len(columns) + 2, 3.6 * len(rows) + 0.4, rows=len(rows), columns=len(columns))
    for axes, (what, curves, name, place) in zip(
        grid, [(what, curves, *column) for what, curves in rows for column in columns], strict=True
    ):
        for arm in comparison.arms:
            mine = curves.get(arm.label, ({}, {}))[place]
            _seeds_and_mean(axes, arm, mine, looks, marker="o" if place else None)
        if curves is plain:
            axes.set_ylim(top=loss_top([curve for found in plain.values() for curve in found[place].values()]))
        else:
            axes.axhline(0.0, color=FAINT, lw=1.6, zorder=1)
            _bounded(axes, [curve for found in curves.values() for curve in found[place].values()])
        minus = ", minus 16 bits" if curves is not plain else ""
        axes.set_title(f"{name}{minus}{'' if place else of_steps('mean', width)}")
        axes.set_ylabel(what)
        _steps_of(axes, comparison)
    legend_beside(grid[len(columns) - 1], *grid[0].get_legend_handles_labels())
    head(figure, f"Loss: {comparison.name}{_early(comparison)}")
    return figure


def many_losses(comparison: Comparison, curves: RelativeCurves, what: str, place: int, name: str) -> Figure:
    """A small panel for each arm, the lowest end first: its mean over seeds before the median of all, by step."""
    means = {
        arm.label: shared_mean([curve for curve in curves[arm.label][place].values() if len(curve[0])])
        for arm in comparison.arms
        if arm.label in curves
    }
    known = [(label, curve) for label, curve in means.items() if np.isfinite(curve[1]).any()]
    means = dict(sorted(known, key=lambda one: one[1][1][np.isfinite(one[1][1])][-1]))
    names = short_names([arm for arm in comparison.arms if arm.label in means])
    number = max(1, math.ceil(len(means) / 5))
    figure, grid = new_figure(12, 1.5 * number + 0.9, rows=number, columns=min(5, max(1, len(means))), share=True)
    by_step: dict[float, list[float]] = {}
    for steps, values in means.values():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            by_step.setdefault(step, []).append(value)
    middle = np.array([np.nanmedian(by_step[step]) for step in sorted(by_step)])
    for axes, (label, (steps, values)) in zip(grid, means.items(), strict=False):
        axes.plot(sorted(by_step), middle, color=BAND, lw=2)
        axes.plot(steps, values, color=COLOURS[0], lw=1.4)
        axes.set_title(names[label], fontsize=7)
        axes.tick_params(labelsize=7)
    _bounded(grid[0], list(means.values()))
    for axes in grid[len(means) :]:
        axes.set_visible(False)
    figure.supylabel(what, fontsize=8)
    head(figure, f"{name} by step of {len(means)} arms, grey the median of all: {comparison.name}")
    return figure


def saved_bytes(comparison: Comparison, looks: Looks) -> Figure:
    """Bytes kept for backward, measured (wide line) and by the memory model (thin dashes on it), one seed an arm."""
    figure, (axes,) = new_figure(8.5, 4.2)
    width = bin_width(last_step(comparison), 200)
    dashes: Any = {"color": INK, "lw": 1.0, "ls": (0, (3, 2))}
    for arm in comparison.arms:
        rows = arm.first.steps
        steps, measured = binned(rows["step"], rows["saved_bytes"] / 2**20, width, "mean")
        _, predicted = binned(rows["step"], rows["saved_bytes_predicted"] / 2**20, width, "mean")
        axes.plot(steps, measured, **looks[arm.label], lw=4.5, alpha=0.55, label=arm.label, solid_capstyle="butt")
        axes.plot(steps, predicted, **dashes)
    axes.plot([], [], label="predicted (memory model)", **dashes)
    axes.set_title(f"measured and predicted{of_steps('mean', width)}")
    axes.set_ylabel("saved activations [MiB]")
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    _steps_of(axes, comparison)
    head(figure, f"Bytes kept for backward by the converted linears: {comparison.name}")
    return figure


def mean_gnmr(comparison: Comparison, means: Curves, looks: Looks) -> Figure:
    """GNMR averaged over the units, `mean_of_units` of each run: the paper's figure 3."""
    figure, (axes,) = new_figure(8.5, 4.2)
    width = bin_width(last_step(comparison), 150)
    for arm in comparison.arms:
        if curves := {r.folder: binned(*means[r.folder], width, "mean") for r in arm.runs if r.folder in means}:
            _seeds_and_mean(axes, arm, curves, looks)
    axes.axhline(1.0, color=FAINT, lw=0.8, zorder=1)
    axes.set_title(f"seeds thin, their mean bold{of_steps('mean', width)}")
    axes.set_ylabel("mean GNMR over units")
    legend_beside(axes)
    _steps_of(axes, comparison)
    head(figure, f"Mean GNMR (as the paper's figure 3): {comparison.name}{_early(comparison)}")
    return figure


def losses_by_tokens(comparisons: Sequence[Comparison], looks: Looks) -> Figure:
    """Training loss of every arm at every scale of an experiment, both axes logarithmic: the paper's figure 4."""
    figure, (axes,) = new_figure(8.5, 4.8)
    several = len({comparison.kind.scale for comparison in comparisons}) > 1
    for comparison in comparisons:
        curves = loss_by_tokens(comparison)
        for arm in comparison.arms:
            mine = {run.folder: curves[run.folder] for run in arm.runs if run.folder in curves}
            _seeds_and_mean(axes, arm, mine, looks, label=arm.label)
        ends = [_end(*curve) for curve in curves.values()]
        if several and ends:
            x, y = np.median(ends, axis=0)
            axes.annotate(comparison.kind.scale, (x, y), (5, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=loss_top([curve for one in comparisons for curve in loss_by_tokens(one).values()]))
    log_ticks(axes.yaxis, (1, 1.5, 2, 3, 4, 5, 6, 8))
    axes.set_title("seeds thin, their mean bold; means of bins of equal width")
    log_ticks(axes.xaxis, (1, 2, 5), count)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("cross-entropy [nats per token]")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))  # an arm looks the same at every scale
    legend_beside(axes, once.values(), once.keys())
    early = max(map(_early, comparisons), key=len)
    head(figure, f"Training loss by tokens (as the paper's figure 4): {comparisons[0].kind.experiment}{early}")
    return figure


def loss_curves(arm: Arm, width: int) -> tuple[Curves, Curves]:
    """Training loss in means of `width` steps, and validation loss."""
    train = {run.folder: binned(run.steps["step"], run.steps["loss"], width, "mean") for run in arm.runs}
    return train, {run.folder: (run.evals["step"], run.evals["val_loss"]) for run in arm.runs}


def loss_by_tokens(comparison: Comparison, bins: int = 80) -> Curves:
    """Training loss of each run that has one, in bins of equal width on a logarithmic axis of tokens."""
    per_step, last = comparison.kind.tokens_per_step, last_step(comparison)
    found: Curves = {}
    for run in comparison.runs:
        if per_step and np.isfinite(run.steps["loss"]).any():
            steps, values = log_binned(run.steps["step"], run.steps["loss"], last, bins)
            found[run.folder] = steps * per_step, values
    return found


def mean_of_units(ratios: Ratios) -> Series | None:
    """GNMR of each recorded step averaged over the units that have a finite one; None under a signal without GNMR."""
    gnmr_SU = ratios.columns.get("gnmr")
    if gnmr_SU is None:
        return None
    known = np.isfinite(gnmr_SU)
    total = np.where(known, gnmr_SU, 0.0).sum(axis=1)
    return ratios.steps, np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)


def _seeds_and_mean(
    axes: Axes, arm: Arm, curves: Curves, looks: Looks, marker: str | None = None, label: str | None = None
) -> None:
    """Thin lines for the seeds, a bold one for the mean of the done ones; a cross ends a run that is not done.

    The mean is drawn at the steps that every done seed has, so that no seed drops out of it half-way.
    """
    look = looks[arm.label]
    done: list[Series] = []
    drawn = [run for run in arm.runs if run.folder in curves and len(curves[run.folder][0])]
    for run in drawn:
        steps, values = curves[run.folder]
        axes.plot(steps, values, **look, lw=0.7, alpha=0.5)
        known = np.flatnonzero(np.isfinite(values))
        if run.status == "done":
            done.append((steps, values))
        elif len(known):
            axes.plot(steps[known[-1]], values[known[-1]], **look, marker="x", ms=6, mew=1.6)
    axes.plot(*shared_mean(done), **look, lw=2.0, marker=marker, ms=4, label=label or _legend(arm, len(drawn)))


def _end(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The last point with a finite height; there is one."""
    last = np.flatnonzero(np.isfinite(y))[-1]
    return float(x[last]), float(y[last])


def loss_top(curves: Sequence[Series]) -> float | None:
    """Where an axis of losses ends: a little above the highest first value, or the last one within half above that.

    A run that diverged leaves the axes and does not flatten the others; a fork's loss may rise. None without any.
    """
    known = [values[np.isfinite(values)] for _, values in curves]
    first = max((float(one[0]) for one in known if len(one)), default=None)
    if first is None:
        return None
    last = [float(one[-1]) for one in known if len(one) and one[-1] <= 1.5 * first]
    return 1.03 * max([first, *last])


def relative_losses(comparison: Comparison, width: int) -> tuple[RelativeCurves, list[Arm]]:
    """By arm training and validation loss minus those of its 16-bit arm, same seed, at the places that both have; and
    the arms that they are minus. An arm without one, and that arm itself, have none."""
    found: RelativeCurves = {}
    references: list[Arm] = []
    for arm in comparison.arms:
        reference = high_precision(comparison, arm)
        if reference is None or reference is arm:
            continue
        minus = tuple(
            _minus(arm, mine, reference, theirs)
            for mine, theirs in zip(loss_curves(arm, width), loss_curves(reference, width), strict=True)
        )
        if any(minus):
            found[arm.label] = minus[0], minus[1]
            references += [] if any(reference is one for one in references) else [reference]
    return found, references


def _minus(arm: Arm, mine: Curves, reference: Arm, theirs: Curves) -> Curves:
    by_seed = {run.seed: _points(*theirs[run.folder]) for run in reference.runs if run.folder in theirs}
    found: Curves = {}
    for run in arm.runs:
        points, other = _points(*mine[run.folder]), by_seed.get(run.seed, {})
        if steps := sorted(points.keys() & other.keys()):
            found[run.folder] = np.array(steps), np.array([points[step] - other[step] for step in steps])
    return found


def _points(steps: np.ndarray, values: np.ndarray) -> dict[float, float]:
    return {s: v for s, v in zip(steps.tolist(), values.tolist(), strict=True) if math.isfinite(v)}


def _drawn(curves: Curves) -> bool:
    return any(np.isfinite(values).any() for _, values in curves.values())


def _bounded(axes: Axes, curves: Sequence[Series]) -> None:
    """Limits that a few far values, as of a run that diverged, do not set."""
    known = [values[np.isfinite(values)] for _, values in curves]
    if not known or not (values := np.concatenate(known)).size:
        return
    low, high = np.quantile(values, (0.01, 0.97))
    room = 0.15 * (high - low) or 0.01
    axes.set_ylim(min(low, 0.0 if low > 0 and low < high - low else low) - room, high + room)


def _steps_of(axes: Axes, comparison: Comparison) -> None:
    tokens = comparison.kind.tokens_per_step
    step_axis(axes, count(tokens) if tokens else "")
    axes.set_xlim(left=0)
    if not any(np.size(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", color=FAINT)


def _early(comparison: Comparison) -> str:
    return "; × ends a run that is not done" if any(run.status != "done" for run in comparison.runs) else ""


def _legend(arm: Arm, drawn: int) -> str:
    """`drawn`: its runs that have what is drawn; the records of others may have been kept without."""
    done, number = len(arm.done), len(arm.runs)
    seeds = f"{f'{drawn} of ' if 0 < drawn < number else ''}{number} seed{'s' if number > 1 else ''}"
    return f"{arm.label} ({seeds}, {done} done)" if done < number else f"{arm.label} ({seeds})"


def last_step(comparison: Comparison) -> int:
    """Newest recorded step of all its runs."""
    return max(run.last_step for run in comparison.runs)
