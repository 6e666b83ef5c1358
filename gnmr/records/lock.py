"""Let one process at a time write a run folder: the operating system locks its file `.lock`."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from gnmr.errors import UserError, warn

LOCK = ".lock"
_locks: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()
"""The locks of this process, by device and inode: an interrupted loop may attach to its folder again."""
os.register_at_fork(after_in_child=_locks.clear)


class FolderLock:
    """The lock on one folder, until nothing refers to this object or the process ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        """Raises UserError if another process holds the lock. The descriptor is that of .lock."""
        weakref.finalize(self, _unlock, descriptor, os.getpid())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise UserError(f"{folder} is being written by another process") from error
            warn(f"{folder}: its file system has no locks ({error.strerror}); start this run once")


def lock_folder(folder: Path) -> FolderLock:
    """Lock an existing folder.

    Returns:
        The lock, to be held while the folder is written; the same object if this process has locked the folder already.

    Raises:
        UserError: another process holds the lock.
        OSError: the folder cannot be written, or its .lock is a link.
    """
    TemporaryFile(dir=folder).close()  # .lock may exist already in a folder that is not writable
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    # By device and inode, because several paths may lead to one folder.
    status = os.fstat(descriptor)
    place = status.st_dev, status.st_ino
    if (held := _locks.get(place)) is not None:
        os.close(descriptor)
        return held
    _locks[place] = lock = FolderLock(folder, descriptor)
    return lock


def _unlock(descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same lock
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
