"""Transfers between host and device: small uploads do not wait, and a step's numbers come in one download."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FEW = 1000
"""Up to so many numbers a loop of Python takes less time than a cold operation."""
_OWN = {torch.bool: np.bool_, torch.int64: np.int64}
"""Dtypes that arrive on the host unchanged."""


def to_device(here: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting; a copy from pageable memory may wait."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """Return `values` as a bool tensor on the device, without waiting for it."""
    return to_device(torch.tensor(values, device="cpu"), device)


def waits_for_nothing(x: Tensor) -> bool:
    """Return True if inspecting the values of `x` waits for nothing, because it is on a CPU."""
    return x.device.type == "cpu"


def at_hand(x: Tensor) -> list[Any] | None:
    """Return the numbers of `x`, (U,), if reading them waits for nothing and they are few, else None.

    The passes of a step evict the code of small operators from the processor's caches. For some hundred units a loop of
    Python therefore takes less time than one operation of PyTorch or NumPy.
    """
    return x.tolist() if waits_for_nothing(x) and len(x) <= _FEW else None


def all_set(x: Tensor) -> bool:
    """Return True if no number or flag of `x`, (U,), is 0, as far as is known without waiting."""
    here = at_hand(x)
    return here is not None and all(here)


def all_finite(x: Tensor, least: float = -math.inf) -> bool:
    """Return True if all numbers are known to be finite, and at least `least`, without waiting.

    `x` is float64, (U,), and its sum must stay in float64's range. A True saves selections in most steps.
    """
    here = at_hand(x) if x.dtype == torch.float64 else None
    return here is not None and math.isfinite(sum(here)) and (least == -math.inf or min(here) >= least)


@dataclass(frozen=True)
class HostPacket:
    """Tensors of one device, packed as float64 unless that is the CPU; integers up to 2^53 arrive exactly."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Does not wait for the device. Raises ValueError if the name is taken."""
        if name in self.tensors:
            raise ValueError(f"{name}: is in the packet already")
        self.tensors[name] = tensor

    @torch.no_grad()
    def to_host(self) -> dict[str, np.ndarray]:
        """Return copies on the host; bool and int64 keep their dtype, others become float64. Waits once."""
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
