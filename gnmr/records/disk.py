"""Replace files atomically, sync them, and never reach them through a link."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gnmr.errors import UserError

_OF_A_FILE_BROWSER = re.compile(
    r"\.DS_Store|\._.*|\.AppleDouble|\.localized|Icon\r|__MACOSX|\.Spotlight-.*|\.fseventsd|"  # macOS
    r"Thumbs\.db|ehthumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information|"  # Windows
    r"\.directory|\.Trash.*|lost\+found|\.ipynb_checkpoints|"  # Linux desktops, file systems, Jupyter
    r"\.nfs[0-9a-f]+|\.fuse_hidden.*|\.smbdelete.*|@eaDir|#recycle|@Recycle|\.snapshots?",  # servers of files
    re.IGNORECASE,
)


def of_a_file_browser(name: str) -> bool:
    """Return True if file browsers, operating systems or file servers make files or folders of this name.

    Args:
        name: the last part of a path; case does not matter.
    """
    return _OF_A_FILE_BROWSER.fullmatch(name) is not None


def no_link(path: str, flags: int) -> int:
    """Open a file for `open(opener=...)`.

    Raises:
        OSError: it is a link or, when reading, not a regular file.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to would wait forever.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if flags & os.O_ACCMODE == os.O_RDONLY and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return descriptor


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a new file, which is synced and then replaces `path`: readers see the old or the new one, never a part.

    A link at `path` is replaced and not followed. After an error the new file is removed.

    Args:
        path: the file to be replaced.
        beside: the new file's name until then, which must be free. By default it is `path` with .tmp, where a file
            that a killed process left is overwritten.
    """
    if beside is None:
        beside = path.with_name(path.name + ".tmp")
        beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def truncate(path: Path, size: int) -> None:
    """Truncate a file.

    Args:
        path: the file.
        size: the bytes that are left.

    Raises:
        OSError: it is a link, or cannot be written.
    """
    with open(path, "r+b", opener=no_link) as file:
        file.truncate(size)


def sync_folder(path: Path) -> None:
    """Write a folder's entries to the disk, if it may be read and its file system can.

    Raises:
        OSError: the disk has an error, or there is no such folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the digest of a file's content, in hexadecimal.

    Raises:
        OSError: the path is a link or no regular file, or cannot be read.
    """
    with open(path, "rb", opener=no_link) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_tree(folder: Path, skip: tuple[str, ...] = ()) -> None:
    """Refuse a run folder with anything in it that is neither a regular file nor a folder.

    A link could lead a run's writing and deleting elsewhere, and a pipe could block it.

    Args:
        folder: an existing folder.
        skip: names of folders directly in it that are not looked into.

    Raises:
        UserError: there is a link or another special file.
    """
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # the run's own process has just renamed or removed it
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and entry.name not in skip:
                check_tree(Path(entry.path))
            elif not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
                raise UserError(f"{entry.path}: is {kind}, which a run folder does not hold: remove it")
