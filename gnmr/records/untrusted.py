"""Reading files that somebody else may have made: no links, bounded sizes, no code.

A path that the user names may be a symbolic link; what is below a folder may not, for a link there could expose any
file of the user's. Sizes and depths are bounded far above what a run writes (1e6 steps, 10,000 units).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.errors import UserError, printable
from gnmr.records.disk import no_link

MAX_FILE = 1 << 33
"""Bytes of a file of rows: 1e6 steps of 8 KB."""
MAX_ROW = 1 << 24
"""Bytes of a row: 10,000 monitored modules take less than one."""
MAX_OBJECT = 1 << 26
"""Bytes of a JSON object: header.json of 10,000 units has 1 MB."""
MAX_CONFIG = 1 << 19
"""Bytes of config.yaml, which has 5 KB."""
MAX_DEPTH = 50
"""Containers within containers; ours have five."""
MAX_NAME = 300
"""Characters of a name; a module's dotted name has some 60."""
SMALL = 1 << 24
"""Bytes; smaller files are not checked for holes or compression."""
MAX_EXPANSION = 100
"""The largest compression ratio of files above `SMALL`: rows compress to a thirtieth at best."""


class Damaged(UserError):
    """A file is not what it should be; a report leaves out the run that it belongs to."""


def opened(path: Path, most: int = MAX_FILE) -> BinaryIO:
    """A regular file of at most `most` bytes, open for reading; follows no link and never waits.

    FileNotFoundError without it, `Damaged` for anything else.
    """
    try:
        descriptor = no_link(os.fspath(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        linked = isinstance(error, OSError) and error.errno == errno.ELOOP
        why = "is a symbolic link" if linked else getattr(error, "strerror", None) or str(error)
        raise Damaged(f"{path}: cannot be read ({why})") from error
    file = os.fdopen(descriptor, "rb")
    size = os.fstat(descriptor).st_size
    if size > most:
        file.close()
        raise Damaged(f"{path}: cannot be read ({size:,} bytes, {most:,} are the most)")
    if size > SMALL and _first_hole(descriptor) < size:
        file.close()
        raise Damaged(f"{path}: cannot be read (has holes: a run writes none)")
    return file


def _first_hole(descriptor: int) -> int:
    """Offset of the file's first hole; its size if it has none or the file system does not tell."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    with suppress(OSError):
        end = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return end


def exists(path: Path) -> bool:
    """Whether anything has this name, a dangling link included (`opened` refuses it)."""
    return os.path.lexists(path)


def content(path: Path, most: int = MAX_OBJECT) -> bytes:
    """The content of a file opened by `opened`."""
    with opened(path, most) as file:
        return file.read(most)


def bounded(tree: Any, room: int = MAX_DEPTH) -> Any:
    """The tree itself; ValueError where it is nested too deeply or holds a number beyond 64 bits."""
    if isinstance(tree, dict | list):
        if room == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for item in tree.values() if isinstance(tree, dict) else tree:
            bounded(item, room - 1)
    elif isinstance(tree, int) and tree.bit_length() > 64:
        raise ValueError("a number beyond 64 bits")
    return tree


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns any error of reading untrusted files into `Damaged`, in one line without a traceback."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:  # from any of a dozen libraries
        raise Damaged(f"{what}: cannot be read ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """First line of an error's message, with its type unless it is a UserError."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}" if line else type(error).__name__


def check_folder(folder: Path) -> None:
    """`Damaged` unless everything below the folder, which may be missing, is a regular file or a folder."""
    if not exists(folder):
        return
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise Damaged(f"{folder}: cannot be read (is no folder, or a symbolic link)")
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            kind = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISDIR(kind) if name in folders else stat.S_ISREG(kind)):
                raise Damaged(f"{os.path.join(parent, name)}: cannot be read (is a link or no regular file)")


def text(value: object, most: int = MAX_NAME) -> str:
    """`value` in one printable line of at most `most` characters."""
    line = printable(value)
    return line if len(line) <= most else f"{line[: most - 3]}..."
