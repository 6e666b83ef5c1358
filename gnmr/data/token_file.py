"""Token ids in a file, read a slice at a time."""

from __future__ import annotations

import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import RunFailed

HASHED_WHOLE = 2**30  # bytes; of larger files the size and both ends are compared, so that a warm start stays fast
HASHED_ENDS = 16 * 2**20  # bytes
CHUNK = 2**20  # bytes


class Corrupt(Exception):
    """Why a file, or the folder that holds it, cannot be used."""


class TokenFile:
    """Token ids (n,) of `file`, unsigned integers; `tokens[start:stop]` reads them into memory.

    It is not memory-mapped: a mapped file that shrinks ends the process (SIGBUS). expected: {"bytes", "sha256"}.
    Raises `Corrupt` where the file is another one or holds an id that is not below `vocab_size`, and once it is open
    `RunFailed`.
    """

    def __init__(self, file: Path, expected: dict[str, Any], dtype: str, vocab_size: int) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self._expected = expected
        self._vocab_size = vocab_size
        self._fd = open_regular(file)
        weakref.finalize(self, os.close, self._fd)
        self._verify()

    def __len__(self) -> int:
        return int(self._expected["bytes"]) // self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in their order, not by {step}")
        size = max(stop - start, 0) * self.dtype.itemsize
        try:
            if _stamp(self._fd) != self._seen:
                self._verify()
            return self._ids(read_at(self._fd, size, start * self.dtype.itemsize), size)
        except Corrupt as reason:
            raise RunFailed(
                f"{self.file.parent}: changed while it was in use ({reason}); started again, the run makes it anew and "
                "continues"
            ) from reason

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def _verify(self) -> None:
        self._seen = _stamp(self._fd)
        verify(self._fd, self.file.name, self._expected)
        for chunk in hashed(self._fd):
            self._ids(chunk, len(chunk))

    def _ids(self, raw: bytes, size: int) -> np.ndarray:
        if len(raw) != size or size % self.dtype.itemsize:
            raise Corrupt(f"{self.file.name} ends early")
        ids = np.frombuffer(raw, dtype=self.dtype)
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise Corrupt(f"{self.file.name} holds token {largest}, and the vocabulary has {self._vocab_size}")
        return ids


def open_regular(file: Path) -> int:
    """A descriptor to read `file`; `OSError` for a symbolic link and for what is no regular file, without waiting."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{file.name} is no regular file")
    return fd


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """The descriptor of `open_regular`, closed at the end."""
    fd = open_regular(file)
    try:
        yield fd
    finally:
        os.close(fd)


def read_file(file: Path, most: int) -> bytes:
    """What `file` holds, as `open_regular` opens it; raises `Corrupt` for more than `most` bytes."""
    with opened(file) as fd:
        if (size := os.fstat(fd).st_size) > most:
            raise Corrupt(f"{file.name} has {size} bytes")
        return read_at(fd, size, 0)


def read_at(fd: int, size: int, offset: int) -> bytes:
    """`size` bytes from `offset`, fewer where the file ends."""
    parts = []
    while size > 0 and (part := os.pread(fd, min(size, 2**30), offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def verify(fd: int, name: str, expected: dict[str, Any]) -> None:
    """Raises `Corrupt` unless size and checksum are as expected."""
    size = os.fstat(fd).st_size
    if size != expected["bytes"]:
        raise Corrupt(f"{name} has {size} bytes instead of {expected['bytes']}")
    if digest(fd) != expected["sha256"]:
        raise Corrupt(f"{name} does not match its checksum")


def digest(fd: int) -> str:
    """sha256 of the file, or of its two ends above `HASHED_WHOLE`."""
    seen = hashlib.sha256()
    for chunk in hashed(fd):
        seen.update(chunk)
    return seen.hexdigest()


def hashed(fd: int) -> Iterator[bytes]:
    """What `digest` is of, in chunks."""
    size = os.fstat(fd).st_size
    whole = size <= HASHED_WHOLE
    for begin, end in [(0, size)] if whole else [(0, HASHED_ENDS), (size - HASHED_ENDS, size)]:
        for offset in range(begin, end, CHUNK):
            yield read_at(fd, min(CHUNK, end - offset), offset)


def _stamp(fd: int) -> tuple[int, int]:
    """What changes with the content of a file."""
    state = os.fstat(fd)
    return state.st_size, state.st_mtime_ns
