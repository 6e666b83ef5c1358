"""Write the files that the user names: a file is replaced atomically; a device or a pipe is written to."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from gnmr.errors import UserError, writing
from gnmr.records import disk
from gnmr.records.append import as_json


@contextmanager
def replacing(path: Path, label: object = None, follow: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write to; `path` gets the new content at the end of the block, and keeps the old one on an error.

    Args:
        path: a file, which is replaced, or a character device or a pipe, which is opened. A symbolic link to a device
            or a pipe is followed; one to a file is refused.
        label: how messages name the path.
        follow: False in a folder that others made: only regular files are accepted there.

    Raises:
        UserError: if the path cannot be written.
    """
    label = path if label is None else label
    with writing(label):
        if _is_device(path, label, follow):
            with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb") as file:
                yield file
            return
        beside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.writing")
        with disk.replacing(path, beside) as file:
            with suppress(OSError):  # its permissions stay as they were
                os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode))
            yield file


def check(path: Path, label: object = None, follow: bool = True) -> None:
    """Raise UserError if `replacing` would refuse the path; called before there is anything to write."""
    label = path if label is None else label
    with writing(label):
        if _is_device(path, label, follow):
            return
        if not path.parent.is_dir():
            raise UserError(f"{label}: must be a file in a folder that exists")
        TemporaryFile(dir=path.parent).close()


def _is_device(path: Path, label: object, follow: bool) -> bool:
    """Return True if `path` is written to instead of being replaced. Raises UserError if neither is possible."""
    try:
        kind = stat.S_IFMT(os.stat(path, follow_symlinks=follow).st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    device = follow and kind in (stat.S_IFCHR, stat.S_IFIFO)
    if not device and kind != stat.S_IFREG:
        raise UserError(f"{label}: must be a file in a folder that exists, and is something else")
    if not device and path.is_symlink():
        raise UserError(f"{label}: is a symbolic link; name the file itself")
    return device


def write_text(path: Path, text: str, label: object = None, follow: bool = True) -> None:
    """Write UTF-8 text; see `replacing`."""
    with replacing(path, label, follow) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, tree: dict[str, Any], label: object = None, follow: bool = True) -> None:
    """Write a JSON object; see `replacing`."""
    write_text(path, as_json(tree), label, follow)
