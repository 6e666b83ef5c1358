"""Write and read the state in a checkpoint with torch.distributed.checkpoint, which takes a second to import.

PyTorch stores its index and plain values as pickles. Restricted unpicklers read them: they admit a few classes and no
functions, so a checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

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

from gnmr.records.disk import no_link

_INDEX = ".metadata"
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


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write `state` to an empty folder. All ranks must call this. Raises OSError if it cannot be written."""
    with _plain_errors():
        dcp.save(state, checkpoint_id=folder)


def read_state(folder: Path, checksums: Mapping[str, str], state: dict[str, Any]) -> None:
    """Fill `state` in place from a folder that `write_state` wrote. All ranks must call this.

    Args:
        folder: the checkpoint.
        checksums: sha256 of its verified files by name; no other files are read.
        state: what to read, with tensors of the right shapes and shards.

    Raises:
        OSError, ValueError: the folder holds another state.
    """
    with _plain_errors():
        dcp.load(state, storage_reader=_Reader(folder, checksums), planner=_Planner())


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the trained weights of the model and the state of the optimizer."""
    return {"model": trained_weights(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def set_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give model and optimizer what `training_state` returned."""
    set_weights(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def trained_weights(model: nn.Module) -> dict[str, Any]:
    """Return the state dict without frozen weights."""
    return get_model_state_dict(model, options=_trained(model))


def set_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Give the model what `trained_weights` returned."""
    set_model_state_dict(model, weights, options=_trained(model))


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """Gather the trained weights of a sharded model on the CPU of rank 0; the other ranks get an empty dict."""
    # On the CPU, because a GPU that holds one shard need not have room for all of them.
    options = replace(_trained(model), full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def _trained(model: nn.Module) -> StateDictOptions:
    """Exclude frozen weights, which the checkpoint that the run started from contains."""
    return StateDictOptions(
        ignore_frozen_params=True, strict=all(parameter.requires_grad for parameter in model.parameters())
    )


class _Index(pickle.Unpickler):
    """Unpickles `.metadata` and admits only the classes that PyTorch stores in it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, function or dtype that the pickle names. Raises UnpicklingError if it is not admitted."""
        admitted = _INDEX_NAMES.get(module, ())
        # Only listed names: a pickle may name any function of any module, and unpickling calls it.
        if name in admitted or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
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
            metadata = _Index(file).load()
        if not isinstance(metadata, dcp_metadata.Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(f"{_INDEX} is not an index")
        # Other files have no checksum, and a path could lead out of the folder.
        if any(piece.relative_path not in self._files for piece in metadata.storage_data.values()):
            raise ValueError(f"{_INDEX} names other files")
        # The method that this one replaces sets the id of the load too.
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Reads plain values with `weights_only`, so that a pickle cannot call functions."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Read the value with `weights_only`, serialize it again, and load that as the default planner does."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's error as an OSError, and hide the warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:  # it lists the errors of all ranks
            raise OSError(str(next(iter(error.failures.values()))[0])) from error
