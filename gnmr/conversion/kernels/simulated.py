"""A linear operator whose operands are quantized as a recipe says, simulated on any device.

An operand is scaled, rounded to the nearest values of its format, scaled back and stored in its own dtype; the GEMMs
then run in that dtype. Hardware with such formats differs in the order of a GEMM's sums. It also does not round a value
times its scale to the dtype's mantissa, an error well below the format's own.

- If a group of elements with one scale contains a NaN or an Inf, the whole group becomes NaN. A low path never turns a
  non-finite number into a finite one. Saturated and non-finite elements are counted on the device.
- The input is kept for backward as `wgrad` reads it: one tensor of the input's own width, which all readers of the
  input share. Casts with delayed scales are not shared, because each operator has its own. If fprop and dgrad read the
  weight in the same cast, that cast is kept in addition to the parameter.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.conversion.passes import Pass, in_backward
from gnmr.conversion.reads import SHARDED, Place, Read, is_sharded, place_of
from gnmr.conversion.shared import Casts, FaultInjection, Measurement
from gnmr.formats.cast import Reference, quantize, rotated_dtype
from gnmr.formats.cast_stats import AmaxHistory, CastStats
from gnmr.formats.number_formats import KeepFormat
from gnmr.formats.recipes import Cast, ExecutionPath, Recipe
from gnmr.formats.scaling import count_nonfinite, largest_magnitude
from gnmr.formats.selective_checkpoints import always_recomputed
from gnmr.names import OPERANDS

Observe: TypeAlias = Callable[[Tensor, "GemmContext", Casts], Measurement] | None
"""Starts the measurement of a forward pass, given its input (T, D), its context and its casts; None: no measurement."""
Draw: TypeAlias = torch.Generator | None
"""Random generator of a stochastic cast; None: round to nearest."""
Draws: TypeAlias = Callable[[int, int, int], torch.Generator]
_READS_INPUT = ("wgrad", "fprop")
"""The GEMM that reads the input, by the dimension of the input that it contracts."""


class GemmContext:
    """The casts of one forward pass of an operator and of its backward pass, and their statistics.

    Args:
        recipe: the casts.
        amax: receives counts and magnitudes.
        index: index of the operator.
        name: name of the operator.
        fault: breaks the casts of the input.
        sound: GEMMs whose casts the fault does not change.
        dry_run: cast without recording statistics: no GEMM runs under this recipe, and its casts are only compared.
        no_side_effects: the pass is not the run's own, so nothing is written at its end.
        draws: maps (operator that draws, its operand, the contracted dimension) to the generator of a stochastic cast;
            None: round to nearest.
        begun: the forward pass whose delayed scales apply; None: the current scales.
    """

    def __init__(
        self,
        recipe: Recipe,
        amax: AmaxHistory,
        index: int,
        name: str = "",
        *,
        fault: FaultInjection | None = None,
        sound: frozenset[str] = frozenset(),
        dry_run: bool = False,
        no_side_effects: bool = False,
        draws: Draws | None = None,
        begun: Pass | None = None,
    ) -> None:
        self.recipe, self.amax, self.index, self.name, self.fault = recipe, amax, index, name, fault
        self._sound, self._dry_run, self._no_side_effects = sound, dry_run, no_side_effects
        self._draws, self._history = draws, amax.history if begun is None else begun.history
        self._reader, self._begun = index, begun
        self._found: dict[int, tuple[int, CastStats]] = {}
        """Statistics by identity, because two GEMMs may read the same cast."""
        self._largest: dict[int, Tensor] = {}

    @always_recomputed
    def cast(
        self, operand: str, x: Tensor, cast: Cast | None, contraction_dim: int = 1, made: Casts | None = None
    ) -> Any:
        """Return `x` (N, D) in `cast`, taken from `made` (the casts of the same tensor) or added to it."""
        place = OPERANDS.index(operand)
        observed = self.amax.history is not None and operand != "result" and not self._dry_run
        if cast is None:
            if observed and place not in self._largest:
                self._largest[place] = largest_magnitude(x.float(), (0, 1))
            return x
        key = self.key(cast, contraction_dim)
        broken = operand == "input" and self.fault is not None and _READS_INPUT[contraction_dim] not in self._sound
        if broken:
            key = *key, "broken"
        found = None if made is None else made.get(key)
        if found is None:
            reference = None
            if cast.scale == "delayed":
                reference = partial(self.amax.delayed, self.index, place, cast.history, begun=self._begun)
            if broken:
                found = self.break_input(x, cast, contraction_dim, reference)
            else:
                draw = None
                if cast.stochastic and self._draws is not None:
                    # the operator whose cast others may share
                    reader = self._reader if operand == "input" else self.index
                    draw = self._draws(reader, place, contraction_dim if cast.directed else 2)
                found = self.quantize(x, cast, contraction_dim, reference, draw)
            if made is not None:
                made[key] = found
        values, stats = found
        if self._dry_run:
            return values
        if stats.operator is None:
            stats.operator = self.index
        if observed and place not in self._largest:
            self._largest[place] = stats.largest
        self._found[id(stats)] = place, stats
        return values

    def quantize(self, x: Tensor, cast: Cast, dim: int, reference: Reference, draw: Draw) -> tuple[Any, CastStats]:
        """Return (`x` as the GEMMs read it, statistics); here its values, in its own dtype."""
        return quantize(x, cast, dim, reference, draw)

    def break_input(self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Any, CastStats]:
        """Return the same as `quantize`, for an input under the fault."""
        assert self.fault is not None
        values, _, stats = self.fault.quantize(x, cast, contraction_dim, reference)
        return values.to(rotated_dtype(x.dtype) if cast.hadamard else x.dtype), stats

    def cast_weight(self, weight: Tensor) -> tuple[Any, Any]:
        """Return (the weight as fprop reads it, the weight as dgrad keeps it: the same cast, or the weight itself)."""
        made: Casts = {}
        w_fprop = self.cast("weight", weight, self.recipe.fprop.weight, 1, made)
        dgrad = self.recipe.dgrad.weight
        same = None if dgrad is None else made.get(self.key(dgrad, 0))
        return w_fprop, weight if same is None else same[0]

    def fprop(self, x: Tensor, x_fprop: Any, weight: Tensor, w_fprop: Any, bias: Tensor | None) -> Tensor:
        """Return the output of operands that `cast` returned; `x` and `weight` are the operands before their casts."""
        output = F.linear(x_fprop.view(x.shape), w_fprop, bias)
        if self.recipe.fprop.result is None:
            return output
        result: Tensor = self.cast("result", output.reshape(-1, output.shape[-1]), self.recipe.fprop.result)
        return result.view(output.shape)

    def nonfinite(self, x: Tensor, largest: Tensor) -> Tensor | None:
        """Return the number of elements of `x` that are Inf or NaN; see `count_nonfinite`."""
        return count_nonfinite(x, largest)

    def product(self, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """Return the product of a (M, K) and b (K, N), as `cast` returned them, in `dtype`."""
        result: Tensor = a @ b
        return result.to(dtype)  # rotated operands of float16 are in float32

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """Return a GEMM's operand from the tensors of its cast in the graph; `dtype`: the other operand's."""
        return saved[0]

    def wgrad(self, grad_2d: Tensor, x: Any, dtype: torch.dtype, made: Casts) -> Tensor:
        """Return grad_weight (O, I), given grad_output (T, O) and the input (T, I), which is cast already."""
        grad = self.cast("grad_output", grad_2d, self.recipe.wgrad.grad_output, 0, made)
        result: Tensor = self.cast("result", self.product(grad.t(), x, dtype), self.recipe.wgrad.result)
        return result

    @staticmethod
    def values(x: Any, every: int = 1) -> Tensor:
        """Return the rows 0, every, 2 every, ... of what `cast` returned, as float32."""
        rows: Tensor = x[::every]
        return rows.float()

    def casts_of(self, read: Read, dtype: torch.dtype) -> Casts:
        """Return the casts of the tensor that was `read`, shared by its readers; casts under a fault are not shared."""
        self._reader = read.index
        return {} if self.fault is not None else read.casts.setdefault((dtype, type(self)), {})

    def kept_by(self, read: Read, x_wgrad: Any) -> str | Place:
        """Return the key of `x_wgrad`, which is kept of the tensor that was `read`: see `PathLinear.read`."""
        cast, name = self.recipe.wgrad.input, self.name
        if cast is None:
            return name if x_wgrad is None else place_of(x_wgrad)
        if self.fault is not None:
            return f"{name} (broken)"
        return name if cast.scale == "delayed" else read.reader

    def key(self, cast: Cast, contraction_dim: int) -> tuple[Any, ...]:
        """Return a key that is equal for casts with equal results."""
        draws = cast.stochastic and self._draws is not None
        own = (self.index, id(self._history)) if cast.scale == "delayed" else None
        return cast, contraction_dim if cast.directed else None, own, draws

    @always_recomputed
    def end(self) -> None:
        """Write the statistics, once, after the last GEMM."""
        if not self._no_side_effects:
            self.amax.write(self.index, self._found.values(), self._largest)
        self._found.clear()
        self._largest.clear()


def linear_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias (dgrad and wgrad), and None for the function's other arguments.

    The saved tensors are `num_weights` tensors of the weight, followed by those that wgrad reads.
    """
    context: GemmContext = ctx.context
    refuse_twice(context.name, context.recipe)
    if is_sharded(grad_output):
        raise ValueError(f"the gradient of a linear's output {SHARDED}")
    saved = ctx.saved_tensors  # only once: checkpointing does not allow a second access
    weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
    ctx.holds_copy = False  # freed when this returns
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
    recipe, made = context.recipe, Casts()
    grad_x = grad_weight = None
    if need_x:
        grad = context.cast("grad_output", grad_2d, recipe.dgrad.grad_output, 1, made)
        if ctx.weight_is_cast:
            read = context.restored(weights, grad_2d.dtype)
        else:
            read = context.cast("weight", weights[0], recipe.dgrad.weight, 0)
        product = context.product(grad, read, ctx.x_dtype)
        grad_x = context.cast("result", product, recipe.dgrad.result).view(ctx.x_shape)
    if need_weight:
        x_wgrad = context.restored(kept, grad_2d.dtype)
        if isinstance(x_wgrad, Tensor):
            x_wgrad = x_wgrad.reshape(-1, x_wgrad.shape[-1])
        grad_weight = context.wgrad(grad_2d, x_wgrad, ctx.weight_dtype, made)
        if ctx.measured is not None:
            with torch.no_grad():
                ctx.measured.add(grad_2d, context, made)
            ctx.measured = None
    grad_bias = grad_2d.sum(dim=0) if need_bias else None
    context.end()
    return grad_x, grad_weight, grad_bias, *([None] * (len(ctx.needs_input_grad) - 3))


class RecipeLinear(torch.autograd.Function):
    """F.linear of a cast input, as `context` casts and multiplies; twice differentiable if nothing is cast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        context: GemmContext,
        x_fprop: Any,
        x_wgrad: Any,
        measured: Measurement | None,
    ) -> Tensor:
        ctx.context, ctx.x_shape, ctx.measured = context, x.shape, measured
        ctx.x_dtype, ctx.weight_dtype, ctx.holds_copy = x.dtype, weight.dtype, x_wgrad is not None
        w_fprop, w_dgrad = context.cast_weight(weight)
        weights = _tensors(w_dgrad)
        ctx.weight_is_cast, ctx.num_weights = w_dgrad is not weight, len(weights)
        kept = _tensors(x_wgrad)
        if kept and casts_nothing(context.recipe):
            kept = (x,)  # with its graph
        ctx.save_for_backward(*weights, *kept)
        return owned(context.fprop(x, x_fprop, weight, w_fprop, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return linear_backward(ctx, *grads)


def owned(output: Tensor) -> Tensor:
    """Return `output`, not as a view: a view that an autograd function returns cannot be changed in place."""
    found: Tensor = torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
    return found


def casts_nothing(path: ExecutionPath) -> bool:
    """Return whether a linear on `path` computes the same as a plain one."""
    return isinstance(path, KeepFormat) or (isinstance(path, Recipe) and not path.casts)


def refuse_twice(name: str, path: ExecutionPath) -> None:
    """Raise RuntimeError if a backward pass should itself be differentiated and `path` does not allow it."""
    if torch.is_grad_enabled() and not casts_nothing(path):
        raise RuntimeError(
            f"{name}: second derivatives (create_graph=True) are not defined on the path {path.name}, whose casts have "
            "none; run the forward pass within converted.high_precision()"
        )


def _tensors(x: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a cast, in the order in which `GemmContext.restored` takes them."""
    return () if x is None else (x,) if isinstance(x, Tensor) else tuple(x)


def recipe_linear(
    context: GemmContext,
    read: Read,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    keeps: bool,
    observe: Observe = None,
) -> tuple[Tensor, str | Place]:
    """Run a linear whose input was `read`, and return (output, key of the kept tensor: see `PathLinear.read`).

    `context` casts and multiplies. `x`, `weight` and `bias` are the operands in the dtype of the GEMMs. `keeps`:
    whether wgrad will run.
    """
    recipe, rows = context.recipe, x.detach().reshape(-1, x.shape[-1])
    made = context.casts_of(read, x.dtype)
    x_fprop = context.cast("input", rows, recipe.fprop.input, 1, made)
    x_wgrad = context.cast("input", rows, recipe.wgrad.input, 0, made) if keeps else None
    measured = None if observe is None or not keeps else always_recomputed(observe)(rows, context, made)
    output: Tensor = RecipeLinear.apply(x, weight, bias, context, x_fprop, x_wgrad, measured)
    if torch.is_grad_enabled() and not output.requires_grad and not in_backward():
        context.end()  # frozen, like everything before it: no backward pass follows
    return output, context.kept_by(read, x_wgrad)
