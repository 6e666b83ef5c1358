"""Token ids in a file, read a slice at a time."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import RunFailed
from gnmr.records.disk import no_link

CHUNK = 2**20  # bytes


class Corrupt(Exception):
    """Why a file, or the folder that holds it, cannot be used."""


class TokenFile:
    """Token ids (n,) of `file`, unsigned integers; `tokens[start:stop]` reads them into memory.

    Not memory-mapped: a mapped file that shrinks ends the process (SIGBUS). expected: {"bytes", "sha256"}. Raises
    `Corrupt` for another file, and for an id of `vocab_size` or more; after the constructor `RunFailed`.
    """

    def __init__(self, file: Path, expected: dict[str, Any], dtype: str, vocab_size: int) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self._expected = expected
        self._vocab_size = vocab_size
        self._fd = no_link(os.fspath(file), os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._verify()

    def __len__(self) -> int:
        return int(self._expected["bytes"]) // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in order, a step of {step} is not possible")
        size = max(stop - start, 0) * self.dtype.itemsize
        try:
            if _stamp(self._fd) != self._seen:
                self._verify()
            return self._ids(read_at(self._fd, size, start * self.dtype.itemsize), size)
        except Corrupt as reason:
            raise RunFailed(
                f"{self.file.parent}: changed while it was in use ({reason}); start the run again, which makes it anew "
                "and continues"
            ) from reason

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def _verify(self) -> None:
        self._seen = _stamp(self._fd)
        verify(self._fd, self.file.name, self._expected)
        for offset in range(0, self._expected["bytes"], CHUNK):
            size = min(CHUNK, self._expected["bytes"] - offset)
            self._ids(read_at(self._fd, size, offset), size)

    def _ids(self, raw: bytes, size: int) -> np.ndarray:
        if len(raw) != size or size % self.dtype.itemsize:
            raise Corrupt(f"{self.file.name} ends early")
        ids = np.frombuffer(raw, dtype=self.dtype)
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise Corrupt(f"{self.file.name} holds token {largest}, and the vocabulary has {self._vocab_size}")
        return ids


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes from `offset`, fewer where the file ends."""
    parts = []
    while size > 0 and (part := os.pread(fd, min(size, 2**30), offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def verify(fd: int, name: str, expected: dict[str, Any]) -> None:
    """Raise Corrupt unless size and checksum are as expected."""
    size = os.fstat(fd).st_size
    if size != expected["bytes"]:
        raise Corrupt(f"{name} has {size} bytes instead of {expected['bytes']}")
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected["sha256"]:
        raise Corrupt(f"{name} does not match its checksum")


def _stamp(fd: int) -> tuple[int, int, int]:
    """Return what changes with the content of a file; nobody can set the last time back."""
    state = os.fstat(fd)
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns
