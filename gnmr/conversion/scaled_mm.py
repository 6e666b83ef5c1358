"""FP8 GEMMs on hardware: backend scaled_mm.

The backend runs GEMMs without casts, and GEMMs of which both operands have

    one scale a tensor      `fp8_hybrid`, `fp8_delayed` and similar recipes: compute capability 8.9 (Ada, Hopper) or
                            newer; E4M3 or E5M2, one of them E4M3
    tiles and blocks        `deepseek_v3`; E4M3, blocks in one operand only: 9.0 (Hopper) alone, CUDA 12.9 or newer

Tiles and blocks ran on one H200 (docs/cost.md), so `auto` does not choose them; backend=scaled_mm does.

The casts, their statistics and delayed scales are those of the simulation. The order of a GEMM's sums differs. The
scale is applied to the product, so that nothing is rounded to bfloat16 in between. The codes, one byte per element, and
the scales are kept for backward.

The hardware reads the first operand row by row and the second column by column. Codes in the other orientation are
transposed. Dimensions must be multiples of 16: widths are checked when the model is converted, and missing tokens are
padded with zeros, which add nothing. Groups of elements (1x128 tiles, 128x128 blocks) go through
`torch.nn.functional.scaled_mm`, which expects the scales in cuBLAS's layout:

    tile    (lines, groups) float32, the lines of one group of columns contiguous; lines a multiple of 4
    block   (groups, lines / 128) float32, groups padded to a multiple of 4 and contiguous

A line is a row of the first operand or a column of the second; a group is 128 elements of a line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.conversion.gemms import GemmContext
from gnmr.conversion.shared import Widths
from gnmr.formats.cast import Reference, as_groups, as_matrix, quantize_to_codes, scale_of_each
from gnmr.formats.cast_stats import CastStats
from gnmr.formats.number_formats import FloatFormat
from gnmr.formats.recipes import TILE, Cast, Gemm, Recipe
from gnmr.names import GEMMS

MULTIPLE = 16
"""The hardware needs every dimension of an eight-bit product to be a multiple of this number."""
_FOUR = 4
_KINDS = {"tensor": "tensor", "delayed": "tensor", "tile": "tile", "block": "tile"}
"""Kind of hardware support by granularity of the scale."""
_LEAST = {"tensor": ((8, 9), " or newer (Ada, Hopper)"), "tile": ((9, 0), " (Hopper)")}
_TILE_CUDA = (12, 9)


def missing(recipe: Recipe, linears: Mapping[str, Widths], device: torch.device | None, auto: bool) -> str | None:
    """Return why scaled_mm cannot run the recipe in these linears on `device`, or None if it can.

    `device` None stands for a device that has the hardware. `auto`: the backend is chosen automatically. This excludes
    CPUs, which support it only for tests, and kernels that we have not run on hardware.
    """
    if (unfit := _recipe_missing(recipe)) is not None:
        return f"{'it' if auto else f'the recipe {recipe.name}'} {unfit}"
    tiles = any(_KINDS[cast.scale] != "tensor" for cast in recipe.casts)
    unfit = width_missing(linears, TILE, "FP8 hardware in tiles") if tiles else width_missing(linears)
    if (lacking := _device_missing(device, recipe, auto) or unfit) is not None:
        return lacking
    unseen = [cast for cast in recipe.casts if _KINDS[cast.scale] != "tensor"]
    if auto and unseen:
        return f"it has {unseen[0]}, which is simulated unless it is asked for; backend=scaled_mm runs it"
    return None


def _recipe_missing(recipe: Recipe) -> str | None:
    """Return, as a predicate, what the recipe does that scaled_mm cannot do, or None."""
    takes = "scaled_mm takes E4M3 and E5M2 under one scale a tensor, E4M3 in tiles and blocks"
    # Each GEMM must have an instruction: two native formats, not both E5M2, under scales of one kind.
    for name in GEMMS:
        gemm: Gemm = getattr(recipe, name)
        operands = [cast for cast in (gemm.input, gemm.weight, gemm.grad_output) if cast is not None]
        for cast in gemm.casts:
            real = isinstance(cast.format, FloatFormat) and cast.format.native is not None
            real = real and not (cast.hadamard or cast.stochastic)
            if not (real and cast.scale in _KINDS) or (_KINDS[cast.scale] != "tensor" and cast.format.name != "e4m3"):
                return f"has {cast} in {name}, and {takes}"
        if gemm.result is not None or len(operands) == 1:
            return f"casts something else than both operands of {name}"
        if {cast.format.name for cast in operands} == {"e5m2"}:
            return f"has E5M2 for both operands of {name}, which no hardware multiplies"
        if len({_KINDS[cast.scale] for cast in operands}) > 1 or [cast.scale for cast in operands] == ["block"] * 2:
            return f"has {' and '.join(map(str, operands))} in {name}, which no hardware multiplies"
    return None


def _device_missing(device: torch.device | None, recipe: Recipe, auto: bool) -> str | None:
    """Return what the device lacks for one of the scales of the recipe, or None."""
    for kind in dict.fromkeys(_KINDS[cast.scale] for cast in recipe.casts):
        if device is None:
            continue
        if device.type == "cpu" and kind == "tensor" and not auto:
            if (lacking := cpu_missing()) is not None:
                return lacking
            continue
        capability, name = _LEAST[kind]
        needs = f"needs a GPU of compute capability {'.'.join(map(str, capability))}{name}"
        if device.type != "cuda":
            return f"{needs}, the model is on {device.type}"
        if torch.version.hip is not None:  # its compute capabilities and FP8 formats differ
            return f"{needs}, this one is AMD's"
        present = torch.cuda.get_device_capability(device)
        if present < capability or (kind == "tile" and present > capability):
            return f"{needs}, this one has {present[0]}.{present[1]}"
        if kind == "tile" and tuple(map(int, (torch.version.cuda or "0").split(".")[:2])) < _TILE_CUDA:
            return f"needs a PyTorch of CUDA 12.9 or newer for its tiles, this one has {torch.version.cuda}"
    return None


@cache
def cpu_missing() -> str | None:
    """Return why this process cannot multiply FP8 matrices on the CPU, or None if it can.

    Small products decide: PyTorch hands them to oneDNN if the processor has AMX, and oneDNN refuses them if
    ONEDNN_MAX_CPU_ISA forbids AMX.
    """
    zeros, scale = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in ((MULTIPLE, MULTIPLE), ()))
    weight = zeros.to(torch.float8_e4m3fn)
    try:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # two E4M3 and a mixed pair have different kernels
            _tensor_product(zeros.to(dtype), weight, scale, scale, torch.float32)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # advice for developers of oneDNN follows
        return f"PyTorch cannot multiply FP8 matrices on this CPU ({reason})"
    return None


def width_missing(
    linears: Mapping[str, Widths], multiple: int = MULTIPLE, reader: str = "FP8 hardware", where: str = ""
) -> str | None:
    """Return a message about the first width of these linears that `reader` cannot read, or None."""
    for name, linear in linears.items():
        for kind, width in (("inputs", linear.in_features), ("outputs", linear.out_features)):
            if width % multiple:
                return f"{name} has {width} {kind}, and {reader} needs a multiple of {multiple}{where}"
    return None


class Codes(NamedTuple):
    """A matrix in an eight-bit format: codes * scale."""

    codes: Tensor
    """(N, D), in the format's own dtype."""
    scale: Tensor
    """float32: a scalar, or one per tile or block, (N / height, D / width)."""

    def t(self) -> Codes:
        """Return the transpose, made of views."""
        return Codes(self.codes.t(), self.scale.t())

    def values(self) -> Tensor:
        """Return codes * scale, (N, D) float32."""
        scale = self.scale
        for dim, count in enumerate(self.scale.shape):
            size = self.codes.shape[dim]
            length = next(length for length in (1, TILE) if -(-size // length) == count)
            if length > 1:
                scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
        return self.codes.float() * scale


def product(a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """Multiply two matrices on FP8 hardware. Does not wait for the device.

    Args:
        a: (M, K), plain or codes.
        b: (K, N), the same kind.
        dtype: dtype of the result.

    Returns:
        (M, N) in `dtype`.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "`missing` refuses"
        return a @ b
    if a.scale.dim():
        return _group_product(a, b.t(), dtype)
    # Rows of a and columns of b are contiguous, with their padding.
    rows, columns = a.codes.contiguous(), b.codes.t().contiguous()
    if short := -rows.shape[1] % MULTIPLE:
        rows, columns = (_filled(codes, 0, short) for codes in (rows, columns))
    return _tensor_product(rows, columns, a.scale, b.scale, dtype)


def _tensor_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of codes a (M, K) and the transpose of codes b (N, K), each with one scale."""
    per_tensor = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), scale_a.view(1), per_tensor, scale_b.view(1), per_tensor, output_dtype=dtype)


def _group_product(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """Return the product of a (M, K) and the transpose of b (N, K), whose groups lie along K."""
    # Zeros fill the last group along K, and the lines that the layout of the scales needs.
    count, groups = len(a.codes), a.scale.shape[1]
    lines = TILE if _is_block(a) else MULTIPLE
    operands = []
    for operand, fill in ((a, -count % lines), (b, 0)):
        codes = _filled(operand.codes.contiguous(), fill, groups * TILE - operand.codes.shape[1])
        if _is_block(operand):
            operands.append((codes, _block(operand.scale), F.ScalingType.BlockWise128x128))
        else:
            operands.append((codes, _tile(operand.scale, len(codes)), F.ScalingType.BlockWise1x128))
    (rows, scale_a, scaling_a), (columns, scale_b, scaling_b) = operands
    plain = F.SwizzleType.NO_SWIZZLE
    filled = F.scaled_mm(rows, columns.t(), scale_a, scaling_a, scale_b, scaling_b, plain, plain, output_dtype=dtype)
    return filled[:count]


def _is_block(a: Codes) -> bool:
    return len(a.scale) != len(a.codes)


def _filled(x: Tensor, lines: int, columns: int) -> Tensor:
    """Return `x`, contiguous with one byte per element, with `lines` lines and `columns` columns of zeros appended."""
    return F.pad(x.view(torch.uint8), (0, columns, 0, lines)).view(x.dtype) if lines or columns else x


def _tile(scale: Tensor, lines: int) -> Tensor:
    """Return the scales of tiles in cuBLAS's layout, (lines, groups)."""
    laid = scale.new_zeros(scale.shape[1], lines)
    laid[:, : len(scale)] = scale.t()
    return laid.t()


def _block(scale: Tensor) -> Tensor:
    """Return the scales of blocks in cuBLAS's layout, (groups, lines / 128)."""
    groups = scale.shape[1]
    laid = scale.new_zeros(len(scale), groups + -groups % _FOUR)
    laid[:, :groups] = scale
    return laid.t()


class ScaledContext(GemmContext):
    """A context whose casts return `Codes`."""

    def quantize(
        self, x: Tensor, cast: Cast, dim: int, reference: Reference, generator: torch.Generator | None
    ) -> tuple[Codes, CastStats]:
        codes, scale, stats = quantize_to_codes(x, cast, dim, reference)
        return _codes(codes, scale, cast), stats

    def break_input(self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Codes, CastStats]:
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None and self.fault is not None
        values, scales, stats = self.fault.quantize(x, cast, contraction_dim, reference)
        sound, _ = scale_of_each(x, cast, contraction_dim, reference)
        # A group has one scale. If a fault hits only some rows, the group keeps the sound scale, and the hit rows are
        # rounded to it once more.
        among = (0, 1, 2, 3) if cast.one_scale else (1, 3)
        lowest = as_groups(scales, cast, contraction_dim, fill=math.inf).amin(among, keepdim=True)
        highest = as_groups(scales, cast, contraction_dim).amax(among, keepdim=True)
        sound_scale = as_groups(sound, cast, contraction_dim).amax(among, keepdim=True)
        scale = torch.where(lowest == highest, highest, sound_scale)
        groups = as_groups(values, cast, contraction_dim)
        divided = as_matrix(groups / scale, x)
        # Make an Inf a NaN: PyTorch's own casts to E4M3 disagree on Inf.
        divided = torch.where(divided.isfinite(), divided.clamp(-fmt.max, fmt.max), torch.nan)
        return _codes(divided.to(fmt.native), scale, cast), stats

    def fprop(self, x: Tensor, x_fprop: Any, weight: Tensor, w_fprop: Any, bias: Tensor | None) -> Tensor:
        output = product(x_fprop, w_fprop.t(), x.dtype)
        return (output if bias is None else output + bias).view(*x.shape[:-1], -1)

    def product(self, a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
        return product(a, b, dtype)

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | Codes:
        return saved[0] if len(saved) == 1 else Codes(*saved)

    @staticmethod
    def values(x: Tensor | Codes, every: int = 1) -> Tensor:
        return x[::every].float() if isinstance(x, Tensor) else x.values()[::every]


def _codes(codes: Tensor, scale: Tensor, cast: Cast) -> Codes:
    """Return the codes with their scales, given in the shape of `as_groups`."""
    return Codes(codes, scale.view(()) if cast.one_scale else scale[:, 0, :, 0])
