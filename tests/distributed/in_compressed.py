"""A loop with compressed gradients on two ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnmr.attachment.ranks import world
from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.control import Controller, ControlSpec
from gnmr.lab.rivals.greedylore import GreedyLore, GreedyLoreSpec

SPEC = GreedyLoreSpec(rank=3, refresh_every=15, dense_steps=3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def compress(how: str, *, steps: int, parts: int) -> dict[str, Any]:
    """What came of a loop on two ranks: `ranks`, or `hook` (of DDP, several buckets). `parts`: micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    compressed = GreedyLore(model, SPEC)
    outer: nn.Module = model
    if how == "hook":
        outer = DistributedDataParallel(model, bucket_cap_mb=0.0015)  # type: ignore[arg-type]
        compressed.register(outer)
    control = ControlSpec(alpha=1.02, beta=1.02, delta=3, max_o=2)
    controller = Controller(compressed.units(), control, ranks=DistributedRanks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sets, sent = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(2, 16, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        for i, part in enumerate(batches[world.rank()].chunk(parts)):
            with outer.no_sync() if how == "hook" and i < parts - 1 else nullcontext():  # type: ignore[operator]
                ((outer(part) - 2 * part.roll(1, 1)).square().mean() / parts).backward()
        if how != "hook":
            rows = {name: one.grad[None] for name, one in model.named_parameters() if one.grad is not None}
            for name, mean in compressed.reduce(rows).items():
                model.get_parameter(name).grad = mean
        sets.append(controller.step().active.tolist())
        sent.append(compressed.sent)
        optimizer.step()
    return {"sets": sets, "sent": sent, "model": model.state_dict(), "compressed": compressed.state_dict()}


def differing_sets(hook: bool) -> None:
    """DistributedRanks whose sets were made to differ."""
    model = nn.Sequential(Block())
    compressed = GreedyLore(model, GreedyLoreSpec(rank=2, refresh_every=9, dense_steps=0))
    unit = compressed.units()[0]
    outer: nn.Module = model
    if hook:
        outer = DistributedDataParallel(model)
        compressed.register(outer)

    def step() -> None:
        outer(torch.ones(2, 8)).sum().backward()
        if not hook:
            compressed.reduce({name: one.grad[None] for name, one in model.named_parameters() if one.grad is not None})

    step()
    if world.rank() == 1 and unit.switch is not None:
        unit.switch(True)
    step()


def sharded() -> None:
    """A model that FSDP2 wraps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Block())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    GreedyLore(model, GreedyLoreSpec(rank=2))
