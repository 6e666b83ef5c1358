"""Read files that somebody else may have made: no links below a folder, bounded sizes, no code.

A path that the user names may be a symbolic link; what lies below a folder may not, because a link there could expose
any file of the user. The bounds are far above what a run writes (1e6 steps, 10,000 units).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.errors import UserError, printable
from gnmr.records.disk import no_link

MAX_FILE = 1 << 33  # bytes of a file of rows: 1e6 steps of 8 KB
MAX_ROW = 1 << 24  # bytes of a row: 10,000 monitored modules take less than one
MAX_OBJECT = 1 << 26  # bytes of a JSON object: header.json of 10,000 units has 1 MB
MAX_CONFIG = 1 << 19  # bytes of config.yaml, which has 5 KB
MAX_DEPTH = 50  # containers within containers; ours have five
MAX_NAME = 300  # characters of a name; a module's dotted name has some 60


class Damaged(UserError):
    """A file is invalid; a report leaves out the run that it belongs to."""


def opened(path: Path, most: int = MAX_FILE) -> BinaryIO:
    """Open a regular file of at most `most` bytes for reading; follow no link and never wait.

    Raises:
        FileNotFoundError: nothing has this name.
        Damaged: it is anything else, or cannot be read.
    """
    try:
        file = os.fdopen(no_link(os.fspath(path), os.O_RDONLY | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        linked = isinstance(error, OSError) and error.errno == errno.ELOOP
        why = "is a symbolic link" if linked else getattr(error, "strerror", None) or str(error)
        raise Damaged(f"{path}: cannot be read ({why})") from error
    # The size is that of the open file, because the name may stand for another one by now.
    if (size := os.fstat(file.fileno()).st_size) > most:
        file.close()
        raise Damaged(f"{path}: cannot be read ({size:,} bytes, {most:,} are the most)")
    return file


def exists(path: Path) -> bool:
    """Return True if anything has this name.

    Args:
        path: the name; a link counts, also one that leads nowhere, which `opened` refuses.
    """
    return os.path.lexists(path)


def content(path: Path, most: int = MAX_OBJECT) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        FileNotFoundError: nothing has this name.
        Damaged: `opened` refuses it.
    """
    with opened(path, most) as file:
        # The bound holds here too, because the file may have grown since it was opened.
        return file.read(most)


def bounded(tree: Any, room: int = MAX_DEPTH) -> Any:
    """Return the tree.

    Raises:
        ValueError: more than `room` containers lie within each other, or a whole number has more than 64 bits.
    """
    if isinstance(tree, dict | list):
        if room == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for item in tree.values() if isinstance(tree, dict) else tree:
            bounded(item, room - 1)
    # Python's integers have no bound, but the arrays that a reader puts them into have.
    elif isinstance(tree, int) and tree.bit_length() > 64:
        raise ValueError("a number beyond 64 bits")
    return tree


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Turn any error of reading untrusted files into one line without a traceback, which begins with `name`.

    Raises:
        Damaged: the block raised an error other than UserError and BrokenPipeError.
    """
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:  # from any of a dozen libraries
        raise Damaged(f"{name}: cannot be read ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message.

    Returns:
        The line, after the error's type unless it is a UserError; the type alone if there is no message.
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}" if line else type(error).__name__


def text(value: object, most: int = MAX_NAME) -> str:
    """Return `value` in one printable line.

    Args:
        value: anything that a file holds.
        most: the largest number of characters; a longer text ends in three dots.
    """
    line = printable(value)
    return line if len(line) <= most else f"{line[: most - 3]}..."
