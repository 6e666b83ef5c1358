"""Our casts against torchao's, on the granularities that both have.

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
from slow_casts import MAX, groups
from test_scaling import round_trip
from test_simulated import normal
from torch import Tensor

from gnmr.formats.cast import quantize
from gnmr.formats.number_formats import FORMATS
from gnmr.formats.recipes import Cast
from gnmr.formats.scaling import compress

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


@pytest.mark.parametrize(
    ("name", "oracle"),
    [("e2m1", "f32_to_f4_unpacked"), ("e2m3", "f32_to_f6_e2m3_unpacked"), ("e3m2", "f32_to_f6_e3m2_unpacked")],
)
def test_codes_are_those_of_torchao(name: str, oracle: str) -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    if not hasattr(kernels, oracle):
        pytest.skip(f"this torchao has no {oracle}")
    fmt = FORMATS[name]
    x = torch.linspace(-fmt.max, fmt.max, 20011)
    assert torch.equal(fmt.encode(x.clone()), getattr(kernels, oracle)(x))


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8", "e4m3", "e5m2"])
def test_rounding_is_that_of_torchao_under_a_scale_of_one(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.cat([torch.linspace(-fmt.max, fmt.max, 20011), torch.arange(-fmt.max, fmt.max) + 0.5])
    values, scale = quantized(x[None], name, (1, len(x)))
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(fmt.decode(fmt.encode(x.clone()), torch.float32), values[0])
    assert torch.equal(fmt.round(x.clone()), values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8", "e4m3", "e5m2"])
def test_rows_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    """Under scales of the same 16 bits."""
    rows = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    rows = rows.to(dtype)
    rows[5] = 0
    oracle, allowed = cast(rows, name, (1, 192), scale_dtype=dtype)
    assert ((round_trip(rows, name) - oracle).abs() <= allowed).all()
    scale = quantized(rows, name, (1, 192), scale_dtype=dtype)[1][:, :1]
    assert torch.equal(compress(rows, FORMATS[name])[1].float(), scale)


SHAPE = (256, 384)
BLOCKS = {  # (scale, contracted dimension): elements with one scale
    ("tensor", 1): SHAPE,
    ("row", 1): (1, SHAPE[1]),
    ("tile", 0): (128, 1),
    ("tile", 1): (1, 128),
    ("block", 1): (128, 128),
}


def with_scales_of_two(x: Tensor, name: str, scale: str, dim: int) -> Tensor:
    """`x`, where each group's largest magnitude is that of the format times a power of two."""
    x = x.clone()
    for place in groups(tuple(x.shape), scale, dim):
        group = x[place]
        if (largest := group.abs().max()) > 0:
            group[-1, -1] = -MAX[name] * (largest.float() / MAX[name]).log2().ceil().exp2()
    return x


@pytest.mark.parametrize(("scale", "dim"), BLOCKS)
@pytest.mark.parametrize("name", ["int4", "int8", "e4m3", "e5m2"])
def test_a_cast_is_that_of_torchao(name: str, scale: str, dim: int) -> None:
    ours, block = Cast.of(f"{name}/{scale}"), BLOCKS[scale, dim]
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(*SHAPE, dtype=dtype)
        x[3] = 0
        x[:128, :128] = 0
        oracle, allowed = cast(x, name, block)
        assert ((quantize(x, ours, dim)[0] - oracle).abs() <= allowed).all()
        x = with_scales_of_two(x, name, scale, dim)
        assert torch.equal(quantize(x, ours, dim)[0], cast(x, name, block)[0]), "ties too"
        if name in FP8 and scale in ("tensor", "row"):
            assert torch.equal(quantize(x, ours, dim)[0], cast_for_training(x, name, scale))


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["mx", "mx_floor"])
def test_mx_is_that_of_torchao(scale: str, name: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    rules = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    rule = rules.RCEIL if scale == "mx" else rules.FLOOR
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
    kind = kinds.get(name, f"fp6_{name}")
    x = normal(64, 128, dtype=torch.float32) * torch.logspace(-30, 30, 64).unsqueeze(1)
    x[:8] = torch.tensor([MAX[name] * 2.0**k for k in range(-4, 4)]).unsqueeze(1) * normal(8, 128).sign()  # no rest
    x[9] = 0
    for y in (x, x.bfloat16()):
        oracle = mx.MXTensor.to_mx(y, kind, 32, rule).dequantize(y.dtype)
        assert torch.equal(quantize(y, Cast.of(f"{name}/{scale}"), 1)[0], oracle)
        oracle = mx.MXTensor.to_mx(y.t().contiguous(), kind, 32, rule).dequantize(y.dtype).t()
        assert torch.equal(quantize(y, Cast.of(f"{name}/{scale}"), 0)[0], oracle)
