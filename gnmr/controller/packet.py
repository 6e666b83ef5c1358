"""What a step sends to the host, by name, in one transfer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
    def to_host(self) -> dict[str, Tensor]:
        """The tensors on the host, each in its own shape and dtype. Waits for the device once."""
        host = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self.tensors.values()]).cpu()
        parts = host.split([tensor.numel() for tensor in self.tensors.values()])
        return {
            name: part.view(tensor.shape).to(tensor.dtype)
            for (name, tensor), part in zip(self.tensors.items(), parts, strict=True)
        }
