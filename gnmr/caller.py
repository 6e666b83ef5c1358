"""Whose line a warning shows: the first one outside of this package and of PyTorch, which is the loop's as a rule."""

from __future__ import annotations

import sys
from traceback import walk_stack

_BETWEEN = ("gnmr", "torch", "contextlib", "weakref")
"""Packages of ours, and those that call what they decorate."""


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
