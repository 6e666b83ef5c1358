"""FP8 GEMMs as the hardware runs them: backend scaled_mm.

It runs GEMMs that cast nothing, and those whose operands both have

    one scale a tensor      `fp8_hybrid`, `fp8_delayed` and their like: compute capability 8.9 (Ada, Hopper) or newer;
                            E4M3 or E5M2, one of them E4M3
    tiles and blocks        `deepseek_v3`; E4M3, blocks in one operand only: 9.0 (Hopper) alone, CUDA 12.9 or newer

Tiles and blocks ran on one H200 (docs/cost.md): `auto` does not choose them, backend=scaled_mm does.

The casts, what is counted of them and delayed scales are those of the simulation. The order of a GEMM's sums differs,
and a value's scale meets the product, so that nothing is rounded to bfloat16 in between. What is kept for backward is
the codes, one byte an element, and the scales.

The hardware reads the first operand row by row and the second column by column: codes are transposed where a GEMM meets
them the other way round. Dimensions must be multiples of 16: widths are checked when the model is converted, and
missing tokens are filled with zeros, which add nothing. Groups of elements (1x128 tiles, 128x128 blocks) go through
`torch.nn.functional.scaled_mm`, which wants their scales laid out as cuBLAS reads them:

    tile    (lines, groups) float32, the lines of one group of columns next to each other; lines a multiple of 4
    block   (groups, lines / 128) float32, groups filled up to a multiple of 4 and next to each other

A line is a row of the first operand or a column of the second; a group is 128 elements of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.names import GEMMS
from gnmr.precision.cast import Reference, as_groups, as_matrix, scale_of_each, scaled
from gnmr.precision.cast_stats import CastStats
from gnmr.precision.formats import FloatFormat
from gnmr.precision.kernels.simulated import Draw, GemmContext
from gnmr.precision.recipes import TILE, Cast, Gemm, Recipe
from gnmr.precision.shared import Widths

MULTIPLE = 16
"""What the hardware wants every dimension of an eight-bit product to be a multiple of."""
_FOUR = 4
_KINDS = {"tensor": "tensor", "delayed": "tensor", "tile": "tile", "block": "tile"}
"""Scale: what its hardware is known by."""
_LEAST = {"tensor": ((8, 9), " or newer (Ada, Hopper)"), "tile": ((9, 0), " (Hopper)")}
_TILE_CUDA = (12, 9)


def missing(recipe: Recipe, linears: Mapping[str, Widths], device: torch.device | None, auto: bool) -> str | None:
    """Why scaled_mm cannot run the recipe in these linears on `device`; None: it can.

    `device` None: one that has the hardware. `auto`: chosen automatically, so CPUs (which have it for tests) and
    kernels that we have not run on hardware are left out.
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
    """What it does that scaled_mm cannot, as a predicate; None: it runs."""
    takes = "scaled_mm takes E4M3 and E5M2 under one scale a tensor, E4M3 in tiles and blocks"
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
    """What the device lacks for one of the scales of the recipe."""
    for kind in dict.fromkeys(_KINDS[cast.scale] for cast in recipe.casts):
        if device is None or (device.type == "cpu" and kind == "tensor" and not auto):
            continue
        capability, name = _LEAST[kind]
        needs = f"needs a GPU of compute capability {'.'.join(map(str, capability))}{name}"
        if device.type != "cuda":
            return f"{needs}, the model is on {device.type}"
        if torch.version.hip is not None:  # whose numbers count otherwise, and whose FP8 formats may be others
            return f"{needs}, this one is AMD's"
        found = torch.cuda.get_device_capability(device)
        if found < capability or (kind == "tile" and found > capability):
            return f"{needs}, this one has {found[0]}.{found[1]}"
        if kind == "tile" and tuple(map(int, (torch.version.cuda or "0").split(".")[:2])) < _TILE_CUDA:
            return f"needs a PyTorch of CUDA 12.9 or newer for its tiles, this one has {torch.version.cuda}"
    return None


def width_missing(
    linears: Mapping[str, Widths], multiple: int = MULTIPLE, reader: str = "FP8 hardware", where: str = ""
) -> str | None:
    """The first width of these linears that `reader` cannot read; None: it can read all."""
    for name, linear in linears.items():
        for kind, width in (("inputs", linear.in_features), ("outputs", linear.out_features)):
            if width % multiple:
                return f"{name} has {width} {kind}, and {reader} needs a multiple of {multiple}{where}"
    return None


class Codes(NamedTuple):
    """A matrix in a format of eight bits: codes * scale."""

    codes: Tensor
    """(N, D), of the format's own dtype."""
    scale: Tensor
    """float32: a scalar, or of each tile or block, (N / height, D / width)."""

    def t(self) -> Codes:
        """The transpose: views."""
        return Codes(self.codes.t(), self.scale.t())

    def values(self) -> Tensor:
        """(N, D) float32."""
        scale = self.scale
        for dim, count in enumerate(self.scale.shape):
            size = self.codes.shape[dim]
            length = next(each for each in (1, TILE) if -(-size // each) == count)
            if length > 1:
                scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
        return self.codes.float() * scale


def product(a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """a (M, K) times b (K, N), both plain or both codes, in `dtype`. Does not wait for the device."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "`missing` refuses"
        return a @ b
    if a.scale.dim():
        return _group_product(a, b.t(), dtype)
    # Rows of a and columns of b lie in one piece, and so does what fills them up.
    rows, columns = a.codes.contiguous(), b.codes.t().contiguous()
    if short := -rows.shape[1] % MULTIPLE:
        rows, columns = (_filled(each, 0, short) for each in (rows, columns))
    return torch._scaled_mm(rows, columns.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype)


def _group_product(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """a (M, K) times the transpose of b (N, K), whose groups lie along K."""
    count, groups = len(a.codes), a.scale.shape[1]
    lines = TILE if _is_block(a) else MULTIPLE
    found = []
    for each, fill in ((a, -count % lines), (b, 0)):
        codes = _filled(each.codes.contiguous(), fill, groups * TILE - each.codes.shape[1])
        if _is_block(each):
            found.append((codes, _block(each.scale), F.ScalingType.BlockWise128x128))
        else:
            found.append((codes, _tile(each.scale, len(codes)), F.ScalingType.BlockWise1x128))
    (rows, scale_a, scaling_a), (columns, scale_b, scaling_b) = found
    plain = F.SwizzleType.NO_SWIZZLE
    whole = F.scaled_mm(rows, columns.t(), scale_a, scaling_a, scale_b, scaling_b, plain, plain, output_dtype=dtype)
    return whole[:count]


def _is_block(a: Codes) -> bool:
    return len(a.scale) != len(a.codes)


def _filled(x: Tensor, lines: int, columns: int) -> Tensor:
    """A contiguous matrix of one byte an element with so many lines and columns of zeros behind."""
    return F.pad(x.view(torch.uint8), (0, columns, 0, lines)).view(x.dtype) if lines or columns else x


def _tile(scale: Tensor, lines: int) -> Tensor:
    """(lines, groups)."""
    laid = scale.new_zeros(scale.shape[1], lines)
    laid[:, : len(scale)] = scale.t()
    return laid.t()


def _block(scale: Tensor) -> Tensor:
    """(groups, lines / 128)."""
    groups = scale.shape[1]
    laid = scale.new_zeros(len(scale), groups + -groups % _FOUR)
    laid[:, :groups] = scale
    return laid.t()


class ScaledContext(GemmContext):
    """Its casts give `Codes`."""

    def quantize(self, x: Tensor, cast: Cast, dim: int, reference: Reference, draw: Draw) -> tuple[Any, CastStats]:
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None, "`missing` refuses"
        divided, scale, largest, saturated = scaled(x, cast, dim, reference)
        return _codes(divided, scale, x, cast, fmt.native), CastStats(largest, saturated, self.nonfinite(x, largest))

    def break_input(self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Codes, CastStats]:
        # A group has one scale: where only some rows are hit the sound one, to which theirs are rounded once more.
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None and self.fault is not None
        values, scales, stats = self.fault.quantize(x, cast, contraction_dim, reference)
        sound, _ = scale_of_each(x, cast, contraction_dim, reference)
        each = as_groups(scales, cast, contraction_dim)
        lowest, highest = each.amin((1, 3), keepdim=True), each.amax((1, 3), keepdim=True)
        scale = torch.where(lowest == highest, highest, as_groups(sound, cast, contraction_dim)[:, :1, :, :1])
        divided = as_groups(values, cast, contraction_dim) / scale
        # An Inf becomes NaN: PyTorch's own casts to E4M3 do not agree on it.
        divided = torch.where(divided.isfinite(), divided.clamp(-fmt.max, fmt.max), torch.nan)
        return _codes(divided, scale, x, cast, fmt.native), stats

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


def _codes(divided: Tensor, scale: Tensor, x: Tensor, cast: Cast, dtype: torch.dtype) -> Codes:
    """Of numbers divided by their `scale`, both as `as_groups` gives them, those of `x` (N, D)."""
    codes = as_matrix(divided, x).to(dtype).contiguous()  # cut first: a view would hold what fills it up
    if cast.scale in ("tensor", "delayed"):
        return Codes(codes, scale.view(()))
    return Codes(codes, scale[:, 0, :, 0])
