"""The figure of quality against promotion."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.statistics import as_percent
from gnmr.lab.report.style import FAINT, INK, head, legend_beside, looks, new_figure
from gnmr.lab.report.tradeoff import ends, signal_curves

_TICKS = (0, 0.1, 1, 5, 25, 100)


def quality_against_promotion(comparison: Comparison) -> Figure:
    """Perplexity relative to the static low path, same seed, with its 95 % interval, by achieved promotion share."""
    figure, (axes,) = new_figure(9.5, 4.6)
    found, diverged = signal_curves(comparison), False
    for place, (name, look) in enumerate(looks(found).items()):
        aside = 1.03 ** (place - (len(found) - 1) / 2)  # many signals have one budget: side by side they stay legible
        shares, means, bars, lost = [], [], [], []
        for point in found[name]:
            share, change = 100 * point.promoted * aside, point.change
            if change.mean is not None:
                mean = as_percent(change.mean)
                low, high = map(as_percent, change.interval or (change.mean, change.mean))
                shares.append(share)
                means.append(mean)
                bars.append((mean - low, high - mean))
            elif any(change.diverged):
                lost.append(share)
        axes.errorbar(shares, means, np.reshape(bars, (-1, 2)).T, **look, marker="o", ms=4, capsize=2, label=name)
        top = axes.get_xaxis_transform()
        axes.plot(lost, np.full(len(lost), 0.97), "x", color=look["color"], mew=1.6, transform=top)
        diverged |= bool(lost)
    axes.axhline(0.0, color=INK, lw=1.0, zorder=1, label="static low path")
    for recovery, change in ends(comparison):
        if change.mean is not None:
            height = as_percent(change.mean)
            axes.axhline(height, color=FAINT, lw=1.0, ls="--", zorder=1, label=f"static {recovery.always}")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.02, 120)
    axes.set_xlabel("mean promotion [% of unit-steps], linear below 0.1")
    axes.set_ylabel("perplexity relative to static low [%]")
    axes.set_title("mean and 95 % interval over seeds, signals a little side by side; lower is better")
    legend_beside(axes)
    early = "; × a run of the pairs diverged" if diverged else ""
    head(figure, f"Quality against promotion: {comparison.name}{early}")
    return figure
