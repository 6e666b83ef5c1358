"""INT8 in the forward pass, for fine-tuning on frozen weights (5.3, E.3).

The weight has a scale an output channel, the input a scale a token, made of the tensor at hand; fprop multiplies the
codes, integers from -127 to 127, and scales their sums:

    x_t = s_t X_t       s_t = max|x_t| / 127        w_o = c_o W_o       c_o = max|w_o| / 127
    y_to = (sum_i X_ti W_oi) * (s_t * c_o) + b_o

The sum is an int32 and exact; the rest is float32. **Choice**: one rounding to the input's dtype at the end, behind the
bias, as in F.linear. dgrad reads the weight in its own 16 bits, or, under `llm_int8_dgrad`, codes times scale;
grad_output is not quantized. wgrad reads the input in 16 bits; of a frozen weight there is none, and nothing of the
input is kept.

    int_mm       `torch._int_mm`: CPUs and NVIDIA GPUs on which it is found to add up exactly; on GPUs widths must be
                 multiples of 8, and fewer than 32 tokens are filled up with zeros
    simulated    codes in float32, 1024 of them at a time, whose sums float32 holds: the same integers, in any order

Both give the same bits.

Where the codes of the weight are (`weights`), with O outputs and I inputs, beside or instead of its 2 O I bytes:

    online     nowhere: made of the weight in every forward pass, whether it is trainable or not. 0 bytes more
    beside     kept besides the weight, which must be frozen: O (I + 4) bytes more. Made again when the weight has
               changed (a loaded state dict, an optimizer's step), moved or been replaced; a change in place through
               `.data` (peft merges adapters so) or an array of NumPy's is not noticed: convert again
    instead    the weight is dropped and only O (I + 4) bytes are left. dgrad, the recovery path and evaluation read
               codes times scale: recovery is then W8A16 and *not* BF16. In the state dict `weight` holds the codes
               (int8) and `weight_scale` (O, 1) the scales; a 16-bit `weight` that is loaded is quantized. peft makes
               the adapters of codes in float32: .to(torch.bfloat16) is for them; to merge them restore the plan first

Outlier columns (LLM.int8(), arXiv 2208.07339): the columns (inputs) of x whose largest magnitude in this very tensor
reaches a threshold, published as 6.0, stay in 16 bits. They are multiplied with the 16-bit weight's columns (`instead`:
codes times scale), that product is added in float32, and neither the INT8 product nor the tokens' scales see them.
Their number decides shapes: choosing them waits for the device, once for all readers of a tensor. Nothing else here
waits, but for the check of the machine when the first model is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnmr.paths import fp8
from gnmr.paths.formats import FORMATS
from gnmr.paths.memory import Place, place_of
from gnmr.paths.recipes import Cast, Gemm, Recipe
from gnmr.paths.saved import Path, PathLinear, autocast_dtype
from gnmr.paths.scaling import count_nonfinite, largest_magnitude, scale_of
from gnmr.paths.simulated import Met, Pass, linear_backward, remember, simulated_linear

if TYPE_CHECKING:
    from gnmr.paths.faults import Injector
    from gnmr.paths.probe import MeasuredCasts

WEIGHTS = ("online", "beside", "instead")
_INT8 = FORMATS["int8"]
_ROW = Cast(_INT8, "row")
_EXACT = 1024
"""Products of two codes that float32 adds up exactly: 1024 * 127^2 < 2^24."""
_INPUTS = (2**31 - 1) // 127**2
"""And that an int32 holds."""
_MULTIPLE, _ROWS = 8, 32


class Integers(NamedTuple):
    """A matrix (N, D) of codes, each row under its scale; of an input the columns in 16 bits, where it has any."""

    codes: Tensor
    """(N, D) int8; 0 in the columns below."""
    scale: Tensor
    """(N, 1) float32; NaN for a row with a NaN or an Inf."""
    columns: Tensor | None = None
    """(C,) int64."""
    outliers: Tensor | None = None
    """(N, C): those columns in their own dtype."""

    def values(self, dtype: torch.dtype) -> Tensor:
        """(N, D): codes times scale, rounded to `dtype` once."""
        return self.codes.to(torch.float32).mul_(self.scale).to(dtype)


def integers(x: Tensor, outliers: float | None = None) -> tuple[Integers, Met]:
    """`x` (N, D), any floating dtype, in INT8 under a scale a row, and what the cast met.

    `outliers`: columns with a magnitude from here on stay as they are; finding them waits for the device.
    """
    x, columns, kept = _without_outliers(x, outliers)
    wide = x.to(torch.float32, copy=True)
    largest = largest_magnitude(wide, (1,))
    scale = scale_of(largest, _INT8, torch.float32)
    codes = _INT8.round(wide.div_(scale)).to(torch.int8)
    nonfinite = count_nonfinite(x, largest)
    if kept is not None:  # delayed scales of another path look back on all of the tensor
        largest = torch.maximum(largest, largest_magnitude(kept, (1,)).float())
    return Integers(codes, scale, columns, kept), Met(largest, None, nonfinite)


def _without_outliers(x: Tensor, threshold: float | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(`x` with 0 in the columns that stay in 16 bits, which these are, the columns); None, None: there are none."""
    if threshold is None or not x.shape[0] or x.is_meta:  # a tensor without contents has none
        return x, None, None
    found = (largest_magnitude(x, (0,)).float() >= threshold).nonzero()[:, 1]
    if not len(found):
        return x, None, None
    return x.index_fill(1, found, 0), found, x.index_select(1, found)


def products(a: Tensor, b: Tensor, real: bool) -> Tensor:
    """(M, N) int32: the rows of codes `a` (M, K) times those of `b` (N, K), int8 both; exact for K up to 133,144."""
    rows = a.shape[0]
    if real and a.shape[1] > 1:  # of a single input oneDNN writes nothing, and what comes back is any memory
        if a.device.type == "cuda" and rows < _ROWS:
            a = F.pad(a, (0, 0, 0, _ROWS - rows))
        return torch._int_mm(a, b.t())[:rows]
    sums, part = (torch.zeros(rows, b.shape[0], dtype=dtype, device=a.device) for dtype in (torch.int32, torch.float32))
    for some, others in zip(a.split(_EXACT, dim=1), b.split(_EXACT, dim=1), strict=True):
        torch.mm(some.float(), others.float().t(), out=part)  # with `out` autocast leaves it in float32
        sums += part.to(torch.int32)
    return sums


# ---- what runs it ----


def missing(recipe: Recipe, linears: dict[str, nn.Linear], device: torch.device) -> str | None:
    """Why `torch._int_mm` cannot run the recipe in these linears on `device`; None: it can.

    A GPU that this machine does not have can. The first time on a device it waits for it.
    """
    if not recipe.integer:
        return f"the recipe {recipe.name} multiplies no integers, as llm_int8 does"
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    found = None if elsewhere else _device_missing(device)
    if found is None and device.type == "cuda":
        found = fp8.width_missing(linears, _MULTIPLE, "torch._int_mm", " on GPUs")
    return found


@cache
def _device_missing(device: torch.device) -> str | None:
    """Found out by trying: kernels for CPUs without integer instructions may saturate halfway."""
    if device.type not in ("cpu", "cuda"):
        return f"torch._int_mm runs on CPUs and NVIDIA GPUs, the model is on {device.type}"
    largest = torch.full((64, 64), 127, dtype=torch.int8, device=device)
    try:
        sums = [int(found) for sign in (1, -1) for found in products(largest, sign * largest, True).aminmax()]
    except RuntimeError as error:
        return f"torch._int_mm does not run on this {device.type} ({str(error).partition(chr(10))[0]})"
    exact = 64 * 127**2
    return None if sums == [exact, exact, -exact, -exact] else "torch._int_mm does not add up exactly on this machine"


# ---- one linear ----


class _IntPass(Pass):
    """A pass whose fprop operands are `Integers`; its other casts are those of the simulation."""

    operator: Int8Linear

    @classmethod
    def of(
        cls, operator: PathLinear, recipe: Recipe, fault: Injector | None = None, looks_on: bool = False
    ) -> _IntPass:
        the_pass = super().of(operator, recipe, fault, looks_on)
        assert isinstance(the_pass, cls) and isinstance(operator, Int8Linear)
        the_pass.operator = operator
        return the_pass

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Met]:
        if cast.codes:
            return integers(x, cast.outliers)
        return super().quantize(x, cast, contraction_dim, reference)

    def break_(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Met]:
        if not cast.codes:
            return super().break_(x, cast, contraction_dim, reference)
        assert self.fault is not None
        x, columns, kept = _without_outliers(x, cast.outliers)
        values, scales, met = self.fault.quantize(x, cast, contraction_dim, reference)
        scale = scales[:, :1]
        codes = (values / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-128, 127).to(torch.int8)
        # An integer is always finite: what is not shows in the row's scale.
        scale = torch.where(values.isinf().any(dim=1, keepdim=True), torch.inf, scale)
        scale = torch.where(values.isnan().any(dim=1, keepdim=True), torch.nan, scale)
        return Integers(codes, scale.contiguous(), columns, kept), met

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return saved[0] if len(saved) == 1 else Integers(*saved).values(dtype)

    @staticmethod
    def values(x: Any, every: int = 1) -> Tensor:
        if not isinstance(x, Integers):
            return Pass.values(x, every)
        rows = x.codes[::every].float() * x.scale[::every]
        if x.columns is not None and x.outliers is not None:
            rows.index_copy_(1, x.columns, x.outliers[::every].float())
        return rows


class _IntLinear(torch.autograd.Function):
    """F.linear by `products`, of an input that was cast already. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        the_pass: _IntPass,
        x_fprop: Integers,
        x_wgrad: Tensor | None,
        measured: MeasuredCasts | None,
    ) -> Tensor:
        recipe, kept = the_pass.recipe, the_pass.operator.kept_codes(weight)
        # A cast of None tells delayed scales of the other path what they look back on.
        found = the_pass.cast("weight", weight, recipe.fprop.weight if kept is None else None)
        w_fprop: Integers = found if kept is None else kept
        remember(ctx, the_pass, x, weight, x_wgrad, measured)
        weights: tuple[Tensor, ...] = (weight,)
        if kept is not None and (not weight.is_floating_point() or recipe.dgrad.weight == _ROW):
            weights = kept.codes, kept.scale
        ctx.weight_is_cast, ctx.num_weights = len(weights) == 2, len(weights)
        ctx.save_for_backward(*weights, *(() if x_wgrad is None else (x_wgrad,)))
        output = products(x_fprop.codes, w_fprop.codes, recipe.backend == "int_mm").float()
        output.mul_(x_fprop.scale * w_fprop.scale.t())
        if x_fprop.columns is not None and x_fprop.outliers is not None:
            if weight.is_floating_point():
                columns = weight.index_select(1, x_fprop.columns)
            else:
                columns = Integers(weight.index_select(1, x_fprop.columns), w_fprop.scale).values(x.dtype)
            output += x_fprop.outliers @ columns.t()
        if bias is not None:
            output += bias
        return output.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return linear_backward(ctx, *grads)


class _LinearOfCodes(torch.autograd.Function):
    """F.linear with codes times scale as its weight, which the graph holds as codes. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.x_shape, ctx.holds_copy, ctx.num_weights = x.shape, False, 2
        ctx.save_for_backward(codes, scale)
        return F.linear(x, Integers(codes, scale).values(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_2d = grads[0].reshape(-1, grads[0].shape[-1])
        need_x, _, _, need_bias = ctx.needs_input_grad
        weight = Integers(*ctx.saved_tensors)
        grad_x = (grad_2d @ weight.values(grad_2d.dtype)).view(ctx.x_shape) if need_x else None
        return grad_x, None, None, grad_2d.sum(dim=0) if need_bias else None


class Int8Linear(PathLinear):
    """A `PathLinear` of a plan with a recipe that multiplies integers: it knows where its weight's codes are."""

    weights: str
    """One of WEIGHTS."""
    weight_scale: Tensor
    """Of `instead`: a buffer, (O, 1) float32."""
    _beside: tuple[object, Integers] | None
    """The codes, and the state of the weight that they are of. No buffer: `.to(dtype)` would round the scales."""
    _own_dtype: torch.dtype

    def store(self, weights: str) -> None:
        """Once, when the operator is converted."""
        self.weights, self._beside, self._own_dtype = weights, None, self.weight.dtype
        if weights == "beside":
            self.kept_codes(self.weight)
        if weights == "instead":
            own, _ = integers(self.weight.detach())
            # Another parameter: another module may share this one.
            self.weight = nn.Parameter(own.codes, requires_grad=False)
            self.register_buffer("weight_scale", own.scale)

    def unstore(self) -> None:
        """Undoes `store`, as far as it can: of codes the weight is codes times scale."""
        if self.weights == "instead":
            own = Integers(self.weight, self.weight_scale)
            self.weight = nn.Parameter(own.values(self._own_dtype), requires_grad=False)
            del self.weight_scale
        del self.weights, self._beside, self._own_dtype

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes and scales that are kept."""
        return 0 if self.weights == "online" else self.out_features * (self.in_features + torch.float32.itemsize)

    def kept_codes(self, weight: Tensor) -> Integers | None:
        """The codes of `weight`, which is the operator's own after autocast's cast; None: they are not kept.

        ValueError for a weight that has become trainable.
        """
        own = self.weight
        if self.weights == "instead":
            return Integers(own, self.weight_scale)
        if self.weights == "online" or own.is_inference():  # an inference tensor does not tell of its changes
            return None
        if own.requires_grad:
            raise ValueError(f"weights='beside': {self.unit_name} is trainable by now; convert with weights='online'")
        state = place_of(own), own._version, weight.dtype
        if self._beside is None or self._beside[0] != state:
            self._beside = state, integers(weight.detach())[0]
        return self._beside[1]

    def plain(self, input: Tensor) -> Tensor:
        if self.weights != "instead":
            return super().plain(input)
        bias: Tensor | None = self.bias
        if (dtype := autocast_dtype(input)) is not None:
            input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        output: Tensor = _LinearOfCodes.apply(input, self.weight, self.weight_scale, bias)
        return output

    def runner(self, path: Recipe) -> Callable[..., tuple[Tensor, str | Place]]:
        if path.integer:
            return int8_linear
        return _linear_of_codes if self.weights == "instead" else super().runner(path)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        scale = self._buffers.get("weight_scale")
        super()._apply(fn, recurse)
        if scale is not None and self.weight_scale.dtype != scale.dtype:  # .to(torch.bfloat16) is for weights
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if self.weights == "instead" and weight is not None and weight.is_floating_point():
            own, _ = integers(weight)
            state_dict = {**state_dict, f"{prefix}weight": own.codes, f"{prefix}weight_scale": own.scale}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        """As `PathLinear`'s; codes beside the weight are made again."""
        return {**super().__getstate__(), "_beside": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weights={self.weights}"


def int8_linear(
    operator: PathLinear,
    recipe: Recipe,
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keeps: bool,
    fault: Injector | None = None,
) -> tuple[Tensor, str | Place]:
    """As `simulated.simulated_linear`, with integers in fprop."""
    return simulated_linear(operator, recipe, input, x, weight, bias, keeps, fault, _IntPass, _IntLinear)


def _linear_of_codes(
    operator: PathLinear,
    recipe: Recipe,
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keeps: bool,
    fault: Injector | None = None,
) -> tuple[Tensor, str | Place]:
    """The same for a recipe without integers (`check_weights`) where only the codes of the weight are left."""
    return _LinearOfCodes.apply(x, weight, operator.weight_scale, bias), operator.unit_name


def pass_kind(recipe: Recipe) -> type[Pass]:
    """What casts and multiplies under `recipe`."""
    return _IntPass if recipe.integer else fp8.pass_kind(recipe)


# ---- settings ----


def with_outliers(recipe: Recipe, threshold: float | None) -> Recipe:
    """The recipe whose integer product leaves the columns from `threshold` on in 16 bits; others as they are."""
    if threshold is None or not recipe.integer:
        return recipe
    assert recipe.fprop.input is not None
    return replace(recipe, fprop=replace(recipe.fprop, input=replace(recipe.fprop.input, outliers=threshold)))


def check_settings(weights: str, outlier_threshold: float | None) -> None:
    """ValueError for values that mean nothing."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r}: use one of {', '.join(WEIGHTS)}")
    number = isinstance(outlier_threshold, (int, float)) and not isinstance(outlier_threshold, bool)
    if outlier_threshold is not None and not (number and outlier_threshold > 0):
        raise ValueError(f"outlier_threshold={outlier_threshold!r}: must be above 0 (published: 6.0), or None")


def check_weights(weights: str, paths: Iterable[Path | None], linears: dict[str, nn.Linear]) -> None:
    """ValueError where these linears' codes cannot be kept so, or their sums would not fit."""
    for name, linear in linears.items():
        if linear.in_features > _INPUTS:
            raise ValueError(f"{name} has {linear.in_features} inputs: int32 sums of INT8 products hold {_INPUTS:,}")
        if weights != "online" and linear.weight.requires_grad:
            raise ValueError(
                f"weights={weights!r}: {name} is trainable, and its codes would soon be an older weight's; freeze it "
                "(requires_grad_(False)) or use weights='online'"
            )
    for path in paths:
        if weights == "instead" and isinstance(path, Recipe) and not _reads_codes(path):
            raise ValueError(
                f"weights='instead': the recipe {path.name} casts a weight of which only INT8 codes are left; use bf16 "
                "or llm_int8, or weights='beside'"
            )


def _reads_codes(recipe: Recipe) -> bool:
    """Whether all that it casts is the weight in INT8, or what meets that in fprop."""
    fprop = Gemm() if recipe.integer else recipe.fprop
    dgrad = replace(recipe.dgrad, weight=None) if recipe.dgrad.weight == _ROW else recipe.dgrad
    return not replace(recipe, fprop=fprop, dgrad=dgrad).casts
