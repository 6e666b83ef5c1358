"""Which runs several processes can share; what they cannot is refused by its name."""

from __future__ import annotations

from gnmr.distributed.launch import is_torchrun, started
from gnmr.distributed.wrap import shards_of
from gnmr.errors import UserError
from gnmr.lab.config import Config


def refuse_processes(config: Config) -> None:
    """UserError where parallel=..., training.processes and the processes that were started do not fit together, and for
    what a run of several processes cannot have."""
    kind, asked = config.parallel, config.training.processes
    if asked is not None and started() > 1:
        raise UserError(f"training.processes={asked}: torchrun has started {started()} processes already; leave it out")
    size = asked or started()
    if kind == "none" and size > 1:
        raise UserError(f"parallel=none: here are {size} processes; use parallel=ddp, fsdp or hsdp")
    if kind != "none" and size == 1 and asked is None and not is_torchrun():
        raise UserError(
            f"parallel={kind}: needs several processes: torchrun --nproc-per-node N -m gnmr train ..., or "
            "training.processes=N"
        )
    refuse_compression(config, size)
    if size > 1:
        _refuse_batches(config, size)


def _refuse_batches(config: Config, size: int) -> None:
    accumulation, kind = config.training.accumulation, config.parallel
    if accumulation < size:
        raise UserError(
            f"training.accumulation={accumulation}: {size} processes need a micro-batch of a step each; "
            f"use training.accumulation={size} with a smaller training.batch_size, or fewer processes"
        )
    if kind != "ddp" and accumulation % size:
        raise UserError(
            f"training.accumulation={accumulation}: under parallel={kind} it must be a multiple of the {size} processes"
        )
    if kind == "hsdp" and (size % shards_of(size) or shards_of(size) < 2):
        raise UserError(f"parallel=hsdp: needs an even number of processes, 4 or more, here are {size}; use fsdp")


def refuse_compression(config: Config, size: int) -> None:
    """UserError for compressed gradients that `size` processes of this run cannot have."""
    asked, kind, accumulation = config.compression, config.parallel, config.training.accumulation
    key = f"compression.name={asked.name}"
    if asked.name == "none":
        return
    if kind in ("fsdp", "hsdp"):
        raise UserError(f"{key}: gradients are compressed whole, which parallel={kind} shards; use parallel=ddp")
    if size == 1 and asked.workers is None:
        raise UserError(
            f"{key}: needs data parallelism: parallel=ddp training.processes=2, or in one process virtual workers, "
            "compression.workers=2"
        )
    if size > 1 and asked.workers not in (None, size):
        raise UserError(f"compression.workers={asked.workers}: here are {size} processes, each a worker; leave it out")
    if size == 1 and asked.workers is not None and accumulation < asked.workers:
        raise UserError(
            f"training.accumulation={accumulation}: {asked.workers} workers need a micro-batch of a step each; use "
            f"training.accumulation={asked.workers} with a smaller training.batch_size, or fewer workers"
        )
