"""A linear operator whose operands are quantized as a recipe says, simulated on any machine.

Fake quantization: an operand is scaled, rounded to the nearest values of its format, scaled back and stored in its own
dtype; the GEMMs then run in that dtype. What differs from hardware with such formats is the order of a GEMM's sums, and
that a value times its scale is rounded to the dtype's mantissa (bfloat16: 8 bits; exact for scales that are powers of
two, and for formats of up to 8 bits an error well below the format's own).

- A group of elements with one scale that holds a NaN or an Inf comes back as NaN throughout, whatever the granularity:
  a low path never turns a non-finite number into a finite one.
- What is kept for backward is the input as `wgrad` reads it, one tensor of the input's own width: operators that read
  the same tensor share it (delayed scales are each operator's own, and so are its casts). A weight that fprop and dgrad
  read in the same cast is kept in that cast, besides the parameter.
- Saturated and non-finite elements are counted on the device, before the cast hides them.

Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnmr.paths.formats import Format
from gnmr.paths.memory import SHARDED, Place, is_sharded, place_of
from gnmr.paths.recipes import Cast, Recipe
from gnmr.paths.scaling import TINY, count_nonfinite, largest_magnitude, largest_of, nan_unless_finite, scale_of

if TYPE_CHECKING:
    from gnmr.paths.faults import Injector
    from gnmr.paths.probe import MeasuredCasts
    from gnmr.paths.saved import PathLinear, Read

_AT_ONCE = 2**17
"""Elements that each thread of a CPU takes at a time, so that they stay in its cache between the dozen passes."""
_MOST = 2**26
"""Elements that any other device takes at a time: the work buffers are 8 bytes for each."""

BEYOND = 1 + 2.0**-20
"""Times the format's largest value: beyond that a number counts as saturated. The largest of a tensor, divided by its
own scale, may come out a rounding error above the format's."""

OPERANDS = ("input", "weight", "grad_output", "result")


def quantize(x: Tensor, cast: Cast | None, contraction_dim: int) -> Tensor:
    """`x` (N, D) in the nearest values of `cast`, same dtype; `x` itself where there is none.

    `contraction_dim`: the dimension of x that its GEMM contracts, for `tile` and `mx`. A delayed scale knows no earlier
    steps here and is that of the tensor.
    """
    return x if cast is None or x.numel() == 0 else _quantize(x, cast, contraction_dim)[0]


@dataclass(eq=False)
class Met:
    """What a cast met in its tensor, on the device."""

    largest: Tensor
    """max|group| of every group, NaN where there is a NaN."""
    saturated: Tensor | None
    """Elements beyond the format's largest value, a scalar; None where there cannot be any."""
    nonfinite: Tensor | None
    """Elements that were Inf or NaN before the cast, a scalar (what shares a scale with one becomes NaN), and those
    that an injected fault made so; None where it is known that there are none."""
    unit: int | None = None
    """The operator for which it counts: the first that ran with it."""
    counted: bool = False
    """Whether it stands in the ledger: several operators may read one cast."""


def _quantize(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Met]:
    """`reference`: makes of max|x| the magnitude that becomes the format's largest; None: that very one."""
    rows, columns = x.shape
    group = cast.group(contraction_dim)
    one_scale = group == (None, None)
    height, width = group[0] or 1, group[1] or columns
    cut = -rows % height or -columns % width
    padded = F.pad(x, (0, -columns % width, 0, -rows % height)) if cut else x
    # As groups (rows, rows of a group, columns, columns of a group).
    groups = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    values = torch.empty_like(groups, memory_format=torch.contiguous_format)
    on_cpu = x.device.type == "cpu"
    # Pieces of one size: a short last one would cost its dozen calls for little.
    pieces = padded.numel() / (_AT_ONCE * torch.get_num_threads() if on_cpu else _MOST)
    at_once = math.ceil(len(groups) / max(1, round(pieces) if on_cpu else math.ceil(pieces)))
    wide = torch.empty_like(values[:at_once], dtype=torch.float32)
    scratch = torch.empty_like(wide, dtype=torch.int32)
    limit = cast.format.max * BEYOND
    may_saturate = cast.scale in ("mx", "delayed")
    each, saturated = [], []  # of the pieces: their groups' largest magnitudes; how many elements saturate
    if one_scale:
        each.append(largest_magnitude(groups, (0, 1, 2, 3)).float())
        scale = scale_under(cast, each[0] if reference is None else reference(each[0]))
        if cast.scale == "delayed" and on_cpu:  # where looking first waits for nothing
            may_saturate = bool(each[0] > scale * limit)
            saturated.append(torch.zeros(1, dtype=torch.int64))
    for piece, out in zip(groups.split(at_once), values.split(at_once), strict=True):
        # Copied first: mixed-dtype arithmetic is slow on CPUs.
        worked = wide[: len(piece)].copy_(piece)
        room = scratch[: len(piece)]
        magnitudes = room.view(torch.float32)
        if may_saturate or not one_scale:
            torch.abs(worked, out=magnitudes)
        if not one_scale:
            each.append(largest_of(magnitudes, (1, 3)))
            scale = scale_under(cast, each[-1])
        if may_saturate:
            # 1.0 or 0.0: on CPUs much faster than bool.
            beyond = torch.gt(magnitudes, scale * limit, out=magnitudes)
            saturated.append(beyond.flatten(1).sum(dim=1))
        if cast.scale == "mx":  # by a power of two: the same number, and much faster for so small groups
            worked.mul_(scale.reciprocal())
        else:
            worked.div_(scale)
        if may_saturate:
            worked.clamp_(-cast.format.max, cast.format.max)
        out.copy_(cast.format.round(worked, room).mul_(scale))
    largest = each[0] if len(each) == 1 else torch.cat(each)
    values = values.view(padded.shape)
    if cut:  # a copy: a view would hold the padding too
        values = values[:rows, :columns].clone(memory_format=torch.contiguous_format)
    over = torch.cat(saturated).sum(dtype=torch.int64) if saturated else None
    return values, Met(largest, over, count_nonfinite(x, largest))


def scaled(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(`x` (N, D) divided by its scales, float32, none beyond the format's largest value; scale; max|group|; elements
    that saturate, a scalar or None), the first three as `as_groups` has them: `_quantize` without its rounding and in
    whole tensors, as GPUs and compilers want it.
    """
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (1, 3))
    scale = scale_under(cast, largest if reference is None else reference(largest))
    saturated = None
    if cast.scale in ("delayed", "mx"):
        saturated = as_matrix(groups.abs() > scale * (cast.format.max * BEYOND), x).sum()
    return (groups / scale).clamp_(-cast.format.max, cast.format.max), scale, largest, saturated


def scale_under(cast: Cast, largest: Tensor) -> Tensor:
    """The float32 scale of groups with these largest magnitudes; NaN for NaN and Inf."""
    if cast.scale == "mx":
        return _power_of_two_scale(largest, cast.format)
    return scale_of(largest, cast.format, torch.float32)


def scale_of_each(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(scale (N, D) float32 of each element of `x` (N, D), max|group| of every group); see `_quantize`."""
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (1, 3))
    scale = scale_under(cast, largest if reference is None else reference(largest))
    return as_matrix(scale.expand_as(groups), x).contiguous(), largest


def as_groups(x: Tensor, cast: Cast, contraction_dim: int) -> Tensor:
    """`x` (N, D) as (rows, rows of a group, columns, columns of a group), filled up with copies of its last ones."""
    rows, columns = x.shape
    group = cast.group(contraction_dim)
    height, width = group[0] or rows, group[1] or columns
    if short := -rows % height:
        x = torch.cat([x, x[-1:].expand(short, -1)])
    if short := -columns % width:
        x = torch.cat([x, x[:, -1:].expand(-1, short)], dim=1)
    return x.view(x.shape[0] // height, height, x.shape[1] // width, width)


def as_matrix(groups: Tensor, x: Tensor) -> Tensor:
    """What `as_groups` made of a matrix of the shape of `x`, as that matrix again."""
    return groups.reshape(groups.shape[0] * groups.shape[1], -1)[: x.shape[0], : x.shape[1]]


def _power_of_two_scale(largest: Tensor, fmt: Format) -> Tensor:
    """E8M0, by the bits of a float32; never below the smallest normal float32 (2^-126; E8M0 has 2^-127 too)."""
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = (power * 2.0 ** (1 - math.frexp(fmt.max)[1])).clamp_(min=TINY)
    return scale.add_(nan_unless_finite(largest))


class Ledger:
    """What the casts of a plan's operators met, on the device; operators are counted in the plan's order.

    - `counts` (units, operands, 2) int64: saturated and non-finite elements of this step, as far as it has come;
    - `history` (units, 3, 1 + h) float32: the largest magnitudes of input, weight and grad_output in this step and in
      the h steps before, from which delayed scales are taken. None where no recipe has any.

    An operator writes in its backward pass, so that neither evaluation nor a recomputed forward pass shows. One that
    will have none (frozen, as all before it) writes at the end of its forward pass.
    """

    def __init__(self, units: int, history: int, device: torch.device) -> None:
        self.counts = torch.zeros(units, len(OPERANDS), 2, dtype=torch.int64, device=device)
        self.history = torch.zeros(units, 3, 1 + history, device=device) if history else None
        self._written = False

    def end_step(self) -> None:
        """Turns the page; nothing happens where nothing was written since the last time."""
        if self._written:
            self.counts.zero_()
            if self.history is not None:
                self.history.copy_(self.history.roll(1, dims=2))
                self.history[:, :, 0] = 0
        self._written = False

    def delayed(self, unit: int, operand: int, history: int, now: Tensor) -> Tensor:
        """The magnitude that a delayed scale is taken from, `now` being the tensor's own.

        The largest of the `history` steps before; `now` before there are any; NaN if `now` is not finite.
        """
        assert self.history is not None
        before = self.history[unit, operand, 1 : 1 + history].amax()
        return torch.where(now.isfinite(), torch.where(before > 0, before, now), torch.nan)

    def add(self, counts: Tensor) -> None:
        """Adds numbers (units, operands, 2) that were counted elsewhere."""
        self._written = True
        self.counts.add_(counts.long())

    def write(self, unit: int, counted: Iterable[tuple[int, Met]], largest: dict[int, Tensor]) -> None:
        """Adds what one forward and backward pass of `unit` met; of casts, those that no other pass has told of."""
        self._written = True
        for operand, met in counted:
            if met.counted:
                continue
            met.counted = True
            assert met.unit is not None
            for kind, number in enumerate((met.saturated, met.nonfinite)):
                if number is not None:
                    self.counts[met.unit, operand, kind].add_(number)
        if self.history is not None:
            for operand, now in largest.items():
                # One bad step must not spoil the history.
                finite = now.amax().nan_to_num(nan=0.0, posinf=0.0)
                self.history[unit, operand, 0] = torch.maximum(self.history[unit, operand, 0], finite)


class Pass:
    """A forward pass of an operator and the backward pass that belongs to it: what they cast, and what that met.

    `unit`: the operator's place in the `ledger`. `fault`: breaks the casts of the input. `looks_on`: nothing runs under
    this recipe, somebody wants to know its casts; they are those of a run, and nothing of it enters the ledger, as
    nothing of a `rehearsal` does.
    """

    def __init__(
        self,
        recipe: Recipe,
        ledger: Ledger,
        unit: int,
        fault: Injector | None = None,
        looks_on: bool = False,
        rehearsal: bool = False,
    ) -> None:
        self.recipe, self.ledger, self.unit, self.fault = recipe, ledger, unit, fault
        self._looks_on, self._rehearsal = looks_on, rehearsal
        self._counted: dict[int, tuple[int, Met]] = {}
        """By identity: two GEMMs may read the same cast."""
        self._largest: dict[int, Tensor] = {}

    @classmethod
    def of(cls, operator: PathLinear, recipe: Recipe, fault: Injector | None = None, looks_on: bool = False) -> Pass:
        """The one that begins in `operator` now."""
        shared = operator.shared
        assert shared.ledger is not None
        return cls(recipe, shared.ledger, operator.index, fault, looks_on, shared.rehearsing)

    def cast(
        self,
        operand: str,
        x: Tensor,
        cast: Cast | None,
        contraction_dim: int = 1,
        made: dict[Any, tuple[Any, Met]] | None = None,
    ) -> Any:
        """`x` (N, D) in `cast`, taken from or added to what was `made` of the same tensor."""
        place = OPERANDS.index(operand)
        observed = self.ledger.history is not None and operand != "result" and not self._looks_on
        if cast is None:
            if observed and place not in self._largest:
                self._largest[place] = largest_magnitude(x.float(), (0, 1))
            return x
        key = self.key(cast, contraction_dim)
        found = None if made is None else made.get(key)
        if found is None:
            reference = None
            if cast.scale == "delayed":
                reference = partial(self.ledger.delayed, self.unit, place, cast.history)
            if operand == "input" and self.fault is not None:
                found = self.break_(x, cast, contraction_dim, reference)
            else:
                found = self.quantize(x, cast, contraction_dim, reference)
            if made is not None:
                made[key] = found
        values, met = found
        if self._looks_on:
            return values
        if met.unit is None:
            met.unit = self.unit
        if observed and place not in self._largest:
            self._largest[place] = met.largest
        self._counted[id(met)] = place, met
        return values

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Met]:
        """What the GEMMs read of `x`: here its values, in its own dtype."""
        return _quantize(x, cast, contraction_dim, reference)

    def break_(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Met]:
        """As `quantize`, of an input under the fault."""
        assert self.fault is not None
        values, _, met = self.fault.quantize(x, cast, contraction_dim, reference)
        return values.to(x.dtype), met

    def nonfinite(self, x: Tensor, largest: Tensor) -> Tensor | None:
        """How many elements of `x` are Inf or NaN; see `count_nonfinite`."""
        return count_nonfinite(x, largest)

    def product(self, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """a (M, K) times b (K, N), as `cast` gives them."""
        result: Tensor = a @ b
        return result

    def restored(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
        """What a GEMM reads of the tensors that the graph held of a cast; `dtype`: the other operand's."""
        return saved[0]

    def wgrad(self, grad_2d: Tensor, x: Any, dtype: torch.dtype, made: dict[Any, tuple[Any, Met]]) -> Tensor:
        """grad_weight (O, I) of grad_output (T, O) and the input (T, I) that was cast already."""
        grad = self.cast("grad_output", grad_2d, self.recipe.wgrad.grad_output, 0, made)
        result: Tensor = self.cast("result", self.product(grad.t(), x, dtype), self.recipe.wgrad.result)
        return result

    @staticmethod
    def values(x: Any, every: int = 1) -> Tensor:
        """The rows 0, every, 2 every, ... of what `cast` gave, as float32."""
        rows: Tensor = x[::every]
        return rows.float()

    def casts_of(self, read: Read, dtype: torch.dtype) -> dict[Any, tuple[Any, Met]]:
        """Where the casts of the tensor that was `read` stand, for its other readers; broken ones are nobody else's."""
        return {} if self.fault is not None else read.casts.setdefault((dtype, type(self)), {})

    def kept_by(self, operator: PathLinear, read: Read, x_wgrad: Any) -> str | Place:
        """What tells `x_wgrad`, kept of the tensor that was `read`, from other tensors: see `PathLinear.read`."""
        cast, name = self.recipe.wgrad.input, operator.unit_name
        if cast is None:
            return name if x_wgrad is None else place_of(x_wgrad)
        if self.fault is not None:
            return f"{name} (broken)"
        return name if cast.scale == "delayed" else read.reader

    def key(self, cast: Cast, contraction_dim: int) -> tuple[Any, ...]:
        """Equal for casts that give the same numbers."""
        return cast, contraction_dim if cast.directed else None, self.unit if cast.scale == "delayed" else None

    def end(self) -> None:
        """Once, when the last of its GEMMs is done."""
        if not self._rehearsal:
            self.ledger.write(self.unit, self._counted.values(), self._largest)
        self._counted.clear()
        self._largest.clear()


def remember(ctx: Any, the_pass: Pass, x: Tensor, weight: Tensor, x_wgrad: Any, measured: MeasuredCasts | None) -> None:
    """Leaves in `ctx` what `linear_backward` needs besides the saved tensors, `num_weights` and `weight_is_cast`."""
    ctx.the_pass, ctx.x_shape, ctx.measured = the_pass, x.shape, measured
    ctx.x_dtype, ctx.weight_dtype, ctx.holds_copy = x.dtype, weight.dtype, x_wgrad is not None


def linear_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, and None for the function's other arguments: dgrad and wgrad as the pass
    casts and multiplies. The saved tensors are the weight's (`num_weights`) and then those that wgrad reads."""
    the_pass: Pass = ctx.the_pass
    if is_sharded(grad_output):
        raise ValueError(f"the gradient of a linear's output {SHARDED}")
    saved = ctx.saved_tensors  # once: checkpointing allows no second look
    weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
    ctx.holds_copy = False  # freed when this returns
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
    recipe, made = the_pass.recipe, dict[Any, tuple[Any, Met]]()
    grad_x = grad_weight = None
    if need_x:
        grad = the_pass.cast("grad_output", grad_2d, recipe.dgrad.grad_output, 1, made)
        if ctx.weight_is_cast:
            read = the_pass.restored(weights, grad_2d.dtype)
        else:
            read = the_pass.cast("weight", weights[0], recipe.dgrad.weight, 0)
        product = the_pass.product(grad, read, ctx.x_dtype)
        grad_x = the_pass.cast("result", product, recipe.dgrad.result).view(ctx.x_shape)
    if need_weight:
        grad_weight = the_pass.wgrad(grad_2d, the_pass.restored(kept, grad_2d.dtype), ctx.weight_dtype, made)
        if ctx.measured is not None:
            ctx.measured.add_backward(grad_2d, grad_weight, the_pass, made)
            ctx.measured = None
    grad_bias = grad_2d.sum(dim=0) if need_bias else None
    the_pass.end()
    return grad_x, grad_weight, grad_bias, *([None] * (len(ctx.needs_input_grad) - 3))


class SimulatedLinear(torch.autograd.Function):
    """F.linear of operands that were cast already; casts those of backward. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        the_pass: Pass,
        x_fprop: Tensor,
        x_wgrad: Tensor | None,
        measured: MeasuredCasts | None,
    ) -> Tensor:
        remember(ctx, the_pass, x, weight, x_wgrad, measured)
        recipe, made = the_pass.recipe, dict[Any, tuple[Tensor, Met]]()
        w_fprop = the_pass.cast("weight", weight, recipe.fprop.weight, 1, made)
        dgrad = recipe.dgrad.weight
        same = made.get(the_pass.key(dgrad, 0)) if dgrad is not None else None
        ctx.weight_is_cast, ctx.num_weights = same is not None, 1
        ctx.save_for_backward(weight if same is None else same[0], *(() if x_wgrad is None else (x_wgrad,)))
        output = F.linear(x_fprop.view(x.shape), w_fprop, bias)
        if recipe.fprop.result is None:
            return output
        return the_pass.cast("result", output.reshape(-1, output.shape[-1]), recipe.fprop.result).view(output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return linear_backward(ctx, *grads)


def simulated_linear(
    operator: PathLinear,
    recipe: Recipe,
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keeps: bool,
    fault: Injector | None = None,
    kind: type[Pass] = Pass,
    function: type[torch.autograd.Function] = SimulatedLinear,
) -> tuple[Tensor, str | Place]:
    """(output, what is kept: see `PathLinear.read`): `operator` on `input`, under `recipe`.

    `x`, `weight` and `bias` are the operands in the dtype of the GEMMs. `keeps`: whether wgrad will run. `fault`: one
    of the low path that is in force, whatever the operator's path. `kind` and `function`: what casts and multiplies,
    for backends that do it otherwise.
    """
    read, probe = operator.shared.read_of(input, operator.unit_name), operator.shared.probe
    the_pass = kind.of(operator, recipe, None if operator.recovering else fault)
    rows = x.detach().reshape(-1, x.shape[-1])
    made = the_pass.casts_of(read, x.dtype)
    x_fprop = the_pass.cast("input", rows, recipe.fprop.input, 1, made)
    x_wgrad = the_pass.cast("input", rows, recipe.wgrad.input, 0, made) if keeps else None
    measured = None
    if keeps and probe is not None and probe.enabled:
        measured = probe.measure_casts(operator, read, rows, fault, the_pass, made)
    output = function.apply(x, weight, bias, the_pass, x_fprop, x_wgrad, measured)
    if torch.is_grad_enabled() and not output.requires_grad and not in_backward():
        the_pass.end()  # frozen, and so is all before it: no backward pass will
    return output, the_pass.kept_by(operator, read, x_wgrad)


def in_backward() -> bool:
    """Whether a backward pass runs: what runs forward in one is recomputed, by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
