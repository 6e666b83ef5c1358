"""Checks of options: each raises a ValueError that names the option, its value and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

_SHOWN = 500
"""Maximum characters of a value that a message repeats."""


def fields(of: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, which may be dotted.

    Returns:
        {name as it was asked for, with its dots: value}.
    """
    return {name: attrgetter(name)(of) for name in names}


def require(sound: object, name: str, value: object, right: str) -> None:
    """Check an option.

    Args:
        sound: whether the value is valid, as a truth value.
        name: the option's name, as the user types it.
        value: the option's value.
        right: a description of valid values.

    Raises:
        ValueError: unless `sound`, in the form `name=value: right`.
    """
    if not sound:
        shown = str(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown):,} characters)"
        raise ValueError(f"{name}={shown}: {right}")


def one_of(choices: Iterable[str], /, **options: object) -> None:
    """Require one of `choices`.

    Raises:
        ValueError: an option is another word; the message lists the choices, and guesses which was meant.
    """
    choices = tuple(choices)
    for name, value in options.items():
        if value not in choices:
            require(False, name, value, f"must be one of {', '.join(choices)}{did_you_mean(value, choices)}")


def positive(*, or_null: bool = False, **options: object) -> None:
    """Require a finite number above 0, or None with `or_null`.

    Raises:
        ValueError: an option is anything else; True is no number.
    """
    right = "must be a positive number" + (" or null" if or_null else "")
    for name, value in options.items():
        require(_number(value) > 0 or (or_null and value is None), name, value, right)


def whole_number(least: int = 1, /, *, or_null: bool = False, **options: object) -> None:
    """Require a whole number of at least `least`, or None with `or_null`.

    Raises:
        ValueError: an option is anything else, such as 2.0 or True.
    """
    right = f"must be a whole number of at least {least}" + (", or null" if or_null else "")
    for name, value in options.items():
        # True is an int in Python, and no number in a config.
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(sound or (or_null and value is None), name, value, right)


def within(least: float, most: float, /, *, or_null: bool = False, **options: object) -> None:
    """Require a number from `least` to `most`, both included, or None with `or_null`.

    Raises:
        ValueError: an option is anything else; True is no number.
    """
    right = f"must be a number from {least:g} to {most:g}" + (" or null" if or_null else "")
    for name, value in options.items():
        require(least <= _number(value) <= most or (or_null and value is None), name, value, right)


def fraction(**options: object) -> None:
    """Require a number of at least 0 and less than 1.

    Raises:
        ValueError: an option is anything else; True is no number.
    """
    for name, value in options.items():
        require(0 <= _number(value) < 1, name, value, "must be a number, at least 0 and less than 1")


def share(**options: object) -> None:
    """Require a number above 0 and at most 1.

    Raises:
        ValueError: an option is anything else; True is no number.
    """
    for name, value in options.items():
        require(0 < _number(value) <= 1, name, value, "must be a share above 0, at most 1")


def _number(value: object) -> float:
    """Return the value; NaN, for which no comparison is true, if it is not a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and -math.inf < value < math.inf else math.nan  # type: ignore[operator,return-value]


def share_of(value: object) -> object:
    """Read a share in percent, for a check such as `share`.

    >>> share_of("10%"), share_of("+10%"), share_of("0.1"), share_of(0.1), share_of("some")
    (0.1, 0.1, 0.1, 0.1, 'some')

    Returns:
        The number that a text stands for; any other value unchanged, so that the check names it as it was typed.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value.removeprefix("+").removesuffix("%"))
            return number / 100 if value.endswith("%") else number
    return value


def nearest(word: str, words: Iterable[str]) -> str:
    """Guess the meaning of an unknown word, for the end of a message.

    Returns:
        `: did you mean ...?` or, if no word is near, `: use one of ...` with the first 40 valid words. What follows a =
        in the word is not compared.
    """
    words = list(words)
    if close := guess(word.partition("=")[0], words):
        return f": did you mean {close}?"
    more = f" and {len(words) - 40} more" if len(words) > 40 else ""
    return f": use one of {', '.join(words[:40])}{more}"


def guess(word: str, words: Iterable[str]) -> str | None:
    """Guess which valid word was meant: letters may be missing at the end, swapped, or mistaken.

    >>> guess("gnrm", ["gsnr", "gnmr_delta"])
    'gnmr_delta'

    Returns:
        The first valid word that begins with this one (fp8: fp8_hybrid); else the first with the same letters, or whose
        first part has them; else the most similar one; None if no word is similar.
    """
    words = list(words)
    # In this order: an abbreviation, swapped letters, a spelling mistake.
    begun = [valid for valid in words if word and valid.startswith((f"{word}_", f"{word}-", f"{word}/"))]
    swapped = [valid for valid in words if sorted(word) in (sorted(valid), sorted(valid.partition("_")[0]))]
    return next(iter([*begun, *swapped, *get_close_matches(word, words, 1)]), None)


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Return the end of a message about an unknown word.

    Returns:
        `; did you mean ...?`, or an empty text if no valid word is near.
    """
    close = guess(str(word), words)
    return f"; did you mean {close}?" if close else ""
