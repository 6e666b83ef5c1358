"""INT8 in the forward pass, for fine-tuning on frozen weights (5.3, E.3).

The weight has one scale per output channel and the input one scale per token, both computed from the current tensor.
fprop multiplies the codes, integers from -127 to 127, and scales their sums:

    x_t = s_t X_t       s_t = max|x_t| / 127        w_o = c_o W_o       c_o = max|w_o| / 127
    y_to = (sum_i X_ti W_oi) * (s_t * c_o) + b_o

The sum is an int32 and exact; the rest is float32. The result is rounded once to the input's dtype, after the bias is
added, as in F.linear. `dgrad` reads the weight in its own 16 bits, or codes times scale under `llm_int8_dgrad`.
`grad_output` is not quantized. `wgrad` reads the input in 16 bits; if the weight is frozen, nothing of the input is
kept.

PyTorch's INT8 product runs on CPUs and NVIDIA GPUs if a trial shows that it adds up exactly. On GPUs widths must be
multiples of 8, and inputs of fewer than 32 tokens are padded with zeros. The simulation multiplies codes in float32,
1024 at a time, because float32 holds such sums exactly. Both give the same bits.

`weights` says where the codes of the weight are. With O outputs and I inputs the 16-bit weight takes 2 O I bytes.

    online     The codes are not kept: every forward pass makes them of the weight, whether it is trainable or not.
    instead    The weight, which must be frozen, is dropped, and only O (I + 4) bytes are left. dgrad, the recovery
               path and evaluation read codes times scale: recovery is then W8A16 and *not* BF16. In the state dict
               `weight` holds the codes (int8) and `weight_scale` (O, 1) the scales. A 16-bit `weight` that is loaded
               is quantized. peft makes the adapters of codes in float32; .to(torch.bfloat16) converts them. Merging
               them is refused.

Outlier columns (LLM.int8(), arXiv 2208.07339) are the input columns of x whose largest magnitude in the current tensor
reaches a threshold, published as 6.0. They stay in 16 bits and are multiplied with the 16-bit weight's columns
(`instead`: codes times scale). That product is added in float32. Neither the INT8 product nor the tokens' scales see
these columns. Choosing them waits for the device, once for all readers of a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion.gemms import GemmContext, LinearFunction
from gnmr.conversion.linear import Arguments, Operands, PathLinear, autocast_dtype
from gnmr.conversion.passes import Pass
from gnmr.conversion.scaled_mm import width_missing
from gnmr.conversion.shared import Widths
from gnmr.formats.cast import Reference
from gnmr.formats.cast_stats import CastStats
from gnmr.formats.dispatch_modes import always_recomputed
from gnmr.formats.number_formats import FORMATS
from gnmr.formats.recipes import RECIPES, Cast, Recipe
from gnmr.formats.scaling import count_nonfinite, largest_magnitude, scale_of

_INT8 = FORMATS["int8"]
PER_ROW = Cast(_INT8, "row")
_EXACT = 1024
"""Number of products of two codes that float32 adds up exactly: 1024 * 127^2 < 2^24."""
MOST_INPUTS = (2**31 - 1) // 127**2
"""Largest number of products of two codes whose sum an int32 holds."""
_MULTIPLE, _ROWS = 8, 32
_READ_VALUES = ("merge", "unmerge", "dequantize_module_weight")
"""Functions of peft that read the elements of a weight as numbers; others read its dtype and device."""


class Integers(NamedTuple):
    """A matrix (N, D) of codes with one scale per row; an input may also have columns in 16 bits."""

    codes: Tensor
    """(N, D) int8; 0 in the columns `columns`."""
    scale: Tensor
    """(N, 1) float32; NaN for a row with a NaN or an Inf."""
    columns: Tensor | None = None
    """Indices of the columns in 16 bits, (C,) int64."""
    outliers: Tensor | None = None
    """The columns in 16 bits, (N, C), in their own dtype."""

    @always_recomputed
    def values(self, dtype: torch.dtype) -> Tensor:
        """Return codes times scale; columns in 16 bits are 0.

        Returns: (N, D), rounded to `dtype` once.
        """
        return self.codes.to(torch.float32).mul_(self.scale).to(dtype)


def integers(x: Tensor, outliers: float | None = None) -> tuple[Integers, CastStats]:
    """Quantize a matrix to INT8.

    Args:
        x: (N, D), any floating dtype.
        outliers: columns with at least this magnitude stay unchanged; finding them waits for the device.

    Returns:
        The codes with one scale per row, and statistics of the cast.
    """
    x, columns, outlier_columns = _without_outliers(x, outliers)
    wide = x.to(torch.float32, copy=True)
    largest = largest_magnitude(wide, (1,))
    scale = scale_of(largest, _INT8, torch.float32)
    codes = _INT8.round(wide.div_(scale)).to(torch.int8)
    nonfinite = count_nonfinite(x, largest)
    if outlier_columns is not None:  # delayed scales of another path look back on the whole tensor
        largest = torch.maximum(largest, largest_magnitude(outlier_columns, (1,)).float())
    return Integers(codes, scale, columns, outlier_columns), CastStats(largest, None, nonfinite)


def _without_outliers(x: Tensor, threshold: float | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (`x` with 0 in the outlier columns; the indices of these columns, and the columns, or None twice)."""
    if threshold is None or not x.shape[0] or x.is_meta:  # a tensor without contents has no outliers
        return x, None, None
    columns = (largest_magnitude(x, (0,)).float() >= threshold).nonzero()[:, 1]
    if not len(columns):
        return x, None, None
    return x.index_fill(1, columns, 0), columns, x.index_select(1, columns)


def products(a: Tensor, b: Tensor, real: bool) -> Tensor:
    """Multiply integers exactly.

    Args:
        a: codes (M, K), int8.
        b: codes (N, K), int8; K is at most 133,144.
        real: whether PyTorch's INT8 product multiplies; False: products of float32.

    Returns:
        a times the transpose of b, (M, N) int32.
    """
    rows = a.shape[0]
    if real and a.shape[1] > 1:  # for a single input oneDNN writes nothing, and the result is arbitrary memory
        if a.device.type == "cuda" and rows < _ROWS:
            a = F.pad(a, (0, 0, 0, _ROWS - rows))
        # Private, because torch has no public product of integers, which would replace it.
        return torch._int_mm(a, b.t())[:rows]
    sums, partial_sums = (
        torch.zeros(rows, b.shape[0], dtype=dtype, device=a.device) for dtype in (torch.int32, torch.float32)
    )
    for a_inputs, b_inputs in zip(a.split(_EXACT, dim=1), b.split(_EXACT, dim=1), strict=True):
        torch.mm(
            a_inputs.float(), b_inputs.float().t(), out=partial_sums
        )  # with `out`, autocast leaves the product in float32
        sums += partial_sums.to(torch.int32)
    return sums


def missing(recipe: Recipe, linears: Mapping[str, Widths], device: torch.device) -> str | None:
    """Return why PyTorch's INT8 product cannot run the recipe in these linears on `device`, or None if it can.

    A GPU that this machine does not have counts as able. The first call for a device waits for it.
    """
    if not recipe.integer:
        return f"the recipe {recipe.name} multiplies no integers, as llm_int8 does"
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    lacking = None if elsewhere else _device_missing(device)
    if lacking is None and device.type == "cuda":
        lacking = width_missing(linears, _MULTIPLE, "PyTorch's INT8 product", " on GPUs")
    return lacking


@cache
def _device_missing(device: torch.device) -> str | None:
    """Return what the device lacks, or None, by a trial: kernels without integer instructions may saturate."""
    if device.type not in ("cpu", "cuda"):
        return f"PyTorch's INT8 product runs on CPUs and NVIDIA GPUs, the model is on {device.type}"
    largest = torch.full((64, 64), 127, dtype=torch.int8, device=device)
    try:
        sums = [int(total) for sign in (1, -1) for total in products(largest, sign * largest, True).aminmax()]
    except RuntimeError as error:
        return f"PyTorch's INT8 product does not run on this {device.type} ({str(error).partition(chr(10))[0]})"
    exact = 64 * 127**2
    return (
        None
        if sums == [exact, exact, -exact, -exact]
        else "PyTorch's INT8 product does not add up exactly on this machine"
    )


class IntContext(GemmContext):
    """A context that multiplies integers in fprop, or reads a weight that is left as codes.

    Its other casts are those of the simulation.
    """

    weight_codes: Integers | None = None
    """The codes that are left of the weight; None: this pass makes them."""

    def cast_weight(self, weight: Tensor) -> tuple[Integers, Any]:
        if self.weight_codes is None:
            return self.cast("weight", weight, self.recipe.fprop.weight), weight
        if self.recipe.integer:
            self.cast("weight", weight, None)  # records the magnitude, for delayed scales of the other path
        return self.weight_codes, (self.weight_codes.codes, self.weight_codes.scale)

    @always_recomputed
    def fprop(self, x: Tensor, x_fprop: Any, weight: Tensor, w_fprop: Any, bias: Tensor | None) -> Tensor:
        if not self.recipe.integer:
            return F.linear(x, w_fprop.values(x.dtype), bias)
        # Exact integer sums, times both scales in float32.
        output = products(x_fprop.codes, w_fprop.codes, self.recipe.backend == "int_mm").float()
        output.mul_(x_fprop.scale * w_fprop.scale.t())
        # Outlier columns in 16 bits.
        if x_fprop.columns is not None and x_fprop.outliers is not None:
            if weight.is_floating_point():
                columns = weight.index_select(1, x_fprop.columns)
            else:
                columns = Integers(weight.index_select(1, x_fprop.columns), w_fprop.scale).values(x.dtype)
            output += x_fprop.outliers @ columns.t()
        if bias is not None:
            output += bias
        return output.to(x.dtype).view(*x.shape[:-1], -1)

    def quantize(
        self, x: Tensor, cast: Cast, dim: int, reference: Reference, generator: torch.Generator | None
    ) -> tuple[Any, CastStats]:
        if cast.codes:
            return integers(x, cast.outliers)
        return super().quantize(x, cast, dim, reference, generator)

    def break_input(self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Any, CastStats]:
        if not cast.codes:
            return super().break_input(x, cast, contraction_dim, reference)
        assert self.fault is not None
        x, columns, outliers = _without_outliers(x, cast.outliers)
        values, scales, stats = self.fault.quantize(x, cast, contraction_dim, reference)
        scale = scales[:, :1]
        codes = (values / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-128, 127).to(torch.int8)
        # An integer is always finite: a non-finite element shows in the row's scale.
        scale = torch.where(values.isinf().any(dim=1, keepdim=True), torch.inf, scale)
        scale = torch.where(values.isnan().any(dim=1, keepdim=True), torch.nan, scale)
        return Integers(codes, scale.contiguous(), columns, outliers), stats

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return saved[0] if len(saved) == 1 else Integers(*saved).values(dtype)

    @staticmethod
    def values(x: Any, every: int = 1) -> Tensor:
        if not isinstance(x, Integers):
            return GemmContext.values(x, every)
        rows = x.codes[::every].float() * x.scale[::every]
        if x.columns is not None and x.outliers is not None:
            rows.index_copy_(1, x.columns, x.outliers[::every].float())
        return rows


class Int8Linear(PathLinear):
    """A `PathLinear` of a model whose recipe multiplies integers, with its weight's codes if it keeps them."""

    plain_class = nn.Linear
    weights: str
    """One of WEIGHTS."""
    weight_scale: Tensor
    """Scales of the weight under `instead`: a buffer, (O, 1) float32."""
    _own_dtype: torch.dtype

    def store(self, weights: str) -> None:
        """Keep the weight as requested; called once, when the operator is converted.

        Args:
            weights: online, or instead: the parameter becomes int8 codes (O, I) and `weight_scale` appears.
        """
        self.weights, self._own_dtype = weights, self.weight.dtype
        if weights == "instead":
            quantized, _ = integers(self.weight.detach())
            # Use another parameter, because another module may share this one.
            self.weight = nn.Parameter(quantized.codes, requires_grad=False)
            self.register_buffer("weight_scale", quantized.scale)

    def unstore(self) -> None:
        """Undo `store` as far as possible: a weight of which only codes are left becomes codes times scale."""
        if self.weights == "instead":
            quantized = Integers(self.weight, self.weight_scale)
            self.weight = nn.Parameter(quantized.values(self._own_dtype), requires_grad=False)
            del self.weight_scale
        del self.weights, self._own_dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute. Raises ValueError if an adapter reads values of a weight that is left as codes."""
        if name == "weight" and self.__dict__.get("weights") == "instead":
            # The one look at a caller: peft reads dtype and device of a weight in the same way as its elements, and
            # safe merges of integers would silently change nothing. A hook of peft before merging would replace it.
            reader = sys._getframe(1)
            if reader.f_code.co_name in _READ_VALUES and reader.f_globals.get("__name__", "").startswith("peft."):
                raise ValueError(
                    f"weights='instead': of the weight of {self.operator_name} INT8 codes alone are left, into which "
                    "no adapter can be merged, and which DoRA cannot read; use weights='online', or detach the "
                    "controller before merging"
                )
        return super().__getattr__(name)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes and scales that are kept."""
        return 0 if self.weights == "online" else self.out_features * (self.in_features + torch.float32.itemsize)

    def plain(self, input: Tensor) -> Tensor:
        """Compute as `PathLinear.plain`, of codes times scale if only codes are left.

        Returns: (..., O) in the dtype of `input`, or autocast's.
        """
        if self.weights != "instead":
            return super().plain(input)
        bias: Tensor | None = self.bias
        if (dtype := autocast_dtype(input)) is not None:
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        output: Tensor = LinearFunction.apply(input, self.weight, bias, None, self._codes_context(), input, None, None)
        return output

    def context_kind(self, recipe: Recipe) -> type[GemmContext]:
        """Return the class that casts and multiplies under `recipe`.

        Returns: `IntContext` if the recipe multiplies integers, on any backend.
        """
        return IntContext if recipe.integer else super().context_kind(recipe)

    def gemm_context(self, recipe: Recipe, **options: Any) -> GemmContext:
        """Return the context of a pass, with the codes of the weight if only these are left.

        Args:
            recipe: the casts.
            options: as in `PathLinear.gemm_context`.
        """
        context = super().gemm_context(recipe, **options)
        if isinstance(context, IntContext) and self.weights == "instead":
            context.weight_codes = Integers(self.weight, self.weight_scale)
        return context

    def _cast_operands(self, recipe: Recipe, begun: Pass, arguments: Arguments) -> Operands:
        if recipe.integer or self.weights != "instead":
            return super()._cast_operands(recipe, begun, arguments)
        # Only the weight is cast (`gnmr.conversion.converting`), and only its codes are left.
        return Operands(self._codes_context(), arguments.x, None, None, self.operator_name)

    def _codes_context(self) -> IntContext:
        """Return a context that reads codes times scale as the weight; the graph holds the weight as codes."""
        context = IntContext(RECIPES["bf16"], None, self.index, self.operator_name)
        context.weight_codes = Integers(self.weight, self.weight_scale)
        return context

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self._buffers.get("weight_scale")
        super()._apply(fn, recurse)
        # .to(torch.bfloat16) is for weights, not for scales
        if scale is not None and self.weight_scale.dtype != scale.dtype:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if self.weights == "instead" and weight is not None and weight.is_floating_point():
            quantized, _ = integers(weight)
            state_dict = {
                **state_dict,
                f"{prefix}weight": quantized.codes,
                f"{prefix}weight_scale": quantized.scale,
            }
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}"
