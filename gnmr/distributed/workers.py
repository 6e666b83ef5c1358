"""Whose gradients a mean is over: the processes of a run, or virtual workers, all played by one process.

A tensor of (K, ...) holds a row for each of the K workers that this process has: 1 of a rank, all of virtual ones.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gnmr.distributed import world
from gnmr.distributed.reduce import reaching
from gnmr.errors import whole


class Workers(Protocol):
    """Data parallel workers, some of them here."""

    @property
    def size(self) -> int:
        """How many there are in all."""
        ...

    @property
    def here(self) -> slice:
        """Which of them this process has."""
        ...

    def mean(self, x_KN: Tensor) -> Tensor:
        """(K, N) -> (N,), the mean over all workers, the same bits in every process: one collective."""
        ...


class VirtualWorkers:
    """Workers that one process plays: all their gradients are here."""

    def __init__(self, number: int) -> None:
        whole(2, workers=number)
        self.size = number
        self.here = slice(0, number)

    def mean(self, x_KN: Tensor) -> Tensor:
        """No collective."""
        return x_KN.mean(0)


class RankWorkers:
    """The processes of torch.distributed's default group, one worker each. ValueError where there is one alone."""

    def __init__(self) -> None:
        self.size = world.size()
        self.here = slice(world.rank(), world.rank() + 1)
        if self.size < 2:
            raise ValueError("compressed gradients need data parallelism, here is one process: start several of them")

    def mean(self, x_KN: Tensor) -> Tensor:
        """One all-reduce, which does not wait for the device. RunFailed where another process is gone."""
        total = x_KN[0].clone()
        with reaching():
            torch.distributed.all_reduce(total)
        return total.div_(self.size)
