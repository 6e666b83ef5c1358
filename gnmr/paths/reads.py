"""A tensor that several operators read, with the copies and casts that they share."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gnmr.paths.formats import Format
from gnmr.paths.scaling import compress


class Read:
    """Copies, casts and measurements of one tensor. They are dropped with the tensor."""

    def __init__(self, x: Tensor, reader: str) -> None:
        own = weakref.ref(self)

        def let_go(_: object) -> None:
            if (read := own()) is not None:
                for known in (read.copies, read.casts, read.measured):
                    known.clear()

        self._tensor = weakref.ref(x, let_go)
        self._version = -1 if x.is_inference() else x._version
        self.reader = reader
        self._readers = {reader}
        self.copies: dict[str, tuple[Tensor, ...]] = {}
        self.casts: dict[Any, Any] = {}
        self.measured: dict[Any, Any] = {}

    def joins(self, x: Tensor, reader: str) -> bool:
        """Whether `x` is this tensor and new to `reader`, which is one of its readers then."""
        if self._tensor() is not x or self._version != x._version or reader in self._readers:
            return False
        self._readers.add(reader)
        return True

    def copy_of(self, x: Tensor, fmt: Format, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """`x`, which is this tensor, compressed in `fmt`: once for all its readers."""
        if fmt.name not in self.copies:
            self.copies[fmt.name] = compress(x.detach().reshape(-1, x.shape[-1]), fmt, generator)
        return self.copies[fmt.name]
