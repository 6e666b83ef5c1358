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
        """Return True if each rank holds a part of `x`, a tensor or a `Slice`.

        Returns: False if `x` is a plain tensor, which every rank holds completely.
        """

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of `x`.

        Returns: a plain tensor; `x` itself if it is not sharded.

        Raises:
            RunFailed: `x` is not reduced over ranks yet.
        """

    def counts(self, x: Any) -> bool:
        """Return True if this rank's part of `x` belongs in a sum that counts each part once.

        Returns: the same in each step, because the sharding of `x` alone decides.
        """

    def sum(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over ranks: one collective.

        Args:
            terms: this rank's terms by name, any shapes and dtypes; every rank has the same names and shapes.

        Returns:
            The sums by name, float64 in the same shapes, with the same bits on each rank.
        """

    def take_largest(self, x: Tensor) -> None:
        """Take the maximum over ranks: one collective.

        Args:
            x: any shape, the same on each rank; overwritten.
        """

    def agreement(self, settings: Sequence[object], active: np.ndarray, plain: Tensor) -> Tensor:
        """Return a part for `sum` that shows whether ranks differ.

        Args:
            settings: anything with a `repr` that must be equal on all ranks.
            active: (U,) bool on the host, the set in force.
            plain: () float64, the square of the gradients that each rank holds completely.

        Returns:
            A few float64 numbers on the device of plain.
        """

    def check(self, agreement: np.ndarray, step: int) -> None:
        """Raise an error if ranks differ.

        Args:
            agreement: the sum of `agreement` over ranks, on the host.
            step: number of the step, for the message.

        Raises:
            RunFailed: ranks have other settings, sets or unreduced gradients.
        """
