"""Checkpoints: written beside and renamed, verified when read.

    checkpoints/step-00000100/     torch.distributed.checkpoint files and meta.json

A folder with its final name is whole: everything is written and synced under another name first. `meta.json` holds the
host's numbers (step, data position, counters), whose run it is, and the sha256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from gnmr.controller import Controller
from gnmr.errors import RunFailed, UserError
from gnmr.paths import Plan

_META = "meta.json"


class Stateful(Protocol):
    """What a checkpoint holds a part of."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that `torch.save` keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; ValueError, if anything is checked, where it belongs to something else."""
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
        controller: Controller,
        plan: Plan,
        extras: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.folder, self.owner, self.keep = folder, owner, keep
        self._model, self._optimizer, self._controller, self._plan = model, optimizer, controller, plan
        self._extras = dict(extras or {})
        self._options = _trained(model)

    def _state(self) -> dict[str, Any]:
        controller = self._controller.state_dict()
        state: dict[str, Any] = {
            "model": get_model_state_dict(self._model, options=self._options),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
            # Names and the step count are the host's; they go to meta.json.
            "controller": {k: v for k, v in controller.items() if k not in ("units", "t")},
            "plan": self._plan.state_dict(),
            "rng": {"cpu": torch.get_rng_state()},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }
        if next(self._model.parameters()).is_cuda:
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
        return state

    def save(self, step: int, host: dict[str, Any]) -> None:
        """Writes the checkpoint of `step` and deletes all but the newest `keep`. Waits for the device.

        RunFailed if it cannot be written; what was written of it is removed, the earlier ones stay.
        """
        final = self.folder / f"step-{step:08d}"
        beside = self.folder / f".writing-{final.name}"
        try:
            self._write(step, host, beside)
            shutil.rmtree(final, ignore_errors=True)
            beside.rename(final)
            _sync_folder(self.folder)
        except (OSError, CheckpointException) as error:
            # A full disk does not always reach us as its own error: the zip writer stumbles over its short files.
            full = shutil.disk_usage(self.folder.parent).free < 2**20
            shutil.rmtree(beside, ignore_errors=True)
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            reason = "disk full" if full else str(cause).partition("\n")[0]
            raise RunFailed(f"{reason} while writing the checkpoint of step {step} in {self.folder}") from error
        self._prune()

    def _write(self, step: int, host: dict[str, Any], beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        with _quiet():
            dcp.save(self._state(), checkpoint_id=beside)
        meta = {
            "step": step,
            "owner": self.owner,
            "units": self._controller.names,
            "host": host,
            "files": {p.name: _sha256(p) for p in sorted(beside.iterdir())},
        }
        with (beside / _META).open("w") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(beside)

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        return _steps(self.folder)

    def newest(self) -> int | None:
        """Step of the newest checkpoint; what a killed run left half-written is removed."""
        for rest in self.folder.glob(".writing-*"):
            shutil.rmtree(rest, ignore_errors=True)
        self._prune()
        steps = self.steps()
        return steps[-1] if steps else None

    def _prune(self) -> None:
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old:08d}", ignore_errors=True)

    def load(self, step: int) -> dict[str, Any]:
        """Restores everything and returns the host's numbers. UserError for a corrupt or foreign checkpoint.

        PyTorch reads parts of a checkpoint with pickle: load only your own.
        """
        path = self.folder / f"step-{step:08d}"
        remedy = "delete that folder to continue from an earlier checkpoint, or start again in another run_dir"
        meta = _meta(path, remedy)
        owner, units, host = meta["owner"], meta["units"], meta["host"]
        if owner != self.owner or units != self._controller.names:
            raise UserError(f"checkpoint {path} belongs to another run ({owner}, this one is {self.owner}): {remedy}")
        _verify(path, meta, remedy)
        state = self._state()
        try:
            with _quiet():
                dcp.load(state, checkpoint_id=path)
        except (CheckpointException, OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"checkpoint {path} does not fit this run ({reason}): {remedy}") from error
        set_model_state_dict(self._model, state["model"], options=self._options)
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
        self._controller.load_state_dict({**state["controller"], "units": units, "t": step})
        self._plan.load_state_dict(state["plan"])
        for name, extra in self._extras.items():
            extra.load_state_dict(state["extras"][name])
        torch.set_rng_state(state["rng"]["cpu"])
        if "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        return host


def load_model(folder: Path, model: nn.Module, plan: Plan | None = None) -> int:
    """Reads the weights of the newest whole checkpoint in `folder`, and the state of `plan`, and returns its step.

    The folder stays as it is. UserError where there is no checkpoint, for a corrupt one, and for one of other weights
    or paths. As with `Checkpointer.load`: load only your own.
    """
    steps = _steps(folder)
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint")
    path, remedy = folder / f"step-{steps[-1]:08d}", "delete that folder to use an earlier checkpoint"
    _verify(path, _meta(path, remedy), remedy)
    options = _trained(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if plan is not None:
        state["plan"] = plan.state_dict()
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path)
        if plan is not None:
            plan.load_state_dict(state["plan"])
    except (CheckpointException, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"checkpoint {path} does not fit this model ({reason}): {remedy}") from error
    set_model_state_dict(model, state["model"], options=options)
    return steps[-1]


def _trained(model: nn.Module) -> StateDictOptions:
    """Frozen weights are no part of a checkpoint: they are those of the checkpoint that the run began from."""
    return StateDictOptions(
        ignore_frozen_params=True, strict=all(parameter.requires_grad for parameter in model.parameters())
    )


def _steps(folder: Path) -> list[int]:
    names = (re.fullmatch(r"step-(\d{8})", p.name) for p in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def _meta(path: Path, remedy: str) -> dict[str, Any]:
    """meta.json of a checkpoint, with all its keys."""
    try:
        meta = json.loads((path / _META).read_text())
        return {"owner": meta["owner"], "units": meta["units"], "host": meta["host"], "files": dict(meta["files"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"checkpoint {path} is corrupt ({_META}: {error}): {remedy}") from error


def _verify(path: Path, meta: dict[str, Any], remedy: str) -> None:
    for name, digest in meta["files"].items():
        if not (path / name).exists() or _sha256(path / name) != digest:
            raise UserError(f"checkpoint {path} is corrupt ({name} is missing or changed): {remedy}")


class _quiet(warnings.catch_warnings):
    """Without a process group torch.distributed.checkpoint warns that it takes this for a single process: it is."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
