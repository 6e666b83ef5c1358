"""paths.*: the two execution paths (`gnmr.paths.spec`) and what this choice is called."""

from __future__ import annotations

from dataclasses import dataclass

from gnmr.errors import UserError
from gnmr.paths.spec import PathSpec


@dataclass(frozen=True, kw_only=True)
class PathsConfig(PathSpec):
    """The two execution paths of a unit (gnmr/paths)."""

    name: str = "int4_int8"
    """Name of this choice, part of the arm's name."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(f"paths.{error}") from error
