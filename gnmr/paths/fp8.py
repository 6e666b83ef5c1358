"""FP8 GEMMs as the hardware runs them: backend scaled_mm (`backends.py`).

scaled_mm runs what has one scale a tensor: `fp8_hybrid`, `fp8_delayed` and their like, and GEMMs that cast nothing. The
casts, what is counted of them and delayed scales are those of the simulation; what differs is the order of a GEMM's
sums, and that values stay codes until the product, so that nothing is rounded to bfloat16 in between. For scales that
are powers of two and sums that float32 holds exactly both give the same bits. What is kept for backward is the codes:
one byte an element, shared as in the simulation, and four bytes for the scale.

The hardware reads the first operand row by row and the second column by column; where a GEMM meets them the other way
round the codes are transposed, one byte an element. Dimensions must be multiples of 16: widths are checked when the
model is converted, and missing tokens of wgrad's contraction are filled with zeros, which add nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnmr.paths.formats import FloatFormat
from gnmr.paths.recipes import GEMMS, Cast, Gemm, Recipe
from gnmr.paths.scaling import count_nonfinite, largest_magnitude, scale_of
from gnmr.paths.simulated import BEYOND, Met, Pass, linear_backward, remember, simulated_linear

if TYPE_CHECKING:
    from gnmr.paths.faults import Injector
    from gnmr.paths.probe import MeasuredCasts
    from gnmr.paths.saved import PathLinear

_CAPABILITY = (8, 9)
_MULTIPLE = 16


def missing(recipe: Recipe, linears: dict[str, nn.Linear], device: torch.device, auto: bool) -> str | None:
    """Why `torch._scaled_mm` cannot run the recipe in these linears on `device`; None: it can.

    `auto`: nobody asked for it. Then CPUs, which have it for tests, count as without.
    """
    if (unfit := _recipe_missing(recipe)) is not None:
        return f"{'it' if auto else f'the recipe {recipe.name}'} {unfit}"
    return _device_missing(device, "auto" if auto else "scaled_mm") or width_missing(linears)


def _recipe_missing(recipe: Recipe) -> str | None:
    """What it does that scaled_mm cannot, as a predicate; None: it runs."""
    takes = "torch._scaled_mm takes E4M3 and E5M2 under one scale a tensor"
    for name in GEMMS:
        gemm: Gemm = getattr(recipe, name)
        operands = [cast for cast in (gemm.input, gemm.weight, gemm.grad_output) if cast is not None]
        for cast in gemm.casts:
            one_scale = cast.scale in ("tensor", "delayed")
            if not (one_scale and isinstance(cast.format, FloatFormat) and cast.format.native is not None):
                return f"has {cast} in {name}, and {takes}"
        if gemm.result is not None or len(operands) == 1:
            return f"casts something else than both operands of {name}"
        if {cast.format.name for cast in operands} == {"e5m2"}:
            return f"has E5M2 for both operands of {name}, which no hardware multiplies"
    return None


def _device_missing(device: torch.device, backend: str) -> str | None:
    if device.type == "cpu" and backend == "scaled_mm":
        return None
    return capability_missing(device, _CAPABILITY, " (Ada, Hopper)")


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
    linears: dict[str, nn.Linear], multiple: int = _MULTIPLE, reader: str = "FP8 hardware", where: str = ""
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
    """A scalar in float32."""

    def t(self) -> Codes:
        return Codes(self.codes.t(), self.scale)


class _RealPass(Pass):
    """A pass whose casts give `Codes`."""

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Codes, Met]:
        fmt, wide = cast.format, x.float()
        assert isinstance(fmt, FloatFormat) and fmt.native is not None, "`missing` refuses"
        largest = largest_magnitude(wide, (0, 1))
        scale = scale_of(largest if reference is None else reference(largest), fmt, torch.float32)
        saturated = (wide.abs() > scale * (fmt.max * BEYOND)).sum() if cast.scale == "delayed" else None
        codes = (wide / scale).clamp_(-fmt.max, fmt.max).to(fmt.native)
        return Codes(codes, scale.view(())), Met(largest, saturated, count_nonfinite(x, largest))

    def break_(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Codes, Met]:
        # The codes have one scale: where only some rows are hit the sound one, to which theirs are rounded once more.
        fmt = cast.format
        assert isinstance(fmt, FloatFormat) and fmt.native is not None and self.fault is not None
        values, scales, sound, met = self.fault.quantize(x, cast, contraction_dim, reference)
        scale = scales.index_select(0, sound)[0, 0]
        scaled = values / scale
        # An Inf becomes NaN: PyTorch's own casts to E4M3 do not agree on it.
        codes = torch.where(scaled.isfinite(), scaled.clamp(-fmt.max, fmt.max), torch.nan).to(fmt.native)
        return Codes(codes, scale), met

    def product(self, a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
        return product(a, b, dtype)

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | Codes:
        return saved[0] if len(saved) == 1 else Codes(*saved)

    @staticmethod
    def values(x: Tensor | Codes, every: int = 1) -> Tensor:
        return x[::every].float() if isinstance(x, Tensor) else x.codes[::every].float() * x.scale


def product(a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """a (M, K) times b (K, N), both plain or both codes, in `dtype`. Does not wait for the device."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "`missing` refuses"
        return a @ b
    # Rows of a and columns of b lie in one piece, and so does what fills them up.
    rows, columns = a.codes.contiguous(), b.codes.t().contiguous()
    if short := -rows.shape[1] % _MULTIPLE:
        rows, columns = (F.pad(x.view(torch.uint8), (0, short)).view(x.dtype) for x in (rows, columns))
    return torch._scaled_mm(rows, columns.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype)


class _ScaledLinear(torch.autograd.Function):
    """F.linear by `product`, of an input that was cast already. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        the_pass: _RealPass,
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
) -> tuple[Tensor, str]:
    """As `simulated.simulated_linear`, really in eight bits."""
    return simulated_linear(operator, recipe, input, x, weight, bias, keeps, fault, _RealPass, _ScaledLinear)


def pass_kind(recipe: Recipe) -> type[Pass]:
    """What casts and multiplies under `recipe`."""
    return _RealPass if recipe.backend == "scaled_mm" else Pass
