"""torchao's casts on the granularities of ours, as an oracle.

Where conventions agree, casts are equal bit by bit. They differ in this:

- torchao takes scales in the tensor's own dtype, ours are float32: it is given float32 tensors here.
- FP8 (`quant_primitives`): its scales have no floor, and an all-zero group becomes NaN; here it is given that of its
  integers and ours, the smallest normal float32.
- Integers: its range is the code's, [-128, 127], with a scale of max|group| / 127.5, unless it is told another; ours is
  symmetric. It multiplies by the scale's reciprocal where we divide: a quotient halfway between two integers may go to
  the other one, unless the scale is a power of two.
- `torchao.float8`, for training: the scale is the reciprocal of ours, max / max|group| with a floor of 1e-12 under
  max|group|, and multiplied by: as with integers.
- MX: ours has no scale below 2^-126. torchao 0.18 divides by that too, but stores 2^-127: such groups come back halved.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantized(
    x: Tensor, name: str, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(values of the format, scale of each element, float32) of `x` (N, D), of which a `block` has one scale."""
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    wide = x.float()
    if name in FP8:
        floor = torch.finfo(FP8[name]).max * torch.finfo(torch.float32).smallest_normal
        scale = ao._choose_scale_float8(wide, block, FP8[name], hp_value_lb=floor).to(scale_dtype).float()
        codes = ao._quantize_affine_float8(wide, scale, FP8[name])
    else:
        largest = 2 ** (int(name.removeprefix("int")) - 1) - 1
        kind, limits = torch.int8, (-largest, largest)
        symmetric = ao.MappingType.SYMMETRIC
        scale, zero = ao.choose_qparams_affine(wide, symmetric, block, kind, *limits, None, scale_dtype, keepdim=True)
        scale = scale.float()
        codes = ao.quantize_affine(wide, block, scale, zero, kind, *limits)
        assert zero.count_nonzero() == 0
    for dim in (0, 1):
        scale = scale.repeat_interleave(block[dim], dim)
    return codes.float(), scale


def cast(
    x: Tensor, name: str, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(`x` (N, D) quantized and back in its own dtype, how far ours may be from it: a step of integers at ties)."""
    values, scale = quantized(x, name, block, scale_dtype)
    quotient = (x.float() / scale).abs()
    tie = (quotient.frac() - 0.5).abs() < 127 * 2.0**-22  # float32 rounds quotients up to 127
    # The half a step is for bfloat16, which rounds the values themselves.
    return (values * scale).to(x.dtype), 1.5 * scale * (tie & (name not in FP8))


def cast_for_training(x: Tensor, name: str, scale: str) -> Tensor:
    """`x` (N, D) quantized and back, by `torchao.float8`, with a scale per `tensor` or per `row`."""
    scaling = pytest.importorskip("torchao.float8.float8_scaling_utils")
    kinds = pytest.importorskip("torchao.float8.config").ScalingGranularity
    axis = {"scaling_granularity": kinds.AXISWISE, "axiswise_dim": -1} if scale == "row" else {}
    return scaling.hp_tensor_to_float8_dynamic(x, FP8[name], None, **axis).to_original_precision()
