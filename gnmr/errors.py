"""Define the errors that a user sees, the checks of options that raise them, and hints for their messages.

`UserError` is a mistake in a request: one line, exit code 2, nothing half-written.
`RunFailed` is a run that could not continue: one line, exit code 1, the run folder marked FAILED.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from traceback import walk_stack
from typing import Any

MAX_LINE = 1500
"""Maximum characters of a line that ends a command; some quote the content of a file."""


class UserError(ValueError):
    """A mistake, its place and the remedy, in one printable line."""

    def __init__(self, line: object) -> None:
        super().__init__(printable(line)[:MAX_LINE])


class RunFailed(RuntimeError):
    """The reason why a training run ended, and the step at which it began; one printable line."""

    def __init__(self, line: object) -> None:
        super().__init__(printable(line)[:MAX_LINE])


def printable(text: object) -> str:
    r"""Return the text in one line, with control characters written out: an escape as \x1b."""
    line = " ".join(str(text).split("\n"))
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and how many more there are.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(number: int, noun: str) -> str:
    """Return the number with its noun.

    >>> plural(1, "batch"), plural(2_000, "batch"), plural(2, "arm")
    ('1 batch', '2,000 batches', '2 arms')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a guess at the meaning of an unknown word, or the first 40 known words, as the end of a message."""
    known = list(known)
    close = guess(word.partition("=")[0], known)
    more = f" and {len(known) - 40} more" * (len(known) > 40)
    return f": did you mean {close}?" if close else f": use one of {', '.join(known[:40])}{more}"


@contextmanager
def as_user_error(start: str = "") -> Iterator[None]:
    """Turn a ValueError of a block or a decorated function into a UserError whose line begins with `start`."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{start}{error}") from error


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raise UserError if `what`, which the user named, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written ({error.strerror or error})") from error


_BETWEEN = ("gnmr", "torch", "contextlib", "weakref")
"""Our packages, and packages that call functions that they decorate."""


def guess(word: str, known: Iterable[str]) -> str | None:
    """Return the first known word that begins with this one (fp8: fp8_hybrid), else the nearest, or None.

    A word with the same letters as a known word, or as its first part, is nearest: letters were swapped.

    >>> guess("gnrm", ["gsnr", "gnmr_delta"])
    'gnmr_delta'
    """
    from difflib import get_close_matches

    known = list(known)
    begun = [one for one in known if word and one.startswith((f"{word}_", f"{word}-", f"{word}/"))]
    swapped = [one for one in known if sorted(word) in (sorted(one), sorted(one.partition("_")[0]))]
    return next(iter([*begun, *swapped, *get_close_matches(word, known, 1)]), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word; empty if no known word is near."""
    close = guess(str(word), known)
    return f"; did you mean {close}?" if close else ""


def users_level() -> int:
    """Return the `stacklevel` at which a warning shows the line that called into this package.

    Under a command it is 1, our own line: commands show our warnings without a place (`gnmr.lab.cli`).
    """
    for level, (frame, _) in enumerate(walk_stack(sys._getframe(1)), 1):
        name = frame.f_globals.get("__name__", "")
        if name.startswith("gnmr.lab.cli"):
            return 1
        if name.partition(".")[0] not in _BETWEEN:
            return level
    return 1


_SHOWN = 500
"""Maximum characters of a value that a message repeats."""


def fields(of: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, which may be dotted."""
    return {name: attrgetter(name)(of) for name in names}


def require(sound: object, name: str, value: object, right: str) -> None:
    """Raise ValueError unless the value is `sound`; `right` describes a valid value."""
    if not sound:
        shown = str(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown):,} characters)"
        raise ValueError(f"{name}={shown}: {right}")


def one_of(choices: Iterable[str], /, **options: object) -> None:
    """Require one of `choices`."""
    known = tuple(choices)
    for name, value in options.items():
        if value not in known:
            require(False, name, value, f"must be one of {', '.join(known)}{did_you_mean(value, known)}")


def positive(*, or_null: bool = False, **options: object) -> None:
    """Require a finite number above 0, or None with `or_null`."""
    right = "must be a positive number" + (" or null" if or_null else "")
    for name, value in options.items():
        require(_number(value) > 0 or (or_null and value is None), name, value, right)


def whole(least: int = 1, /, *, or_null: bool = False, **options: object) -> None:
    """Require a whole number of at least `least`, or None with `or_null`."""
    right = f"must be a whole number of at least {least}" + (", or null" if or_null else "")
    for name, value in options.items():
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(sound or (or_null and value is None), name, value, right)


def within(least: float, most: float, /, *, or_null: bool = False, **options: object) -> None:
    """Require a number from `least` to `most`, both included, or None with `or_null`."""
    right = f"must be a number from {least:g} to {most:g}" + (" or null" if or_null else "")
    for name, value in options.items():
        require(least <= _number(value) <= most or (or_null and value is None), name, value, right)


def fraction(**options: object) -> None:
    """Require a number of at least 0 and less than 1."""
    for name, value in options.items():
        require(0 <= _number(value) < 1, name, value, "must be a number, at least 0 and less than 1")


def share(**options: object) -> None:
    """Require a number above 0 and at most 1."""
    for name, value in options.items():
        require(0 < _number(value) <= 1, name, value, "must be a share above 0, at most 1")


def _number(value: object) -> float:
    """Return the value; NaN, for which no comparison is true, if it is not a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and -math.inf < value < math.inf else math.nan  # type: ignore[operator,return-value]


def share_of(value: object) -> object:
    """Return the number of a word, and any other value unchanged, for a check such as `share`.

    >>> share_of("10%"), share_of("+10%"), share_of("0.1"), share_of(0.1), share_of("some")
    (0.1, 0.1, 0.1, 0.1, 'some')
    """
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value.removeprefix("+").removesuffix("%"))
            return number / 100 if value.endswith("%") else number
    return value


def install(extra: str) -> str:
    """Return the command that installs an extra. gnmr is on no package index, so the command needs the checkout."""
    return f"pip install -e '.[{extra}]' in gnmr's checkout"


# Standard output and error, which may end before the process does: a reader leaves, a terminal closes, a disk is full.
# All of these are a BrokenPipeError, which a run treats as an unread pipe: its records are in files.


class Unwritable(BrokenPipeError):
    """Output cannot be written although its reader is there: the disk is full, or the file is closed."""


def lost(error: OSError) -> BrokenPipeError:
    """Return the error as that of a pipe without a reader; a terminal that is gone answers EIO."""
    if isinstance(error, BrokenPipeError):
        return error
    return BrokenPipeError(*error.args) if error.errno == errno.EIO else Unwritable(*error.args)


class _Stream(io.FileIO):
    """Standard output whose errors are those of a pipe without a reader, or standard error that ignores its errors."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._forgives = descriptor == 2

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._forgives:
                return len(data)
            raise lost(error) from error


_replaced: list[Any] = []
"""Kept alive: at its end a stream closes its file, which the new one writes to."""


def open_streams() -> None:
    """Make all prints of this process fail alike, as `gnmr.console.Terminal` does; a closed stream is discarded.

    Streams that are not files, as those of a notebook or a test, are left alone.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
            continue
        buffer = getattr(old, "buffer", None)
        if type(getattr(buffer, "raw", buffer)) is io.FileIO:
            old.flush()
            _replaced.append(old)
            raw = _Stream(old.fileno())
            how = {"encoding": old.encoding, "errors": old.errors, "line_buffering": old.line_buffering}
            whole: Any = raw if isinstance(buffer, io.FileIO) else io.BufferedWriter(raw)  # PYTHONUNBUFFERED
            setattr(sys, name, io.TextIOWrapper(whole, **how, write_through=old.write_through))
            logging.raiseExceptions = False  # an unwritable line of a log is not a bug


def why_unwritable(error: Unwritable) -> str:
    """Return the message of this error."""
    return f"standard output: cannot be written ({error.strerror or error})"


def unread() -> None:
    """Send standard output to the null device: its reader has left, and closing it would raise again."""
    with suppress(OSError, ValueError):  # standard output may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
