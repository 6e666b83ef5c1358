"""Wrap a model for several processes: DistributedDataParallel, FSDP2, or both (HSDP); or leave it as it is.

Every wrapper averages gradients over ranks, so each rank starts backward from its part of the step's loss times the
number of ranks. Gradients are compressed (`gnmr.lab.rivals.greedylore`) during the reduction.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.attachment.ranks.torchrun import is_torchrun, processes_started
from gnmr.attachment.ranks.world import World
from gnmr.errors import UserError
from gnmr.lab.config import Config
from gnmr.lab.rivals.greedylore import GreedyLore


class Wrapped:
    """A model of one process; the call is the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.call: Callable[..., Any] = model
        """The callable of a training pass."""
        self.arrived = 0.0
        """Time at which this rank last reached a step's final point without waiting for another rank; 0: not yet."""
        self.workers = 1
        """Number of workers over which gradients are averaged."""
        self.compressed: GreedyLore | None = None
        self.own: dict[int, Tensor] | None = None
        """This process's gradient of each parameter before its reduction, by the parameter's id; None: not kept."""
        self.fills = False
        """True if parameters that no process used have a gradient of zeros instead of none."""

    @property
    def repeatable(self) -> bool:
        """Return True if passes of the bare model in this process alone give the step's gradients."""
        return self.workers == 1

    def keep_own(self) -> None:
        """Keep `own` from now on if DDP reduces, at the cost of one more copy of the gradients."""

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Enclose the forward and backward pass of a micro-batch; gradients are reduced only in the `last`."""
        return nullcontext()

    def after(self, last: bool) -> None:
        """Follow the backward pass of each micro-batch of this process."""


class _Virtual(Wrapped):
    """One process that plays all workers: micro-batch i belongs to worker i modulo their number."""

    def __init__(self, model: nn.Module, compressed: GreedyLore) -> None:
        super().__init__(model)
        self.compressed, self._reduce, self.workers = compressed, compressed.reduce, compressed.workers.size
        self._of_worker: list[list[Tensor | None]] = []
        self._number = 0

    def after(self, last: bool) -> None:
        """Take the gradients of the micro-batch; after the last one of a step, leave the compressed means."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        # Each worker's first micro-batch of the step; further ones are added to it.
        if self._number < self.workers:
            self._of_worker.append([parameter.grad for _, parameter in named])
        else:
            for total, (_, parameter) in zip(self._of_worker[self._number % self.workers], named, strict=True):
                if total is not None and parameter.grad is not None:
                    total += parameter.grad
        self._number += 1
        # The next micro-batch belongs to another worker, so its gradient must not add to this one.
        for _, parameter in named:
            parameter.grad = None
        if last:
            grads, self._of_worker, self._number = self._of_worker, [], 0
            by_name = {name: list[Tensor | None](rows) for (name, _), *rows in zip(named, *grads, strict=True)}
            # (W, ...) of each parameter that has a gradient in every worker.
            sent = {name: torch.stack(rows) for name, rows in by_name.items() if None not in rows}  # type: ignore[arg-type]
            for name, mean in self._reduce(sent).items():
                self.model.get_parameter(name).grad = mean


class _DDP(Wrapped):
    """A DDP model whose inner model keeps its names; `arrived` is the time at which its own gradients were ready."""

    def __init__(self, model: nn.Module, device: torch.device, size: int, compressed: GreedyLore | None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        self.workers, self.compressed = size, compressed
        ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of 2.13, which also brought the replacement
            # Without the search, DDP reorders its buckets after the first step of each start. Three or more ranks then
            # round their sums differently, and a resumed run would not be equal to the last bit.
            self.call = self._outer = DistributedDataParallel(
                model, device_ids=ids, broadcast_buffers=False, find_unused_parameters=True
            )

        def timed(bucket: Any) -> Any:
            self.arrived = time.perf_counter()
            if self.own is not None:
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                self.own |= {id(parameter): gradient.clone() for parameter, gradient in pairs}
            return allreduce_hook(None, bucket) if compressed is None else compressed.hook(bucket)  # type: ignore[arg-type]

        self._outer.register_comm_hook(None, lambda _, bucket: timed(bucket))

    def keep_own(self) -> None:
        self.own = {}

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._outer.no_sync()


class _FSDP(Wrapped):
    """An FSDP2 model; `arrived` is the start of its first forward pass, after which all-gathers keep ranks together."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], mesh: Any, partly: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        # Block by block, so that one block's weights are gathered at a time.
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model)
        self.workers, self.fills = mesh.size(), partly
        if partly:  # else ranks would reduce other parameters, and wait for each other
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                raise UserError(
                    f"model.name=moe: FSDP2 of PyTorch {torch.__version__} cannot leave out experts on some processes "
                    "alone; use parallel=ddp, or PyTorch 2.13"
                )
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        self.call = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        # Only the first pass of a step: later ones have waited for other ranks.
        self.arrived = self.arrived or time.perf_counter()
        return self.model(*args, **kwargs)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


def wrap(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    kind: str,
    world: World,
    device: torch.device,
    compressed: GreedyLore | None = None,
    partly: bool = False,
) -> Wrapped:
    """Return the model as `world` runs it, wrapped by `kind` (none, ddp, fsdp, hsdp).

    FSDP2 may replace the parameters. Raises UserError if this PyTorch's FSDP2 does not support `partly`.

    Args:
        model: the model of this process.
        blocks: the modules that FSDP2 shards one by one.
        kind: the wrapper; one process is never wrapped.
        world: the processes of the run.
        device: the device of this process.
        compressed: compresses gradients, between virtual workers in one process or between the ranks of DDP.
        partly: True if a pass may leave out parts of the model that another process uses.
    """
    if world.size == 1 or kind == "none":
        return Wrapped(model) if compressed is None else _Virtual(model, compressed)
    if kind == "ddp":
        return _DDP(model, device, world.size, compressed)
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "fsdp":
        return _FSDP(model, blocks, init_device_mesh(device.type, (world.size,)), partly)
    # HSDP: the processes of a group hold one copy of the model together, and all groups hold equal copies.
    shards = shards_of(world.size)
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (world.size // shards, shards), mesh_dim_names=names)
    return _FSDP(model, blocks, mesh, partly)


def shards_of(size: int) -> int:
    """Return how many processes share one copy of the model in HSDP: those of a machine, or half of a single one's."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return local if local < size else size // 2


def refuse_processes(config: Config) -> None:
    """Raise UserError if the number of processes does not fit `parallel` or this run."""
    kind, size = config.parallel, processes_started()
    if kind == "none" and size > 1:
        raise UserError(f"parallel=none: here are {size} processes; use parallel=ddp, fsdp or hsdp")
    if kind != "none" and not is_torchrun():
        raise UserError(f"parallel={kind}: needs several processes: torchrun --nproc-per-node N -m gnmr train ...")
    refuse_compression(config, size)
    accumulation = config.training.accumulation
    if accumulation < size:
        raise UserError(
            f"training.accumulation={accumulation}: {size} processes need a micro-batch of a step each; "
            f"use training.accumulation={size} with a smaller training.batch_size, or fewer processes"
        )
    if size > 1 and kind != "ddp" and accumulation % size:
        raise UserError(
            f"training.accumulation={accumulation}: under parallel={kind} it must be a multiple of the {size} processes"
        )
    if size > 1 and kind == "hsdp" and (size % shards_of(size) or shards_of(size) < 2):
        raise UserError(f"parallel=hsdp: needs an even number of processes, 4 or more, here are {size}; use fsdp")


def refuse_compression(config: Config, size: int) -> None:
    """Raise UserError if `size` processes of this run cannot compress gradients as configured."""
    compression, kind, accumulation = config.compression, config.parallel, config.training.accumulation
    key = f"compression.name={compression.name}"
    if compression.name == "none":
        return
    if kind in ("fsdp", "hsdp"):
        raise UserError(f"{key}: gradients are compressed whole, which parallel={kind} shards; use parallel=ddp")
    workers = compression.workers
    if size == 1 and workers is None:
        raise UserError(
            f"{key}: needs data parallelism: parallel=ddp under torchrun, or in one process virtual workers, "
            "compression.workers=2"
        )
    if size > 1 and workers not in (None, size):
        raise UserError(f"compression.workers={workers}: here are {size} processes, each a worker; leave it out")
    if size == 1 and workers is not None and accumulation < workers:
        raise UserError(
            f"training.accumulation={accumulation}: {workers} workers need a micro-batch of a step each; use "
            f"training.accumulation={workers} with a smaller training.batch_size, or fewer workers"
        )
