"""Files that only grow, and what was counted of them: a checkpoint keeps it, and a resumed run compares."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from gnmr.records.disk import no_link

_AT_ONCE = 1 << 16
"""Bytes that wait for their digest at the most."""


class AppendFile:
    """A file that only grows. Every piece is flushed to the operating system, `sync` brings it to the disk."""

    def __init__(self, path: Path) -> None:
        """Goes on behind what is there. OSError for a link."""
        self.path = path
        self._file: BinaryIO = open(path, "ab", opener=no_link)  # noqa: SIM115 (open until `close`)
        self._digest = hashlib.sha256()
        self._undigested = bytearray()
        self._bytes = self._lines = 0
        size = os.fstat(self._file.fileno()).st_size
        if size:
            with open(path, "rb", opener=no_link) as before:
                while part := before.read(min(1 << 20, size - self._bytes)):
                    self._seen(part)

    def append(self, data: bytes) -> None:
        """One write."""
        self._file.write(data)
        self._file.flush()
        self._seen(data)

    def _seen(self, data: bytes) -> None:
        self._undigested += data  # many small pieces at once: in a step the digest's code alone costs more than they do
        self._bytes += len(data)
        self._lines += data.count(b"\n")
        if len(self._undigested) >= _AT_ONCE:
            self._digest_all()

    def _digest_all(self) -> None:
        self._digest.update(self._undigested)
        self._undigested.clear()

    def sync(self) -> None:
        """Brings the rows to the disk; harmless after `close`."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def in_place(self) -> bool:
        """Whether the file at its path is still this one, as long as what was written."""
        try:
            there = os.lstat(self.path)
        except OSError:
            return False
        if there.st_size != self._bytes or not stat.S_ISREG(there.st_mode):
            return False
        return self._file.closed or os.path.samestat(there, os.fstat(self._file.fileno()))

    def count(self) -> dict[str, Any]:
        """What was written: rows, bytes and their sha256."""
        self._digest_all()
        return {"rows": self._lines, "bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Nothing is lost without it: every row was flushed."""
        self._file.close()


NOTHING = {"rows": 0, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
"""What is counted of a file that is not there yet."""


def holds(path: Path, count: dict[str, Any]) -> bool:
    """Whether the file begins with what was counted (`AppendFile.count`)."""
    wanted, digest = count["bytes"], hashlib.sha256()
    try:
        with open(path, "rb", opener=no_link) as file:
            while wanted and (part := file.read(min(1 << 20, wanted))):
                digest.update(part)
                wanted -= len(part)
    except FileNotFoundError:
        pass
    return bool(wanted == 0 and digest.hexdigest() == count["sha256"])
