"""What a value must be; each raises UserError in one line that names the key."""

from __future__ import annotations

import math

from gnmr.errors import UserError


def require(condition: bool, key: str, value: object, right: str) -> None:
    """`right` says what would be right."""
    if not condition:
        raise UserError(f"{key}={value}: {right}")


def one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    """One of `choices`."""
    require(value in choices, key, value, f"must be one of {', '.join(choices)}")


def positive(key: str, value: float | None, optional: bool = False) -> None:
    """Finite and above 0; `optional`: or None."""
    if value is None and optional:
        return
    require(
        value is not None and value > 0 and math.isfinite(value),
        key,
        value,
        "must be a positive number" + (" or null" if optional else ""),
    )


def within(key: str, value: float, least: float, most: float, or_else: str = "") -> None:
    """A number from `least` to `most`, both included; `or_else`: what is right too."""
    require(least <= value <= most, key, value, f"must be a number from {least:g} to {most:g} {or_else}".rstrip())


def share(key: str, value: float) -> None:
    """From 0 to 1, both included."""
    require(0.0 <= value <= 1.0, key, value, "must lie between 0 and 1")
