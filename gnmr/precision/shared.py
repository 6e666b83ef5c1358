"""What all converted operators of a model have in common, and the protocols by which faults (`gnmr.lab.faults`) and
measurements (`gnmr.measure`) take part in their passes. Linears and kernels know no more of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gnmr.precision.cast import Reference
from gnmr.precision.cast_stats import AmaxHistory, CastStats
from gnmr.precision.formats import Format
from gnmr.precision.reads import Read, seen_by_numpy
from gnmr.precision.recipes import Cast, ExecutionPath
from gnmr.precision.rounding import Rounding

Casts: TypeAlias = dict[Any, tuple[Any, CastStats]]
"""The casts that were made of one tensor, by `GemmContext.key`."""
GraphLinear: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor, torch.dtype | None, bool, str], Tensor]
"""(input, weight, bias, tally, dtype that autocast computes in, whether wgrad will run, its recipe in full) -> output:
a linear that torch.compile takes into its graph (`compile.py`)."""


class Widths(Protocol):
    """A linear operator, as far as a recipe or a kernel asks whether it can run it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


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

    def add(self, grad_2d: Tensor, context: Any = None, made: Casts | None = None) -> None:
        """Add it up, given the grad_output (T, O) of the pass. Under a recipe `context` (a `GemmContext`) has `made`
        casts of grad_output."""


class Observer(Protocol):
    """Measures in forward passes; operators are known by their index."""

    enabled: bool

    def measure(
        self, index: int, read: Read, input: Tensor, x: Tensor, fault: FaultInjection | None, copy: tuple[Tensor, ...]
    ) -> Measurement:
        """Under a format: `x` is `input` after autocast's cast, `copy` what backward will read of it."""

    def measure_casts(
        self, index: int, read: Read, fault: FaultInjection | None, rows: Tensor, context: Any, made: Casts
    ) -> Measurement:
        """Under a recipe: `rows` (T, D) are the input, of which the `GemmContext` has `made` casts."""


class PriceObserver(Protocol):
    """Measures the prices of operators (`gnmr.measure.price`)."""

    enabled: bool

    def watch(self, operator: Any, input: Tensor, output: Tensor) -> None:
        """Has the backward pass of this forward pass measured."""


class Switches:
    """What a converted model and its copies (an average of its weights) have in common: a copy is switched with it."""

    def __init__(self) -> None:
        self.high_precision = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Switches:
        return self


class SharedState:
    """Common to all operators of a converted model.

    - the compressed copies of the tensor that was read last, so that its other readers find them;
    - `rounding`: what stochastic rounding draws (None: round to nearest);
    - `step`: the optimizer step that runs, from 1;
    - `no_side_effects`: while true, a pass must leave no trace in what faults and casts remember;
    - `high_precision`: while true, every operator is a plain linear (evaluation is always on the 16-bit path), as are
      those of copies of the model;
    - `warmup`: in a warm-up in 16 bits, the path of operators in recovery in place of their own; else None;
    - `probe`: what measures the paths' errors, if anything does;
    - `prices`: what measures the paths' prices, if anything does;
    - `watch`: what looks at operators' outputs in a repeated pass (`gnmr.attachment.blame`), if anything does;
    - `amax`: counts and magnitudes of what recipes cast (None: the paths are formats).
    """

    def __init__(
        self,
        *,
        quantize_forward: bool,
        rounding: Rounding | None = None,
        amax: AmaxHistory | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.quantize_forward = quantize_forward
        self.rounding = rounding
        self.step = 1
        self.amax = amax
        self.switches = Switches()
        self.warmup: ExecutionPath | None = None
        self.no_side_effects = False
        self.probe: Observer | None = None
        self.prices: PriceObserver | None = None
        self.watch: Callable[[Any, Tensor, Tensor], None] | None = None
        self._last: Read | None = None

    @property
    def high_precision(self) -> bool:
        """See above."""
        return self.switches.high_precision

    @property
    def stays(self) -> bool:
        """Whether it holds tensors on the device on which the operators were converted."""
        return self.amax is not None or self.rounding is not None or self.probe is not None

    def read_of(self, x: Tensor, reader: str, index: int) -> Read:
        """What is known of this very tensor since its first operator read it. Once in each forward pass of `reader`,
        the operator in place `index`.

        The other readers of the tensor that was read last join in. The same operator's next pass does not: the tensor
        may hold something else by then, be it under the same version number (a write through `.data`).
        """
        last = self._last
        if last is None or not last.joins(x, reader):
            last = Read(x, reader, index)
            # These change without a new version number: a parameter (fused optimizers), an inference tensor, an array.
            if not (x.is_leaf and x.requires_grad) and not x.is_inference() and not seen_by_numpy(x):
                self._last = last  # in one assignment: another thread finds all of it or none
        return last

    def forget(self) -> None:
        """Drops the copies of the last tensor (each step's end)."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without what belongs to a step."""
        return {**self.__dict__, "_last": None, "probe": None, "prices": None, "watch": None}
