"""A tensor that operators read: where it lies, who else may write there, and what its readers share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gnmr.formats.number_formats import Format
from gnmr.formats.scaling import compress

Place: TypeAlias = tuple[StorageWeakRef, int]
"""A storage, held by a weak reference, and an offset in it; equal for views that begin at the same element.

While a place refers to a storage that is gone, the storage's address is not reused.
"""

SHARDED = (
    "is a DTensor, of which a path would take scales and gradients shard by shard: leave what tensor parallelism "
    "shards out of the targets"
)


def place_of(x: Tensor) -> Place:
    """Return the place where `x` begins."""
    return StorageWeakRef(x.untyped_storage()), int(x.storage_offset())


def seen_by_numpy(x: Tensor) -> bool:
    """Return whether NumPy shares the memory of `x`, so that it can change without a new version number.

    PyTorch does not resize memory that an array views, whichever of the two was made of the other.
    """
    return not x.untyped_storage().resizable()


def is_sharded(*tensors: Tensor | None) -> bool:
    """Return whether one of them is a DTensor.

    Args:
        tensors: tensors of any class; None counts as a plain one.
    """
    return any(hasattr(x, "device_mesh") for x in tensors)


class Read:
    """Copies, casts and measurements of one tensor, which are dropped with it.

    `reader` and `index` are the name and the index of the operator that read it first, on any path.
    """

    def __init__(self, x: Tensor, reader: str, index: int) -> None:
        this = weakref.ref(self)

        def let_go(_: object) -> None:
            if (read := this()) is not None:
                for results in (read.copies, read.casts, read.measured):
                    results.clear()

        # Copies go with the tensor, at the latest.
        self._tensor = weakref.ref(x, let_go)
        # Private: torch counts changes in place only here. A public counter would replace it.
        self._version = -1 if x.is_inference() else x._version
        self.reader, self.index = reader, index
        self._readers = {reader}
        self.copies: dict[str, tuple[Tensor, ...]] = {}
        self.casts: dict[Any, Any] = {}
        self.measured: dict[Any, Any] = {}

    def joins(self, x: Tensor, reader: str) -> bool:
        """Let an operator join the readers of the tensor, if it reads the same numbers.

        Args:
            x: the tensor that it reads.
            reader: the operator's name.

        Returns:
            Whether `x` is this tensor, unchanged, and new to the reader.
        """
        # A reader that comes again begins another pass, in which the tensor may have changed unseen.
        if self._tensor() is not x or self._version != x._version or reader in self._readers:
            return False
        self._readers.add(reader)
        return True

    def copy_of(
        self, x: Tensor, fmt: Format, generator: Callable[[], torch.Generator] | None = None
    ) -> tuple[Tensor, ...]:
        """Compress the tensor once for all its readers.

        Args:
            x: this tensor, (..., D).
            fmt: the format of the copy.
            generator: returns the source of stochastic rounding, and is called only if the copy is made now; None:
                round to nearest.

        Returns:
            Codes and scales, as `scaling.compress` returns them.
        """
        if fmt.name not in self.copies:
            drawn = None if generator is None else generator()
            self.copies[fmt.name] = compress(x.detach().reshape(-1, x.shape[-1]), fmt, drawn)
        return self.copies[fmt.name]
