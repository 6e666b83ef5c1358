"""Errors and warnings that a user sees, and the wording of their messages.

`UserError` is a mistake in a request: one line, exit code 2, nothing half-written.
`RunFailed` is a run that could not continue: one line, exit code 1, the run folder marked FAILED.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence

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
    r"""Return the text in one line.

    Returns:
        The text with a space for each line break, and control characters written out: an escape as \x1b.
    """
    # Escapes and directional marks of a file's name could hide or forge what a terminal shows.
    line = " ".join(str(text).split("\n"))
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names with commas between them, and how many more there are.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'

    Args:
        names: any number of names; none gives an empty text.
        most: the largest number of names that are shown.
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def plural(number: int, noun: str) -> str:
    """Return the number with its noun.

    >>> plural(1, "batch"), plural(2_000, "batch"), plural(2, "arm")
    ('1 batch', '2,000 batches', '2 arms')

    Args:
        number: a count, 0 or more.
        noun: its singular, whose plural ends in -s, or in -es after -ch.
    """
    # batch, batches; run, runs.
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def install(extra: str) -> str:
    """Return the command that installs an extra. gnmr is on no package index, so the command needs the checkout.

    Args:
        extra: one of `project.optional-dependencies` in pyproject.toml.
    """
    return f"pip install -e '.[{extra}]' in gnmr's checkout"


@contextlib.contextmanager
def as_user_error(start: str = "") -> Iterator[None]:
    """Turn a ValueError of a block or a decorated function into a UserError whose line begins with `start`.

    Raises:
        UserError: the block raised ValueError. A UserError of the block is left as it is.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{start}{error}") from error


@contextlib.contextmanager
def writing(target: object) -> Iterator[None]:
    """Turn an OSError of the block into a UserError whose line begins with `target`, which the user named.

    Raises:
        UserError: the block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from error


def warn(text: str) -> None:
    """Give a UserWarning that shows the line of the user's code that called into this package.

    Python 3.11 cannot skip frames by file, so it shows our line. Commands show our warnings without a place.

    Args:
        text: one line, which commands print after `gnmr: warning:`.
    """
    if sys.version_info >= (3, 12):
        # torch, contextlib and weakref call functions of ours that they decorate.
        modules = (sys.modules["gnmr"], sys.modules.get("torch"), contextlib, weakref)
        files = [module.__file__ for module in modules if module is not None and module.__file__ is not None]
        prefixes = tuple(file.removesuffix("__init__.py") for file in files)
        warnings.warn(text, skip_file_prefixes=prefixes)
    else:
        warnings.warn(text, stacklevel=2)
