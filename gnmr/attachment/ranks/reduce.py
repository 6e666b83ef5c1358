"""Share one sum over ranks per step, in float64, between the processes of a run.

Every rank decides for itself from the same bits. All ranks get the same result of one all-reduce, although two ranks
may round differently. The sum also carries two guards. All W ranks have equal numbers if the sum s and the sum of
squares s2 satisfy s^2 = W s2:

    digest   20 bits of step, units, settings and the set in force: equal, or ranks have diverged
    plain    sum of squares of the gradients that every rank has whole: unequal if they were not reduced yet
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from gnmr.attachment.ranks import shards, world
from gnmr.control.device import to_device
from gnmr.errors import RunFailed

_EQUAL = 1e-6
"""Relative variance below which gradients of two ranks count as equal, because other processors round differently."""


def lost(error: BaseException) -> bool:
    """Return True if a collective, ours or the wrapped model's, did not reach another process."""
    if not isinstance(error, RuntimeError) or isinstance(error, RunFailed) or world.size() == 1:
        return False
    kinds = tuple(getattr(torch.distributed, name) for name in ("DistBackendError", "DistNetworkError"))
    return isinstance(error, kinds) or any(word in str(error) for word in ("gloo", "onnection", "NCCL"))


@contextmanager
def reaching() -> Iterator[None]:
    """Raise RunFailed, in one line, if another process is gone."""
    try:
        yield
    except RuntimeError as error:
        if not lost(error):
            raise
        line = str(error).strip().partition("\n")[0]
        raise RunFailed(f"another process ended, or cannot be reached ({line})") from error


class Ranks:
    """The processes of torch.distributed's default group, as a controller sees them (`gnmr.control.ranks`)."""

    def __init__(self, share: float | None = None, tells_own: bool = False) -> None:
        """Set the part of the step's loss that one rank's loss is, from which its backward pass starts.

        With share=None it is 1 / size, for losses that DDP and FSDP average. For `tells_own`, see `gnmr.control.ranks`.
        """
        self._share, self.tells_own = share, tells_own

    @property
    def size(self) -> int:
        """Return the current number of ranks."""
        return world.size()

    @property
    def share(self) -> float:
        """Return the part of the step's loss that each rank's loss is."""
        return 1 / self.size if self._share is None else self._share

    is_sharded, local, counts = staticmethod(shards.is_sharded), staticmethod(shards.local), staticmethod(shards.counts)

    @torch.no_grad()
    def sum(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over ranks by one collective, float64 in the given shapes, without waiting for the device.

        Raises RunFailed if another process is gone.
        """
        packed = torch.cat([part.reshape(-1).to(torch.float64) for part in parts.values()])
        if self.size > 1:
            with reaching():
                torch.distributed.all_reduce(packed)
        sizes = [part.numel() for part in parts.values()]
        sums = packed.split(sizes)
        return {name: sums[i].reshape(part.shape) for i, (name, part) in enumerate(parts.items())}

    def take_largest(self, x: Tensor) -> None:
        """Replace each number by the largest over ranks, by one collective. Raises RunFailed as `sum` does."""
        if self.size > 1:
            largest = x.contiguous()
            with reaching():
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            x.copy_(largest)

    def agreement(self, settings: Sequence[object], active: np.ndarray, plain: Tensor) -> Tensor:
        """Return both guards, (4,) float64, a part for `sum`; `settings` must be equal besides the set in force."""
        digest = zlib.crc32(repr(settings).encode() + np.packbits(active).tobytes()) & 0xFFFFF
        own = to_device(torch.tensor([digest, digest**2], dtype=torch.float64), plain.device)
        return torch.cat([own, torch.stack([plain, plain.square()])])

    def check(self, agreement: np.ndarray, step: int) -> None:
        """Raise RunFailed if the summed `agreement` shows that ranks differ."""
        digest, digests, plain, squares = agreement.tolist()
        if int(digest) ** 2 != self.size * int(digests):  # whole numbers up to 2^53: exact for 8,192 ranks
            raise RunFailed(
                f"ranks disagree in step {step}: they have other units, settings or recovered sets; start all "
                "of them from the same words, seed and checkpoint"
            )
        if np.isfinite(squares) and self.size * squares - plain**2 > _EQUAL * plain**2:
            raise RunFailed(
                f"gradients differ between ranks in step {step}: call step() after the backward pass that reduces them "
                "(DDP's outside of no_sync), in every rank"
            )
