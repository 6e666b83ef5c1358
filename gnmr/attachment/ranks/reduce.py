"""Sums over the processes of a run: the part of a parameter that a rank holds, and one sum of a step.

| wrapped by | a gradient is | counted in a sum |
|---|---|---|
| DDP | the same on every rank | by rank 0 |
| FSDP2 | in parts, one per rank | by each rank, its part |
| HSDP | in parts, each on several ranks | by the first of these ranks |

Every rank decides for itself from the same bits: all ranks get the same result of one all-reduce in float64 per step,
although two ranks may round differently. The sum also carries two guards. All W ranks have equal numbers if the sum s
and the sum of squares s2 satisfy s^2 = W s2:

    digest   20 bits of step, units, settings and the set in force: equal, or ranks have diverged
    plain    sum of squares of the gradients that every rank has completely: unequal if they were not reduced yet
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.world import World
from gnmr.control.device import to_device
from gnmr.errors import RunFailed

_EQUAL = 1e-6
"""Relative variance below which gradients of two ranks count as equal, because other processors round differently."""
_CHUNK = 2**22
"""Elements that `digest` widens to 64 bits at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_sharded(x: Tensor) -> bool:
    """Return True for a DTensor.

    Returns: True also if the mesh replicates it on all ranks.
    """
    return hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor.

    Returns: a plain tensor; `x` itself if it is not sharded.

    Raises:
        RunFailed: `x` is a gradient that is not summed over ranks yet.
    """
    if not is_sharded(x):
        return x
    if any(placement.is_partial() for placement in x.placements):  # type: ignore[attr-defined]
        raise RunFailed(
            "a gradient is not reduced over the ranks yet (DTensor, Partial): call step() after the backward pass that "
            "synchronises, or leave what tensor parallelism shards out of the model's trained parameters"
        )
    shard: Tensor = x.to_local()  # type: ignore[attr-defined]
    return shard


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that lies where this rank's part of another one lies. Communicates nothing.

    Args:
        full: a plain tensor, the same on every rank.
        like: a DTensor in the shape of full, or a plain tensor.

    Returns:
        A plain tensor in the shape of `local(like)`.
    """
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    shard: Tensor = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return shard


def counts(x: Tensor) -> bool:
    """Return True if a sum over ranks takes this rank's part of a tensor, so that each part enters once.

    Raises:
        RunFailed: `x` is sharded over some of the ranks only, so that other ranks may hold the same part.
    """
    if not is_sharded(x):
        return world.rank() == 0
    if (size := x.device_mesh.size()) != world.size():  # type: ignore[attr-defined]
        raise RunFailed(
            f"a parameter is sharded over {size} of {world.size()} processes: shard all over one mesh of all of them"
        )
    coordinate = x.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:
        return False
    placements = x.placements  # type: ignore[attr-defined]
    return all(i == 0 for i, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())


def _place(x: Tensor) -> tuple[int, ...]:
    """Return which part of `x` this rank has; equal on ranks that have the same part."""
    if not is_sharded(x):
        return ()
    coordinate = x.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    placements = x.placements  # type: ignore[attr-defined]
    return tuple(i for i, placement in zip(coordinate, placements, strict=True) if not placement.is_replicate())


@torch.no_grad()
def _bits(x: Tensor) -> Tensor:
    """Return the sum over this rank's elements of a square of their bits, modulo 2^64.

    Squares, so that two changes of opposite sign do not cancel.
    """
    shard = local(x.detach()).contiguous().flatten()
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    for chunk in shard.view(_BITS[shard.element_size()]).split(_CHUNK):
        total += (chunk.to(torch.int64) + 0x9E3779B1).square().sum()
    return total


def digest(weights: Mapping[str, Tensor], world: World, step: int) -> str:
    """Return a digest of all weights, equal under DDP, FSDP2, HSDP and in one process.

    Sums of elements add up over parts in any order. Waits for the device and all ranks.

    Args:
        weights: parameters by name, the same names on every rank.
        world: all ranks, which call this together.
        step: number of the last step, for the message.

    Returns:
        16 hexadecimal digits.

    Raises:
        RunFailed: on all ranks, if two of them differ in a part that both hold.
    """
    names = sorted(weights)
    places = [_place(weights[name]) for name in names]
    bits = torch.stack([_bits(weights[name]) for name in names]).cpu().numpy()
    counted = np.where([counts(weights[name]) for name in names], bits, 0)
    of_ranks = world.gather((places, bits.tolist(), counted))

    # Ranks that hold the same part of a weight must hold the same bits.
    first_with = dict[tuple[str, tuple[int, ...]], tuple[int, int]]()
    for rank, (places, rank_bits, _) in enumerate(of_ranks):
        for name, place, part_bits in zip(names, places, rank_bits, strict=True):
            first_rank, first_bits = first_with.setdefault((name, place), (rank, part_bits))
            if part_bits != first_bits:
                raise RunFailed(
                    f"ranks disagree after step {step}: {name} of rank {rank} is not that of rank {first_rank}; "
                    "continue from a checkpoint of before"
                )
    total = np.sum([counted for *_, counted in of_ranks], axis=0, dtype=np.int64)
    return hashlib.blake2b(total.tobytes(), digest_size=8).hexdigest()


def lost_rank(error: BaseException) -> bool:
    """Return True if an error says that another process is gone.

    Args:
        error: any error, of a collective of ours or of the wrapped model's; in a single process none says so.
    """
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
        if not lost_rank(error):
            raise
        line = str(error).strip().partition("\n")[0]
        raise RunFailed(f"another process ended, or cannot be reached ({line})") from error


class DistributedRanks:
    """The processes of torch.distributed's default group, as a controller sees them (`gnmr.control.ranks`)."""

    def __init__(self, share: float | None = None, tells_own: bool = False) -> None:
        """Describe what one rank contributes to a step.

        Args:
            share: the part of the step's loss that one rank's loss is, from which its backward pass starts; None:
                1 / size, for losses that DDP and FSDP average.
            tells_own: see `gnmr.control.ranks`.
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

    is_sharded, local, counts = staticmethod(is_sharded), staticmethod(local), staticmethod(counts)

    @torch.no_grad()
    def sum(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over ranks by one collective, without waiting for the device.

        Args:
            terms: this rank's terms by name, any shapes and dtypes, on one device.

        Returns:
            The sums by name, float64 in the same shapes.

        Raises:
            RunFailed: another process is gone.
        """
        packed = torch.cat([term.reshape(-1).to(torch.float64) for term in terms.values()])
        if self.size > 1:
            with reaching():
                torch.distributed.all_reduce(packed)
        sizes = [term.numel() for term in terms.values()]
        sums = packed.split(sizes)
        return {name: sums[i].reshape(term.shape) for i, (name, term) in enumerate(terms.items())}

    def take_largest(self, x: Tensor) -> None:
        """Replace each number of `x` by the largest over ranks, by one collective.

        Raises:
            RunFailed: another process is gone.
        """
        if self.size > 1:
            largest = x.contiguous()
            with reaching():
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            x.copy_(largest)

    def agreement(self, settings: Sequence[object], active: np.ndarray, plain: Tensor) -> Tensor:
        """Return both guards of the module, a part for `sum`, of settings and a set that must be equal on all ranks.

        Returns: (4,) float64 on the device of `plain`: the digest, its square, `plain` and its square.
        """
        # 20 bits, so that the sum of the squares over 8,192 ranks is exact in float64.
        digest = zlib.crc32(repr(settings).encode() + np.packbits(active).tobytes()) & 0xFFFFF
        digests = to_device(torch.tensor([digest, digest**2], dtype=torch.float64), plain.device)
        return torch.cat([digests, torch.stack([plain, plain.square()])])

    def check(self, agreement: np.ndarray, step: int) -> None:
        """Check the guards of a step.

        Args:
            agreement: (4,), the sum of `agreement` over ranks, on the host.
            step: number of the step, for the message.

        Raises:
            RunFailed: ranks differ in settings or in the set in force, or their gradients are not reduced.
        """
        digest, digests, plain, squares = agreement.tolist()
        if int(digest) ** 2 != self.size * int(digests):  # whole numbers up to 2^53: exact for 8,192 ranks
            raise RunFailed(
                f"ranks disagree in step {step}: they have other units, settings or recovered sets; start all "
                "of them from the same words, seed and checkpoint"
            )
        # W s2 - s^2 is W^2 times the variance over the ranks, here relative to the squared sum.
        if np.isfinite(squares) and self.size * squares - plain**2 > _EQUAL * plain**2:
            raise RunFailed(
                f"gradients differ between ranks in step {step}: call step() after the backward pass that reduces them "
                "(DDP's outside of no_sync), in every rank"
            )
