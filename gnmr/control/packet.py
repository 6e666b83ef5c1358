"""What a step sends to the host, by name, in one transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_OWN = {torch.bool: np.bool_, torch.int64: np.int64}
"""Kinds of numbers that arrive as they left."""


@dataclass(frozen=True)
class HostPacket:
    """Tensors of one device, packed as float64: whole numbers up to 2^53 arrive exactly."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor along. Does not wait for the device; ValueError where the name is taken."""
        if name in self.tensors:
            raise ValueError(f"{name}: is in the packet already")
        self.tensors[name] = tensor

    @torch.no_grad()
    def to_host(self) -> dict[str, np.ndarray]:
        """The numbers on the host, copies, each array in its tensor's shape: flags as bool, int64 as int64, all others
        as float64. Waits for the device once."""
        host = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self.tensors.values()]).cpu().numpy()
        arrays, end = {}, 0
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.numel()
            part, own = host[begin:end], _OWN.get(tensor.dtype)
            arrays[name] = (part if own is None else part.astype(own)).reshape(tensor.shape)
        return arrays
