"""Where a tensor lies: which tensors are one piece of memory, who else may write there, and what lies on many ranks."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Place: TypeAlias = tuple[StorageWeakRef, int]
"""A storage, which it does not keep alive, and an offset in it. Equal for views that begin together; the address of a
storage that is gone is not given to another one while a place knows it."""

SHARDED = (
    "is a DTensor, of which a path would take scales and gradients shard by shard: leave what tensor parallelism "
    "shards out of the targets"
)


def place_of(x: Tensor) -> Place:
    """Where `x` begins."""
    return StorageWeakRef(x.untyped_storage()), int(x.storage_offset())


def seen_by_numpy(x: Tensor) -> bool:
    """Whether NumPy has the memory of `x` too, so that it can change without a new version number.

    PyTorch does not resize what an array looks at, whichever of the two was made of the other.
    """
    return not x.untyped_storage().resizable()


def is_sharded(*tensors: Tensor | None) -> bool:
    """Whether one of them is a DTensor."""
    return any(hasattr(x, "device_mesh") for x in tensors)
