"""16-bit products in FP32, rounded once, for CPUs without native 16-bit matrix multiplication.

If a CPU has AVX-512 or Arm's bfloat16, PyTorch multiplies bfloat16 matrices with oneDNN. Otherwise it uses its own
loops, which take 15 to 50 times as long as the same product in FP32 (pytorch/pytorch#146508). On these CPUs `provide`
replaces the kernels of `mm`, `addmm`, `bmm` and `baddbmm`. Operands of 16 bits are read as FP32, summed in FP32 as on
other machines, and rounded once. Only the order of the sums differs from other machines.

Other operands reach PyTorch's kernels some microseconds later; in-place forms (`addmm_`) are unchanged. The functions
that build or load a model (`models.build`, `pretrained.load`) call `provide` for the whole process. `gnmr.attach` does
not.
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
_LIBRARIES: list[torch.library.Library] = []
"""Keeps the libraries alive: a collected library removes its kernels."""


def lacking() -> bool:
    """Return whether PyTorch has no fast bfloat16 products on this CPU."""
    # torch has no public query for native bfloat16: torch.backends.cpu.get_cpu_capability() does not know Arm's. This
    # operator is missing if torch was built without oneDNN.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or not supported()


def kind() -> str:
    """Return how this process multiplies 16-bit tensors on the CPU, for its records."""
    return "in FP32" if _LIBRARIES else "16-bit"


@cache
def provide() -> bool:
    """Replace the kernels of this process, once, if the CPU is `lacking`, and return whether it did."""
    if not lacking():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about replaced kernels
        for name in _NAMES:
            plain, out = (torch.library.get_kernel(f"aten::{name}{more}", "CPU") for more in ("", ".out"))
            library.impl(name, _product(plain), "CPU", with_keyset=True)
            library.impl(f"{name}.out", _written(plain, out), "CPU", with_keyset=True)
    _LIBRARIES.append(library)
    return True


def _is_half(operands: tuple[Tensor, ...]) -> bool:
    return operands[0].dtype in _HALF and all(operand.dtype == operands[0].dtype for operand in operands)


def _product(plain: Any) -> Callable[..., Tensor]:
    def product(keys: Any, *operands: Tensor, **scales: Any) -> Tensor:
        if not _is_half(operands):
            return plain.call_boxed(keys, *operands, **scales)
        result: Tensor = plain.call_boxed(keys, *(operand.float() for operand in operands), **scales)
        return result.to(operands[0].dtype)

    return product


def _written(plain: Any, out_kernel: Any) -> Callable[..., Tensor]:
    """Return the kernel that writes to `out`, for compiled graphs; PyTorch resizes an `out` of another shape."""

    def written(keys: Any, *operands: Tensor, out: Tensor, **scales: Any) -> Tensor:
        if _is_half((*operands, out)):
            result: Tensor = plain.call_boxed(keys, *(operand.float() for operand in operands), **scales)
            if result.shape == out.shape:
                return out.copy_(result)
        return out_kernel.call_boxed(keys, *operands, **scales, out=out)

    return written
