"""What is printed for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_T = TypeVar("_T")


class Terminal(Console):
    """rich's console; a reader that leaves (gnmr report | head) is a BrokenPipeError, as for `print`, and no exit."""

    def on_broken_pipe(self) -> None:
        """rich's own ends the process, which in the middle of a run would be taken for a signal."""
        raise BrokenPipeError


def for_tables() -> Terminal:
    """Standard output, 100 columns wide where it is no terminal: what reads it then has its own width."""
    return Terminal(width=None if sys.stdout.isatty() else 100)


def tracked(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """The items, with a progress bar on standard error while that is a terminal; `total` of them, where they have no
    length."""
    console = Console(stderr=True)
    return track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)
