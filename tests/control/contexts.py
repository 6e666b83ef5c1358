"""What signals are told of units that are nothing but numbered."""

from __future__ import annotations

import torch

from gnmr.control import Context


def context(num_units: int, device: str = "cpu") -> Context:
    names = tuple(f"unit{i}" for i in range(num_units))
    return Context(names=names, device=torch.device(device))
