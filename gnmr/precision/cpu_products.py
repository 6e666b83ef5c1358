"""Products of 16-bit tensors on CPUs without instructions for them: in FP32, and rounded once.

PyTorch multiplies bfloat16 matrices by oneDNN where a CPU has AVX-512 (or Arm's bfloat16), else by loops of its own,
which take 15 to 50 times as long as the same product in FP32 (pytorch/pytorch#146508). There `provide` exchanges the
kernels of `mm`, `addmm`, `bmm` and `baddbmm`: operands of 16 bits are read as FP32, in which their sums are made, as
they are elsewhere, and the result is rounded once. What differs from other machines is the order of the sums. Other
operands go to PyTorch's kernels, some microseconds later; in-place forms (`addmm_`) are left alone. What builds or
loads a model for us calls it (`models.build`, `pretrained.load`), for the whole process; `gnmr.attach` does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_NAMES = ("mm", "addmm", "bmm", "baddbmm")
_KEPT: list[torch.library.Library] = []
"""A library that is collected takes its kernels with it."""


def lacking() -> bool:
    """Whether PyTorch has no fast products of bfloat16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # no such op: built without oneDNN
    return supported is None or not supported()


def kind() -> str:
    """How this process multiplies 16-bit tensors on the CPU, for its records."""
    return "in FP32" if _KEPT else "16-bit"


@cache
def provide() -> bool:
    """Exchanges the kernels of this process, once, where the CPU is `lacking`; whether it did."""
    if not lacking():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are exchanged
        for name in _NAMES:
            plain, out = (torch.library.get_kernel(f"aten::{name}{more}", "CPU") for more in ("", ".out"))
            library.impl(name, _product(plain), "CPU", with_keyset=True)
            library.impl(f"{name}.out", _written(plain, out), "CPU", with_keyset=True)
    _KEPT.append(library)
    return True


def _is_half(operands: tuple[Tensor, ...]) -> bool:
    return operands[0].dtype in _HALF and all(one.dtype == operands[0].dtype for one in operands)


def _product(plain: Any) -> Callable[..., Tensor]:
    """The functional kernel, of PyTorch's own."""

    def product(keys: Any, *operands: Tensor, **scales: Any) -> Tensor:
        if not _is_half(operands):
            return plain.call_boxed(keys, *operands, **scales)
        found: Tensor = plain.call_boxed(keys, *(one.float() for one in operands), **scales)
        return found.to(operands[0].dtype)

    return product


def _written(plain: Any, out_kernel: Any) -> Callable[..., Tensor]:
    """The kernel that writes to `out`, which compiled graphs call; an `out` of another shape is PyTorch's to resize."""

    def written(keys: Any, *operands: Tensor, out: Tensor, **scales: Any) -> Tensor:
        if _is_half((*operands, out)):
            found: Tensor = plain.call_boxed(keys, *(one.float() for one in operands), **scales)
            if found.shape == out.shape:
                return out.copy_(found)
        return out_kernel.call_boxed(keys, *operands, **scales, out=out)

    return written
