"""Losses over steps as lines of a few hundred points: of each run, and minus the 16-bit arm of the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.headline import high_precision

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values."""
Curves = dict[Path, Series]
"""By run folder."""


def bin_width(last_step: int, bins: int) -> int:
    """Return the steps per bin for at most that many bins over steps 1..last_step."""
    return max(1, math.ceil(last_step / bins))


def binned(steps: np.ndarray, values: np.ndarray, width: int) -> Series:
    """Return the centres and means of bins of `width` steps; a bin without a number is NaN.

    A last bin that is less than half full is merged into the one before: the mean of few steps looks like a cliff.
    """
    if len(steps) == 0:
        return np.zeros(0), np.zeros(0)
    place = (steps.astype(np.int64) - 1) // width
    number = int(place.max()) + 1
    if number > 1 and 2 * (int(steps.max()) - (number - 1) * width) < width:
        number -= 1
        place = np.minimum(place, number - 1)
    known = ~np.isnan(values)
    total = np.bincount(place[known], values[known], number)
    seen = np.bincount(place[known], minlength=number)
    centres = np.arange(number) * width + (width + 1) / 2
    return centres, np.where(seen > 0, total / np.maximum(seen, 1), np.nan)


def shared_mean(curves: Sequence[Series]) -> Series:
    """Return the mean of the curves at the steps that all of them have, so that none drops out of it half-way."""
    found = [dict(zip(steps.tolist(), values.tolist(), strict=True)) for steps, values in curves]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    return np.array(shared), np.array([np.mean([one[step] for one in found]) for step in shared])


def loss_curves(arm: Arm, width: int) -> tuple[Curves, Curves]:
    """Return the training loss in means of `width` steps, and the validation loss."""
    train = {run.folder: binned(run.steps["step"], run.steps["loss"], width) for run in arm.runs}
    return train, {run.folder: (run.evals["step"], run.evals["val_loss"]) for run in arm.runs}


def relative_losses(comparison: Comparison, width: int) -> tuple[dict[str, tuple[Curves, Curves]], list[Arm]]:
    """Return, by arm, the losses minus those of its 16-bit arm with the same seed, and the arms that were subtracted.

    An arm without a 16-bit arm, and the 16-bit arm itself, have none.
    """
    found: dict[str, tuple[Curves, Curves]] = {}
    references: dict[str, Arm] = {}
    for arm in comparison.arms:
        reference = high_precision(comparison, arm)
        if reference is None or reference is arm:
            continue
        mine, theirs = loss_curves(arm, width), loss_curves(reference, width)
        train, val = (_minus(arm, mine[place], reference, theirs[place]) for place in (0, 1))
        if train or val:
            found[arm.label] = train, val
            references[reference.label] = reference
    return found, list(references.values())


def _minus(arm: Arm, mine: Curves, reference: Arm, theirs: Curves) -> Curves:
    by_seed = {run.seed: _points(*theirs[run.folder]) for run in reference.runs}
    found: Curves = {}
    for run in arm.runs:
        points, other = _points(*mine[run.folder]), by_seed.get(run.seed, {})
        if steps := sorted(points.keys() & other.keys()):
            found[run.folder] = np.array(steps), np.array([points[step] - other[step] for step in steps])
    return found


def _points(steps: np.ndarray, values: np.ndarray) -> dict[float, float]:
    return {s: v for s, v in zip(steps.tolist(), values.tolist(), strict=True) if math.isfinite(v)}
