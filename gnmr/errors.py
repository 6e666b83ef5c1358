"""The two errors that end a command, apart from defects of ours.

`UserError` is a mistake in what was asked for: one line, exit code 2, nothing half-written.
`RunFailed` is a run that could not go on: one line, exit code 1, the run folder marked FAILED.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gnmr.caller import guess

MAX_LINE = 1500
"""Characters of a line that ends a command: some quote what a file holds."""


class UserError(ValueError):
    """What was wrong, where, and what would be right, in one printable line."""

    def __init__(self, line: object) -> None:
        super().__init__(printable(line)[:MAX_LINE])


class RunFailed(RuntimeError):
    """Why a training run ended, and at which step it began; one printable line."""

    def __init__(self, line: object) -> None:
        super().__init__(printable(line)[:MAX_LINE])


def printable(text: object) -> str:
    """The text in one line, with control characters written out: an escape as \\x1b."""
    line = " ".join(str(text).split("\n"))
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def nearest(word: str, known: Iterable[str]) -> str:
    """What an unknown word may have been meant to be, as the end of a message."""
    known = list(known)
    close = guess(word.partition("=")[0], known)
    return f": did you mean {close}?" if close else f": use one of {', '.join(known)}"


@contextmanager
def told_as(start: str = "") -> Iterator[None]:
    """For a block, or a function that it decorates: a ValueError becomes a UserError whose line begins with `start`."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{start}{error}") from error


@contextmanager
def writing(what: object) -> Iterator[None]:
    """UserError where `what`, which the user named, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written ({error.strerror or error})") from error
