"""Token files on disk: a folder is complete or absent, and verified when it is opened.

    <cache folder>/<corpus>-<key>/
        tokenizer.json
        train.bin, val.bin    token ids, raw little-endian uint16, or uint32 for vocabularies above 65,536
        train.documents.bin, val.documents.bin    of examples: the borders of `Documents`, raw little-endian int64
        meta.json             vocabulary, end token, dtype, and size and checksum of each file

A folder is built under a hidden name and renamed when it is complete. If a build is killed, its hidden folder is
removed after a day. If two builds run concurrently, the second uses the folder of the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import RunFailed, UserError
from gnmr.records.disk import no_link, of_a_file_browser, sha256
from gnmr.records.untrusted import content

TOKENIZER, TRAIN, VAL, META = "tokenizer.json", "train.bin", "val.bin", "meta.json"
DOCUMENTS = {TRAIN: "train.documents.bin", VAL: "val.documents.bin"}
LARGEST_META = 2**20  # bytes
ABANDONED_AFTER = 24 * 3600.0  # seconds without a write


def cache_folder() -> Path:
    """Return the folder of prepared tokens: GNMR_CACHE, or ~/.cache/gnmr if it is unset or empty.

    Raises UserError if the path begins with ~ and there is no such home folder.
    """
    place = os.environ.get("GNMR_CACHE") or "~/.cache/gnmr"
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise UserError(f"GNMR_CACHE={place}: {error} Give an absolute path") from error


class Corrupt(Exception):
    """The reason why a token folder cannot be used."""


class TokenFile:
    """Token ids (n,) in a file, unsigned integers, read as `tokens[start:stop]`.

    The file is not memory-mapped, because a mapped file that shrinks ends the process (SIGBUS).
    """

    def __init__(self, file: Path, dtype: str) -> None:
        self.file, self.dtype = file, np.dtype(dtype)
        self._fd = no_link(os.fspath(file), os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._seen = self._state()

    def __len__(self) -> int:
        return self._seen[0] // self.dtype.itemsize

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Read contiguous ids. Raises RunFailed if the file has changed since it was opened."""
        start, stop, _ = positions.indices(len(self))
        size = max(stop - start, 0) * self.dtype.itemsize
        raw = os.pread(self._fd, size, start * self.dtype.itemsize)
        # Compared after the read, so that no change before or during it goes unnoticed.
        if len(raw) != size or self._state() != self._seen:
            raise RunFailed(
                f"{self.file}: changed while it was in use; start the run again, which prepares the data anew and "
                "continues"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._fd)
        return state.st_size, state.st_mtime_ns


@dataclass(frozen=True)
class Documents:
    """Tokenized examples of a split, which `gnmr.lab.data.packing` packs into sequences."""

    tokens: np.ndarray | TokenFile
    """Token ids (n,), uint16 or uint32, of the concatenated documents."""
    borders: np.ndarray
    """(documents, 2) int64: each document's end in `tokens`, and the number of its tokens before the first target."""
    end_token: int
    alone: bool = False
    """Put one document into each sequence, because the model would mix documents of a sequence."""


@dataclass(frozen=True)
class TokenCorpus:
    """A tokenized corpus."""

    train: TokenFile | Documents
    """Token ids (n,), uint16 or uint32: documents in order, each followed by the end token."""
    val: TokenFile | Documents
    """Tokens of documents that are not in `train`."""
    vocab_size: int
    """Largest token id + 1. A model may have more."""
    end_token: int
    fingerprint: str
    """The sha256 over the other files of the folder. Equal fingerprints mean equal data."""
    tokenizer_path: Path
    folder: Path
    source: str = ""
    """`corpora.Corpus.identity` of the examples that were tokenized."""


def open_folder(folder: Path) -> TokenCorpus:
    """Return the verified corpus in `folder`.

    No symbolic link is followed, because others may write into a shared cache. Raises FileNotFoundError if there is no
    folder, `Corrupt` if it is damaged, and UserError if this user may not read it.
    """
    if not os.path.lexists(folder):
        raise FileNotFoundError(folder)
    if folder.is_symlink() or not folder.is_dir():
        raise Corrupt("it is not a folder")
    try:
        # meta.json comes first, because it says what the other files have to be.
        meta = json.loads(content(folder / META, LARGEST_META))
        if meta["fingerprint"] != _fingerprint(meta):
            raise Corrupt(f"{META} does not match its fingerprint")
        vocab_size, end_token, dtype, files = meta["vocab_size"], meta["end_token"], meta["dtype"], meta["files"]
        for name in (TOKENIZER, TRAIN, VAL, *files):
            if _recorded(folder / name) != files[name]:
                raise Corrupt(f"{name} does not match its checksum")

        # A corpus of examples has a file with the borders of its documents too.
        def split(name: str) -> TokenFile | Documents:
            ids = TokenFile(folder / name, dtype)
            if DOCUMENTS[name] not in files:
                return ids
            return Documents(ids, np.fromfile(folder / DOCUMENTS[name], dtype="<i8").reshape(-1, 2), end_token)

        fingerprint = meta["fingerprint"]
        return TokenCorpus(split(TRAIN), split(VAL), vocab_size, end_token, fingerprint, folder / TOKENIZER, folder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
            raise UserError(
                f"GNMR_CACHE={folder.parent}: this user may not read {folder.name} there; its owner can share it "
                "by chmod -R a+rX, or set GNMR_CACHE to a folder of your own"
            ) from error
        raise Corrupt(f"it cannot be read: {error}") from error


def open_or_build(folder: Path, build: Callable[[Path], None], say: Callable[[str], None]) -> TokenCorpus:
    """Return the verified corpus in `folder`. If it is missing or damaged, `build(new folder)` creates it first.

    Raises UserError if the cache cannot be read or written, before `build` is called. No files remain after an error.
    """
    corrupt = False
    try:
        return open_folder(folder)
    except FileNotFoundError:
        pass
    except Corrupt as reason:
        say(f"token cache is corrupt ({reason}); rebuilding {folder}")
        corrupt = True
    cache, hidden = folder.parent, f".{folder.name}-"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for abandoned in cache.glob(f"{hidden}*"):  # folders of killed builds
            with suppress(OSError):  # another process may finish or clean up at the same time
                newest = max(path.lstat().st_mtime for path in (abandoned, *abandoned.rglob("*")))
                if time.time() - newest > ABANDONED_AFTER:
                    shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=hidden, dir=cache, ignore_cleanup_errors=True) as temporary:
            # Moved before the long build, because the folder of another user may not be (sticky bit).
            if corrupt:
                with suppress(FileNotFoundError):  # another process was faster
                    shutil.move(folder, Path(temporary, "corrupt"))
            new = Path(temporary, "new")
            new.mkdir()  # the permissions of the temporary folder would exclude other users of a shared cache
            build(new)
            try:
                new.rename(folder)
            except OSError:  # another process has built the same folder
                if not folder.is_dir():
                    raise
        return open_folder(folder)
    except Corrupt as reason:
        raise UserError(f"{folder}: changed by another program right after it was made ({reason})") from reason
    except OSError as error:
        raise UserError(
            f"GNMR_CACHE={cache}: cannot be written ({error.strerror or error}); "
            "set GNMR_CACHE to a folder with room, in which you may write"
        ) from error


def seal(folder: Path, vocab_size: int, end_token: int, dtype: np.dtype) -> None:
    """Complete a build: write meta.json with the sizes and checksums of the files in `folder`."""
    files = {file.name: _recorded(file) for file in sorted(folder.iterdir()) if not of_a_file_browser(file.name)}
    meta = {"vocab_size": vocab_size, "end_token": end_token, "dtype": dtype.str, "files": files}
    (folder / META).write_text(json.dumps(meta | {"fingerprint": _fingerprint(meta)}, indent=1) + "\n")


def _recorded(file: Path) -> dict[str, Any]:
    return {"bytes": file.lstat().st_size, "sha256": sha256(file)}


def _fingerprint(meta: dict[str, Any]) -> str:
    fields = {key: value for key, value in meta.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
