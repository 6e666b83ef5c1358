"""What is printed for people."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.text import Text

_T = TypeVar("_T")


class Terminal(Console):
    """rich's console; a reader that leaves (gnmr report | head) or a terminal that is closed is a BrokenPipeError, as
    for `print`, and no exit."""

    def on_broken_pipe(self) -> None:
        """rich's own ends the process, which in the middle of a run would be taken for a signal."""
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # what a terminal that is gone answers
                raise
            raise BrokenPipeError from error


class Picture(Live):
    """rich's live picture. While it shows, it stands in for standard output and error.

    What stands in is kept: another thread may still be printing to it when the picture ends, and CPython's `print`
    holds no reference to the stream that it writes to.
    """

    _kept: ClassVar[list[Any]] = []

    def start(self, refresh: bool = False) -> None:
        super().start(refresh)
        self._kept.extend((sys.stdout, sys.stderr))


@cache
def shared() -> Terminal:
    """Standard output: the one console of this process for lines and pictures, which otherwise paint over each other
    where several threads print."""
    return Terminal()


def say(text: str) -> None:
    """Lines above the picture. That nobody reads them any more is no failure: the files are the truth."""
    try:
        print_plain(shared(), text)
    except BrokenPipeError:
        unread()


def print_plain(console: Console, text: str) -> None:
    """The text as it is: no markup, no emoji, no line break of the console's own."""
    console.print(Text(text), soft_wrap=True)


def unread() -> None:
    """Standard output leads nowhere from now on: its reader has left, and closing it would be one more error."""
    with suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def for_tables() -> Terminal:
    """Standard output, 100 columns wide where it is no terminal: what reads it then has its own width."""
    return Terminal(width=None if sys.stdout.isatty() else 100)


def tracked(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """The items, with a progress bar on standard error while that is a terminal; `total` of them, where they have no
    length."""
    console = Console(stderr=True)
    return track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)
