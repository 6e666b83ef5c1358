"""Curves of all arms: losses, by tokens too (the paper's figure 4), saved bytes, mean GNMR (figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gnmr.report.arms import Arm
from gnmr.report.binning import bin_width, binned, log_binned, shared_mean
from gnmr.report.comparisons import Comparison
from gnmr.report.layout import count
from gnmr.report.runs import Ratios, Run
from gnmr.report.style import (
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


def losses(comparison: Comparison, looks: Looks) -> Figure:
    """Training loss, validation loss, and the latter minus the 16-bit arm's of the same seed where there is one."""
    gaps = {arm.label: _gaps(comparison, arm) for arm in comparison.arms}
    paired = any(gaps.values())
    figure, (train, val, *rest) = new_figure(13 if paired else 9.5, 4.2, columns=3 if paired else 2)
    width = bin_width(last_step(comparison), 120)
    for arm in comparison.arms:
        by_step, by_eval = loss_curves(arm, width)
        _seeds_and_mean(train, arm, _capped(by_step), looks)
        _seeds_and_mean(val, arm, _capped(by_eval), looks, marker="o")
        for axes in rest:
            _seeds_and_mean(axes, arm, gaps[arm.label], looks, marker="o")
    train.set_title(f"Training loss{of_steps('mean', width)}")
    val.set_title("Validation loss")
    val.legend(loc="upper right")
    for axes in (train, val):
        axes.set_ylabel("cross-entropy [nats per token]")
    for axes in rest:
        axes.set_title("Validation loss minus the 16-bit arm's, same seed")
        axes.set_ylabel("difference [nats per token]")
        axes.axhline(0.0, color=FAINT, lw=1.0, zorder=1)
    for axes in (train, val, *rest):
        _steps_of(axes, comparison)
    head(figure, f"Loss: {comparison.name}{_early(comparison)}")
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
            _seeds_and_mean(axes, arm, _capped(mine), looks, label=arm.label)
        ends = [_end(*curve) for curve in curves.values()]
        if several and ends:
            x, y = np.median(ends, axis=0)
            axes.annotate(comparison.kind.scale, (x, y), (5, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_xscale("log")
    axes.set_yscale("log")
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


def _capped(curves: Curves) -> Curves:
    """A diverged run drawn no higher than a little above where it began, so that it does not flatten the others."""
    found = {}
    for key, (steps, values) in curves.items():
        first = values[np.isfinite(values)][:1]
        found[key] = steps, np.minimum(values, 1.03 * first) if len(first) else values
    return found


def _gaps(comparison: Comparison, arm: Arm) -> Curves:
    """Validation loss minus the reference's of the same seed, at the evaluations that both have."""
    reference = comparison.reference(arm)
    if reference is None or reference is arm:
        return {}
    theirs = {run.seed: _val_losses(run) for run in reference.runs}
    found = {}
    for run in arm.runs:
        mine, other = _val_losses(run), theirs.get(run.seed, {})
        if steps := sorted(mine.keys() & other.keys()):
            found[run.folder] = (np.array(steps), np.array([mine[step] - other[step] for step in steps]))
    return found


def _val_losses(run: Run) -> dict[float, float]:
    return dict(zip(run.evals["step"].tolist(), run.evals["val_loss"].tolist(), strict=True))


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
