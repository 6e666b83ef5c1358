"""What a controller asks of several processes that train one model; `gnmr.distributed` has it for torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor


class Ranks(Protocol):
    """The processes, of which each decides for itself from the same sums."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def share(self) -> float:
        """What part of the step's loss each one's own is."""
        ...

    @property
    def tells_own(self) -> bool:
        """Whether the loop tells each process's own gradients before they are reduced (`Controller.micro_step`)."""
        ...

    def is_sharded(self, x: Tensor) -> bool:
        """Whether ranks hold parts of it."""
        ...

    def local(self, x: Tensor) -> Tensor:
        """This rank's part of it."""
        ...

    def counts(self, x: Tensor) -> bool:
        """Whether this rank's part is to be in a sum that holds each part once."""
        ...

    def sum(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over ranks in float64, the same bits on each: one collective."""
        ...

    def take_largest(self, x: Tensor) -> None:
        """Puts the largest over ranks of each number in its place: one collective."""
        ...

    def agreement(self, settings: Sequence[object], active: np.ndarray, plain: Tensor) -> Tensor:
        """A part for `sum` that tells whether ranks differ in settings, set in force, or `plain`, the square of the
        gradients that each has whole."""
        ...

    def check(self, agreement: np.ndarray, step: int) -> None:
        """Raises where its sum, on the host, says that they do."""
        ...
