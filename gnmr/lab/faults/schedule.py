"""Schedule of faults: windows of steps in which units of a converted model are hit, known when the run starts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.unit_names import module_of
from gnmr.formats.number_formats import KeepFormat, RangeFormat
from gnmr.formats.recipes import Recipe
from gnmr.lab.faults.faults import Fault, Injector
from gnmr.names import GEMMS
from gnmr.patterns import select
from gnmr.records.reader import FaultWindow


class FaultSchedule:
    """The windows in which `fault` hits units, known when the run starts. Call `begin_step` in each step."""

    def __init__(
        self,
        converted: ConvertedModel,
        fault: Fault,
        targets: Sequence[str],
        steps: int,
        *,
        windows: Sequence[Sequence[int]] = (),
        rate: float = 0.0,
        duration: int = 1,
        seed: int = 0,
    ) -> None:
        """Take the given `windows`, or draw windows with `rate`. Steps count from 1.

        Args:
            converted: The model whose operators are hit.
            fault: The fault.
            targets: Patterns of the units or their operators, as in `convert`. A fault hits the operators of a unit
                that match, or all of them if the unit matches, at the same time.
            steps: Steps of the run.
            windows: (first step, number of steps) of each window, in which every target is hit.
            rate: Expected windows per 1,000 unit-steps of the targets. Windows are drawn separately for each unit, and
                the windows of a unit do not overlap.
            duration: Steps of each drawn window; the last window ends with the run.
            seed: Seed of the drawn windows and of the randomness in all windows.

        With unit=gemm, a fault hits the casts of an operator's input on the low path, in `fprop` and `wgrad`. Warns if
        no drawn window falls into the run.

        Raises:
            ValueError: The low path leaves the input in 16 bits, a target matches no unit, a window exceeds the run or
                overlaps another one, or `rate` is invalid.
        """
        low = converted.low
        if isinstance(low, KeepFormat) or (isinstance(low, Recipe) and not (low.fprop.input or low.wgrad.input)):
            raise ValueError(f"the low path is {low.name}: there is no quantizer to break")
        if isinstance(low, RangeFormat):
            raise ValueError(f"the low path is {low.name}: faults break a scale, and ranges have none; use group=null")
        self._seed, self._step = seed, 0
        self._group = _targeted(converted, targets)  # {index of an operator that may be hit: its group}
        members = _members(converted, self._group)
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for i in sorted(members):
            drawn = np.random.default_rng([seed, i])
            self._spans[i] = _checked(windows, steps) if windows else _drawn(rate, duration, steps, drawn)
        self.windows = [
            FaultWindow(converted.units[unit].name, *span, fault.kind, fault.magnitude)
            for i, spans in self._spans.items()
            for unit in members[i]
            for span in spans
        ]
        self.windows.sort(key=lambda window: window.start)
        if not self.windows:
            warnings.warn(f"rate={rate}: no window falls into the {steps} steps of this run", stacklevel=2)

        self._history = None
        if fault.kind == "stale_scale":  # row 0 belongs to the current step
            device = converted.operators[0].weight.device
            self._history = torch.zeros(len(self._group), 1 + fault.history, dtype=torch.float64, device=device)
        self._injectors: list[Injector] = []
        for k, i in enumerate(self._group):
            self._injectors.append(Injector(fault, None if self._history is None else self._history[k]))
            if converted.operators[i].pinned != GEMMS:  # a pinned operator never runs on the low path
                converted.operators[i].fault = self._injectors[-1]

    def begin_step(self, step: int) -> None:
        """Arm the faults of `step` and disarm all others. Does not wait for the device."""
        if self._history is not None and step != self._step:
            self._history.copy_(self._history.roll(1, dims=1))
            self._history[:, 0] = 0
        self._step = step
        armed = {i for i, spans in self._spans.items() if any(start <= step <= end for start, end in spans)}
        for (index, group), injector in zip(self._group.items(), self._injectors, strict=True):
            numbers = np.random.SeedSequence([self._seed, step, index])
            injector.arm(int(numbers.generate_state(1, np.uint64)[0]) if group in armed else None)

    def end_step(self, take_largest: Callable[[Tensor], None]) -> None:
        """Call after each step of several processes, to share what stale_scale has recorded.

        `take_largest` reduces a tensor to its maximum over the processes, in place.
        """
        if self._history is not None:
            take_largest(self._history[:, 0])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the magnitudes that stale_scale remembers. The state is empty for other kinds."""
        return {} if self._history is None else {"history": self._history.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._history is not None:
            self._history.copy_(state["history"])


def _targeted(converted: ConvertedModel, targets: Sequence[str]) -> dict[int, int]:
    """Return {operator: its unit, or with unit=gemm the operator} of the operators that match, or whose unit matches.

    Raises ValueError for a pattern without a match. A single GEMM cannot be a target, because a fault hits all GEMMs
    that read the input.
    """
    by_gemm = any(unit.gemm is not None for unit in converted.units)
    names = [module_of(unit.name) if by_gemm else unit.name for unit in converted.units]
    operators, unmatched = select([operator.operator_name for operator in converted.operators], targets)
    units, no_unit = ([], list(targets)) if by_gemm else select(names, targets)
    unmatched = [pattern for pattern in unmatched if pattern in no_unit]
    if not targets or unmatched:
        patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
        raise ValueError(f"targets {unmatched}: no unit has such a name; there are {', '.join(patterns)}")
    if by_gemm:
        hit = [operator for operator in converted.operators if operator.operator_name in operators]
        return {operator.index: operator.index for operator in hit}
    return {
        operator.index: i
        for i, unit in enumerate(converted.units)
        for operator in unit.operators
        if unit.name in units or operator.operator_name in operators
    }


def _members(converted: ConvertedModel, group_of: dict[int, int]) -> dict[int, list[int]]:
    """Return the units of each group of operators that are hit together, by index.

    A group is one unit, or with unit=gemm the GEMMs that read the operator's input. Raises ValueError if these GEMMs
    are not routed.
    """
    members: dict[int, list[int]] = {}
    for i, unit in enumerate(converted.units):
        index, low = unit.operators[0].index, unit.operators[0].low
        if unit.gemm is None:
            if i in group_of.values():
                members[i] = [i]
        elif index in group_of and isinstance(low, Recipe) and getattr(low, unit.gemm).input is not None:
            members.setdefault(index, []).append(i)
    if not members:
        raise ValueError(
            "a fault breaks the casts of the input, and no GEMM that reads it is routed (precision.recovers)"
        )
    return members


def _checked(windows: Sequence[Sequence[int]], steps: int) -> list[tuple[int, int]]:
    """Return (start, end) of each window in ascending order."""
    spans: list[tuple[int, int]] = []
    for start, length in sorted(map(tuple, windows)):
        if start < 1 or length < 1 or start + length - 1 > steps:
            raise ValueError(f"window [{start}, {length}]: must lie within the run's steps 1 to {steps}")
        if spans and start <= spans[-1][1]:
            raise ValueError(f"window [{start}, {length}]: begins before the one from step {spans[-1][0]} has ended")
        spans.append((start, start + length - 1))
    return spans


def _drawn(rate: float, duration: int, steps: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Draw (start, end) of each window in ascending order, with 1000 / rate steps between starts on average."""
    if not (rate > 0 and duration >= 1 and rate * duration <= 1000):
        raise ValueError(f"rate={rate}, duration={duration}: their product must be above 0 and at most 1000")
    spans: list[tuple[int, int]] = []
    end = 0
    while True:
        start = end + int(generator.geometric(1 / (1000 / rate - duration + 1)))
        if start > steps:
            return spans
        end = start + duration - 1
        spans.append((start, min(end, steps)))
