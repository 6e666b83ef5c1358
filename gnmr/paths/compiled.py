"""A recipe's linear as part of a graph of torch.compile's, in place of running between the graphs (`Plan.compile`).

The arithmetic is that of `simulated.py` and `fp8.py`, written without what a graph cannot hold: scratch memory, looks
at values, and what is found again by the identity of tensors. q, k and v cast the tensor that they all read each for
itself; the compiler finds that it is one. What backward keeps is the compiler's choice, so it is not measured.

What the casts met leaves the graph as a gradient: each operator has a leaf tensor, its tally, that takes part in no
arithmetic, and the "gradient" that backward gives it are the numbers of saturated and non-finite elements. So they add
up over micro-batches, and neither evaluation nor a recomputed forward pass shows, as in the `Ledger`, which gets them
at the end of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnmr.paths.fp8 import RealPass, ScaledLinear
from gnmr.paths.recipes import Cast, Recipe
from gnmr.paths.scaling import nan_unless_finite
from gnmr.paths.simulated import OPERANDS, Ledger, Met, Pass, SimulatedLinear, as_matrix, linear_backward, scaled

GraphLinear = Callable[[Tensor, Tensor, Tensor | None, Tensor, torch.dtype | None, bool], Tensor]
"""(input, weight, bias, tally, dtype that autocast computes in, whether wgrad will run) -> output."""


def new_tally(device: torch.device) -> Tensor:
    """(operands, 2) float64: a leaf whose gradient counts as `Ledger.counts` does."""
    return torch.zeros(len(OPERANDS), 2, dtype=torch.float64, device=device, requires_grad=True)


def missing(*paths: object) -> str | None:
    """Why operators on these paths stay between the graphs; None: they need not."""
    for path in paths:
        if path is None:
            continue
        if not isinstance(path, Recipe):
            return "what a format keeps for backward is its own choice, not the compiler's"
        if path.integer or path.backend not in ("simulated", "scaled_mm"):
            return f"{path.name} is run by {path.backend}"
        if path.history:
            return f"{path.name} has delayed scales, which remember earlier steps"
    return None


def graph_linear(recipe: Recipe) -> GraphLinear:
    """The linear of `recipe` as one node of Dynamo's graph, into which the compiler behind it sees."""
    real = recipe.backend == "scaled_mm"
    last: weakref.ref[Tensor] | None = None

    def linear(
        input: Tensor, weight: Tensor, bias: Tensor | None, tally: Tensor, dtype: torch.dtype | None, keeps: bool
    ) -> Tensor:
        nonlocal last
        # While a graph is made its values are objects, and all readers of one are given the same.
        first = last is None or last() is not input
        last = weakref.ref(input)
        x = input if dtype is None else input.to(dtype)
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        the_pass = (_GraphRealPass if real else _GraphPass)(recipe, _Counts(first), 0)
        rows, made = x.detach().reshape(-1, x.shape[-1]), dict[Any, tuple[Any, Met]]()
        x_fprop = the_pass.cast("input", rows, recipe.fprop.input, 1, made)
        x_wgrad = the_pass.cast("input", rows, recipe.wgrad.input, 0, made) if keeps else None
        function = _GraphScaledLinear if real else _GraphSimulatedLinear
        output: Tensor = function.apply(x, weight, bias, the_pass, x_fprop, x_wgrad, None, tally)
        return output

    found: GraphLinear = torch.compiler.allow_in_graph(linear)
    return found


class _Counts(Ledger):
    """The ledger of one pass: what is written becomes the gradient of a tally."""

    def __init__(self, first: bool) -> None:
        """`first`: of the operators that read this input, the one for which its casts count."""
        self.history, self.first = None, first
        self.found: dict[tuple[int, int], list[Tensor]] = {}

    def write(self, unit: int, counted: Iterable[tuple[int, Met]], largest: dict[int, Tensor]) -> None:
        for operand, met in counted:
            for kind, number in enumerate((met.saturated, met.nonfinite)):
                if number is not None and (self.first or OPERANDS[operand] != "input"):
                    self.found.setdefault((operand, kind), []).append(number)

    def gradient(self, device: torch.device) -> Tensor:
        """What a tally gets."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        rows = ((sum(self.found.get((i, kind), []), zero) for kind in range(2)) for i in range(len(OPERANDS)))
        return torch.stack([torch.stack(list(row)) for row in rows])


class _GraphPass(Pass):
    """A pass whose casts are those of the simulation in whole tensors."""

    ledger: _Counts

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Met]:
        divided, scale, largest, saturated = scaled(x, cast, contraction_dim, reference)
        values = as_matrix(cast.format.round(divided).mul_(scale), x).to(x.dtype)
        return values, Met(largest, saturated, self.nonfinite(x, largest))

    def nonfinite(self, x: Tensor, largest: Tensor) -> Tensor:
        return _nonfinite(x)


class _GraphRealPass(RealPass):
    """The same in codes."""

    ledger: _Counts

    def nonfinite(self, x: Tensor, largest: Tensor) -> Tensor:
        return _nonfinite(x)


def _nonfinite(x: Tensor) -> Tensor:
    bad = nan_unless_finite(x)
    return (bad != bad).sum()


class _GraphSimulatedLinear(SimulatedLinear):
    """As its base, with one argument more: the tally, whose gradient are the counts."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return SimulatedLinear.forward(ctx, *args[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


class _GraphScaledLinear(ScaledLinear):
    """The same of codes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return ScaledLinear.forward(ctx, *args[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *others, _ = linear_backward(ctx, *grads)
    counts: _Counts = ctx.the_pass.ledger
    return *others, counts.gradient(grads[0].device)
