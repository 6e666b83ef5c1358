"""Let one process at a time write a run folder.

    .lock     locked by the operating system while a process works on the folder
    .owner    says which process writes the records; removed when it closes them

The second file serves where a file system has no locks, where its locks hold on one machine only, and where somebody
has deleted the first. Its owner touches it every `_TOUCH_S` seconds, so that another machine can see that it lives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from gnmr.errors import UserError, warn
from gnmr.records.disk import no_link, replacing

OWNER = ".owner"
_TOUCH_S = 15.0
_SILENT_S = 60.0  # time without a touch after which an owner on another machine counts as dead
_CHECK_S = 1.0
_DYING_S = 2.0  # time for a process that is being killed, which loses its lock first
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
    """Lock an existing folder. Raises UserError if another process writes it, and OSError if it cannot be written."""
    TemporaryFile(dir=folder).close()  # .lock may exist already in a folder that is not writable
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    # By device and inode, because several paths may lead to one folder.
    status = os.fstat(descriptor)
    place = status.st_dev, status.st_ino
    if (held := _locks.get(place)) is not None:
        os.close(descriptor)
        return held
    lock = FolderLock(folder, descriptor)
    _refuse_living_owner(folder)
    _locks[place] = lock
    return lock


def _unlock(descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same lock
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


class OwnerMark:
    """Marks this process as the one that writes the records of a folder."""

    def __init__(self, folder: Path) -> None:
        """Write the mark. Raises UserError if another process that lives has marked the folder."""
        # A lock may not reach other machines that share the folder, but a file in it does.
        _refuse_living_owner(folder)
        self._path, self._mark = folder / OWNER, _mark()
        _write(self._path, self._mark)
        self._status, self._checked = _identity(self._path), time.monotonic()
        ended = threading.Event()
        self.close = weakref.finalize(self, _remove, self._path, self._mark, os.getpid(), ended)
        threading.Thread(target=_touch, args=(self._path, self._mark, ended), daemon=True).start()

    def lost(self, now: bool = True) -> bool:
        """Return True if another process has marked the folder since.

        Without `now`, the mark is read if its file was replaced, and else once a second at most: a run asks before
        every row. The attributes of a file may be old on NFS, which looks anew when it opens a file.
        """
        status = _identity(self._path)
        if not now and status == self._status and time.monotonic() - self._checked < _CHECK_S:
            return False
        if self.close.alive and _read(self._path) not in (None, self._mark):
            return True
        self._status, self._checked = status, time.monotonic()
        return False


def _mark() -> dict[str, str | int]:
    """Return what identifies this process; a digest stands for the machine, whose name is nobody's business."""
    where = [platform.node()]
    with suppress(OSError):
        where.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        where.append(os.readlink("/proc/self/ns/pid"))  # containers of one machine have numbers of their own
    pid = os.getpid()
    return {
        "machine": hashlib.sha256(" ".join(where).encode()).hexdigest()[:16],
        "pid": pid,
        "start": _start_of(pid) or "",
    }


def _start_of(pid: int) -> str | None:
    """Return when a process of this machine began (empty where the system does not say), or None if it has ended."""
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if state in "ZX" else fields[18]  # starttime, in clock ticks since boot
        return None
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
    return ""


def _read(path: Path) -> dict[str, str | int] | None:
    """Return a mark, or None if there is none that can be read."""
    with suppress(OSError, ValueError), open(path, "rb", opener=no_link) as file:
        mark = json.loads(file.read(1000))
        if isinstance(mark, dict) and type(mark.get("pid")) is int:
            return mark
    return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the inode of a file and when it was made or renamed; None without the file."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_ino, status.st_ctime_ns
    return None


def _write(path: Path, mark: dict[str, str | int]) -> None:
    with suppress(OSError), replacing(path) as file:  # on a full disk the run goes on without the mark
        file.write(json.dumps(mark).encode())


def _remove(path: Path, mark: dict[str, str | int], pid: int, ended: threading.Event) -> None:
    ended.set()
    if os.getpid() == pid and _read(path) == mark:
        with suppress(OSError):
            path.unlink()


def _touch(path: Path, mark: dict[str, str | int], ended: threading.Event) -> None:
    while not ended.wait(_TOUCH_S):
        # The mark is touched while it is this process's own, and written again if it was deleted.
        there = _read(path)
        if there == mark:
            with suppress(OSError):
                os.utime(path)
        elif there is None and path.parent.is_dir() and not path.exists():
            _write(path, mark)


def _refuse_living_owner(folder: Path) -> None:
    path = folder / OWNER
    mark = _read(path)
    if mark is None or mark == (own_mark := _mark()):
        return
    if mark.get("machine") == own_mark["machine"]:
        # On this machine the owner lives if its number has the same start: numbers are used again.
        until = time.monotonic() + _DYING_S
        while mark.get("start") == _start_of(int(mark["pid"])):
            if time.monotonic() > until:
                raise UserError(f"{folder} is being written by another process, {mark['pid']} of this machine")
            time.sleep(0.05)
        return
    # On another machine, only touches of the mark show that the owner lives.
    if (seen := _age(path)) is None or seen[1] > _SILENT_S:
        return
    warn(f"{folder}: another machine wrote here within the last minute; looking whether it still does")
    # Wait for the next touch, or until there was none for too long.
    touched, age = seen
    while age <= _SILENT_S:
        time.sleep(min(1.0, _TOUCH_S))
        if (seen := _age(path)) is None:
            return
        if seen[0] != touched:
            raise UserError(f"{folder} is being written by another process, on another machine")
        age = seen[1]


def _age(path: Path) -> tuple[float, float] | None:
    """Return when a file was touched, and how long ago by the clock of its file system; None without the file."""
    try:
        with open(path, "rb", opener=no_link) as file, TemporaryFile(dir=path.parent) as fresh:  # open: NFS looks anew
            # A new file has the time of the file system, whose clock may differ from this machine's.
            fresh.write(b"x")
            fresh.flush()
            touched = os.fstat(file.fileno()).st_mtime
            return touched, os.fstat(fresh.fileno()).st_mtime - touched
    except OSError:
        return None
