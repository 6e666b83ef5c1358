"""Print to the terminal."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from shutil import which
from textwrap import wrap
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.text import Text

from gnmr.errors import printable
from gnmr.streams import Unwritable, lost, unread, why_unwritable

NARROW = 64
"""Number of columns below which tables have fewer columns, or more lines."""

_T = TypeVar("_T")


class Terminal(Console):
    """A rich console that raises BrokenPipeError, as `print` does, instead of ending the process.

    The error means that the reader left (gnmr report | head), the terminal was closed, or the disk is full.
    """

    def on_broken_pipe(self) -> None:
        """Raise the error: rich would end the process, which a run would take for a signal."""
        raise sys.exception() or BrokenPipeError

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            raise lost(error) from error


class Picture(Live):
    """A rich live display that replaces standard output and error while it runs.

    The replacements are kept alive: another thread may still print to them when the display ends, and CPython's `print`
    holds no reference to its stream.
    """

    _kept: ClassVar[list[Any]] = []

    def start(self, refresh: bool = False) -> None:
        """Start the display.

        Args:
            refresh: True draws it at once, and not only at the next refresh.
        """
        with suppress(BrokenPipeError):  # the terminal is gone, which is not a failure, here and below
            super().start(refresh)
        self._kept.extend((sys.stdout, sys.stderr))

    def refresh(self) -> None:
        with suppress(BrokenPipeError):
            super().refresh()

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            super().stop()


@cache
def shared() -> Terminal:
    """Return this process's only console for lines and live displays, which would otherwise overwrite each other."""
    return Terminal()


def say(text: str, by_words: bool = False) -> None:
    """Print lines above the live display; a lost reader is not a failure, because the records are in files.

    Args:
        text: one or more lines, as for `print_plain`.
        by_words: on a terminal, break lines between words; for text that nobody copies.
    """
    try:
        print_plain(shared(), text, by_words and shared().is_terminal)
    except BrokenPipeError as error:
        unread()
        if isinstance(error, Unwritable):
            with suppress(OSError):
                print(f"gnmr: {why_unwritable(error)}; the work goes on without it", file=sys.stderr)


def print_plain(console: Console, text: str, by_words: bool = False) -> None:
    """Print the text without markup or emoji, and with control characters and directional marks written out.

    Args:
        console: where to print, which also says how wide a line may be.
        text: one or more lines.
        by_words: break lines between words, but none inside a word, however long: a path stays whole. False adds no
            line break.

    Raises:
        BrokenPipeError: the output of a `Terminal` has no reader, or cannot be written.
    """
    text = "\n".join(map(printable, text.split("\n")))
    if by_words:
        lines = (wrap(line, console.width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))
        text = "\n".join("\n".join(line) for line in lines)
    console.print(Text(text), soft_wrap=True)


def shown_command(*words: object) -> str:
    """Return a gnmr command as it is typed.

    Args:
        words: its words after `gnmr`, which are quoted for the shell where that is needed.
    """
    return " ".join(["gnmr", *(_quoted(str(word)) for word in words)])


def _quoted(word: str) -> str:
    """Quote a word for the shell; characters that would not be seen, or turn the text around, are written out."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in escaped) + "'"


def activation() -> list[str]:
    """Return the line to type before a gnmr command; nothing if a shell finds the command already."""
    script = Path(sys.prefix, "bin", "activate")
    if which("gnmr") or sys.prefix == sys.base_prefix or not script.exists():
        return []
    with suppress(ValueError, OSError):  # not below the working folder, or that folder is gone
        script = script.relative_to(Path.cwd())
    return [f"first: source {shlex.quote(str(script))}"]


def next_lines(what: str) -> list[str]:
    """Return the lines that say what to do next.

    Returns:
        The line of `activation`, if gnmr would not be found without it, and `next: ` with the text `what`.
    """
    return [*activation(), f"next: {what}"]


def for_tables() -> Terminal:
    """Return a console on standard output, 100 columns wide if it is not a terminal."""
    return Terminal(width=None if sys.stdout.isatty() else 100)


def tracked(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """Yield the items, with a progress bar on standard error if that is a terminal.

    Args:
        items: anything to iterate over.
        what: the words before the bar.
        total: number of items; None: their length, and a bar without an end if they have none.
    """
    # On standard error, so that standard output can be piped.
    console = Console(stderr=True)
    return track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def showing(doing: str, of: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar with the remaining time on a terminal's standard error, and elsewhere a line every ten seconds.

    Args:
        doing: what is done, such as `diagnosing`.
        of: what is counted, such as `batches`.

    Yields:
        A function that takes the finished and the total number, which is None while it is unknown.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(of), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(doing, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    printed, first = time.monotonic(), (0, 0.0)  # how many were done at the first call, and when

    def print_line(done: int, total: int | None) -> None:
        nonlocal printed, first
        now = time.monotonic()
        first = first if first[0] else (done, now)  # earlier work (preparing data) does not predict the rest
        if total is not None and done < total and now - printed >= 10:
            printed = now
            since = done - first[0]
            left = f", {(now - first[1]) / since * (total - done):.0f} s left" if since else ""
            print(f"gnmr: {doing}: {done} of {total} {of}{left}", file=sys.stderr, flush=True)

    yield print_line
