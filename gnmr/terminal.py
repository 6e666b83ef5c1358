"""Printing to the terminal."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from textwrap import wrap
from typing import Any, ClassVar, TypeVar

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.live import Live
from rich.progress import track
from rich.segment import ControlType
from rich.text import Text

NARROW = 64
"""Columns of a terminal below which tables have fewer columns, or more lines."""

_T = TypeVar("_T")


class Terminal(Console):
    """rich's console; a reader that leaves (gnmr report | head) or a terminal that is closed is a BrokenPipeError, as
    for `print`, and no exit."""

    def on_broken_pipe(self) -> None:
        """rich would end the process, which a run would take for a signal."""
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # what a terminal that is gone answers
                raise
            raise BrokenPipeError from error


class Picture(Live):
    """rich's live display. While it runs, it replaces standard output and error.

    The replacements are kept alive: another thread may still print to them when the display ends, and CPython's `print`
    holds no reference to its stream.
    """

    _kept: ClassVar[list[Any]] = []

    def start(self, refresh: bool = False) -> None:
        super().start(refresh)
        self._kept.extend((sys.stdout, sys.stderr))


@cache
def shared() -> Terminal:
    """The one console of this process for lines and live displays, which would otherwise overwrite each other."""
    return Terminal()


def say(text: str, by_words: bool = False) -> None:
    """Prints lines above the live display. A closed pipe is no failure: the records are in files.

    by_words: a terminal that is too narrow breaks the line between words, for what nobody copies.
    """
    try:
        print_plain(shared(), text, by_words and shared().is_terminal)
    except BrokenPipeError:
        unread()


class _Wiped(RenderHook):
    """Wipes the line that the cursor is in before each print; nothing where output is no terminal."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)), *renderables]


@cache
def wiping() -> None:
    """For a process whose parent shows a bar of one line on the same terminal: what it prints from now on takes the
    bar's line, and the bar comes back below it."""
    shared().push_render_hook(_Wiped())


def print_plain(console: Console, text: str, by_words: bool = False) -> None:
    """The text as it is: no markup, no emoji. Without `by_words` no line break of ours, with it none inside
    a word, however long: a path stays whole."""
    if by_words:
        lines = (wrap(line, console.width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
        text = "\n".join("\n".join(line) for line in lines)
    console.print(Text(text), soft_wrap=True)


def unread() -> None:
    """Sends standard output to the null device: its reader has left, and closing it would raise again."""
    with suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def for_tables() -> Terminal:
    """Standard output; 100 columns wide where it is no terminal."""
    return Terminal(width=None if sys.stdout.isatty() else 100)


def tracked(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """The items, with a progress bar on standard error while that is a terminal; `total` of them, where they have no
    length."""
    console = Console(stderr=True)
    return track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)
