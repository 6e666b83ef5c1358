"""stress.*: faults of the low-cost path."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.config.checks import one_of, positive, require, share

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

    def __post_init__(self) -> None:
        one_of("stress.kind", self.kind, STRESSES)
        positive("stress.magnitude", self.magnitude)
        share("stress.share", self.share)
        positive("stress.share", self.share)
        require(len(self.targets) > 0, "stress.targets", self.targets, "needs at least one pattern")
        for window in self.windows:
            require(
                len(window) == 2 and min(window) >= 1,
                "stress.windows",
                self.windows,
                "each must be [first step, number of steps], both 1 or more",
            )
        require(
            self.kind == "none" or len(self.windows) > 0 or self.rate > 0,
            "stress.rate",
            self.rate,
            "give windows, or a rate above 0",
        )
        require(0 <= self.rate <= 1000, "stress.rate", self.rate, "must lie between 0 and 1000")
        positive("stress.duration", self.duration)
        positive("stress.history", self.history)
        require(self.seed is None or 0 <= self.seed < 2**62, "stress.seed", self.seed, "must lie between 0 and 2^62")
