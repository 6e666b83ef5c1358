"""Checkpoints: written beside and renamed, verified when read.

    checkpoints/step-00000100/              torch.distributed.checkpoint files, meta.json and meta.sha256
    checkpoints/step-00000100.corrupt/      one that was set aside

Everything is written and synced under another name first, so a folder with its final name is complete. `meta.json`
holds the host's numbers (step, data position, counters, sizes of the records), the run it belongs to, and the sha256 of
every other file; meta.sha256 is its own. Anything else is corrupt, and the checkpoint before it is used.

PyTorch stores its index and plain values as pickles. They are read by unpicklers that admit a few classes and no
function, so that a checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from gnmr.attachment import Router
from gnmr.distributed.shards import is_sharded, local
from gnmr.distributed.world import ALONE, World
from gnmr.errors import RunFailed, UserError, writing
from gnmr.precision import ConvertedModel
from gnmr.records.disk import no_link, sha256, sync_folder

_META, _META_SUM, _INDEX = "meta.json", "meta.sha256", ".metadata"
_NAME = r"step-(\d{8})"
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
_Meta = dict[str, Any]


class Stateful(Protocol):
    """Has state that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that `torch.save` keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`; may raise ValueError for that of something else."""
        ...


@runtime_checkable
class Expecting(Protocol):
    """Has state whose shape depends on the run that saved it."""

    def expect(self, host: Mapping[str, Any]) -> None:
        """The host's numbers of the checkpoint that is read next; UserError where it cannot be gone on from."""
        ...


class Checkpointer:
    """Saves and loads everything that the next step depends on."""

    def __init__(
        self,
        folder: Path,
        owner: str,
        keep: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        controller: Router,
        extras: Mapping[str, Stateful] | None = None,
        *,
        world: World = ALONE,
    ) -> None:
        """`world`: the processes that save and load together, each what it has; rank 0 sees to the folders."""
        self._world = world
        self.folder, self.owner, self.keep = folder, owner, keep
        self._model, self._optimizer, self._controller = model, optimizer, controller
        self._extras = dict(extras or {})
        self._options = _trained(model)
        self._whole: _Meta | None = None  # the one that `newest` found

    def _state(self) -> dict[str, Any]:
        controller = self._controller.state_dict()
        state: dict[str, Any] = {
            "model": get_model_state_dict(self._model, options=self._options),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
            # Names and the step count go to meta.json, with the host's numbers.
            "controller": {k: v for k, v in controller.items() if k not in ("units", "t", "plan")},
            "plan": controller["plan"],
            "rng": {"cpu": torch.get_rng_state()},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }
        if next(self._model.parameters()).is_cuda:
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
        return state

    def save(self, step: int, host: dict[str, Any]) -> None:
        """Writes the checkpoint of `step` and deletes all but the newest `keep`. Waits for the device.

        RunFailed if it cannot be written or a number in it is not finite; what was written of it is removed, the
        earlier ones stay.
        """
        with self._world.agreed():
            if (where := self._nonfinite()) is not None:
                why = f"{where} is not finite after step {step}"
                raise RunFailed(f"{why}: no checkpoint was written; use a smaller optim.lr")
        final = self.folder / f"step-{step:08d}"
        beside = self.folder / f".writing-{final.name}"
        try:
            self._write(step, host, beside)
            self._world.from_first(lambda: self._put(beside, final))
        except (OSError, CheckpointException) as error:
            # A full disk is not always reported as such: the zip writer raises its own errors for short files.
            run = self.folder.parent
            full = run.is_dir() and shutil.disk_usage(run).free < 2**20
            if self._world.first:
                shutil.rmtree(beside, ignore_errors=True)
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            reason = "disk full" if full else str(cause).partition("\n")[0]
            raise RunFailed(f"{reason} while writing the checkpoint of step {step} in {self.folder}") from error
        self._world.from_first(self._prune)

    def _put(self, beside: Path, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        sync_folder(self.folder)

    def _nonfinite(self) -> str | None:
        """The first trained weight or optimizer state with a number that is not finite."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                held: dict[str, Any] = {name: parameter.detach()}
                held |= {f"{key} of {name}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
                for what, value in held.items():
                    numbers = isinstance(value, Tensor) and value.is_floating_point()
                    if numbers and not bool(local(value).isfinite().all()):
                        return what
        return None

    def _write(self, step: int, host: dict[str, Any], beside: Path) -> None:
        def begin() -> None:
            shutil.rmtree(beside, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)  # not its parent: a run folder that was removed stays so
            beside.mkdir()

        self._world.from_first(begin)
        with _quiet():
            dcp.save(self._state(), checkpoint_id=beside)
        self._world.from_first(lambda: self._write_meta(step, host, beside))

    def _write_meta(self, step: int, host: dict[str, Any], beside: Path) -> None:
        meta = {
            "step": step,
            "owner": self.owner,
            "units": self._controller.names,
            "host": host,
            "files": {p.name: sha256(p) for p in sorted(beside.iterdir())},
        }
        text = json.dumps(meta, indent=1).encode()
        _write_synced(beside / _META, text)
        _write_synced(beside / _META_SUM, f"{hashlib.sha256(text).hexdigest()}  {_META}\n".encode())
        sync_folder(beside)

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        return _steps(self.folder)

    def newest(self) -> int | None:
        """Step of the newest whole checkpoint; what a killed run left half-written is removed.

        A newer one that is corrupt is renamed, which a warning says. UserError where every one is corrupt.
        """
        self._whole = self._world.from_first(self._newest)
        return None if self._whole is None else int(self._whole["step"])

    def _newest(self) -> _Meta | None:
        """meta.json of it. UserError, before anything is changed, where it belongs to another run."""
        steps = self.steps()
        whole, corrupt = _newest_whole(self.folder, steps) if steps else (None, {})
        if whole is not None:
            self._check(whole)
        for rest in self.folder.glob(".writing-*"):
            shutil.rmtree(rest, ignore_errors=True)
        if whole is None:
            return None
        step = int(whole["step"])
        for path, error in corrupt.items():
            aside = path.with_name(f"{path.name}.corrupt")
            with writing(path):
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            warnings.warn(f"{error}: set aside as {aside.name}, step {step} is taken", stacklevel=5)
        self._prune()
        return whole

    def _prune(self) -> None:
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def load(self, step: int) -> dict[str, Any]:
        """Restores everything and returns the host's numbers. UserError for a corrupt or foreign checkpoint."""
        path = self.folder / f"step-{step:08d}"
        meta, self._whole = self._whole, None
        if meta is None or meta["step"] != step:
            meta = self._world.from_first(lambda: _newest_whole(self.folder, [step])[0])
        self._check(meta)
        units, host = meta["units"], meta["host"]
        for extra in self._extras.values():
            if isinstance(extra, Expecting):
                extra.expect(host)
        state = self._state()
        with _fitting(path, "run"):
            _read(path, meta, state)
            set_model_state_dict(self._model, state["model"], options=self._options)
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
            self._controller.load_state_dict({**state["controller"], "plan": state["plan"], "units": units, "t": step})
            for name, extra in self._extras.items():
                extra.load_state_dict(state["extras"][name])
            torch.set_rng_state(state["rng"]["cpu"])
            if "cuda" in state["rng"]:
                torch.cuda.set_rng_state(state["rng"]["cuda"])
        return dict(host)

    def _check(self, meta: _Meta) -> None:
        """UserError for the checkpoint of another run."""
        owner, path = meta["owner"], self.folder / f"step-{meta['step']:08d}"
        if owner != self.owner or meta["units"] != self._controller.names:
            raise UserError(f"checkpoint {path} belongs to another run ({owner}, this one is {self.owner}): {_ANEW}")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    meta: _Meta

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return int(self.meta["step"])

    @property
    def host(self) -> dict[str, Any]:
        """The host's numbers, as `Checkpointer.save` was given them."""
        return dict(self.meta["host"])

    @property
    def sha256(self) -> str:
        """Of meta.json, which names the sha256 of every other file."""
        return hashlib.sha256((self.path / _META).read_bytes()).hexdigest()


def find(folder: Path) -> Found:
    """The newest whole checkpoint in `folder`, or `folder` itself where it is one (step-...).

    The folder stays as it is. A warning names newer ones that are corrupt. UserError where no checkpoint is whole.
    """
    steps = _steps(folder)
    if re.fullmatch(_NAME, folder.name):
        folder, steps = folder.parent, [int(folder.name.removeprefix("step-"))]
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint")
    meta, corrupt = _newest_whole(folder, steps)
    for error in corrupt.values():
        warnings.warn(f"{error}: step {meta['step']} is taken", stacklevel=3)
    return Found(folder / f"step-{meta['step']:08d}", meta)


def load_training(found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Reads weights and optimizer state. UserError for a checkpoint of another model or optimizer."""
    options = _trained(model)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    with _fitting(found.path, "model"):
        _read(found.path, found.meta, state)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load_model(folder: Path, model: nn.Module, plan: ConvertedModel | None = None) -> int:
    """Reads the weights of the checkpoint that `find` finds, and the state of `plan`, and returns its step.

    UserError where no checkpoint is whole, and for one of other weights or paths.
    """
    found = find(folder)
    options = _trained(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if plan is not None:
        state["plan"] = plan.state_dict()
    with _fitting(found.path, "model"):
        _read(found.path, found.meta, state)
        if plan is not None:
            plan.load_state_dict(state["plan"])
        set_model_state_dict(model, state["model"], options=options)
    return found.step


def gathered(model: nn.Module) -> dict[str, Tensor] | None:
    """The trained weights of a model of which each process has parts, whole and on the CPU, in rank 0; none in others,
    which all call it. None where processes have whole weights."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return None
    options = replace(_trained(model), full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _trained(model: nn.Module) -> StateDictOptions:
    """Frozen weights are no part of a checkpoint: they are those of the checkpoint that the run began from."""
    return StateDictOptions(
        ignore_frozen_params=True, strict=all(parameter.requires_grad for parameter in model.parameters())
    )


def _steps(folder: Path) -> list[int]:
    names = (re.fullmatch(_NAME, p.name) for p in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


_ANEW = "start again in another run_dir"
_REMEDY = f"delete that folder to continue from an earlier checkpoint, or {_ANEW}"


_MOST_TRIED = 8
"""The most checkpoints that are tried, newest first."""


class _Corrupt(ValueError):
    """A checkpoint whose files differ from what was written."""


def _newest_whole(folder: Path, steps: list[int]) -> tuple[_Meta, dict[Path, _Corrupt]]:
    """meta.json of the newest of these checkpoints that is whole, and what is wrong with the newer ones.

    UserError if none is whole.
    """
    corrupt: dict[Path, _Corrupt] = {}
    for step in sorted(steps)[: -_MOST_TRIED - 1 : -1]:
        path = folder / f"step-{step:08d}"
        try:
            return _verified(path), corrupt
        except _Corrupt as error:
            corrupt[path] = error
    every = corrupt.keys() == {folder / f"step-{step:08d}" for step in _steps(folder)}
    tried = "none before it" if every else f"none of the {_MOST_TRIED} newest"
    more = f", and {tried} is whole" if len(corrupt) > 1 else ""
    remedy = f"delete {folder} to train from step 1 again, or {_ANEW}" if every else _REMEDY
    raise UserError(f"{next(iter(corrupt.values()))}{more}: {remedy}")


def _verified(path: Path) -> _Meta:
    """meta.json of a checkpoint that holds exactly the files that it names."""
    try:
        meta = _meta(path)
        named = {_META, _META_SUM, *meta["files"]}
        for name in sorted(named | {p.name for p in path.iterdir()}):
            file, wanted = path / name, meta["files"].get(name)
            if name not in named or not stat.S_ISREG(file.lstat().st_mode) or (wanted and sha256(file) != wanted):
                raise ValueError(f"{name} is missing or changed")
    except FileNotFoundError as error:
        raise _Corrupt(f"checkpoint {path} is corrupt ({Path(error.filename).name} is missing)") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Corrupt(f"checkpoint {path} is corrupt ({error})") from error
    return meta


def _meta(path: Path) -> _Meta:
    """meta.json as meta.sha256 has it; ValueError for anything else."""
    text, named = ((path / name).read_bytes() for name in (_META, _META_SUM))
    if named != f"{hashlib.sha256(text).hexdigest()}  {_META}\n".encode():
        raise ValueError(f"{_META} is missing or changed")
    meta = json.loads(text)
    kinds = {"step": int, "owner": str, "units": list, "host": dict, "files": dict}
    if any(type(meta[key]) is not kind for key, kind in kinds.items()) or path.name != f"step-{meta['step']:08d}":
        raise ValueError(f"{_META} is of another checkpoint")
    return {key: meta[key] for key in kinds}


def _read(path: Path, meta: _Meta, state: dict[str, Any]) -> None:
    """Fills `state` from a checkpoint."""
    with _quiet():
        dcp.load(state, storage_reader=_Reader(path, meta["files"]), planner=_Planner())


@contextmanager
def _fitting(path: Path, whose: str) -> Iterator[None]:
    """UserError for state that does not fit what it is loaded into."""
    kinds = (CheckpointException, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
    try:
        yield
    except kinds as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(f"checkpoint {path} does not fit this {whose} ({reason}): {_ANEW}") from error


class _Index(pickle.Unpickler):
    """Reads `.metadata`, admitting only the classes that PyTorch makes it of."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, function or dtype that the pickle names; UnpicklingError unless it is one of the index's own."""
        known = _INDEX_NAMES.get(module, ())
        if name in known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """Reads a checkpoint's own files, its index with `_Index`."""

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._files = path, files

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> dcp_metadata.Metadata:
        """ValueError for what is no index of these files."""
        with open(self._folder / _INDEX, "rb", opener=no_link) as file:
            found = _Index(file).load()
        if not isinstance(found, dcp_metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError(f"{_INDEX} is no index")
        if any(part.relative_path not in self._files for part in found.storage_data.values()):
            raise ValueError(f"{_INDEX} names other files")
        found.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return found


class _Planner(dcp.DefaultLoadPlanner):
    """Reads plain values with `weights_only`, so that a pickle cannot call functions."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """What the default does with the value, after it was read with `weights_only` and packed anew."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _quiet(warnings.catch_warnings):
    """Hides the warning of torch.distributed.checkpoint that there is no process group: there is one process."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
