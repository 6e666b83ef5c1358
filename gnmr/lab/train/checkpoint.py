"""Checkpoints that are written atomically and verified when they are read.

    checkpoints/step-00000100/              torch.distributed.checkpoint files, meta.json and meta.sha256
    checkpoints/step-00000100.corrupt/      a corrupt checkpoint that was renamed

All files are written and synced under a temporary name first, so a folder with its final name is complete. If a folder
is corrupt nevertheless, the previous checkpoint is used.
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
from gnmr.attachment.ranks.shards import is_sharded, local
from gnmr.attachment.ranks.world import ALONE, World
from gnmr.conversion import ConvertedModel
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
from gnmr.records.disk import move_folder, sync_folder


class Stateful(Protocol):
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
        extras: Mapping[str, Stateful] | None = None,
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
        self._whole: Meta | None = None  # meta.json of the checkpoint that `newest` found

    def _state(self) -> dict[str, Any]:
        controller = self._controller.state_dict()
        state = _training_state(self._model, self._optimizer) | {
            # Names and the step count go to meta.json with the host state.
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

        Raises RunFailed if the checkpoint cannot be written or a value in it is not finite. The partial checkpoint is
        then removed, and earlier checkpoints stay.
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
            # A full disk is not always reported as an OSError: the zip writer raises its own errors for short files.
            run = self.folder.parent
            full = run.is_dir() and shutil.disk_usage(run).free < 2**20
            if self._world.first:
                shutil.rmtree(beside, ignore_errors=True)
            reason = "disk full" if full else str(cause_of(error)).partition("\n")[0]
            raise RunFailed(f"{reason} while writing the checkpoint of step {step} in {self.folder}") from error
        self._world.from_first(self._prune)

    def _begin(self, beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # no parents: a run folder that was removed is not created again
        beside.mkdir()

    def _put(self, meta: Meta, beside: Path, final: Path) -> None:
        write_meta(beside, meta)
        shutil.rmtree(final, ignore_errors=True)
        beside.rename(final)
        sync_folder(self.folder)

    def _nonfinite(self) -> str | None:
        """Return the name of the first trained weight or optimizer state that is not finite."""
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
        """Return the step of the newest complete checkpoint, and remove partial files of a killed run.

        A newer checkpoint that is corrupt is renamed with a warning. Raises UserError if all checkpoints are corrupt.
        """
        self._whole = self._world.from_first(self._newest)
        return None if self._whole is None else int(self._whole["step"])

    def _newest(self) -> Meta | None:
        """Return meta.json of the newest complete checkpoint. Raises UserError before any change if it is foreign."""
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
                move_folder(path, aside)
            warnings.warn(f"{error}: set aside as {aside.name}, step {whole['step']} is taken", stacklevel=5)
        self._prune()
        return whole

    def _prune(self) -> None:
        for old in steps_in(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def load(self, step: int) -> dict[str, Any]:
        """Restore everything and return the host state. Raises UserError for a corrupt or foreign checkpoint."""
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
        """Raise UserError if the checkpoint belongs to another run."""
        owner, path = meta["owner"], self.folder / f"step-{meta['step']:08d}"
        if owner != self.owner or meta["units"] != self._controller.names:
            raise UserError(f"checkpoint {path} belongs to another run ({owner}, this one is {self.owner}): {ANEW}")


@dataclass(frozen=True)
class Found:
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
        return hashlib.sha256((self.path / META).read_bytes()).hexdigest()


def find(folder: Path) -> Found:
    """Return the newest complete checkpoint in `folder`, or `folder` if it is a checkpoint (step-...).

    The folder is not changed. A warning names newer checkpoints that are corrupt. Raises UserError if no checkpoint is
    complete.
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
    """Load weights and optimizer state. Raises UserError if the model or optimizer differs."""
    state = _training_state(model, optimizer)
    with fitting(found.path, "model"):
        read(found.path, found.meta, state)
        _set_training_state(model, optimizer, state)


def load_model(folder: Path, model: nn.Module, converted: ConvertedModel | None = None) -> int:
    """Load the weights and the state of `converted` from the checkpoint that `find` returns, and return its step.

    Raises UserError if no checkpoint is complete or if it belongs to another model.
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
    """Gather the trained weights of a sharded model on the CPU of rank 0; the other ranks get an empty dict.

    All ranks must call this. Returns None if every rank has complete weights.
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
    """Exclude frozen weights, which the checkpoint that the run started from contains."""
    return StateDictOptions(
        ignore_frozen_params=True, strict=all(parameter.requires_grad for parameter in model.parameters())
    )
