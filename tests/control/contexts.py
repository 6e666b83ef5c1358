"""Units that are nothing but named, what signals are told of them, and steps that are given their evidence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnmr.control import Context, Controller, Decision, Unit


def context(num_units: int, device: str = "cpu") -> Context:
    names = tuple(f"unit{i}" for i in range(num_units))
    return Context(names=names, device=torch.device(device))


def units(names: Iterable[str], size: int = 1) -> list[Unit]:
    return [Unit(name, (nn.Parameter(torch.zeros(size)),), lambda _: None) for name in names]


def step(controller: Controller, **evidence: Tensor) -> Decision:
    """A step of which this was measured; every unit is observed unless it says otherwise."""
    observed = torch.ones_like(evidence["norm"], dtype=torch.bool)
    return controller.apply(controller.observe({"observed": observed} | evidence).to_host())
