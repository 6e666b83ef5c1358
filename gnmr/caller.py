"""What a message to the caller says: which known word an unknown one is near to, and whose line a warning shows, the
first one outside of this package and of PyTorch, which is the loop's as a rule."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from traceback import walk_stack

_BETWEEN = ("gnmr", "torch", "contextlib", "weakref")
"""Packages of ours, and those that call what they decorate."""


def guess(word: str, known: Iterable[str]) -> str | None:
    """Return the first known word that has this one as its first part (fp8: fp8_hybrid), else the nearest one; None
    where no word is near."""
    from difflib import get_close_matches

    known = list(known)
    begun = [one for one in known if word and one.startswith((f"{word}_", f"{word}-", f"{word}/"))]
    return next(iter([*begun, *get_close_matches(word, known, 1)]), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word; empty where no known word is near."""
    close = guess(str(word), known)
    return f"; did you mean {close}?" if close else ""


def users_level() -> int:
    """The `stacklevel` at which a warning that is given here shows the line that called into this package.

    1, which is ours, under a command: it shows warnings of ours as a line without a place (`gnmr.commands`).
    """
    for level, (frame, _) in enumerate(walk_stack(sys._getframe(1)), 1):
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("gnmr.commands", "gnmr.sweep")):
            return 1
        if name.partition(".")[0] not in _BETWEEN:
            return level
    return 1
