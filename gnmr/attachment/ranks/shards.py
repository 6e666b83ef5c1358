"""The part of a parameter that a rank holds, and whether it counts in a sum over ranks.

| wrapped by | a gradient is | counted |
|---|---|---|
| DDP | the same on every rank | by rank 0 |
| FSDP2 | in parts, one per rank | by each rank, its part |
| HSDP | in parts, each on several ranks | by the first of these ranks |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.world import World
from gnmr.errors import RunFailed

_CHUNK = 2**22
"""Elements that `digest` widens to 64 bits at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_sharded(x: Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor. Raises RunFailed if it is a gradient that is not summed over ranks yet."""
    if not is_sharded(x):
        return x
    if any(placement.is_partial() for placement in x.placements):  # type: ignore[attr-defined]
        raise RunFailed(
            "a gradient is not reduced over the ranks yet (DTensor, Partial): call step() after the backward pass that "
            "synchronises, or leave what tensor parallelism shards out of the model's trained parameters"
        )
    found: Tensor = x.to_local()  # type: ignore[attr-defined]
    return found


def part(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of `whole`, which every rank has, where this rank's part of `like` lies; both of one shape."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    found: Tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    return found


def counts(x: Tensor) -> bool:
    """Return True if a sum over ranks takes this rank's part, so that each part enters once.

    Raises RunFailed if `x` is sharded over some of the ranks only: other ranks may hold the same part.
    """
    if not is_sharded(x):
        return world.rank() == 0
    if (size := x.device_mesh.size()) != world.size():  # type: ignore[attr-defined]
        raise RunFailed(
            f"a parameter is sharded over {size} of {world.size()} processes: shard all over one mesh of all of them"
        )
    at = x.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements = x.placements  # type: ignore[attr-defined]
    return at is not None and all(place == 0 for place, how in zip(at, placements, strict=True) if how.is_replicate())


def _place(x: Tensor) -> tuple[int, ...]:
    """Return which part of `x` this rank has; equal on ranks that have the same part."""
    if not is_sharded(x):
        return ()
    at = x.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    return tuple(i for i, how in zip(at, x.placements, strict=True) if not how.is_replicate())  # type: ignore[attr-defined]


@torch.no_grad()
def _bits(x: Tensor) -> Tensor:
    """Return the sum over this rank's elements of a square of their bits, modulo 2^64.

    Squares, so that two changes of opposite sign do not cancel.
    """
    held = local(x.detach()).contiguous().flatten()
    total = torch.zeros((), dtype=torch.int64, device=held.device)
    for chunk in held.view(_BITS[held.element_size()]).split(_CHUNK):
        total += (chunk.to(torch.int64) + 0x9E3779B1).square().sum()
    return total


def digest(weights: Mapping[str, Tensor], world: World, step: int) -> str:
    """Return 16 hexadecimal digits of all weights, equal under DDP, FSDP2, HSDP and in one process.

    Sums of elements add up over parts in any order. Waits for the device and all ranks. Raises RunFailed on all ranks
    if two of them differ in a part that both hold.
    """
    names = sorted(weights)
    own = torch.stack([_bits(weights[name]) for name in names]).cpu().numpy()
    counted = np.array([counts(weights[name]) for name in names])
    told = world.gather(([_place(weights[name]) for name in names], own.tolist(), np.where(counted, own, 0)))
    first = dict[tuple[str, tuple[int, ...]], tuple[int, int]]()
    for rank, (places, held, _) in enumerate(told):
        for name, place, bits in zip(names, places, held, strict=True):
            other, wanted = first.setdefault((name, place), (rank, bits))
            if bits != wanted:
                raise RunFailed(
                    f"ranks disagree after step {step}: {name} of rank {rank} is not that of rank {other}; "
                    "continue from a checkpoint of before"
                )
    whole = np.sum([part for *_, part in told], axis=0, dtype=np.int64)
    return hashlib.blake2b(whole.tobytes(), digest_size=8).hexdigest()
