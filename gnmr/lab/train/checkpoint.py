"""Checkpoints that are written atomically, verified when they are read, and read without running code.

    checkpoints/step-00000100/              torch.distributed.checkpoint files, meta.json and meta.sha256
    checkpoints/step-00000100.corrupt/      a corrupt checkpoint that was renamed

All files are written and synced under a temporary name first, so a folder with its final name is complete. If a folder
is corrupt nevertheless, the previous checkpoint is used. meta.json holds the sha256 of every other file.

`state_files` writes and reads the state itself. It is imported when it is needed, because its import takes a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnmr.attachment import Router
from gnmr.attachment.ranks.reduce import is_sharded, local
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.conversion import ConvertedModel
from gnmr.errors import RunFailed, UserError, writing
from gnmr.records.disk import sha256, sync_folder

Meta = dict[str, Any]  # meta.json: the host state, the run that owns the checkpoint, and the sha256 of every other file
_META, _META_SUM = "meta.json", "meta.sha256"
_INDEX = ".metadata"  # of torch.distributed.checkpoint
_NAME = r"step-(\d{8})"
_ANEW = "start again in another run_dir"


class HasState(Protocol):
    """An object whose state a checkpoint contains."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values that `torch.save` can store."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. May raise ValueError if the state belongs to another object."""
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
        extras: Mapping[str, HasState] | None = None,
        *,
        world: World = ALONE,
    ) -> None:
        """Keep the newest `keep` checkpoints of the run `owner`; a checkpoint of another owner is refused.

        The processes of `world` save and load together, each its own part. Rank 0 handles the folders.
        """
        self._world = world
        self.folder, self.owner, self.keep = folder, owner, keep
        self._model, self._optimizer, self._controller = model, optimizer, controller
        self._extras = dict(extras or {})
        self._verified: Meta | None = (
            None  # meta.json of the checkpoint that `newest` verified, so that it is read once
        )

    def _state(self) -> dict[str, Any]:
        from gnmr.lab.train.state_files import training_state

        controller = self._controller.state_dict()
        state = training_state(self._model, self._optimizer) | {
            # Names and the step count go to meta.json with the host state.
            "controller": {key: value for key, value in controller.items() if key not in ("units", "t", "converted")},
            "plan": controller["converted"],
            "rng": {"cpu": torch.get_rng_state()},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }
        if next(self._model.parameters()).is_cuda:
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
        return state

    def save(self, step: int, host: dict[str, Any]) -> None:
        """Write the checkpoint of `step` and delete all but the newest `keep`. Waits for the device.

        Args:
            step: the number of steps taken so far.
            host: plain values that the next step depends on, such as the position in the data.

        Raises:
            RunFailed: the checkpoint cannot be written, or a value in it is not finite. The partial checkpoint is then
                removed, and earlier checkpoints stay.
        """
        from gnmr.lab.train.state_files import write_state

        with self._world.agreed():
            # A run cannot continue from Inf or NaN, and this checkpoint would push out a good one.
            if (where := self._nonfinite()) is not None:
                why = f"{where} is not finite after step {step}"
                raise RunFailed(f"{why}: no checkpoint was written; use a smaller optim.lr")
        final = self.folder / f"step-{step:08d}"
        # The name marks the folder as unfinished; only the rename in `_put` makes it a checkpoint.
        beside = self.folder / f".writing-{final.name}"
        meta = {"step": step, "owner": self.owner, "units": self._controller.names, "host": host}
        try:
            self._world.from_first(lambda: self._begin(beside))
            write_state(self._state(), beside)
            self._world.from_first(lambda: self._put(meta, beside, final))
        except OSError as error:
            # A full disk is not always reported as an OSError: the zip writer raises its own errors for short files.
            run = self.folder.parent
            full = run.is_dir() and shutil.disk_usage(run).free < 2**20
            if self._world.first:
                shutil.rmtree(beside, ignore_errors=True)
            reason = "disk full" if full else str(error).partition("\n")[0]
            raise RunFailed(f"{reason} while writing the checkpoint of step {step} in {self.folder}") from error
        # Older checkpoints go last: until now they were all that a killed run would have had.
        self._world.from_first(self._prune)

    def _begin(self, beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # no parents: a run folder that was removed is not created again
        beside.mkdir()

    def _put(self, meta: Meta, beside: Path, final: Path) -> None:
        _write_meta(beside, meta)
        # A folder cannot be renamed onto another one that holds files.
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        # The new name itself is on the disk only once the folder that lists it is synced.
        sync_folder(self.folder)

    def _nonfinite(self) -> str | None:
        """Return the name of the first trained weight or optimizer state that is not finite."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                state: dict[str, Any] = {name: parameter.detach()}
                state |= {f"{key} of {name}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
                for value_name, value in state.items():
                    # Of a sharded tensor, each rank checks its own shard; the caller agrees on the outcome.
                    numbers = isinstance(value, Tensor) and value.is_floating_point()
                    if numbers and not bool(local(value).isfinite().all()):
                        return value_name
        return None

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, and remove partial files of a killed run.

        A newer checkpoint that is corrupt is renamed with a warning. Raises UserError if all checkpoints are corrupt.
        """
        self._verified = self._world.from_first(self._newest)
        return None if self._verified is None else int(self._verified["step"])

    def _newest(self) -> Meta | None:
        """Return meta.json of the newest complete checkpoint. Raises UserError before any change if it is foreign."""
        steps = steps_in(self.folder)
        newest, corrupt = _newest_complete(self.folder, steps) if steps else (None, {})
        if newest is not None:
            # Before anything is deleted or renamed: a foreign folder must stay as it is.
            self._check(newest)
        for unfinished in self.folder.glob(".writing-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if newest is None:
            return None
        for path, error in corrupt.items():
            aside = path.with_name(f"{path.name}.corrupt")
            with writing(path):
                shutil.rmtree(aside, ignore_errors=True)
                shutil.move(path, aside)  # copies where overlayfs cannot rename a folder of a lower layer
            warnings.warn(f"{error}: set aside as {aside.name}, step {newest['step']} is taken", stacklevel=5)
        self._prune()
        return newest

    def _prune(self) -> None:
        for old in steps_in(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def load(self, step: int) -> dict[str, Any]:
        """Restore model, optimizer, controller, random states and extras.

        Args:
            step: the step after which the checkpoint was saved.

        Returns:
            The host state that was passed to `save`.

        Raises:
            UserError: the checkpoint is corrupt or belongs to another run.
        """
        from gnmr.lab.train.state_files import read_state, set_training_state

        path = self.folder / f"step-{step:08d}"
        meta, self._verified = self._verified, None
        if meta is None or meta["step"] != step:
            meta = self._world.from_first(lambda: _newest_complete(self.folder, [step])[0])
        self._check(meta)
        units, host = meta["units"], meta["host"]
        # Loading fills tensors in place, so it needs a state with the right shapes and shards.
        state = self._state()
        with _fitting(path, "run"):
            read_state(path, meta["files"], state)
            set_training_state(self._model, self._optimizer, state)
            self._controller.load_state_dict(
                {**state["controller"], "converted": state["plan"], "units": units, "t": step}
            )
            for name, extra in self._extras.items():
                extra.load_state_dict(state["extras"][name])
            # Last, so that nothing above draws from the restored generators.
            torch.set_rng_state(state["rng"]["cpu"])
            if "cuda" in state["rng"]:
                torch.cuda.set_rng_state(state["rng"]["cuda"])
        return dict(host)

    def _check(self, meta: Meta) -> None:
        """Raise UserError if the checkpoint belongs to another run."""
        owner, path = meta["owner"], self.folder / f"step-{meta['step']:08d}"
        if owner != self.owner or meta["units"] != self._controller.names:
            raise UserError(f"checkpoint {path} belongs to another run ({owner}, this one is {self.owner}): {_ANEW}")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint."""

    path: Path
    meta: Meta

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return int(self.meta["step"])

    @property
    def host(self) -> dict[str, Any]:
        """The host state that was passed to `Checkpointer.save`."""
        return dict(self.meta["host"])

    @property
    def sha256(self) -> str:
        """The sha256 of meta.json, which contains the sha256 of every other file."""
        return hashlib.sha256((self.path / _META).read_bytes()).hexdigest()


def find(folder: Path) -> StoredCheckpoint:
    """Find a checkpoint to read from. The folder is not changed, and a warning names newer corrupt checkpoints.

    Args:
        folder: a folder of checkpoints, or one checkpoint (step-...).

    Returns:
        The newest complete checkpoint.

    Raises:
        UserError: no checkpoint is complete.
    """
    steps = steps_in(folder)
    if re.fullmatch(_NAME, folder.name):
        folder, steps = folder.parent, [int(folder.name.removeprefix("step-"))]
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint")
    meta, corrupt = _newest_complete(folder, steps)
    for error in corrupt.values():
        warnings.warn(f"{error}: step {meta['step']} is taken", stacklevel=3)
    return StoredCheckpoint(folder / f"step-{meta['step']:08d}", meta)


def load_training(checkpoint: StoredCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state. Raises UserError if the model or optimizer differs."""
    from gnmr.lab.train.state_files import read_state, set_training_state, training_state

    state = training_state(model, optimizer)
    with _fitting(checkpoint.path, "model"):
        read_state(checkpoint.path, checkpoint.meta["files"], state)
        set_training_state(model, optimizer, state)


def load_model(folder: Path, model: nn.Module, converted: ConvertedModel | None = None) -> int:
    """Load the weights and the state of `converted` from the checkpoint that `find` returns.

    Args:
        folder: as for `find`.
        model: the model, changed in place.
        converted: what converted the model, if its state is to be restored too.

    Returns:
        The checkpoint's step.

    Raises:
        UserError: no checkpoint is complete, or it belongs to another model.
    """
    from gnmr.lab.train.state_files import read_state, set_weights, trained_weights

    checkpoint = find(folder)
    state: dict[str, Any] = {"model": trained_weights(model)}
    if converted is not None:
        state["plan"] = converted.state_dict()
    with _fitting(checkpoint.path, "model"):
        read_state(checkpoint.path, checkpoint.meta["files"], state)
        if converted is not None:
            converted.load_state_dict(state["plan"])
        set_weights(model, state["model"])
    return checkpoint.step


def gathered(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather the trained weights of a sharded model on the CPU of rank 0; the other ranks get an empty dict.

    All ranks must call this. Returns None if every rank has complete weights.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return None
    from gnmr.lab.train.state_files import gathered_weights

    return gathered_weights(model)


class CorruptCheckpoint(ValueError):
    """Files of a checkpoint differ from the files that were written."""


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in ascending order."""
    names = (re.fullmatch(_NAME, p.name) for p in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def _newest_complete(folder: Path, steps: Sequence[int]) -> tuple[Meta, dict[Path, CorruptCheckpoint]]:
    """Return meta.json of the newest complete checkpoint, and the error of each newer one.

    Raises UserError if none is complete.
    """
    corrupt: dict[Path, CorruptCheckpoint] = {}
    for step in sorted(steps, reverse=True):
        path = folder / f"step-{step:08d}"
        try:
            return _verified(path), corrupt
        except CorruptCheckpoint as error:
            corrupt[path] = error
    more = ", and none before it is whole" if len(corrupt) > 1 else ""
    remedy = f"delete {folder} to train from step 1 again, or {_ANEW}"
    if len(corrupt) < len(steps_in(folder)):
        remedy = f"delete that folder to continue from an earlier checkpoint, or {_ANEW}"
    raise UserError(f"{next(iter(corrupt.values()))}{more}: {remedy}")


def _verified(path: Path) -> Meta:
    """Return meta.json of a checkpoint after checking every file that it names.

    Files that meta.json does not name are never read.

    Raises:
        CorruptCheckpoint: a file is missing or changed.
        UserError: this user may not read a file.
    """
    try:
        text, named = ((path / name).read_bytes() for name in (_META, _META_SUM))
        # meta.json comes first, because its checksums are what the other files are compared with.
        if named != _sum_line(text):
            raise ValueError(f"{_META} is missing or changed")
        meta = json.loads(text)
        kinds = {"step": int, "owner": str, "units": list, "host": dict, "files": dict}
        if any(type(meta[key]) is not kind for key, kind in kinds.items()) or path.name != f"step-{meta['step']:08d}":
            raise ValueError(f"{_META} is of another checkpoint")
        if _INDEX not in meta["files"]:
            raise ValueError(f"{_META} names no {_INDEX}")
        for name in sorted({_META, _META_SUM, *meta["files"]}):
            file, wanted = path / name, meta["files"].get(name)
            # lstat, because a link could lead to a file outside of the checkpoint.
            if not stat.S_ISREG(file.lstat().st_mode) or (wanted and sha256(file) != wanted):
                raise ValueError(f"{name} is missing or changed")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"checkpoint {path} is corrupt ({Path(error.filename).name} is missing)") from error
    except PermissionError as error:
        where = error.filename or path
        raise UserError(f"{where}: cannot be read ({error.strerror}); its owner can make it readable") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"checkpoint {path} is corrupt ({error})") from error
    return {key: meta[key] for key in kinds}


def _write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json of the files in `folder` and its checksum, and sync both to disk."""
    files = sorted(folder.iterdir())
    text = json.dumps(meta | {"files": {p.name: sha256(p) for p in files}}, indent=1).encode()
    for name, data in ((_META, text), (_META_SUM, _sum_line(text))):
        with (folder / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def _sum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {_META}\n".encode()


@contextmanager
def _fitting(path: Path, whose: str) -> Iterator[None]:
    """Raise UserError if the block cannot load the checkpoint's state."""
    kinds = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
    try:
        yield
    except kinds as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"checkpoint {path} does not fit this {whose} ({reason}): {_ANEW}") from error
