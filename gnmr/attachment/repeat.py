"""Extra passes of a converted model, under either path or as a repetition of a step, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.compiler import compiled_code_eagerly
from gnmr.control import Unit
from gnmr.control.measurements import of_shards, part_of, summed
from gnmr.control.norms import Distinct
from gnmr.control.ranks import Ranks
from gnmr.conversion import ConvertedModel
from gnmr.conversion.converted import StepMark
from gnmr.conversion.linear import PathLinear
from gnmr.conversion.passes import in_backward

FORWARD = 1 / 3
"""Share of a step's time that its forward passes take."""
MAX_STEP_TIMES = 4.0
"""Step times that a search for a cause may take; beyond them the smallest set that was tried is reported."""


class PassNumbers(NamedTuple):
    """Numbers of a step, on the host."""

    loss: float
    norm: float
    """Global gradient norm before clipping."""
    units: np.ndarray | None = None
    """(U,) float64: the units' gradient norms."""


@dataclass(frozen=True)
class Start:
    """The generators of random numbers, and the state of the paths, at the start of a step."""

    device: torch.device
    cpu: Tensor
    """State of the CPU's generator, uint8 as torch returns it."""
    cuda: Tensor | None
    """State of the generator of `device`; None: it is no GPU."""
    paths: StepMark

    @classmethod
    def of(cls, converted: ConvertedModel, device: torch.device) -> Start:
        """Return the current state. Does not wait for the device.

        Args:
            converted: the paths.
            device: the device of the passes; its generator counts besides the CPU's.
        """
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda, converted.mark())

    def restore(self, converted: ConvertedModel) -> None:
        """Restore the state, so that the same numbers are drawn again.

        Args:
            converted: the paths of which the state was taken.
        """
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        converted.back_to(self.paths)


class StepRepeater:
    """Repeats the passes of one step under other paths. Use it within `repeating`.

    Compiled blocks run uncompiled, because other paths would be other graphs, and compiling a graph takes a minute.

    Args:
        converted: the paths, as they were in the step.
        start: the state at the start of the step.
        forward: runs the step's forward passes, and returns the mean loss, () in nats.
        both: runs forward and backward passes, and leaves the gradients unchanged.
        buffers: buffers of the model, as they were at the start of the step.
    """

    def __init__(
        self,
        converted: ConvertedModel,
        start: Start,
        forward: Callable[[], Tensor],
        both: Callable[[], PassNumbers],
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self.converted, self.passes = converted, 0.0
        self.units = [i for i, unit in enumerate(converted.units) if unit.routable]
        self._start, self._forward, self._both = start, forward, both
        self._put = {operator: operator.recovered for operator in converted.operators}
        self._warmup = converted.shared.warmup
        self._buffers = _copies(buffers)

    @property
    def low(self) -> list[int]:
        """Indices of the units that were not on the recovery path."""
        units = self.converted.units
        return [
            i for i in self.units if any((units[i].gemm or "fprop") not in self._put[o] for o in units[i].operators)
        ]

    def affords(self, cost: float) -> bool:
        """Return True if further passes do not exceed `MAX_STEP_TIMES`.

        Args:
            cost: duration in step times, a sum of thirds: 1 for forward and backward, `FORWARD` for a forward pass.
        """
        return self.passes + cost <= MAX_STEP_TIMES + 1e-9

    @contextmanager
    def _paths(self, recover: Iterable[int], sixteen: bool, compiled: bool = False) -> Iterator[None]:
        # First the paths of the step, then the units to recover on top of them.
        for operator, put in self._put.items():
            operator.put(put)
        for i in recover:
            self.converted.units[i].switch(True)
        shared = self.converted.shared
        shared.warmup, shared.repeats_step = self._warmup, True
        # Dropout and stochastic rounding draw what they drew in the step: only the paths differ.
        self._start.restore(self.converted)
        # Buffers such as running statistics change in each pass.
        _put_back(self._buffers)
        try:
            with (
                self.converted.high_precision() if sixteen else nullcontext(),
                nullcontext() if compiled else compiled_code_eagerly(),
            ):
                yield
        finally:
            shared.repeats_step = False

    @torch.no_grad()
    def loss(self, recover: Iterable[int] = (), sixteen: bool = False) -> float:
        """Return the mean loss of the step's forward passes. Waits for the device.

        Args:
            recover: Units that are on the recovery path in addition to those of the step.
            sixteen: Compute all linears in 16 bits instead.
        """
        self.passes += FORWARD
        with self._paths(recover, sixteen):
            return float(self._forward())

    def numbers(self, recover: Iterable[int] = (), sixteen: bool = False, compiled: bool = False) -> PassNumbers:
        """Return the numbers of the step's forward and backward passes. Waits for the device.

        Args:
            recover: Units that are on the recovery path in addition to those of the step.
            sixteen: Compute all linears in 16 bits instead.
            compiled: Run compiled blocks compiled, which is possible with the paths of the step alone.
        """
        self.passes += 1
        with self._paths(recover, sixteen, compiled):
            return self._both()

    @contextmanager
    def watching(self, watch: Callable[[PathLinear, Tensor, Tensor], None]) -> Iterator[None]:
        """Observe the forward passes of the operators inside this context.

        Args:
            watch: is called with operator, input (..., I) and output (..., O) after each of them.
        """
        self.converted.shared.watch = watch
        try:
            yield
        finally:
            self.converted.shared.watch = None

    def units_of(self, operator: PathLinear) -> list[int]:
        """Return the units whose switch changes what the operator's forward pass reads.

        Returns: their indices, of routable units alone; of units of single GEMMs that of fprop.
        """
        units = self.converted.units
        return [i for i in self.units if operator in units[i].operators and units[i].gemm in (None, "fprop")]

    @contextmanager
    def errors(self, errors: dict[PathLinear, float]) -> Iterator[None]:
        """Measure the low path's errors inside this context; waits for the device at its end.

        Each forward pass of an operator in recovery also runs on the low path, without gradients.

        Args:
            errors: receives ||y_low - y||^2 / ||y||^2 of each operator that ran, the largest of its passes; Inf if it
                is not finite.
        """
        operators: list[PathLinear] = []
        relative_errors: list[Tensor] = []
        self.passes += FORWARD

        @torch.no_grad()
        def watch(operator: PathLinear, input: Tensor, output: Tensor) -> None:
            if in_backward() or output.numel() == 0:  # a recomputation, or an expert without tokens
                return
            recovered = operator.recovered
            # The low path gets the recovered input, so that errors of earlier operators do not add up.
            operator.put(self._put[operator])
            try:
                low = operator._on_path(input, operator._begin())
            finally:
                operator.put(recovered)
            # In float32, because squares of 16-bit numbers leave the range of float16.
            norm = torch.linalg.vector_norm(output, dtype=torch.float32)
            operators.append(operator)
            relative_errors.append(torch.linalg.vector_norm(low - output, dtype=torch.float32) / norm)

        with self.watching(watch):
            yield
        if relative_errors:
            squares = torch.stack(relative_errors).double().square().tolist()
            for operator, square in zip(operators, squares, strict=True):
                # An operator may run several times in a step, of which the worst counts.
                errors[operator] = max(errors.get(operator, 0.0), square if math.isfinite(square) else math.inf)


@contextmanager
def repeating(converted: ConvertedModel, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Allow extra passes inside this context, and restore paths, faults, generators and buffers afterwards.

    Gradients and meters are not restored (`Router.unmeasured`).

    Args:
        converted: the paths.
        model: the model that runs, whose buffers are restored.
        device: its device, whose generator is restored besides the CPU's.
    """
    ran = [(operator, operator.read, operator._node) for operator in converted.operators]
    buffers = _copies(model.buffers())
    with converted.no_side_effects(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for operator, read, node in ran:
                operator.read, operator._node = read, node
            _put_back(buffers)


def _copies(buffers: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with a copy, except inference tensors, which a training step cannot change either."""
    return [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_inference()]


@torch.no_grad()
def _put_back(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the buffers of `_copies` their former values."""
    for buffer, before in copies:
        buffer.copy_(before)


def true_gap(
    converted: ConvertedModel,
    model: nn.Module,
    units: Sequence[Unit],
    ranks: Ranks | None,
    backward: Callable[[], object],
) -> Tensor:
    """Return the evidence of `Router.true_gap`; `ranks` are those that may hold parts of the parameters."""
    distinct = Distinct(unit.parameters for unit in units)
    ranks, device = of_shards(distinct.groups, ranks), units[0].parameters[0].device
    gradients_of_paths: list[list[list[Tensor]]] = []
    for recovering in (False, True):
        # Dropout draws in both passes the numbers that the step will draw.
        with converted.no_side_effects(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for operator in converted.operators:
                operator.switch(recovering)
            backward()
        # If one path leaves a parameter without gradient (an expert without tokens), the gap is the other's gradient.
        gradients_of_paths.append(
            [
                [part_of(torch.zeros_like(p.detach()) if p.grad is None else p.grad, p, ranks).float() for p in group]
                for group in distinct.groups
            ]
        )
        # The second path must not add to the gradients of the first.
        model.zero_grad(set_to_none=True)
    gaps = torch.zeros(len(distinct.groups), dtype=torch.float64, device=device)
    for i, (low, high) in enumerate(zip(*gradients_of_paths, strict=True)):
        for low_gradient, high_gradient in zip(low, high, strict=True):
            # ||g_low - g_recovery||^2 of a unit is the sum over its parameters.
            gaps[i] += (low_gradient - high_gradient).square().sum(dtype=torch.float64)
    return distinct.of_each(summed(gaps, ranks))
