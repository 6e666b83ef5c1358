"""The three GEMMs of a converted linear, whatever path it is on: `LinearFunction` and the casts that it reads.

    fprop    y  = x W^T + b       x (T, I), W (O, I)
    dgrad    dx = dy W            dy (T, O)
    wgrad    dW = dy^T x

A `GemmContext` makes the operands of one pass. This one simulates a recipe on any device: an operand is scaled, rounded
to the nearest values of its format, scaled back and stored in its own dtype; the GEMMs then run in that dtype. Hardware
with such formats differs in the order of a GEMM's sums. It also does not round a value times its scale to the dtype's
mantissa, an error well below the format's own. Other contexts multiply codes (`scaled_mm.py`, `int8.py`) or keep a
compressed copy of the input (`SavedCopyContext`).

- If a group of elements with one scale contains a NaN or an Inf, the whole group becomes NaN. A low path never turns a
  non-finite number into a finite one. Saturated and non-finite elements are counted on the device.
- The input is kept for backward as `wgrad` reads it: one tensor, which all readers of the input share. Casts with
  delayed scales are not shared, because each operator has its own. If fprop and dgrad read the weight in the same cast,
  that cast is kept in addition to the parameter.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.conversion.passes import Pass
from gnmr.conversion.reads import SHARDED, Place, Read, is_sharded, place_of
from gnmr.conversion.shared import Casts, FaultInjection, Measurement
from gnmr.formats.cast import Reference, quantize, rotated_dtype
from gnmr.formats.cast_stats import AmaxHistory, CastStats
from gnmr.formats.dispatch_modes import always_recomputed
from gnmr.formats.number_formats import Format, KeepFormat
from gnmr.formats.recipes import RECIPES, Cast, ExecutionPath, Recipe
from gnmr.formats.scaling import decompress, largest_magnitude
from gnmr.names import OPERANDS

Draws: TypeAlias = Callable[[int, int, int], torch.Generator]
"""Maps (operator that draws, its operand, the contracted dimension) to the generator of a stochastic cast."""
_READS_INPUT = ("wgrad", "fprop")
"""The GEMM that reads the input, by the dimension of the input that it contracts."""


class LinearFunction(torch.autograd.Function):
    """F.linear on a path; twice differentiable if the path casts nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tally: Tensor | None,
        context: GemmContext,
        x_fprop: Any,
        x_wgrad: Any,
        measurement: Measurement | None,
    ) -> Tensor:
        """Run fprop.

        Args:
            ctx: keeps the weight as dgrad reads it, and the input as wgrad reads it.
            x: (..., I).
            weight: (O, I).
            bias: (O,) or None.
            tally: leaf whose gradient becomes the counts of the casts, in graphs of torch.compile; else None.
            context: makes the operands.
            x_fprop: the rows of x as fprop reads them.
            x_wgrad: the rows of x as wgrad reads them; None: wgrad will not run.
            measurement: what receives grad_output in the backward pass.
        """
        # fprop: y = x W^T + b
        w_fprop, w_dgrad = context.cast_weight(weight)
        output = context.fprop(x, x_fprop, weight, w_fprop, bias)
        # Kept for backward: the weight for dgrad, the input for wgrad.
        weights, inputs = _tensors(w_dgrad), _tensors(x_wgrad)
        if inputs and casts_nothing(context.path):
            inputs = (x,)  # with its graph, for second derivatives
        ctx.save_for_backward(*weights, *inputs)
        ctx.context, ctx.measurement = context, measurement
        ctx.weight_is_cast, ctx.num_weights, ctx.holds_copy = w_dgrad is not weight, len(weights), bool(inputs)
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        return owned(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad."""
        needs_x, needs_weight, needs_bias, needs_tally = ctx.needs_input_grad[:4]
        if needs_tally and torch.is_grad_enabled():  # a compiler traces both passes with gradients enabled
            with torch.no_grad():
                return LinearFunction.backward(ctx, *grads)
        context: GemmContext = ctx.context
        recipe, casts_of_grad, (grad_output,) = context.recipe, Casts(), grads
        _refuse(context, grad_output)
        saved = ctx.saved_tensors  # only once: checkpointing does not allow a second access
        weights, inputs = saved[: ctx.num_weights], saved[ctx.num_weights :]
        ctx.holds_copy = False  # freed when this returns
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_weight = None
        # dgrad: dx = dy W
        if needs_x:
            dy_dgrad = context.cast("grad_output", dy, recipe.dgrad.grad_output, 1, casts_of_grad)
            if ctx.weight_is_cast:
                w_dgrad = context.restored(weights, dy.dtype)
            else:
                w_dgrad = context.cast("weight", weights[0], recipe.dgrad.weight, 0)
            product = context.product(dy_dgrad, w_dgrad, ctx.x_dtype)
            grad_x = context.cast("result", product, recipe.dgrad.result).view(ctx.x_shape)
        # wgrad: dW = dy^T x
        if needs_weight:
            x_wgrad = context.restored(inputs, dy.dtype)
            if isinstance(x_wgrad, Tensor):
                x_wgrad = x_wgrad.reshape(-1, x_wgrad.shape[-1])
            dy_wgrad = context.cast("grad_output", dy, recipe.wgrad.grad_output, 0, casts_of_grad)
            product = context.product(dy_wgrad.t(), x_wgrad, ctx.weight_dtype)
            grad_weight = context.cast("result", product, recipe.wgrad.result)
        grad_bias = dy.sum(dim=0) if needs_bias else None
        if ctx.measurement is not None:  # not in forward, because checkpointing runs forward twice
            with torch.no_grad():
                ctx.measurement.add(dy, context, casts_of_grad)
            ctx.measurement = None
        grad_tally = context.counts(dy.device) if needs_tally else None
        context.end()
        return grad_x, grad_weight, grad_bias, grad_tally, None, None, None, None


class GemmContext:
    """The casts of one forward pass of an operator and of its backward pass, and their statistics.

    Args:
        recipe: the casts.
        amax: receives counts and magnitudes; None: `counts` has them.
        index: index of the operator.
        name: name of the operator.
        fault: breaks the casts of the input.
        sound: GEMMs whose casts the fault does not change.
        dry_run: cast without recording statistics: no GEMM runs under this recipe, and its casts are only compared.
        no_side_effects: the pass is not the run's own, so nothing is written at its end.
        draws: gives the generators of stochastic casts; None: round to nearest.
        begun: the forward pass whose delayed scales apply; None: the current scales.
    """

    def __init__(
        self,
        recipe: Recipe,
        amax: AmaxHistory | None,
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
        self._draws, self._begun, self._reader = draws, begun, index
        self._history = begun.history if begun is not None else None if amax is None else amax.history
        self._stats: dict[int, tuple[int, CastStats]] = {}
        """Statistics by identity, because two GEMMs may read the same cast."""
        self._largest: dict[int, Tensor] = {}

    @property
    def path(self) -> ExecutionPath:
        """The format or recipe of the pass."""
        return self.recipe

    @always_recomputed
    def cast(
        self, operand: str, x: Tensor, cast: Cast | None, contraction_dim: int = 1, casts_of_x: Casts | None = None
    ) -> Any:
        """Return an operand of a GEMM.

        Args:
            operand: one of `OPERANDS`.
            x: (N, D), before the cast.
            cast: the cast; None: x itself.
            contraction_dim: the dimension of x that the GEMM contracts.
            casts_of_x: the casts of x so far, from which the operand is taken, or to which it is added.
        """
        place = OPERANDS.index(operand)
        history = None if self.amax is None else self.amax.history
        observed = history is not None and operand != "result" and not self._dry_run
        if cast is None:
            if observed and place not in self._largest:
                self._largest[place] = largest_magnitude(x.float(), (0, 1))
            return x
        # A cast of the same tensor is made once, whichever GEMMs and operators read it.
        key = self.key(cast, contraction_dim)
        broken = operand == "input" and self.fault is not None and _READS_INPUT[contraction_dim] not in self._sound
        if broken:
            key = *key, "broken"
        if casts_of_x is None or key not in casts_of_x:
            quantized = self._make(place, x, cast, contraction_dim, broken)
            if casts_of_x is not None:
                casts_of_x[key] = quantized
        else:
            quantized = casts_of_x[key]
        values, stats = quantized
        if self._dry_run:
            return values
        if stats.operator is None:
            stats.operator = self.index
        if observed and place not in self._largest:
            self._largest[place] = stats.largest
        self._stats[id(stats)] = place, stats
        return values

    def _make(self, place: int, x: Tensor, cast: Cast, dim: int, broken: bool) -> tuple[Any, CastStats]:
        """Return the cast of an operand, and its statistics."""
        reference: Reference = None
        if cast.delayed:
            assert self.amax is not None
            reference = partial(self.amax.delayed, self.index, place, cast.history, begun=self._begun)
        if broken:
            return self.break_input(x, cast, dim, reference)
        generator = None
        if cast.stochastic and self._draws is not None:
            # Others may share the cast of an input, which belongs to its first reader.
            reader = self._reader if OPERANDS[place] == "input" else self.index
            generator = self._draws(reader, place, dim if cast.directed else 2)
        return self.quantize(x, cast, dim, reference, generator)

    def quantize(
        self, x: Tensor, cast: Cast, dim: int, reference: Reference, generator: torch.Generator | None
    ) -> tuple[Any, CastStats]:
        """Cast an operand.

        Args:
            x: (N, D), any floating dtype.
            cast: the cast.
            dim: the dimension of x that the GEMM contracts.
            reference: source of a delayed scale; None: the tensor's own largest magnitude.
            generator: source of stochastic rounding, on the device of x; None: round to nearest.

        Returns:
            x as the GEMMs read it, here the values of `formats.cast.quantize`; statistics of the cast.
        """
        return quantize(x, cast, dim, reference, generator)

    def break_input(self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Any, CastStats]:
        """Cast an input under the fault.

        Returns: the same as `quantize`, in the same dtype.
        """
        assert self.fault is not None
        values, _, stats = self.fault.quantize(x, cast, contraction_dim, reference)
        return values.to(rotated_dtype(x.dtype) if cast.hadamard else x.dtype), stats

    def cast_weight(self, weight: Tensor) -> tuple[Any, Any]:
        """Cast the weight, (O, I).

        Returns: it as fprop reads it, as `cast` returned it; what dgrad keeps, which is the same cast or the weight
        itself.
        """
        casts: Casts = {}
        # dgrad contracts the other dimension, so that only undirected casts are the same in both GEMMs.
        w_fprop = self.cast("weight", weight, self.recipe.fprop.weight, 1, casts)
        dgrad = self.recipe.dgrad.weight
        same = None if dgrad is None else casts.get(self.key(dgrad, 0))
        return w_fprop, weight if same is None else same[0]

    def fprop(self, x: Tensor, x_fprop: Any, weight: Tensor, w_fprop: Any, bias: Tensor | None) -> Tensor:
        """Run fprop, y = x W^T + b.

        Args:
            x: (..., I), before the cast.
            x_fprop: its rows as `cast` returned them.
            weight: (O, I), before the cast.
            w_fprop: the weight as `cast_weight` returned it.
            bias: (O,) or None.

        Returns:
            (..., O) in the dtype of x.
        """
        if bias is not None and w_fprop.dtype != weight.dtype:
            bias = bias.to(w_fprop.dtype)  # rotated operands of float16 are in float32
        output = F.linear(x_fprop.view(x.shape), w_fprop, bias).to(x.dtype)
        if self.recipe.fprop.result is None:
            return output
        result: Tensor = self.cast("result", output.reshape(-1, output.shape[-1]), self.recipe.fprop.result)
        return result.view(output.shape)

    def product(self, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """Multiply a (M, K) and b (K, N), as `cast` or `restored` returned them.

        Returns: (M, N) in `dtype`.
        """
        result: Tensor = a @ b
        return result.to(dtype)  # rotated operands of float16 are in float32

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """Return an operand of dgrad or wgrad, made from the tensors of its cast that the graph holds.

        Args:
            saved: those tensors.
            dtype: the other operand's, in which codes times scale are returned.
        """
        return saved[0]

    @staticmethod
    def values(x: Any, every: int = 1) -> Tensor:
        """Return numbers of a cast, for measurements.

        Args:
            x: (N, D), as `cast` returned it.
            every: take the rows 0, every, 2 every, ...

        Returns:
            (rows, D) float32.
        """
        rows: Tensor = x[::every]
        return rows.float()

    def casts_of(self, read: Read, dtype: torch.dtype) -> Casts:
        """Return the casts of the tensor that was read, to which this pass adds its own.

        Args:
            read: the tensor's record.
            dtype: of the tensor after autocast's cast, as which readers may differ.

        Returns:
            The casts that all readers share; empty under a fault, whose casts are not shared.
        """
        self._reader = read.index
        return {} if self.fault is not None else read.casts.setdefault((dtype, type(self)), {})

    def kept_by(self, read: Read, x_wgrad: Any) -> str | Place:
        """Return the key of what is kept of the tensor that was read (`PathLinear.read`).

        Args:
            read: the tensor's record.
            x_wgrad: the input as wgrad reads it, which is kept; None: wgrad will not run.
        """
        cast, name = self.recipe.wgrad.input, self.name
        if cast is None:
            return name if x_wgrad is None else place_of(x_wgrad)
        if self.fault is not None:
            return f"{name} (broken)"
        return name if cast.delayed else read.reader

    def key(self, cast: Cast, contraction_dim: int) -> tuple[Any, ...]:
        """Return a key in `Casts`; `contraction_dim` enters it if the cast is directed.

        Returns: a key that is equal for casts of one tensor with equal results.
        """
        draws = cast.stochastic and self._draws is not None
        scales_of = (self.index, id(self._history)) if cast.delayed else None
        return cast, contraction_dim if cast.directed else None, scales_of, draws

    def counts(self, device: torch.device) -> Tensor:
        """Count the elements that saturated or were not finite in the casts of this pass.

        Returns: (operands, 2) float64 on `device`; casts that are counted already are left out.
        """
        counts = torch.zeros(len(OPERANDS), 2, dtype=torch.float64, device=device)
        for operand, stats in self._stats.values():
            for kind, number in enumerate((stats.saturated, stats.nonfinite)):
                if number is not None and not stats.counted:
                    counts[operand, kind] += number
        return counts

    @always_recomputed
    def end(self) -> None:
        """Write the statistics, once, after the last GEMM."""
        if self.amax is not None and not self._no_side_effects:
            self.amax.write(self.index, self._stats.values(), self._largest)
        self._stats.clear()
        self._largest.clear()


class SavedCopyContext(GemmContext):
    """A context whose wgrad reads a compressed copy of the input; everything else is exact.

    Args:
        fmt: the format of the copy; `bf16` keeps the input itself.
        name: name of the operator.
        from_copy: whether fprop reads the copy too (site="forward").
    """

    def __init__(self, fmt: Format, name: str, from_copy: bool) -> None:
        super().__init__(RECIPES["bf16"], None, 0, name)
        self._format, self._from_copy = fmt, from_copy and not isinstance(fmt, KeepFormat)

    @property
    def path(self) -> ExecutionPath:
        return self._format

    def fprop(self, x: Tensor, x_fprop: Any, weight: Tensor, w_fprop: Any, bias: Tensor | None) -> Tensor:
        """Return the output; `x_fprop` is the copy."""
        if self._from_copy:
            packed, scale = x_fprop
            x = decompress(packed, scale, self._format, x.shape[-1], x.dtype).view(x.shape)
        self._width, self._dtype = x.shape[-1], x.dtype  # for the copy in backward
        return F.linear(x, weight, bias)

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if len(saved) == 1:
            return saved[0]
        packed, scale = saved
        return decompress(packed, scale, self._format, self._width, self._dtype)


def owned(output: Tensor) -> Tensor:
    """Return `output`, not as a view: a view that an autograd function returns cannot be changed in place."""
    if not output._is_view():
        return output
    not_a_view: Tensor = torch.ops.aten._unsafe_view(output, output.shape)  # private: torch has no public form
    return not_a_view


def casts_nothing(path: ExecutionPath) -> bool:
    """Return whether a linear on `path` computes the same as a plain one."""
    return isinstance(path, KeepFormat) or (isinstance(path, Recipe) and not path.casts)


def _refuse(context: GemmContext, grad_output: Tensor) -> None:
    """Raise if the backward pass should itself be differentiated, but the casts have no derivative, or on a DTensor."""
    if torch.is_grad_enabled() and not casts_nothing(context.path):
        raise RuntimeError(
            f"{context.name}: second derivatives (create_graph=True) are not defined on the path {context.path.name}, "
            "whose casts have none; run the forward pass within converted.high_precision()"
        )
    if is_sharded(grad_output):
        raise ValueError(f"the gradient of a linear's output {SHARDED}")


def _tensors(x: Any) -> tuple[Tensor, ...]:
    """Return the tensors of an operand, in the order in which `GemmContext.restored` takes them."""
    if x is None:
        return ()
    return (x,) if isinstance(x, Tensor) else tuple(x)
