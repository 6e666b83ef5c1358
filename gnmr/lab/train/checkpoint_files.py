"""The files of a checkpoint, which are verified before use and read without running code.

PyTorch stores its index and plain values as pickles. Restricted unpicklers read them: they admit a few classes and no
functions, so a checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from gnmr.errors import UserError
from gnmr.records.disk import no_link, of_a_file_browser, sha256, sync_folder

Meta = dict[str, Any]
"""meta.json: the host state, the run that owns the checkpoint, and the sha256 of every other file."""
META = "meta.json"
NAME = r"step-(\d{8})"
ANEW = "start again in another run_dir"
_META_SUM, _INDEX = "meta.sha256", ".metadata"
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}


class Corrupt(ValueError):
    """Files of a checkpoint differ from the files that were written."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in ascending order."""
    names = (re.fullmatch(NAME, p.name) for p in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def newest_whole(folder: Path, steps: Sequence[int]) -> tuple[Meta, dict[Path, Corrupt]]:
    """Return meta.json of the newest complete checkpoint, and the error of each newer one.

    Raises UserError if none is complete.
    """
    corrupt: dict[Path, Corrupt] = {}
    for step in sorted(steps, reverse=True):
        path = folder / f"step-{step:08d}"
        try:
            return _verified(path), corrupt
        except Corrupt as error:
            corrupt[path] = error
    more = ", and none before it is whole" if len(corrupt) > 1 else ""
    remedy = f"delete {folder} to train from step 1 again, or {ANEW}"
    if len(corrupt) < len(steps_in(folder)):
        remedy = f"delete that folder to continue from an earlier checkpoint, or {ANEW}"
    raise UserError(f"{next(iter(corrupt.values()))}{more}: {remedy}")


def _verified(path: Path) -> Meta:
    """Return meta.json of a checkpoint after checking every file that it names.

    Raises `Corrupt` for a missing or changed file. Raises UserError for a file that this user may not read, and for a
    file that meta.json does not name, unless it is hidden or a file browser's.
    """
    try:
        text, named = ((path / name).read_bytes() for name in (META, _META_SUM))
        if named != _sum_line(text):
            raise ValueError(f"{META} is missing or changed")
        meta = json.loads(text)
        kinds = {"step": int, "owner": str, "units": list, "host": dict, "files": dict}
        if any(type(meta[key]) is not kind for key, kind in kinds.items()) or path.name != f"step-{meta['step']:08d}":
            raise ValueError(f"{META} is of another checkpoint")
        if _INDEX not in meta["files"]:
            raise ValueError(f"{META} names no {_INDEX}")
        known = {META, _META_SUM, *meta["files"]}
        for name in sorted(known):
            file, wanted = path / name, meta["files"].get(name)
            if not stat.S_ISREG(file.lstat().st_mode) or (wanted and sha256(file) != wanted):
                raise ValueError(f"{name} is missing or changed")
        surplus = sorted(p.name for p in path.iterdir() if p.name not in known and not _passed_over(p.name))
    except FileNotFoundError as error:
        raise Corrupt(f"checkpoint {path} is corrupt ({Path(error.filename).name} is missing)") from error
    except PermissionError as error:
        where = error.filename or path
        raise UserError(f"{where}: cannot be read ({error.strerror}); its owner can make it readable") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"checkpoint {path} is corrupt ({error})") from error
    if surplus:
        more = f", and {len(surplus) - 1} more are" if len(surplus) > 1 else ""
        raise UserError(f"{path / surplus[0]}: is not part of the checkpoint{more}; remove what does not belong there")
    return {key: meta[key] for key in kinds}


def _passed_over(name: str) -> bool:
    return name.startswith(".") or of_a_file_browser(name)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json of the files in `folder` and its checksum, and sync both to disk."""
    files = [p for p in sorted(folder.iterdir()) if p.name == _INDEX or not _passed_over(p.name)]
    text = json.dumps(meta | {"files": {p.name: sha256(p) for p in files}}, indent=1).encode()
    for name, data in ((META, text), (_META_SUM, _sum_line(text))):
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def _sum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {META}\n".encode()


def read(path: Path, meta: Meta, state: dict[str, Any]) -> None:
    """Fill `state` from a checkpoint."""
    with quiet():
        dcp.load(state, storage_reader=_Reader(path, meta["files"]), planner=_Planner())


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the first failed rank if `error` is one that dcp collected from all ranks."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


@contextmanager
def fitting(path: Path, whose: str) -> Iterator[None]:
    """Raise UserError if the block cannot load the checkpoint's state."""
    kinds = (CheckpointException, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
    try:
        yield
    except kinds as error:
        reason = str(cause_of(error)).strip().partition("\n")[0]
        raise UserError(f"checkpoint {path} does not fit this {whose} ({reason}): {ANEW}") from error


class _Index(pickle.Unpickler):
    """Unpickles `.metadata` and admits only the classes that PyTorch stores in it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, function or dtype that the pickle names. Raises UnpicklingError if it is not admitted."""
        known = _INDEX_NAMES.get(module, ())
        if name in known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            module = "pathlib" if module == "pathlib._local" else module  # Python 3.13 alone has that name
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Reads only files that meta.json names, and the index with `_Index`."""

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._files = path, files

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> dcp_metadata.Metadata:
        """Return the index. Raises ValueError if it is invalid or names other files."""
        with open(self._folder / _INDEX, "rb", opener=no_link) as file:
            found = _Index(file).load()
        if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError(f"{_INDEX} is not an index")
        if any(part.relative_path not in self._files for part in found.storage_data.values()):
            raise ValueError(f"{_INDEX} names other files")
        found.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return found


class _Planner(dcp.DefaultLoadPlanner):
    """Reads plain values with `weights_only`, so that a pickle cannot call functions."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Read the value with `weights_only`, serialize it again, and load that as the default planner does."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the warning of torch.distributed.checkpoint that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
