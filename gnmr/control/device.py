"""Numbers between host and device: small tensors go up without waiting, a step's numbers come down in one transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_OWN = {torch.bool: np.bool_, torch.int64: np.int64}
"""Kinds of numbers that arrive on the host as they left the device."""


def to_device(here: Tensor, device: torch.device) -> Tensor:
    """Return the host's tensor on the device without waiting for it; a copy from pageable memory may wait."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """Return `values` as a bool tensor on the device, without waiting for it."""
    return to_device(torch.tensor(values), device)


def waits_for_nothing(x: Tensor) -> bool:
    """Return True if its numbers may be looked at: on CPUs, where they are there already."""
    return x.device.type == "cpu"


def all_finite(x: Tensor) -> bool:
    """Return True if every number (float64, its square within float64's range) is known to be finite without waiting.
    It saves most steps a selection."""
    if x.dtype != torch.float64 or not waits_for_nothing(x):
        return False
    here = x.detach().numpy()
    return bool(here @ here < math.inf)  # one call; NaN is not below


@dataclass(frozen=True)
class HostPacket:
    """Tensors of one device, packed as float64: whole numbers up to 2^53 arrive exactly."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Does not wait for the device. Raises ValueError if the name is taken."""
        if name in self.tensors:
            raise ValueError(f"{name}: is in the packet already")
        self.tensors[name] = tensor

    @torch.no_grad()
    def to_host(self) -> dict[str, np.ndarray]:
        """Return copies of the numbers on the host, each array in its tensor's shape: flags as bool, int64 as int64,
        all others as float64. Waits for the device once."""
        if all(map(waits_for_nothing, self.tensors.values())):
            return {name: _kept(tensor).numpy().copy() for name, tensor in self.tensors.items()}
        host = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self.tensors.values()]).cpu().numpy()
        arrays, end = {}, 0
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.numel()
            part, own = host[begin:end], _OWN.get(tensor.dtype)
            arrays[name] = (part if own is None else part.astype(own)).reshape(tensor.shape)
        return arrays


def _kept(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in _OWN else x.detach().to(torch.float64)
