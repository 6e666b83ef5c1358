"""Long series to a few hundred points, so that 20,000 steps stay legible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np


def bin_width(last_step: int, bins: int) -> int:
    """Steps in a bin for at most that many bins over steps 1..last_step."""
    return max(1, math.ceil(last_step / bins))


def binned(
    steps: np.ndarray, values: np.ndarray, width: int, how: Literal["mean", "max"]
) -> tuple[np.ndarray, np.ndarray]:
    """Bins of `width` steps from step 1: centres (B,) and values (B, ...) along the first axis.

    NaNs are passed over; a bin with nothing in it is NaN. An inf is a value: it is the maximum and the mean of its bin.
    The last mean has the steps of a last bin that is less than half full: few steps of their own look like a cliff.
    """
    shape = values.shape[1:]
    if len(steps) == 0:
        return np.zeros(0), np.zeros((0, *shape))
    place = (steps.astype(np.int64) - 1) // width
    number = int(place.max()) + 1
    if how == "mean" and number > 1 and 2 * (int(steps.max()) - (number - 1) * width) < width:
        number -= 1
        place = np.minimum(place, number - 1)
    known = ~np.isnan(values)
    total = np.full((number, *shape), -np.inf if how == "max" else 0.0)
    if how == "max":
        np.maximum.at(total, place, np.where(known, values, -np.inf))
    else:
        np.add.at(total, place, np.where(known, values, 0.0))
    seen = np.zeros((number, *shape))
    np.add.at(seen, place, known)
    centres = np.arange(number) * width + (width + 1) / 2
    return centres, np.where(seen > 0, total / np.maximum(seen, 1) if how == "mean" else total, np.nan)


def log_binned(steps: np.ndarray, values: np.ndarray, last_step: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """As `binned` to means, in at most so many bins that are equally wide on a logarithmic axis of 1..last_step.

    A bin holds one step at least, and its centre is the geometric mean of its ends.
    """
    edges = np.unique(np.geomspace(1, last_step + 1, bins + 1).round())
    place = np.searchsorted(edges, steps, side="right") - 1
    known = ~np.isnan(values)
    total, seen = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    np.add.at(total, place[known], values[known])
    np.add.at(seen, place[known], 1)
    return np.sqrt(edges[:-1] * (edges[1:] - 1)), np.where(seen > 0, total / np.maximum(seen, 1), np.nan)


def shared_mean(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of curves at the places that all of them have, so that none drops out of it half-way."""
    found = [dict(zip(steps.tolist(), values.tolist(), strict=True)) for steps, values in curves]
    shared = sorted(set.intersection(*map(set, found))) if found else []
    return np.array(shared), np.array([np.mean([one[step] for one in found]) for step in shared])
