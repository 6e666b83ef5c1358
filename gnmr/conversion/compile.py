"""Run a recipe's linear inside the graphs of torch.compile instead of between them (`ConvertedModel.compile`).

The function is `LinearFunction`, as between graphs. Only lookups by the identity of tensors are left out: each of q, k
and v casts the tensor that they all read, and the compiler merges these casts.

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

from gnmr.conversion.gemms import GemmContext, LinearFunction
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.scaled_mm import ScaledContext
from gnmr.conversion.shared import Casts, GraphLinear
from gnmr.conversion.unit_names import unit_of
from gnmr.formats.recipes import ExecutionPath, Recipe
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
        # The graphs of all operators share one function for each recipe.
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
    context_kind = ScaledContext if recipe.backend == "scaled_mm" else GemmContext
    last_read = _LastRead()

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
        if dtype is not None:  # autocast
            x, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        # Without a history: the counts leave the graph as the gradient of the tally.
        context = context_kind(recipe, None, 0)
        rows, casts = x.detach().reshape(-1, x.shape[-1]), Casts()
        x_fprop = context.cast("input", rows, recipe.fprop.input, 1, casts)
        x_wgrad = context.cast("input", rows, recipe.wgrad.input, 0, casts) if keeps else None
        last_read.count_once(input, casts)
        output: Tensor = LinearFunction.apply(x, weight, bias, tally, context, x_fprop, x_wgrad, None)
        return output

    in_graph: GraphLinear = torch.compiler.allow_in_graph(linear)
    return in_graph


class _LastRead:
    """The tensor that was read last, and which of its casts are counted: each counts for its first reader.

    While a graph is made, `linear` receives fake tensors, and all readers of a tensor receive the same one. The reader
    is therefore fixed when the graph is made, with the same result as `SharedState.read_of`.
    """

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None
        self._counted: set[Any] = set()

    def count_once(self, x: Tensor, casts: Casts) -> None:
        """Mark those of its `casts` that an earlier reader of `x` counts."""
        if self._tensor is None or self._tensor() is not x:
            self._tensor, self._counted = weakref.ref(x), set()
        for key, (_, stats) in casts.items():
            # The compiler merges equal casts, but each operator's backward pass would count its own.
            stats.counted = key in self._counted
            self._counted.add(key)
