"""What the two processes of the fixture `pair` run, and the test's own process alone: loops that are not ours."""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from in_compressed import compress, differing_sets, sharded  # noqa: F401  for `serve`
from in_diagnoses import audited, audited_in_parts, diagnosed  # noqa: F401  for `serve`
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gnmr
from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.reduce import local
from gnmr.conversion.adapters import register
from gnmr.lab.models import cpu_products


def serve(rank: int, size: int, store: str, pipe: Any) -> None:
    """Of a process of `pair` or `four`: runs what it is asked until it is asked nothing."""
    cpu_products.provide()  # as the process of the tests (conftest.py): bits are compared
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": f"{size}", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    import in_transforms  # which imports this

    known = globals() | {"transformed": in_transforms.transformed}
    while (asked := pipe.recv()) is not None:
        name, options = asked
        try:
            pipe.send((True, known[name](**options)))
        except BaseException as error:
            if os.environ.get("GNMR_TRACE"):
                traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)  # gloo's threads may take their time


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(x)))


def net(dtype: str = "float32", width: int = 33) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width)).to(getattr(torch, dtype))


class Experts(nn.Module):
    """A mixture of four experts, of which the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 16) / 4), nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen, found = (x[:, :2] > 0).long() @ torch.tensor([1, 2]), torch.zeros_like(x)
        for i in range(4):
            rows = (chosen == i).nonzero()[:, 0]
            found = found.index_add(0, rows, F.linear(x[rows], self.up[i]).relu() @ self.down[i])
        return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.experts = nn.MultiheadAttention(16, 2, batch_first=True), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x[None], x[None], x[None], need_weights=False)[0][0]
        return x + self.experts(x)


def mixture() -> nn.Sequential:
    register(Experts, up="eoi", down="eio")
    torch.manual_seed(0)
    return nn.Sequential(Mixture(), Mixture())


def shard(model: nn.Module, shape: tuple[int, ...] = (2,)) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    return shard(model, {"fsdp": (2,), "hsdp": (2, 1)}[how])


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def loop(
    how: str = "alone",
    *,
    after: bool = False,
    steps: int = 8,
    dtype: str = "float32",
    clip: bool = False,
    accumulation: int = 2,
    nan: int | None = None,
    experts: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Micro-batches of a step over the ranks, or one after the other `alone`: what came of it.

    `after`: attached to the wrapped model. `nan`: step whose last micro-batch has a NaN. `experts`: of `mixture`.
    """
    usual: dict[str, Any] = {} if "signal" in options else {"alpha": 1.001, "beta": 1.001, "delta": 3}
    options = {"max_o": 2, "targets": ["*_proj"]} | usual | options
    inner = mixture() if experts else net(dtype)
    size, rank = (1, 0) if how == "alone" else (world.size(), world.rank())
    model = inner if how == "alone" or not after else wrapped(inner, how)
    controller = gnmr.attach(model, **options)
    model = model if how == "alone" or after else wrapped(inner, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, Any] = {"names": controller.names, "sets": [], "norms": [], "risks": []}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(8, 16, generator=generator).to(getattr(torch, dtype)) for _ in range(accumulation)]
        if nan == step:
            batches[-1][0, 0] = torch.nan
        mine = batches[rank::size]
        for i, x in enumerate(mine):
            last = i == len(mine) - 1
            if how in ("fsdp", "hsdp"):
                model.set_requires_gradient_sync(last)
            with model.no_sync() if how == "ddp" and not last else nullcontext():
                ((model(x) - 2 * x).square().mean() / len(mine)).backward()
            controller.micro_step()
        decision = controller.step()
        found["sets"].append(controller.active)
        found["norms"].append(decision.norm.tolist())
        found["risks"].append(decision.risk.tolist())
        for name, values in decision.evidence.items():
            found.setdefault(name, []).append(values.tolist())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if all(map(torch.isfinite, map(torch.tensor, decision.norm))):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found | {"weights": [whole(p) for p in inner.parameters()]}


def train(
    config: Any,
    *,
    parallel: str,
    nan: int | None = None,
    stop: int | None = None,
    slow: int | None = None,
    nudged: int | None = None,
    other_seed: bool = False,
    other_data: str | None = None,
) -> Any:
    """The run of this config by both ranks: what was said, or how it ended.

    `nan`: step in which rank 1 reads an embedding that is not finite. `stop`: step in which rank 1 gets a SIGTERM.
    `slow`: the rank that comes late by its clock in three steps. `nudged`: step after which a weight of rank 1 moves by
    one bit.
    `other_seed`: rank 1 has one.
    `other_data`: the text that rank 1 finds in the place of the others'.
    """
    from gnmr.attachment.ranks.world import World
    from gnmr.lab.evaluation.scores import RunScorer
    from gnmr.lab.train import build, loop, wrap
    from gnmr.lab.train.run import run

    def opened(config: Any, *rest: Any) -> Any:
        if other_data is not None and world.rank() == 1:
            config = replace(config, data=replace(config.data, path=other_data))
        return open_data(config, *rest)

    class Steps(loop.Steps):
        def __call__(self, step: int) -> Any:
            if world.rank() == 1 and step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            late = 3600.0 if world.rank() == slow and step in (4, 5, 6) else 0.0
            wrap.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late)
            handle = None
            if world.rank() == 1 and step == nan:
                embedding = self._parts.model.get_submodule("embed_tokens")
                handle = embedding.register_forward_hook(lambda *found: found[-1] * torch.nan)
            result = super().__call__(step)
            if handle is not None:
                handle.remove()
            if world.rank() == 1 and step == nudged:
                with torch.no_grad():
                    weight = self._parts.model.get_submodule("lm_head").weight
                    local(weight).view(torch.int16)[0, 0] ^= 1
            return result

    if other_seed and world.rank() == 1:
        config = replace(config, training=replace(config.training, seed=7))
    said: list[str] = []
    before, loop.Steps, open_data, build.open_data = loop.Steps, Steps, build.open_data, opened
    together = World(world.rank(), world.size())
    try:
        run(replace(config, parallel=parallel), said.append, world=together, scorer=RunScorer())
    except SystemExit as end:
        return end.code
    finally:
        loop.Steps, build.open_data, wrap.time = before, open_data, time
    return said


def disagreeing(case: str) -> None:
    """Ranks with other thresholds (`apart`), with sets that were made to differ, or where DDP did not reduce."""
    model = net()
    max_o = 1 + world.rank() if case == "apart" else 2
    controller = gnmr.attach(model, max_o=max_o, targets=["*_proj"])
    outer = wrapped(model, "ddp")
    if case == "other_set" and world.rank() == 1:
        controller.promote(controller.names[:1])
    with outer.no_sync() if case == "unreduced" else nullcontext():
        outer(torch.full((2, 16), 1.0 + world.rank())).sum().backward()
    controller.step()


def tensor_parallel(order: str, low: str = "int4", **options: Any) -> Any:
    """Two blocks of which tensor parallelism shards the linears, `first` or `after` two paths: a step, or what is said.

    `order`: first, after, or beside, where the first block alone is sharded and the second alone has paths; alone: none
    is sharded, and the second has paths.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net(width=32)

    def parallelize() -> None:
        mesh = init_device_mesh("cpu", (2,))
        blocks = "0" if order == "beside" else "01"
        names = {
            f"{i}.{name}": how()
            for i in blocks
            for name, how in (("up_proj", ColwiseParallel), ("down_proj", RowwiseParallel))
        }
        parallelize_module(model, mesh, names)

    if order in ("first", "beside"):
        parallelize()
    targets = ["1.*_proj"] if order in ("beside", "alone") else ["*_proj"]
    controller = gnmr.attach(model, low=low, targets=targets, max_o=1, **options)
    if order == "after":
        parallelize()
    torch.manual_seed(1)
    model(torch.randn(4, 16)).square().mean().backward()
    return controller.step().norm.tolist()


def on_a_part() -> None:
    """FSDP2 over one process each."""
    model = net()
    controller = gnmr.attach(model, targets=["*_proj"], max_o=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"])
    model(torch.ones(2, 16)).sum().backward()
    controller.step()
