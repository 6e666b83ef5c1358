"""What one rank holds of a parameter's gradient, and whether it counts it.

| wrapped by | a gradient is | counted |
|---|---|---|
| DDP | the same on every rank | by rank 0 |
| FSDP2 | in parts, one a rank | each rank its part |
| HSDP | in parts, each on several ranks | a part by the first of them |
"""

from __future__ import annotations

from torch import Tensor

from gnmr.distributed import world
from gnmr.errors import RunFailed


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor. RunFailed for a gradient whose sum over ranks is still to be made."""
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
    """What lies of `whole`, which every rank has, where this rank's part of `like` does; both of one shape."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    found: Tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    return found


def place(x: Tensor) -> tuple[int, ...]:
    """Which part of it this rank has: equal on ranks that have the same."""
    if not is_sharded(x):
        return ()
    at = x.device_mesh.get_coordinate() or ()  # type: ignore[attr-defined]
    return tuple(i for i, how in zip(at, x.placements, strict=True) if not how.is_replicate())  # type: ignore[attr-defined]


def counts(x: Tensor) -> bool:
    """Whether this rank's part is one that the sum over ranks is to hold: each part once. RunFailed for one that lies
    on some of them alone: others may have the same."""
    if not is_sharded(x):
        return world.rank() == 0
    if (size := x.device_mesh.size()) != world.size():  # type: ignore[attr-defined]
        raise RunFailed(
            f"a parameter is sharded over {size} of {world.size()} processes: shard all over one mesh of all of them"
        )
    at = x.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    placements = x.placements  # type: ignore[attr-defined]
    return at is not None and all(place == 0 for place, how in zip(at, placements, strict=True) if how.is_replicate())
