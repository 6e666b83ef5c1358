"""Products of 16-bit tensors on CPUs without instructions for them: in FP32, and rounded once.

PyTorch multiplies bfloat16 matrices by oneDNN where a CPU has AVX-512 (or Arm's bfloat16), else by loops of its own,
which take 15 to 50 times as long as the same product in FP32 (pytorch/pytorch#146508). There `provide` exchanges the
kernels of `mm`, `addmm`, `bmm` and `baddbmm` for ones that read the operands as FP32: products of 16-bit values are
exact in it, sums are FP32's as they are elsewhere, and the result is rounded once. What differs from other machines is
the order of the sums. Training, forks, `diagnose` and `eval` call it; `gnmr.attach` leaves PyTorch as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def lacking() -> bool:
    """Whether this CPU has no fast products of bfloat16."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def told() -> str:
    """What records say of it."""
    return "in FP32" if lacking() else "16-bit"


@cache
def provide() -> bool:
    """Exchanges the kernels of this process, once, where the CPU is `lacking`; whether it did."""
    if not lacking():
        return False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are exchanged
        for name, shape in _SHAPES.items():
            library.impl(name, _in_fp32(getattr(torch.ops.aten, name).out, shape), "CPU")
    _KEPT.append(library)
    return True


_KEPT: list[torch.library.Library] = []
"""A library that is collected takes its kernels with it."""


def _in_fp32(out: Callable[..., Tensor], shape: Callable[..., tuple[int, ...]]) -> Callable[..., Tensor]:
    """The product that `out` writes; 16-bit operands are read as FP32."""

    def product(*operands: Tensor, **scales: Any) -> Tensor:
        first = operands[0]
        if first.dtype in _HALF and all(one.dtype == first.dtype for one in operands):
            wide = [one.float() for one in operands]
            return out(*wide, **scales, out=wide[0].new_empty(shape(*operands))).to(first.dtype)
        return out(*operands, **scales, out=first.new_empty(shape(*operands)))

    return product


_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "mm": lambda a, b: (a.shape[0], b.shape[1]),
    "addmm": lambda _, a, b: (a.shape[0], b.shape[1]),
    "bmm": lambda a, b: (a.shape[0], a.shape[1], b.shape[2]),
    "baddbmm": lambda _, a, b: (a.shape[0], a.shape[1], b.shape[2]),
}
