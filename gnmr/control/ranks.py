"""The interface to several processes that train one model; `gnmr.attachment.ranks` implements it with torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor


class Ranks(Protocol):
    """The processes, each of which decides from the same sums."""

    @property
    def size(self) -> int: ...

    @property
    def share(self) -> float:
        """The part of the step's loss that each process contributes."""

    @property
    def tells_own(self) -> bool:
        """True if the loop provides each process's own gradients before they are reduced (`Controller.micro_step`)."""

    def is_sharded(self, x: Any) -> bool:
        """Return True if each rank holds a part of `x`."""

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of `x`."""

    def counts(self, x: Any) -> bool:
        """Return True if this rank's part belongs in a sum that counts each part once."""

    def sum(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over ranks in float64, with the same bits on each rank: one collective."""

    def take_largest(self, x: Tensor) -> None:
        """Replace each number by its maximum over ranks: one collective."""

    def agreement(self, settings: Sequence[object], active: np.ndarray, plain: Tensor) -> Tensor:
        """Return a part for `sum` that shows whether ranks differ in settings, in the set in force, or in `plain`.

        `plain` is the square of the gradients that each rank holds completely.
        """

    def check(self, agreement: np.ndarray, step: int) -> None:
        """Raise an error if the sum of `agreement`, on the host, shows that ranks differ."""
