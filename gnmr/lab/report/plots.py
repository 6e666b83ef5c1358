"""The report's plots as PNG: which there are, of which runs, under which names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from gnmr.lab.report.comparisons import Comparison, by_experiment, runs_of
from gnmr.lab.report.curves import (
    Curves,
    loss_by_tokens,
    losses,
    losses_by_tokens,
    mean_gnmr,
    mean_of_units,
    saved_bytes,
)
from gnmr.lab.report.faults import read_windows
from gnmr.lab.report.layout import counted, numbered
from gnmr.lab.report.runs import Run
from gnmr.lab.report.style import STYLE, Looks, foot, looks
from gnmr.lab.report.tradeoff import tradeoff
from gnmr.lab.report.tradeoff_plot import quality_against_promotion
from gnmr.lab.report.unit_plots import risk_map, traces
from gnmr.records import output


def draw(comparisons: list[Comparison], out: Path) -> list[Path]:
    """Draws everything that the records of these runs hold into `out`; the files, in order."""
    stems = [_slug(f"{comparison.kind.experiment}-{comparison.kind.scale}") for comparison in comparisons]
    arms = sorted((arm for comparison in comparisons for arm in comparison.arms), key=lambda arm: arm.sort_key)
    shared = looks(dict.fromkeys(arm.label for arm in arms), {arm.label for arm in arms if arm.sixteen_bit})
    images: list[Path] = []

    def save(name: str, figure: Figure, runs: list[Run]) -> None:
        foot(figure, _origin(runs))
        images.append(out / f"{name}.png")
        with output.replacing(images[-1], follow=False) as file:
            figure.savefig(file, format="png")

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        for what in ("Glyph", "constrained_layout not applied", "Tight layout not applied"):
            warnings.filterwarnings("ignore", message=what)  # names may have any characters, and any length
        for comparison, stem in zip(comparisons, numbered(stems, "{}-{}"), strict=True):
            for name, figure, runs in _figures(comparison, shared):
                save(f"{stem}-{name}", figure, runs)
        for experiment, mine in by_experiment(comparisons).items():
            if any(map(loss_by_tokens, mine)):
                save(f"{_slug(experiment)}-loss-by-tokens", losses_by_tokens(mine, shared), runs_of(mine))
    return images


def _figures(comparison: Comparison, shared: Looks) -> Iterable[tuple[str, Figure, list[Run]]]:
    """Name, figure and the runs in it. An arm looks the same in all of them."""
    if any(len(run.steps["step"]) for run in comparison.runs):  # records may have been kept without their steps
        if (figure := losses(comparison, shared)) is not None:
            yield "loss", figure, comparison.runs
        if any((run.steps["saved_bytes"] > 0).any() for run in comparison.runs):
            yield "saved-bytes", saved_bytes(comparison, shared), [arm.first for arm in comparison.arms]
    if tradeoff(comparison).rows:
        yield "promotion", quality_against_promotion(comparison), comparison.runs
    means: Curves = {}
    for arm in comparison.arms:
        for run in arm.runs:
            ratios = run.ratios()  # one run's at a time: a long run's matrices are large
            if len(ratios.steps) == 0:
                continue
            if (mean := mean_of_units(ratios)) is not None:
                means[run.folder] = mean
            if run is not arm.first:
                continue
            name = "risk-trace" if mean is None else "gnmr"
            yield f"{name}-{_slug(arm.label)}", traces(arm, run, ratios), [run]
            if arm.routed:
                yield f"risk-{_slug(arm.label)}", risk_map(arm, run, ratios, read_windows(run.folder)), [run]
    if means:
        yield "mean-gnmr", mean_gnmr(comparison, means, shared), [r for r in comparison.runs if r.folder in means]


def _origin(runs: list[Run]) -> str:
    seeds = counted("seed", sorted({run.seed for run in runs}))
    return f"{seeds} · commit {', '.join(sorted({run.commit for run in runs}))}"


def _slug(text: str) -> str:
    """As part of a file's name, whose length is limited."""
    slug = re.sub(r"[^A-Za-z0-9_.=]+", "-", text).strip("-")
    return slug if len(slug) <= 100 else f"{slug[:90]}-{sha256(text.encode()).hexdigest()[:8]}"
