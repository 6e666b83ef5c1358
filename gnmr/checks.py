"""What the values of options must be: numbers, and words of which there are some.

A check takes options as keyword arguments and raises ValueError, one line `name=value: what would be right`;
`gnmr.errors.told_as` makes the name a key of the config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Any

from gnmr.caller import did_you_mean

_SHOWN = 500
"""Characters of a value that a message repeats."""


def fields(of: object, *names: str) -> dict[str, Any]:
    """Attributes by their names, which may be dotted."""
    return {name: attrgetter(name)(of) for name in names}


def require(sound: object, name: str, value: object, right: str) -> None:
    """`sound`: whether the value is right; `right` says what would be."""
    if not sound:
        shown = str(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown):,} characters)"
        raise ValueError(f"{name}={shown}: {right}")


def one_of(choices: Iterable[str], /, **options: object) -> None:
    """One of `choices`."""
    known = tuple(choices)
    for name, value in options.items():
        if value not in known:
            require(False, name, value, f"must be one of {', '.join(known)}{did_you_mean(value, known)}")


def positive(*, or_null: bool = False, **options: object) -> None:
    """A finite number above 0; `or_null`: or None."""
    right = "must be a positive number" + (" or null" if or_null else "")
    for name, value in options.items():
        require(_number(value) > 0 or (or_null and value is None), name, value, right)


def whole(least: int = 1, /, *, or_null: bool = False, **options: object) -> None:
    """A whole number of at least `least`; `or_null`: or None."""
    right = f"must be a whole number of at least {least}" + (", or null" if or_null else "")
    for name, value in options.items():
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(sound or (or_null and value is None), name, value, right)


def within(least: float, most: float, /, *, or_null: bool = False, **options: object) -> None:
    """A number from `least` to `most`, both included; `or_null`: or None."""
    right = f"must be a number from {least:g} to {most:g}" + (" or null" if or_null else "")
    for name, value in options.items():
        require(least <= _number(value) <= most or (or_null and value is None), name, value, right)


def fraction(**options: object) -> None:
    """A number from 0 to 1, 1 left out."""
    for name, value in options.items():
        require(0 <= _number(value) < 1, name, value, "must be a number, at least 0 and less than 1")


def true_or_false(**options: object) -> None:
    """A truth value."""
    for name, value in options.items():
        require(isinstance(value, bool), name, value, "must be true or false")


def _number(value: object) -> float:
    """The value; NaN, of which no comparison is true, where it is no finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and -math.inf < value < math.inf else math.nan  # type: ignore[operator,return-value]


def share_of(given: object) -> object:
    """0.1 of "10%"; anything else as it is."""
    if isinstance(given, str) and given.endswith("%"):
        with suppress(ValueError):
            return float(given[:-1]) / 100
    return given
