"""Protocols by which faults (`faults.py`), measurements (`probe.py`) and Transformer Engine (`kernels/te.py`) take part
in an operator's passes. Linears and kernels know no more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.precision.cast import Reference
from gnmr.precision.cast_stats import CastStats
from gnmr.precision.formats import Format
from gnmr.precision.reads import Read
from gnmr.precision.recipes import Cast, Recipe

Casts: TypeAlias = dict[Any, tuple[Any, CastStats]]
"""The casts that were made of one tensor, by `GemmContext.key`."""
GraphLinear: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor, torch.dtype | None, bool, str], Tensor]
"""(input, weight, bias, tally, dtype that autocast computes in, whether wgrad will run, its recipe in full) -> output:
a linear that torch.compile takes into its graph (`compiled.py`)."""


class FaultInjection(Protocol):
    """Breaks the low path of one operator."""

    def for_step(self, input: Tensor, remember: bool = True) -> FaultInjection | None:
        """The fault where it is in force in this step. `remember`: take note of the size of `input` if it is needed."""

    def compress(self, input: Tensor, fmt: Format, stochastic: bool) -> tuple[Tensor, Tensor]:
        """As `scaling.compress`, of `input` (..., D)."""

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
    ) -> tuple[Tensor, Tensor, CastStats]:
        """(values, scale of each element, statistics) of `x` (N, D)."""


class Measurement(Protocol):
    """What was measured in a forward pass, until its backward pass."""

    def add(self, grad_2d: Tensor) -> None:
        """Adds it up, given the grad_output (T, O) of the pass."""


class CastMeasurement(Protocol):
    """The same of a pass under a recipe."""

    def add_backward(self, grad_2d: Tensor, grad_weight: Tensor, context: Any, made: Casts) -> None:
        """As `Measurement.add`; `context` (a `GemmContext`) gave `grad_weight` and has `made` casts of grad_output."""


class Observer(Protocol):
    """Measures in forward passes; operators are known by their index."""

    enabled: bool

    def measure(
        self, index: int, read: Read, input: Tensor, x: Tensor, fault: FaultInjection | None, copy: tuple[Tensor, ...]
    ) -> Measurement:
        """Under a format: `x` is `input` after autocast's cast, `copy` what backward will read of it."""

    def measure_casts(
        self, index: int, read: Read, fault: FaultInjection | None, rows: Tensor, context: Any, made: Casts
    ) -> CastMeasurement:
        """Under a recipe: `rows` (T, D) are the input, of which the `GemmContext` has `made` casts."""


class PriceObserver(Protocol):
    """Measures the prices of operators (`price.py`)."""

    enabled: bool

    def watch(self, operator: Any, input: Tensor, output: Tensor) -> None:
        """Has the backward pass of this forward pass measured."""


class Engine(Protocol):
    """Runs the linears of a plan by kernels of its own, whose casts are not counted."""

    delayed: bool
    """Whether it has delayed scales, which are state."""

    def __call__(self, operator: nn.Linear, name: str, index: int, recipe: Recipe, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""

    def close(self) -> None:
        """Takes its hooks from the model."""

    def state(self) -> bytes:
        """Its delayed scales."""

    def load(self, state: bytes, runs: Iterable[tuple[int, nn.Linear, Recipe]]) -> None:
        """What `state` gave, of these operators under these recipes."""
