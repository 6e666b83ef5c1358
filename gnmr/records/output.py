"""Write the files that the user names: a file is replaced atomically, and nothing else is written to."""

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
def replacing(path: Path, label: object = None) -> Iterator[BinaryIO]:
    """Open a file to write to; `path` gets the new content at the end of the block, and keeps the old one on an error.

    Args:
        path: a file, which is replaced.
        label: how messages name the path.

    Raises:
        UserError: if the path is a link, or is no file, or cannot be written.
    """
    label = path if label is None else label
    with writing(label):
        _refuse_other(path, label)
        beside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.writing")
        with disk.replacing(path, beside) as file:
            with suppress(OSError):  # its permissions stay as they were
                os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode))
            yield file


def check(path: Path, label: object = None) -> None:
    """Refuse a path that `replacing` would refuse; called before there is anything to write.

    Raises:
        UserError: the path is a link or no file, or its folder is missing or cannot be written to.
    """
    label = path if label is None else label
    with writing(label):
        _refuse_other(path, label)
        if not path.parent.is_dir():
            raise UserError(f"{label}: must be a file in a folder that exists")
        TemporaryFile(dir=path.parent).close()


def _refuse_other(path: Path, label: object) -> None:
    """Raise UserError if something other than a file has this name. A link could lead to a file of somebody else."""
    if path.is_symlink():
        raise UserError(f"{label}: is a symbolic link; name the file itself")
    if path.exists() and not path.is_file():
        raise UserError(f"{label}: must be a file in a folder that exists, and is something else")


def write_text(path: Path, text: str, label: object = None) -> None:
    """Write UTF-8 text; see `replacing`.

    Raises:
        UserError: the file cannot be written.
    """
    with replacing(path, label) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, tree: dict[str, Any], label: object = None) -> None:
    """Write a JSON object, non-finite floats as strings; see `replacing`.

    Raises:
        UserError: the file cannot be written.
    """
    write_text(path, as_json(tree), label)
