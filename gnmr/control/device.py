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
_SAME_ON_HOST: dict[torch.dtype, Any] = {torch.bool: np.bool_, torch.int64: np.int64}
"""Dtypes that arrive on the host unchanged."""


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting; a copy from pageable memory may wait.

    Args:
        host: a CPU tensor of any shape and dtype.
        device: the target; for a CPU `host` itself is returned.
    """
    # Only a copy from pinned memory is asynchronous; PyTorch keeps that memory until the copy is over.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """Put flags on the device, without waiting for it.

    Returns: (len(values),) bool.
    """
    return to_device(torch.tensor(values, device="cpu"), device)


def waits_for_nothing(x: Tensor) -> bool:
    """Return True if inspecting the values of `x` waits for nothing, because it is on a CPU."""
    return x.device.type == "cpu"


def at_hand(x: Tensor) -> list[Any] | None:
    """Return the numbers of `x`, (U,), if reading them waits for nothing (on a CPU) and they are few, else None.

    The passes of a step evict the code of small operators from the processor's caches. For some hundred units a loop of
    Python therefore takes less time than one operation of PyTorch or NumPy.
    """
    return x.tolist() if waits_for_nothing(x) and len(x) <= _FEW else None


def all_set(x: Tensor) -> bool:
    """Return True if no number or flag of `x`, (U,), is 0, as far as is known without waiting."""
    numbers = at_hand(x)
    return numbers is not None and all(numbers)


def all_finite(x: Tensor, least: float = -math.inf) -> bool:
    """Return True if all numbers are known to be finite, and at least `least`, without waiting.

    `x` is float64, (U,), and its sum must stay in float64's range. A True saves selections in most steps.
    """
    numbers = at_hand(x) if x.dtype == torch.float64 else None
    # NaN and Inf carry over to the sum, which is one test for all numbers.
    return numbers is not None and math.isfinite(sum(numbers)) and (least == -math.inf or min(numbers) >= least)


@dataclass
class HostPacket:
    """The numbers of one step by name: tensors of one device, and after `to_host` NumPy arrays.

    They travel together as float64 unless the device is the CPU; integers up to 2^53 arrive exactly.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    host: dict[str, np.ndarray] = field(default_factory=dict)
    """The arrays, empty before `to_host`."""

    def add(self, **tensors: Tensor) -> None:
        """Add tensors by name. Does not wait for the device.

        Raises:
            ValueError: if a name is taken.
        """
        for name, tensor in tensors.items():
            if name in self.tensors:
                raise ValueError(f"{name}: is in the packet already")
            self.tensors[name] = tensor

    @torch.no_grad()
    def to_host(self) -> dict[str, np.ndarray]:
        """Return copies on the host; bool and int64 keep their dtype, others become float64. Waits once."""
        if self.host:
            return self.host
        # On a CPU nothing travels; copies keep the numbers of this step when buffers are written again.
        if all(map(waits_for_nothing, self.tensors.values())):
            self.host = {name: _same_or_float64(tensor).numpy().copy() for name, tensor in self.tensors.items()}
            return self.host
        # One tensor, one transfer
        packed = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self.tensors.values()]).cpu().numpy()
        end = 0
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.numel()
            # Back to flags and whole numbers, which float64 holds exactly up to 2^53.
            array = packed[begin:end].astype(_SAME_ON_HOST.get(tensor.dtype, np.float64))
            self.host[name] = array.reshape(tensor.shape)
        return self.host


def _same_or_float64(x: Tensor) -> Tensor:
    return x.detach() if x.dtype in _SAME_ON_HOST else x.detach().to(torch.float64)
