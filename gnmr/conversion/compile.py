"""Run a recipe's linear inside the graphs of torch.compile instead of between them (`ConvertedModel.compile`).

The arithmetic is that of `kernels/simulated.py` and `kernels/scaled_mm.py`, without constructs that a graph cannot
hold: scratch memory, inspection of values, and lookups by the identity of tensors. Each of q, k and v casts the tensor
that they all read; the compiler merges these casts.

The statistics of the casts leave the graph as a gradient. Each operator has a leaf tensor, its tally, that takes part
in no arithmetic. The "gradient" of the tally holds the numbers of saturated and non-finite elements. These therefore
add up over micro-batches, and evaluation and recomputed forward passes are not counted. `AmaxHistory` receives them at
the end of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gnmr.conversion.kernels.scaled_mm import ScaledContext
from gnmr.conversion.kernels.simulated import Draw, GemmContext, RecipeLinear, linear_backward
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.shared import Casts, GraphLinear
from gnmr.conversion.unit_names import unit_of
from gnmr.formats.cast import Reference, as_matrix, scaled
from gnmr.formats.cast_stats import AmaxHistory, CastStats
from gnmr.formats.recipes import Cast, ExecutionPath, Recipe
from gnmr.formats.scaling import count_nonfinite
from gnmr.names import OPERANDS


def into_graphs(
    operators: Sequence[PathLinear],
    num_units: int,
    low: ExecutionPath,
    recovery: ExecutionPath | None,
    blocks: Iterable[nn.Module],
) -> str | None:
    """Prepare the operators for blocks that are compiled next; call it before their first pass.

    Returns why they stay between the graphs, or None.
    """
    why = _missing(low, recovery)
    together = {unit_of(operator.operator_name, "block") for operator in operators}
    if recovery is not None and len(together) != num_units:
        why = "units are smaller than blocks, and each combination of their paths would be a graph"
    if any(operator.pinned for operator in operators):
        why = "pinned operators have paths of their own, and each block would be graphs by itself"
    if why is None:
        recipes = [path for path in (low, recovery) if isinstance(path, Recipe)]
        graphs = tuple((repr(recipe), graph_linear(recipe)) for recipe in recipes)
        inside = {module for block in blocks for module in block.modules()}
        for operator in operators:
            if operator in inside:
                operator.in_graphs, operator.tally = graphs, new_tally(operator.weight.device)
    return why


def new_tally(device: torch.device) -> Tensor:
    """Return a leaf, (operands, 2) float64, whose gradient counts as `AmaxHistory.counts` does."""
    return torch.zeros(len(OPERANDS), 2, dtype=torch.float64, device=device, requires_grad=True)


def _missing(*paths: object) -> str | None:
    """Return why operators on these paths stay between the graphs, or None if they can be in them."""
    for path in paths:
        if path is None:
            continue
        if not isinstance(path, Recipe):
            return "what a format keeps for backward is its own choice, not the compiler's"
        if path.integer or path.backend not in ("simulated", "scaled_mm"):
            return f"{path.name} is run by {path.backend}"
        if path.history:
            return f"{path.name} has delayed scales, which remember earlier steps"
        if path.stochastic or any(cast.hadamard for cast in path.casts):
            return f"{path.name} {'draws random numbers' if path.stochastic else 'rotates its operands'}"
    return None


def graph_linear(recipe: Recipe) -> GraphLinear:
    """Return the linear of `recipe` as one node of Dynamo's graph, which the compiler behind Dynamo can inspect.

    Dynamo stores graphs by code and distinguishes functions of one definition only by their arguments, not by their
    closures. The recipe is therefore an argument too; otherwise a second model in the process would reuse the graphs of
    the first.
    """
    context_kind = _CodesContext if recipe.backend == "scaled_mm" else _ValuesContext
    read = _Read()

    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tally: Tensor,
        dtype: torch.dtype | None,
        keeps: bool,
        _recipe: str,
    ) -> Tensor:
        x = input
        if dtype is not None:
            x, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        context: GemmContext = context_kind(recipe, _Counts(), 0)
        rows, made = x.detach().reshape(-1, x.shape[-1]), Casts()
        x_fprop = context.cast("input", rows, recipe.fprop.input, 1, made)
        x_wgrad = context.cast("input", rows, recipe.wgrad.input, 0, made) if keeps else None
        read.count_once(input, made)
        output: Tensor = _CountedLinear.apply(x, weight, bias, context, x_fprop, x_wgrad, None, tally)
        return output

    found: GraphLinear = torch.compiler.allow_in_graph(linear)
    return found


class _Read:
    """The tensor that was read last, and which of its casts are counted: each counts for its first reader.

    While a graph is made, `linear` receives fake tensors, and all readers of a tensor receive the same one. The reader
    is therefore fixed when the graph is made, with the same result as `SharedState.read_of`.
    """

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None
        self._counted: set[Any] = set()

    def count_once(self, x: Tensor, made: Casts) -> None:
        """Mark those of the casts `made` that an earlier reader of `x` counts."""
        if self._tensor is None or self._tensor() is not x:
            self._tensor, self._counted = weakref.ref(x), set()
        for key, (_, stats) in made.items():
            stats.counted = key in self._counted
            self._counted.add(key)


class _Counts(AmaxHistory):
    """The counts of one pass, without a history; they become the gradient of a tally."""

    def __init__(self) -> None:
        self.history = None
        self._found: dict[tuple[int, int], list[Tensor]] = {}

    def write(self, operator: int, found: Iterable[tuple[int, CastStats]], largest: dict[int, Tensor]) -> None:
        for operand, stats in found:
            for kind, number in enumerate((stats.saturated, stats.nonfinite)):
                if number is not None and not stats.counted:
                    self._found.setdefault((operand, kind), []).append(number)

    def gradient(self, device: torch.device) -> Tensor:
        """Return the gradient of a tally."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        rows = ((sum(self._found.get((i, kind), []), zero) for kind in range(2)) for i in range(len(OPERANDS)))
        return torch.stack([torch.stack(list(row)) for row in rows])


class _InGraph(GemmContext):
    """A context that never inspects values."""

    amax: _Counts

    def nonfinite(self, x: Tensor, largest: Tensor) -> Tensor | None:
        return count_nonfinite(x)


class _ValuesContext(_InGraph):
    """A context whose casts are those of the simulation, on whole tensors."""

    def quantize(self, x: Tensor, cast: Cast, dim: int, reference: Reference, draw: Draw) -> tuple[Any, CastStats]:
        divided, scale, largest, saturated = scaled(x, cast, dim, reference)
        values = as_matrix(cast.format.round(divided).mul_(scale), x).to(x.dtype)
        return values, CastStats(largest, saturated, self.nonfinite(x, largest))


class _CodesContext(_InGraph, ScaledContext):
    """A context whose casts are the hardware's codes."""


class _CountedLinear(torch.autograd.Function):
    """`RecipeLinear` with the tally as its last argument; the counts are the tally's gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, _tally = args
        output: Tensor = RecipeLinear.forward(ctx, *operands)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *of_operands, _ = linear_backward(ctx, *grads)
        counts: _Counts = ctx.context.amax
        return *of_operands, counts.gradient(grads[0].device)
