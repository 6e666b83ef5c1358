"""The state that all converted operators of a model share, and the protocols of faults and measurements.

Faults (`gnmr.lab.fault_injection`) and measurements (`gnmr.measure`) take part in passes through these protocols.
Linears and kernels know nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gnmr.conversion.reads import Read, seen_by_numpy
from gnmr.formats.cast import Reference
from gnmr.formats.cast_stats import AmaxHistory, CastStats
from gnmr.formats.number_formats import Format
from gnmr.formats.recipes import Cast, ExecutionPath
from gnmr.formats.rounding import Rounding

Casts: TypeAlias = dict[Any, tuple[Any, CastStats]]
"""The casts of one tensor, by `GemmContext.key`."""
GraphLinear: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor, torch.dtype | None, bool, str], Tensor]
"""A linear that torch.compile takes into its graph (`compile.py`).

It maps (input, weight, bias, tally, dtype of autocast, whether wgrad will run, its complete recipe) to the output.
"""


class Widths(Protocol):
    """The properties of a linear operator that decide whether a recipe or a kernel can run it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class FaultInjection(Protocol):
    """Breaks the low path of one operator."""

    def for_step(self, input: Tensor, remember: bool = True) -> FaultInjection | None:
        """Return the fault if it is in force in this step.

        Args:
            input: the operator's input, any shape.
            remember: record the largest magnitude of input, if the fault needs the steps before.
        """

    def compress(self, input: Tensor, fmt: Format, stochastic: bool) -> tuple[Tensor, Tensor]:
        """Compress an input (..., D) as `scaling.compress` does, with the fault.

        Returns: codes and scales of the rows; rounded stochastically if `stochastic`.
        """

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
    ) -> tuple[Tensor, Tensor, CastStats]:
        """Cast an operand (N, D) as `formats.cast.quantize` does, with the fault.

        Returns: values and the scale of each element, (N, D) float32; statistics.
        """


class Measurement(Protocol):
    """A measurement that began in a forward pass and ends in its backward pass."""

    def add(self, grad_2d: Tensor, context: Any = None, casts: Casts | None = None) -> None:
        """Add grad_output (T, O) of the pass; under a recipe `casts` are its casts by `context`."""


class Observer(Protocol):
    """Measures in forward passes; operators are identified by their index."""

    enabled: bool

    def measure(
        self, index: int, read: Read, input: Tensor, x: Tensor, fault: FaultInjection | None, copy: tuple[Tensor, ...]
    ) -> Measurement:
        """Measure under a format: `x` is `input` after autocast's cast, and `copy` is what backward will read of it."""

    def measure_casts(
        self, index: int, read: Read, fault: FaultInjection | None, rows: Tensor, context: Any, casts: Casts
    ) -> Measurement:
        """Measure under a recipe: `rows` (T, D) are the input, and `casts` its casts by the `GemmContext`."""


class PriceObserver(Protocol):
    """Measures the prices of operators (`gnmr.measure.price`)."""

    enabled: bool

    def watch(self, operator: Any, input: Tensor, output: Tensor) -> None:
        """Arrange that the backward pass of this forward pass is measured."""


class Switches:
    """State that a converted model shares with its copies (an average of its weights): a copy switches with it."""

    def __init__(self) -> None:
        self.high_precision = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Switches:
        return self


class SharedState:
    """State that all operators of a converted model share.

    Besides the attributes below it holds the compressed copies of the tensor that was read last, so that its other
    readers find them.

    - `device`: where the operators were converted, or run if their weights were on the meta device.
    - `quantize_forward`: whether fprop reads the compressed copy of the input too (site="forward").
    - `rounding`: the random numbers of stochastic rounding; None: round to nearest.
    - `step`: the current optimizer step, from 1.
    - `no_side_effects`: while true, a pass leaves no trace in the state of faults and casts.
    - `repeats_step`: while true, passes are those of a training step once more, although they leave no trace.
    - `high_precision`: while true, every operator is a plain linear, also in copies of the model. Evaluation always
      uses this 16-bit path.
    - `warmup`: in a 16-bit warm-up, the path of operators in recovery; else None.
    - `probe`: the observer of the paths' errors, if any.
    - `prices`: the observer of the paths' prices, if any.
    - `watch`: the observer of operators' outputs in a repeated pass (`gnmr.attachment.blame`), if any.
    - `amax`: counts and magnitudes of the casts of recipes; None if the paths are formats.
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
        self.no_side_effects = self.repeats_step = False
        self.probe: Observer | None = None
        self.prices: PriceObserver | None = None
        self.watch: Callable[[Any, Tensor, Tensor], None] | None = None
        self._last: Read | None = None

    @property
    def high_precision(self) -> bool:
        """Whether every operator is a plain linear; see the class."""
        return self.switches.high_precision

    @property
    def stays(self) -> bool:
        """Whether the tensors of this state are on the device on which the operators were converted."""
        return self.amax is not None or self.rounding is not None or self.probe is not None

    def move_from_meta(self, device: torch.device) -> None:
        """Begin the state anew where the weights of operators on the meta device come when they run.

        Args:
            device: where they run; counts and delayed scales begin with zeros there.
        """
        self.device = device
        if self.amax is not None:
            steps = 0 if self.amax.history is None else self.amax.history.shape[2] - 1
            self.amax = AmaxHistory(len(self.amax.counts), steps, device)

    def read_of(self, x: Tensor, reader: str, index: int) -> Read:
        """Return the record of a tensor since its first operator read it.

        Call it once in each forward pass of an operator. Other operators that read the tensor that was read last join
        its record. The next pass of the same operator starts a new record, because the tensor may have changed under
        the same version number (a write through `.data`).

        Args:
            x: the tensor.
            reader: the operator's name.
            index: its index.
        """
        last = self._last
        if last is None or not last.joins(x, reader):
            last = Read(x, reader, index)
            # These change without a new version number: a parameter (fused optimizers), an inference tensor, an array.
            if not (x.is_leaf and x.requires_grad) and not x.is_inference() and not seen_by_numpy(x):
                self._last = last  # one assignment: another thread sees all of it or none
        return last

    def forget(self) -> None:
        """Drop the copies of the last tensor, at the end of each step."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without the state of a step."""
        return {**self.__dict__, "_last": None, "probe": None, "prices": None, "watch": None}
