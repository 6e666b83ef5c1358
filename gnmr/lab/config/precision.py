"""precision.* and faults.*: the two execution paths (`gnmr.conversion.path_spec`), and faults of the low-cost path."""

from __future__ import annotations

from dataclasses import dataclass, field

from gnmr.conversion.path_spec import PathSpec
from gnmr.errors import as_user_error
from gnmr.options import one_of, require, within


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(PathSpec):
    """The two execution paths of a unit (gnmr/conversion)."""

    name: str | None = None
    """Part of the arm's name. If null, it is `<low>_<recovery>`, with `_pins` if there are pins."""

    _SECTION = "precision."

    @as_user_error("precision.")
    def __post_init__(self) -> None:
        if self.name is None:
            pins = "_pins" if self.pins else ""
            object.__setattr__(self, "name", str(self.low) + (f"_{self.recovery}" if self.recovery else "") + pins)
        super().__post_init__()


USUAL: dict[str, dict[str, float]] = {
    "none": {"magnitude": 1.0, "rows_frac": 1.0, "rate": 0.0, "duration": 1},
    "scale_up": {"magnitude": 8.0, "rows_frac": 1.0, "rate": 0.5, "duration": 20},
    "scale_down": {"magnitude": 8.0, "rows_frac": 1.0, "rate": 0.5, "duration": 20},
    "stale_scale": {"magnitude": 4.0, "rows_frac": 1.0, "rate": 0.5, "duration": 20},
    "noise": {"magnitude": 2.0, "rows_frac": 1.0, "rate": 0.5, "duration": 20},
    "bit_flip": {"magnitude": 1.0, "rows_frac": 0.05, "rate": 0.5, "duration": 20},
    "nan": {"magnitude": 1.0, "rows_frac": 0.001, "rate": 0.5, "duration": 3},
    "inf": {"magnitude": 1.0, "rows_frac": 0.001, "rate": 0.5, "duration": 3},
}
"""The values of each kind of fault, of which magnitude and rate replace null in the config. In int4, a scale_up of 8
sets all values below 57% of a row's largest value to zero; e4m3 needs about 1e4 for this effect. Under nan and inf the
optimizer skips steps. Their windows are shorter than `MAX_NONFINITE_STREAK`, so that a run without recovery does not
end there."""


@dataclass(frozen=True)
class FaultsConfig:
    """Faults in the low-cost path of chosen units at known times (gnmr/lab/fault_injection.py)."""

    kind: str = "none"
    """The kind of fault, or none."""
    magnitude: float | None = None
    """Strength: the factor on the scale, or the noise in grid steps. bit_flip, nan and inf have no strength. Null
    selects the default of the kind (`USUAL`), here and in rate."""
    targets: list[str] = field(default_factory=lambda: ["*"])
    """Patterns of the units, or of their operators, that may be hit, as in precision.targets."""
    windows: list[list[int]] = field(default_factory=list)
    """[[first step, number of steps], ...] in which every target is hit. If empty, windows are drawn from rate."""
    rate: float | None = None
    """Windows per 1,000 unit-steps, drawn for each target separately. It has no effect if windows are given."""

    @as_user_error("faults.")
    def __post_init__(self) -> None:
        one_of(USUAL, kind=self.kind)
        for key in ("magnitude", "rate"):
            if getattr(self, key) is None:
                object.__setattr__(self, key, USUAL[self.kind][key])
        require(self.targets, "targets", self.targets, "needs at least one pattern")
        sound = all(len(window) == 2 and min(window) >= 1 for window in self.windows)
        require(sound, "windows", self.windows, "each must be [first step, number of steps], both 1 or more")
        within(0, 1000, rate=self.rate)
        sound = self.kind == "none" or len(self.windows) > 0 or self.rate != 0
        require(sound, "rate", self.rate, "give windows, or a rate above 0")

    @property
    def rows_frac(self) -> float:
        """Fraction of the rows (tokens) of a unit's input that are hit."""
        return USUAL[self.kind]["rows_frac"]

    @property
    def duration(self) -> int:
        """Steps of a drawn window."""
        return int(USUAL[self.kind]["duration"])
