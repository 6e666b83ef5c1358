"""Output that the user named: a file is replaced atomically; a device or a pipe is written to."""

from __future__ import annotations

import io
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from gnmr.errors import UserError, writing
from gnmr.records import disk
from gnmr.records.files import encode

_OTHERS = {stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device"}


@contextmanager
def replacing(path: Path, what: object = None, follow: bool = True) -> Iterator[BinaryIO]:
    """A file to write to; `path` gets the new content at the end of the block, and keeps the old one after an error.

    A symbolic link is followed to a device or a pipe, and refused where it leads to a file; without `follow`, as where
    others made the folder, it is refused. A character device, a pipe and what this process's own output goes to are
    opened and written to. UserError for a folder, a socket, a block device, and for what cannot be written. `what`
    names the place.
    """
    what = path if what is None else what
    with writing(what):
        if _through(path, what, follow):
            with open(_as_it_is(path), "wb") as file:
                yield file
            return
        beside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.writing")
        with disk.replacing(path, beside) as file:
            with suppress(OSError):  # who may read it stays as it was
                os.fchmod(file.fileno(), stat.S_IMODE(os.lstat(path).st_mode))
            yield file


def check(path: Path, what: object = None, follow: bool = True) -> None:
    """UserError for a path that `replacing` would refuse; called before there is anything to write."""
    what = path if what is None else what
    with writing(what):
        through = _through(path, what, follow)
    if through:
        return
    if not path.parent.is_dir():
        raise UserError(f"{what}: must be a file in a folder that exists")
    with writing(what), TemporaryFile(dir=path.parent):
        pass


def _through(path: Path, what: object, follow: bool) -> bool:
    """Whether `path` is written to instead of being replaced. UserError where neither is possible."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{what}: is a symbolic link that leads nowhere; name a file") from None
        return False
    kind = stat.S_IFMT(found.st_mode)
    if kind in _OTHERS:
        raise UserError(f"{what}: must be a file in a folder that exists, and is {_OTHERS[kind]}")
    if not follow and kind != stat.S_IFREG:
        raise UserError(f"{what}: is {'a symbolic link' if kind == stat.S_IFLNK else 'no file'}, and is left as it is")
    through = kind != stat.S_IFREG or _own_output(found) is not None
    if not through and path.is_symlink():
        raise UserError(f"{what}: is a symbolic link to a file; name the file itself")
    return through


def _own_output(found: os.stat_result) -> int | None:
    """The descriptor, 1 or 2, if this process already writes to that file."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _as_it_is(path: Path) -> int:
    """What is there, opened for writing, neither created nor truncated; appended to where our own output goes there."""
    if (own := _own_output(os.stat(path))) is None:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    (sys.stdout if own == 1 else sys.stderr).flush()
    return os.dup(own)


def write_text(path: Path, text: str, what: object = None, follow: bool = True) -> None:
    """UTF-8; see `replacing`."""
    with replacing(path, what, follow) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, tree: dict[str, Any], what: object = None, follow: bool = True) -> None:
    """An indented JSON object; numbers that are not finite become strings, as in records."""
    write_text(path, json.dumps(encode(tree), indent=2, allow_nan=False) + "\n", what, follow)


@contextmanager
def json_lines(path: Path, what: object = None) -> Iterator[io.TextIOWrapper]:
    """A text file for lines; see `replacing`."""
    with replacing(path, what) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        yield text
        text.flush()
        text.detach()
