"""Digests of weights: whether ranks that should have the same have it, and one number for the weights of the run.

A tensor's digest is a sum over its elements, so the digests of its parts add up to that of the whole, in any order and
to the last bit: a run has the same digest under DDP, FSDP2 and HSDP, and in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from gnmr.distributed import shards
from gnmr.distributed.world import World
from gnmr.errors import RunFailed

_CHUNK = 2**22
"""Elements that are widened to 64 bits at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums(tensors: Iterable[Tensor]) -> Tensor:
    """(P,) int64: of each tensor, of what this rank holds of it, the sum over elements of a square of their bits,
    modulo 2^64. A square, so that two changes of opposite sign do not cancel. Does not wait for the device."""
    found = []
    for tensor in tensors:
        held = shards.local(tensor.detach()).contiguous().flatten()
        total = torch.zeros((), dtype=torch.int64, device=held.device)
        for chunk in held.view(_BITS[held.element_size()]).split(_CHUNK):
            total += (chunk.to(torch.int64) + 0x9E3779B1).square().sum()
        found.append(total)
    return torch.stack(found)


def of_run(weights: Mapping[str, Tensor], world: World, step: int) -> str:
    """16 hexadecimal digits of all weights, by name, wherever their parts are. Waits for the device and all ranks.

    RunFailed, in all of them, where a rank's weights are not those of the first that has the same parts.
    """
    names = sorted(weights)
    own = sums(weights[name] for name in names).cpu().numpy()
    counted = np.array([shards.counts(weights[name]) for name in names])
    told = world.gather(([shards.place(weights[name]) for name in names], own.tolist(), np.where(counted, own, 0)))
    first = dict[tuple[str, tuple[int, ...]], tuple[int, int]]()
    for rank, (places, held, _) in enumerate(told):
        for name, place, digest in zip(names, places, held, strict=True):
            other, wanted = first.setdefault((name, place), (rank, digest))
            if digest != wanted:
                raise RunFailed(
                    f"ranks disagree after step {step}: {name} of rank {rank} is not that of rank {other}; "
                    "continue from a checkpoint of before"
                )
    whole = np.sum([part for *_, part in told], axis=0, dtype=np.int64)
    return hashlib.blake2b(whole.tobytes(), digest_size=8).hexdigest()
