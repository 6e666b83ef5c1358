"""FP8 GEMMs as the hardware runs them: backend scaled_mm (`backends.py`).

scaled_mm runs GEMMs that cast nothing, and those whose operands both have

    one scale a tensor      `fp8_hybrid`, `fp8_delayed` and their like: compute capability 8.9 (Ada, Hopper) or newer;
                            E4M3 or E5M2, one of them E4M3
    tiles and blocks        `deepseek_v3`; E4M3, blocks in one operand only: 9.0 (Hopper) alone, CUDA 12.9 or newer
    mx                      `mxfp8`; E4M3: 10.0 (Blackwell) or newer

The last two were never run on hardware by us: `auto` leaves them alone, who asks for them by name gets them.

The casts, what is counted of them and delayed scales are those of the simulation; what differs is the order of a GEMM's
sums, and that a value's scale meets the product, so that nothing is rounded to bfloat16 in between. For scales
that are powers of two and sums that float32 holds exactly both give the same bits. What is kept for backward is the
codes: one byte an element, shared as in the simulation, and the scales.

The hardware reads the first operand row by row and the second column by column; where a GEMM meets them the other way
round the codes are transposed, one byte an element. Dimensions must be multiples of 16: widths are checked when the
model is converted, and missing tokens are filled with zeros, which add nothing (`codes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gnmr.paths.codes import E8M0, MULTIPLE, Codes, product
from gnmr.paths.formats import FloatFormat
from gnmr.paths.memory import Place
from gnmr.paths.recipes import GEMMS, Cast, Gemm, Recipe
from gnmr.paths.simulated import (
    Met,
    Pass,
    as_groups,
    as_matrix,
    linear_backward,
    remember,
    scale_of_each,
    scaled,
    simulated_linear,
)

if TYPE_CHECKING:
    from gnmr.paths.faults import Injector
    from gnmr.paths.probe import MeasuredCasts
    from gnmr.paths.saved import PathLinear

_KINDS = {"tensor": "tensor", "delayed": "tensor", "tile": "tile", "block": "tile", "mx": "mx"}
"""Scale: what its hardware is known by."""
_LEAST = {"tensor": ((8, 9), " (Ada, Hopper)"), "mx": ((10, 0), " (Blackwell)")}
_TILE_CAPABILITY = (9, 0)
_TILE_CUDA = (12, 9)


def missing(recipe: Recipe, linears: dict[str, nn.Linear], device: torch.device | None, auto: bool) -> str | None:
    """Why scaled_mm cannot run the recipe in these linears on `device`; None: it can.

    `device` None: one that has the hardware. `auto`: nobody asked for it. Then CPUs, which have it for tests, count as
    without, and so does what no hardware has run yet.
    """
    if (unfit := _recipe_missing(recipe)) is not None:
        return f"{'it' if auto else f'the recipe {recipe.name}'} {unfit}"
    if (lacking := _device_missing(device, recipe, auto) or width_missing(linears)) is not None:
        return lacking
    unseen = [cast for cast in recipe.casts if _KINDS[cast.scale] != "tensor"]
    if auto and unseen:
        return f"it has {unseen[0]}, which scaled_mm was never seen to run on hardware; backend=scaled_mm tries it"
    return None


def _recipe_missing(recipe: Recipe) -> str | None:
    """What it does that scaled_mm cannot, as a predicate; None: it runs."""
    takes = "scaled_mm takes E4M3 and E5M2 under one scale a tensor, E4M3 in tiles, blocks and mx"
    for name in GEMMS:
        gemm: Gemm = getattr(recipe, name)
        operands = [cast for cast in (gemm.input, gemm.weight, gemm.grad_output) if cast is not None]
        for cast in gemm.casts:
            real = isinstance(cast.format, FloatFormat) and cast.format.native is not None
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
        lacking = _tile_missing(device) if kind == "tile" else capability_missing(device, *_LEAST[kind])
        if lacking is not None:
            return lacking
    return None


def _tile_missing(device: torch.device) -> str | None:
    needs = "needs a GPU of compute capability 9.0 (Hopper)"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{needs}, the model is on {device.type if torch.version.hip is None else 'a GPU of AMD'}"
    if (found := torch.cuda.get_device_capability(device)) != _TILE_CAPABILITY:
        return f"{needs}, this one has {found[0]}.{found[1]}"
    if tuple(map(int, (torch.version.cuda or "0").split(".")[:2])) < _TILE_CUDA:
        return f"needs a PyTorch of CUDA 12.9 or newer for its tiles, this one has {torch.version.cuda}"
    return None


def capability_missing(device: torch.device, least: tuple[int, int], known_as: str = "") -> str | None:
    """Why `device` is no GPU of compute capability `least`; None: it is one."""
    needs = f"needs a GPU of compute capability {least[0]}.{least[1]} or newer{known_as}"
    if device.type != "cuda":
        return f"{needs}, the model is on {device.type}"
    if torch.version.hip is not None:  # whose numbers count otherwise, and whose FP8 formats may be others
        return f"{needs}, this one is AMD's"
    found = torch.cuda.get_device_capability(device)
    return None if found >= least else f"{needs}, this one has {found[0]}.{found[1]}"


def width_missing(
    linears: dict[str, nn.Linear], multiple: int = MULTIPLE, reader: str = "FP8 hardware", where: str = ""
) -> str | None:
    """The first width of these linears that `reader` cannot read; None: it can read all."""
    for name, linear in linears.items():
        for kind, width in (("inputs", linear.in_features), ("outputs", linear.out_features)):
            if width % multiple:
                return f"{name} has {width} {kind}, and {reader} needs a multiple of {multiple}{where}"
    return None


class RealPass(Pass):
    """A pass whose casts give `Codes`."""

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Codes, Met]:
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None, "`missing` refuses"
        divided, scale, largest, saturated = scaled(x, cast, contraction_dim, reference)
        return _codes(divided, scale, x, cast, fmt.native), Met(largest, saturated, self.nonfinite(x, largest))

    def break_(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Codes, Met]:
        # A group has one scale: where only some rows are hit the sound one, to which theirs are rounded once more.
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None and self.fault is not None
        values, scales, met = self.fault.quantize(x, cast, contraction_dim, reference)
        sound, _ = scale_of_each(x, cast, contraction_dim, reference)
        each = as_groups(scales, cast, contraction_dim)
        lowest, highest = each.amin((1, 3), keepdim=True), each.amax((1, 3), keepdim=True)
        scale = torch.where(lowest == highest, highest, as_groups(sound, cast, contraction_dim)[:, :1, :, :1])
        if cast.scale == "mx":  # a fault's scale need not be a power of two; the next larger one holds its values
            scale = scale.log2().ceil().exp2()
        divided = as_groups(values, cast, contraction_dim) / scale
        # An Inf becomes NaN: PyTorch's own casts to E4M3 do not agree on it.
        divided = torch.where(divided.isfinite(), divided.clamp(-fmt.max, fmt.max), torch.nan)
        return _codes(divided, scale, x, cast, fmt.native), met

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
    found = scale[:, 0, :, 0]
    return Codes(codes, found.to(E8M0) if cast.scale == "mx" else found)


class ScaledLinear(torch.autograd.Function):
    """F.linear by `product`, of an input that was cast already. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        the_pass: RealPass,
        x_fprop: Tensor | Codes,
        x_wgrad: Tensor | Codes | None,
        measured: MeasuredCasts | None,
    ) -> Tensor:
        remember(ctx, the_pass, x, weight, x_wgrad, measured)
        recipe, made = the_pass.recipe, dict[Any, tuple[Any, Met]]()
        w_fprop = the_pass.cast("weight", weight, recipe.fprop.weight, 1, made)
        dgrad = recipe.dgrad.weight
        same = made.get(the_pass.key(dgrad, 0)) if dgrad is not None else None
        weights = (weight,) if same is None else tuple(same[0])
        ctx.weight_is_cast, ctx.num_weights = same is not None, len(weights)
        kept = () if x_wgrad is None else (x_wgrad,) if isinstance(x_wgrad, Tensor) else tuple(x_wgrad)
        ctx.save_for_backward(*weights, *kept)
        output = product(x_fprop, w_fprop.t(), x.dtype)
        return (output if bias is None else output + bias).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return linear_backward(ctx, *grads)


def scaled_mm_linear(
    operator: PathLinear,
    recipe: Recipe,
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keeps: bool,
    fault: Injector | None = None,
) -> tuple[Tensor, str | Place]:
    """As `simulated.simulated_linear`, really in eight bits."""
    return simulated_linear(operator, recipe, input, x, weight, bias, keeps, fault, RealPass, ScaledLinear)


def pass_kind(recipe: Recipe) -> type[Pass]:
    """What casts and multiplies under `recipe`."""
    return RealPass if recipe.backend == "scaled_mm" else Pass
