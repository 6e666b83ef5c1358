"""Checkpoints: written beside and renamed, verified when read.

    checkpoints/step-00000100/              torch.distributed.checkpoint files, meta.json and meta.sha256
    checkpoints/step-00000100.corrupt/      one that was set aside

Everything is written and synced under another name first, so a folder with its final name is complete. Any other folder
is corrupt, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
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
from gnmr.lab.train.checkpoint_files import (
    ANEW,
    META,
    NAME,
    Meta,
    cause_of,
    fitting,
    newest_whole,
    quiet,
    read,
    steps_in,
    write_meta,
)
from gnmr.precision import ConvertedModel
from gnmr.records.disk import sync_folder


class Stateful(Protocol):
    """Has state that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values that `torch.save` keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`. May raise ValueError if it belongs to something else."""
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
        """`world`: the processes that save and load together, each its own part; rank 0 handles the folders."""
        self._world = world
        self.folder, self.owner, self.keep = folder, owner, keep
        self._model, self._optimizer, self._controller = model, optimizer, controller
        self._extras = dict(extras or {})
        self._whole: Meta | None = None  # the one that `newest` found

    def _state(self) -> dict[str, Any]:
        controller = self._controller.state_dict()
        state = _training_state(self._model, self._optimizer) | {
            # Names and the step count go to meta.json, with the host's numbers.
            "controller": {k: v for k, v in controller.items() if k not in ("units", "t", "converted")},
            "plan": controller["converted"],
            "rng": {"cpu": torch.get_rng_state()},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }
        if next(self._model.parameters()).is_cuda:
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
        return state

    def save(self, step: int, host: dict[str, Any]) -> None:
        """Write the checkpoint of `step` and delete all but the newest `keep`. Waits for the device.

        Raises RunFailed if it cannot be written or if a number in it is not finite; what was written of it is removed,
        and the earlier ones stay.
        """
        with self._world.agreed():
            if (where := self._nonfinite()) is not None:
                why = f"{where} is not finite after step {step}"
                raise RunFailed(f"{why}: no checkpoint was written; use a smaller optim.lr")
        final = self.folder / f"step-{step:08d}"
        beside = self.folder / f".writing-{final.name}"
        meta = {"step": step, "owner": self.owner, "units": self._controller.names, "host": host}
        try:
            self._world.from_first(lambda: self._begin(beside))
            with quiet():
                dcp.save(self._state(), checkpoint_id=beside)
            self._world.from_first(lambda: self._put(meta, beside, final))
        except (OSError, CheckpointException) as error:
            # A full disk is not always reported as such: the zip writer raises its own errors for short files.
            run = self.folder.parent
            full = run.is_dir() and shutil.disk_usage(run).free < 2**20
            if self._world.first:
                shutil.rmtree(beside, ignore_errors=True)
            reason = "disk full" if full else str(cause_of(error)).partition("\n")[0]
            raise RunFailed(f"{reason} while writing the checkpoint of step {step} in {self.folder}") from error
        self._world.from_first(self._prune)

    def _begin(self, beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # not its parent: a run folder that was removed stays so
        beside.mkdir()

    def _put(self, meta: Meta, beside: Path, final: Path) -> None:
        write_meta(beside, meta)
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        sync_folder(self.folder)

    def _nonfinite(self) -> str | None:
        """Return the first trained weight or optimizer state with a number that is not finite."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                held: dict[str, Any] = {name: parameter.detach()}
                held |= {f"{key} of {name}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
                for what, value in held.items():
                    numbers = isinstance(value, Tensor) and value.is_floating_point()
                    if numbers and not bool(local(value).isfinite().all()):
                        return what
        return None

    def newest(self) -> int | None:
        """Return the step of the newest whole checkpoint, and remove what a killed run left half-written.

        A newer one that is corrupt is renamed, with a warning. Raises UserError if every one is corrupt.
        """
        self._whole = self._world.from_first(self._newest)
        return None if self._whole is None else int(self._whole["step"])

    def _newest(self) -> Meta | None:
        """Return its meta.json. Raises UserError, before anything is changed, if it belongs to another run."""
        steps = steps_in(self.folder)
        whole, corrupt = newest_whole(self.folder, steps) if steps else (None, {})
        if whole is not None:
            self._check(whole)
        for rest in self.folder.glob(".writing-*"):
            shutil.rmtree(rest, ignore_errors=True)
        if whole is None:
            return None
        for path, error in corrupt.items():
            aside = path.with_name(f"{path.name}.corrupt")
            with writing(path):
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            warnings.warn(f"{error}: set aside as {aside.name}, step {whole['step']} is taken", stacklevel=5)
        self._prune()
        return whole

    def _prune(self) -> None:
        for old in steps_in(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def load(self, step: int) -> dict[str, Any]:
        """Restore everything and return the host's numbers. Raises UserError for a corrupt or foreign checkpoint."""
        path = self.folder / f"step-{step:08d}"
        meta, self._whole = self._whole, None
        if meta is None or meta["step"] != step:
            meta = self._world.from_first(lambda: newest_whole(self.folder, [step])[0])
        self._check(meta)
        units, host = meta["units"], meta["host"]
        state = self._state()
        with fitting(path, "run"):
            read(path, meta, state)
            _set_training_state(self._model, self._optimizer, state)
            self._controller.load_state_dict(
                {**state["controller"], "converted": state["plan"], "units": units, "t": step}
            )
            for name, extra in self._extras.items():
                extra.load_state_dict(state["extras"][name])
            torch.set_rng_state(state["rng"]["cpu"])
            if "cuda" in state["rng"]:
                torch.cuda.set_rng_state(state["rng"]["cuda"])
        return dict(host)

    def _check(self, meta: Meta) -> None:
        """Raises UserError for the checkpoint of another run."""
        owner, path = meta["owner"], self.folder / f"step-{meta['step']:08d}"
        if owner != self.owner or meta["units"] != self._controller.names:
            raise UserError(f"checkpoint {path} belongs to another run ({owner}, this one is {self.owner}): {ANEW}")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    path: Path
    meta: Meta

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
        """The digest of meta.json, which names the sha256 of every other file."""
        return hashlib.sha256((self.path / META).read_bytes()).hexdigest()


def find(folder: Path) -> Found:
    """Return the newest whole checkpoint in `folder`, or `folder` itself if it is one (step-...).

    The folder is not changed. A warning names newer ones that are corrupt. Raises UserError if no checkpoint is whole.
    """
    steps = steps_in(folder)
    if re.fullmatch(NAME, folder.name):
        folder, steps = folder.parent, [int(folder.name.removeprefix("step-"))]
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint")
    meta, corrupt = newest_whole(folder, steps)
    for error in corrupt.values():
        warnings.warn(f"{error}: step {meta['step']} is taken", stacklevel=3)
    return Found(folder / f"step-{meta['step']:08d}", meta)


def load_training(found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state. Raises UserError for a checkpoint of another model or optimizer."""
    state = _training_state(model, optimizer)
    with fitting(found.path, "model"):
        read(found.path, found.meta, state)
        _set_training_state(model, optimizer, state)


def load_model(folder: Path, model: nn.Module, converted: ConvertedModel | None = None) -> int:
    """Load the weights of the checkpoint that `find` returns, and the state of `converted`; return its step.

    Raises UserError if no checkpoint is whole or if it belongs to another model.
    """
    found, options = find(folder), _trained(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if converted is not None:
        state["plan"] = converted.state_dict()
    with fitting(found.path, "model"):
        read(found.path, found.meta, state)
        if converted is not None:
            converted.load_state_dict(state["plan"])
        set_model_state_dict(model, state["model"], options=options)
    return found.step


def gathered(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the trained weights of a sharded model, whole and on the CPU, in rank 0, and none in the others.

    All ranks call it. Returns None if every rank has whole weights.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return None
    options = replace(_trained(model), full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=_trained(model)),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def _set_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_model_state_dict(model, state["model"], options=_trained(model))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _trained(model: nn.Module) -> StateDictOptions:
    """Frozen weights are no part of a checkpoint: they are those of the checkpoint that the run began from."""
    return StateDictOptions(
        ignore_frozen_params=True, strict=all(parameter.requires_grad for parameter in model.parameters())
    )
