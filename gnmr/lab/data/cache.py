"""Token files on disk: a folder is complete or absent, and verified when it is opened.

    <cache_dir>/<corpus>-<key>/
        tokenizer.json
        train.bin, val.bin    token ids, raw little-endian uint16, or uint32 for vocabularies above 65,536
        train.documents.bin, val.documents.bin    of examples: the borders of `Documents`, raw little-endian int64
        meta.json             vocabulary, end token, dtype, and size and checksum of each file

A folder is built under a hidden name and renamed when it is complete. A killed build leaves its hidden folder, which is
removed a day later. Of two concurrent builds the second uses the first one's folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.errors import UserError
from gnmr.lab.data.progress import Progress
from gnmr.lab.data.token_file import Corrupt, TokenFile, verify
from gnmr.records.disk import no_link, sha256

TOKENIZER, TRAIN, VAL, META = "tokenizer.json", "train.bin", "val.bin", "meta.json"
DOCUMENTS = {TRAIN: "train.documents.bin", VAL: "val.documents.bin"}
DTYPES = ("<u2", "<u4")
LARGEST_META = 2**20  # bytes
ABANDONED_AFTER = 24 * 3600.0  # seconds without a write


@dataclass(frozen=True)
class Documents:
    """Tokenized examples of a split; `gnmr.lab.data.packing` makes sequences of them."""

    tokens: np.ndarray | TokenFile
    """Token ids (n,), uint16 or uint32, the documents one after the other."""
    borders: np.ndarray
    """(documents, 2) int64: where a document ends in `tokens`, and how many of its tokens come before its first
    target."""
    end_token: int


@dataclass(frozen=True)
class TokenCorpus:
    """A tokenized corpus."""

    train: TokenFile | Documents
    """Token ids (n,), uint16 or uint32; documents in order, the end token after each."""
    val: TokenFile | Documents
    """As `train`, from documents that are not in it."""
    vocab_size: int
    """Largest token id + 1; a model may have more."""
    end_token: int
    fingerprint: str
    """sha256 over the other files of the folder: equal fingerprints, equal data."""
    tokenizer_path: Path
    folder: Path


def open_folder(folder: Path) -> TokenCorpus:
    """The verified corpus in `folder`; raises `FileNotFoundError` if there is no folder, `Corrupt` if it is damaged.

    No symbolic link is followed: others may write into a shared cache.
    """
    try:
        kind = folder.lstat().st_mode
    except OSError as error:  # anything else in the way is reported when writing
        raise FileNotFoundError(folder) from error
    if not stat.S_ISDIR(kind):
        raise Corrupt("it is no folder")
    try:
        with open(folder / META, "rb", opener=no_link) as file:
            raw = file.read(LARGEST_META + 1)
        if len(raw) > LARGEST_META:
            raise Corrupt(f"{META} has more than {LARGEST_META} bytes")
        meta = json.loads(raw)
        if meta["fingerprint"] != _fingerprint(meta):
            raise Corrupt(f"{META} does not match its fingerprint")
        vocab_size, end_token = meta["vocab_size"], meta["end_token"]
        if meta["dtype"] not in DTYPES or not 0 <= end_token < vocab_size <= 2**32:
            raise Corrupt(f"{META} describes no tokens")
        for name in sorted({TOKENIZER, *meta["files"]} - {TRAIN, VAL}):
            with open(folder / Path(name).name, "rb", opener=no_link) as file:
                verify(file.fileno(), name, meta["files"][name])
        train, val = (_split(folder, name, meta) for name in (TRAIN, VAL))
        return TokenCorpus(train, val, vocab_size, end_token, meta["fingerprint"], folder / TOKENIZER, folder)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise Corrupt(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"{META} cannot be used: {error}") from error


def _split(folder: Path, name: str, meta: dict[str, Any]) -> TokenFile | Documents:
    ids = TokenFile(folder / name, meta["files"][name], meta["dtype"], meta["vocab_size"])
    if (file := DOCUMENTS[name]) not in meta["files"]:
        return ids
    borders = np.fromfile(folder / file, dtype="<i8")
    ends = borders[::2]
    if len(borders) % 2 or (np.diff(ends, prepend=0) <= 0).any() or ends[-1:].tolist() != [len(ids)]:
        raise UserError(f"{folder}: {file} does not match {name}; remove the folder")
    return Documents(ids, borders.reshape(-1, 2), meta["end_token"])


def open_or_build(folder: Path, build: Callable[[Path, Progress], None], say: Callable[[str], None]) -> TokenCorpus:
    """The verified corpus in `folder`; if it is missing or damaged, `build(new folder, progress)` makes it first.

    `say` receives progress lines, some of them from another thread.
    """
    try:
        return open_folder(folder)
    except FileNotFoundError:
        pass
    except Corrupt as reason:
        say(f"token cache is corrupt ({reason}); rebuilding {folder}")
    with building(folder) as new, Progress(say) as progress:
        build(new, progress)
    try:
        return open_folder(folder)
    except (FileNotFoundError, Corrupt) as reason:
        raise UserError(f"{folder}: changed by another program right after it was made ({reason})") from reason


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; it is renamed to `folder` at the end, or removed after an error.

    Raises `UserError` if the place cannot be written.
    """
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{folder.name}-*"):  # the remains of killed builds
            with suppress(OSError):  # another process may finish or sweep at the same time
                newest = max(path.lstat().st_mtime for path in (left, *left.rglob("*")))
                if time.time() - newest > ABANDONED_AFTER:
                    shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        new = temporary / "new"
        new.mkdir()  # mkdtemp's own permissions would lock out other users of a shared cache
        yield new
        try:
            open_folder(folder)
            return  # another process has built it meanwhile
        except FileNotFoundError:
            pass
        except Corrupt:
            with suppress(FileNotFoundError):
                folder.rename(temporary / "old")
        try:
            new.rename(folder)
        except OSError:  # another process was faster after all
            if not folder.is_dir():
                raise
    except OSError as error:
        raise UserError(
            f"data.cache_dir={folder.parent}: cannot be written ({error.strerror or error}); "
            "set data.cache_dir or GNMR_CACHE to a folder with room"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path, vocab_size: int, end_token: int, dtype: np.dtype) -> None:
    """Writes meta.json, with the sizes and checksums of the files in `folder`; ends a build."""
    meta: dict[str, Any] = {"vocab_size": vocab_size, "end_token": end_token, "dtype": dtype.str, "files": {}}
    for file in sorted(folder.iterdir()):
        meta["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / META).write_text(json.dumps(meta | {"fingerprint": _fingerprint(meta)}, indent=1) + "\n")


def _fingerprint(meta: dict[str, Any]) -> str:
    content = {key: value for key, value in meta.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
