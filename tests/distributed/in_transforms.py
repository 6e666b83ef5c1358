"""Gradient transforms and what is measured of weights and moments, over a small model: whole, or in shards."""

from __future__ import annotations

from typing import Any

import torch
from in_ranks import net, whole, wrapped
from torch import Tensor

from gnmr.attachment.ranks.reduce import DistributedRanks
from gnmr.control.measurements import weight_std
from gnmr.control.unit import Unit
from gnmr.lab.rivals.transforms import TRANSFORMS, StepContext, tensor_norms

OPTIONS: dict[str, dict[str, Any]] = {
    "agc": {"clip": 0.001},
    "stable_spam": {"theta": 0.5, "reset_every": 3},
    "gradient_stabilizer": {},
    "skip_step": {"window": 4, "min_values": 3, "sigmas": 0.01},
}
"""So sharp that each of them does something in five steps."""


def transformed(how: str = "alone", transform: str | None = None, steps: int = 5) -> dict[str, list[Tensor]]:
    """What a transform (None: none) makes of the gradients of each step, and what is measured on the way."""
    model = net()
    if how != "alone":
        wrapped(model, how)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    made = None
    if transform is not None:
        made = TRANSFORMS[transform](model.named_parameters(), **OPTIONS[transform])
    units = [Unit(f"{i}", tuple(block.parameters()), lambda _: None) for i, block in enumerate(model)]
    ranks = None if how == "alone" else DistributedRanks()
    found: dict[str, list[Tensor]] = {key: [] for key in ("gradients", "norms", "skips", "std")}
    for step in range(1, steps + 1):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * step**2
        loss = (model(x) - 2 * x).square().mean()
        loss.backward()  # both ranks have the same batch: the mean is that of one
        norm = tensor_norms(parameters).square().sum().sqrt()
        nothing = torch.zeros((), dtype=torch.bool)
        found["norms"].append(norm)
        found["std"].append(weight_std(units, ranks))
        if made is not None:
            skip = made(StepContext(step, loss, norm, nothing, optimizer))
            found["skips"].append(nothing if skip is None else skip)
        found["gradients"] += [whole(p.grad) for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return found | {"state": list(made.state.values()) if made is not None else []}
