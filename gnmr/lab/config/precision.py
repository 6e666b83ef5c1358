"""precision.*: the two execution paths (`gnmr.precision.spec`) and the name of this choice."""

from __future__ import annotations

from dataclasses import dataclass

from gnmr.errors import as_user_error
from gnmr.precision.spec import PathSpec


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(PathSpec):
    """The two execution paths of a unit (gnmr/precision)."""

    name: str | None = None
    """Part of the arm's name. If null, it is `<low>_<recovery>`, with `_pins` if there are pins."""

    _SECTION = "precision."

    @as_user_error("precision.")
    def __post_init__(self) -> None:
        if self.name is None:
            pins = "_pins" if self.pins else ""
            object.__setattr__(self, "name", str(self.low) + (f"_{self.recovery}" if self.recovery else "") + pins)
        super().__post_init__()
