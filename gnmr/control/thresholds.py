"""Thresholds that follow a schedule (paper, section 5.2 and table 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TwoStage:
    """`init` during the first `init_steps` steps, `main` afterwards.

    The history is short at first and the false-trigger bound of theorem 2 loose, hence a higher threshold there.
    """

    init: float
    main: float
    init_steps: int

    def __post_init__(self) -> None:
        _check_threshold(self.init)
        _check_threshold(self.main)
        if self.init_steps < 0:
            raise ValueError(f"init_steps={self.init_steps}: must be 0 or more")


Threshold = float | TwoStage


def _check_threshold(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"threshold {value!r}: must be a positive number")


def check(threshold: Threshold | None, name: str) -> None:
    """ValueError naming `name` unless it is None, a positive number or a `TwoStage`."""
    if threshold is None or isinstance(threshold, TwoStage):
        return
    try:
        _check_threshold(threshold)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def at(threshold: Threshold, step: int) -> float:
    """alpha_t or beta_t of step t (from 1)."""
    if isinstance(threshold, TwoStage):
        return threshold.init if step <= threshold.init_steps else threshold.main
    return float(threshold)
