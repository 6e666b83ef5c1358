"""Thresholds of signals, and the checks of them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gnmr.options import positive, require


@dataclass(frozen=True)
class TwoStage:
    """A threshold that changes once, given where a number is expected.

    At first the history is short and the false-trigger bound of theorem 2 loose, hence a higher threshold.

    Args:
        init: the threshold in the first steps, a positive number.
        main: the threshold afterwards.
        init_steps: number of first steps, 0 or more.

    Raises:
        ValueError: a value is invalid.
    """

    init: float
    main: float
    init_steps: int

    def __post_init__(self) -> None:
        positive(threshold=self.init)
        positive(threshold=self.main)
        require(self.init_steps >= 0, "init_steps", self.init_steps, "must be 0 or more")


Threshold = float | TwoStage
_T = TypeVar("_T", bound=Threshold | None)


def check_threshold(threshold: _T, name: str, or_null: bool = False) -> _T:
    """Return the threshold.

    Raises:
        ValueError: naming `name`, unless it is a positive number, a `TwoStage`, or None with `or_null`.
    """
    if not isinstance(threshold, TwoStage):
        positive(or_null=or_null, **{name: threshold})
    return threshold


def threshold_at(threshold: Threshold, step: int) -> float:
    """Return alpha_t or beta_t of step t (from 1)."""
    if isinstance(threshold, TwoStage):
        return threshold.init if step <= threshold.init_steps else threshold.main
    return float(threshold)
