"""The workers over which gradients are averaged: the ranks of a run, or virtual workers that one process plays.

Shapes: K is the number of workers that this process has (1 for a rank, all of the virtual ones).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from gnmr.distributed import world
from gnmr.distributed.reduce import reaching
from gnmr.errors import whole


class VirtualWorkers:
    """Workers that one process plays; it holds all their gradients. `here`: the workers of this process."""

    def __init__(self, number: int) -> None:
        whole(2, workers=number)
        self.size = number
        self.here = slice(0, number)

    def mean(self, x_KN: Tensor) -> Tensor:
        """Return the mean over all workers, (K, N) -> (N,), without a collective."""
        return x_KN.mean(0)


class RankWorkers:
    """The ranks of the default process group, one worker each. Raises ValueError if there is only one."""

    def __init__(self) -> None:
        self.size = world.size()
        self.here = slice(world.rank(), world.rank() + 1)
        if self.size < 2:
            raise ValueError("compressed gradients need data parallelism, here is one process: start several of them")

    def mean(self, x_KN: Tensor) -> Tensor:
        """Return the mean by one all-reduce, without waiting for the device. Raises RunFailed if a rank is gone."""
        total = x_KN[0].clone()
        with reaching():
            torch.distributed.all_reduce(total)
        return total.div_(self.size)


Workers: TypeAlias = VirtualWorkers | RankWorkers
