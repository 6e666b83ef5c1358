"""Standard output and error, which may end before the process does: a reader leaves, a terminal closes, a disk is full.

Each such end is a BrokenPipeError, which a run treats as an unread pipe: its records are in files.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any


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
            options = {"encoding": old.encoding, "errors": old.errors, "line_buffering": old.line_buffering}
            writer: Any = raw if isinstance(buffer, io.FileIO) else io.BufferedWriter(raw)  # PYTHONUNBUFFERED
            setattr(sys, name, io.TextIOWrapper(writer, **options, write_through=old.write_through))
            logging.raiseExceptions = False  # an unwritable line of a log is not a bug


def why_unwritable(error: Unwritable) -> str:
    """Return the message of this error.

    Returns:
        One line that begins with `standard output:` and has the system's reason.
    """
    return f"standard output: cannot be written ({error.strerror or error})"


def unread() -> None:
    """Send standard output to the null device: its reader has left, and closing it would raise again."""
    with suppress(OSError, ValueError):  # standard output may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
