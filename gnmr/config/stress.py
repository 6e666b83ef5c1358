"""stress.*: faults of the low-cost path."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.checks import fields, one_of, positive, require, whole, within
from gnmr.errors import told_as

STRESSES = ("none", "scale_up", "scale_down", "stale_scale", "noise", "bit_flip", "nan", "inf")


@dataclass(frozen=True)
class StressConfig:
    """Faults in the low-cost path of chosen units at known times (gnmr/paths/faults.py)."""

    kind: str = "none"
    """What fails; none: nothing."""
    magnitude: float = 1.0
    """How much: the factor on the scale, the noise in grid steps; bit_flip, nan and inf have none."""
    share: float = 1.0
    """Part of a unit's rows (tokens) that is hit."""
    targets: list[str] = field(default_factory=lambda: ["*"])
    """Patterns of the units, or of their operators, that may be hit, as paths.targets."""
    windows: list[list[int]] = field(default_factory=list)
    """[[first step, number of steps], ...] in which every target is hit; empty: drawn from rate."""
    rate: float = 0.0
    """Windows per 1,000 unit-steps, drawn for each target by itself; without effect where windows are given."""
    duration: int = 1
    """Steps of a drawn window."""
    history: int = 16
    """Steps that stale_scale looks back."""
    seed: int | None = None
    """Draws the windows and what is random in them; null: training.seed."""

    @told_as("stress.")
    def __post_init__(self) -> None:
        one_of(STRESSES, kind=self.kind)
        positive(**fields(self, "magnitude", "share"))
        within(0, 1, share=self.share)
        require(self.targets, "targets", self.targets, "needs at least one pattern")
        sound = all(len(window) == 2 and min(window) >= 1 for window in self.windows)
        require(sound, "windows", self.windows, "each must be [first step, number of steps], both 1 or more")
        within(0, 1000, rate=self.rate)
        sound = self.kind == "none" or len(self.windows) > 0 or self.rate > 0
        require(sound, "rate", self.rate, "give windows, or a rate above 0")
        whole(**fields(self, "duration", "history"))
        require(self.seed is None or 0 <= self.seed < 2**62, "seed", self.seed, "must lie between 0 and 2^62")
