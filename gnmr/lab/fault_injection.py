"""Faults in the low path of chosen units and steps (`FaultSchedule`): the ground truth for evaluating detection.

A fault changes how rows (tokens) of an operator's input are quantized:

    scale = max|row| / format.max;  codes = Q(row / scale)

For a format, this is the compressed copy. For a recipe, these are the casts of the input in every GEMM that reads it
(fprop and wgrad). There, max is taken over the elements that share a scale. The kinds of faults are:

    scale_up      scale * magnitude: small values underflow to zero
    scale_down    scale / magnitude: large values saturate at the format's largest one
    stale_scale   one scale for the tensor, from the largest magnitude of the `history` previous steps (delayed
                  scaling), / magnitude: saturates if activations have grown
    noise         up to +-magnitude steps of the grid, uniform, added before rounding
    bit_flip      one random bit of one random code of the row
    nan, inf      the stored scale is NaN or Inf: with site "saved" it appears in the unit's weight gradient, with
                  "forward" and under a recipe that casts the input of fprop already in the loss

Values beyond the format's largest one are clamped to it. A row with a NaN or an Inf stays non-finite. A unit on its
recovery path is not hit, nor is another reader of the same tensor. Evaluation is always exact.

Some scales of a recipe cover several tokens (a tensor, a block, the tiles and mx groups of wgrad). The hit rows are
then cast with the broken scale and the other rows with the intact scale, so `rows_frac` has the same meaning
everywhere. For a rotated input (wgrad of nvfp4), the rows are the rows after the rotation, and a broken cast rounds to
nearest. `stale_scale` applies the rule of the cast to the remembered magnitude, so its scale is a power of two under
mx. The codes of `scaled_mm` have one scale per group. Unless all rows of a group are hit, it stays the intact scale, to
which the broken rows are rounded once more. An operator in recovery is not hit in any GEMM, even one that it leaves to
the low recipe. If the GEMMs of an operator are routed individually (unit=gemm), those on the low path are hit.

Randomness depends only on the schedule's seed, the step and the operator (and on the kind of device). Resumed and
recomputed steps meet the same faults, and the micro-batches of a step have the same hit rows.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.unit_names import module_of
from gnmr.formats.cast import BEYOND, Reference, over_scale, rotated, scale_of_each, scale_under
from gnmr.formats.cast_stats import CastStats
from gnmr.formats.number_formats import Format, KeepFormat, RangeFormat
from gnmr.formats.recipes import Cast, Recipe
from gnmr.formats.scaling import TINY, over_max, pack, row_scale, scale_dtype, uniform_noise
from gnmr.names import GEMMS
from gnmr.options import one_of, positive, share, whole_number
from gnmr.patterns import select
from gnmr.records.reader import FaultWindow

KINDS = ("scale_up", "scale_down", "stale_scale", "noise", "bit_flip", "nan", "inf")


@dataclass(frozen=True)
class Fault:
    """A kind of fault and its strength. Raises ValueError for an invalid value."""

    kind: str
    magnitude: float = 1.0
    """Strength, see the module docstring. bit_flip, nan and inf have none."""
    rows_frac: float = 1.0
    """Fraction of the rows (tokens) that are hit. At least one row of a tensor is hit."""
    history: int = 16
    """Number of steps that stale_scale looks back."""

    def __post_init__(self) -> None:
        one_of(KINDS, kind=self.kind)
        positive(magnitude=self.magnitude)
        share(rows_frac=self.rows_frac)
        whole_number(history=self.history)

    def compress(
        self,
        rows: Tensor,
        fmt: Format,
        generator: torch.Generator,
        stochastic: bool = False,
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compress rows like `scaling.compress`, but with the fault. Does not wait for the device.

        Args:
            rows: (N, D), the activation that a linear keeps for its backward pass.
            fmt: Format of the codes.
            generator: Draws the hit rows, noise and bits.
            stochastic: Round stochastically.
            largest: Magnitude (scalar) from which stale_scale takes its scale.

        Returns:
            (packed codes (N, row_bytes) uint8, scales (N, 1)).
        """
        scaled = rows.to(torch.float32, copy=True)
        hit = self._hit_rows(len(rows), generator)
        # The rows are divided by the broken scale, which is also the one that is stored: both passes see one error.
        scale = row_scale(scaled, fmt, scale_dtype(rows.dtype))
        stale = None if largest is None else over_max(largest, fmt)
        scale[hit] = self._scale(scale[hit].float(), stale).to(scale.dtype)

        scaled.div_(scale.float())
        self._add_noise(scaled, hit, fmt, generator)
        noise = uniform_noise(scaled, generator) if stochastic else None
        codes = fmt.encode(scaled.clamp_(-fmt.max, fmt.max), noise)
        if self.kind == "bit_flip":
            codes[hit] = _flipped(codes[hit], fmt.bits, generator)
        elif self.kind in ("nan", "inf"):
            scale.index_fill_(0, hit, float(self.kind))
        return pack(codes, fmt.bits), scale

    def quantize(
        self,
        x: Tensor,
        cast: Cast,
        contraction_dim: int,
        reference: Reference,
        generator: torch.Generator,
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, CastStats]:
        """Quantize an operand like `gnmr.formats.cast`, but with the fault. Does not wait for the device.

        Args:
            x: (N, D), the operand of a GEMM.
            cast: The cast of the recipe.
            contraction_dim: Dimension of `x` over which the GEMM sums.
            reference: Reference of delayed scales.
            generator: Draws the hit rows, noise and bits.
            largest: Magnitude (scalar) from which stale_scale takes its scale.

        Returns:
            Values and scales, (N, D) float32, and statistics.
        """
        fmt, nonfinite = cast.format, (~x.isfinite()).sum()
        hit = self._hit_rows(len(x), generator)
        if cast.hadamard:
            x = rotated(x, contraction_dim)
        # Rows may share a scale, so each element gets its own copy, and only the hit rows' copies are broken.
        scale, groups = scale_of_each(x, cast, contraction_dim, reference)
        lost = scale.isnan()  # these share a scale with an Inf or NaN, independent of the fault
        scale[hit] = self._scale(scale[hit], None if largest is None else scale_under(cast, largest))

        wide = x.float()
        # With two levels, the scale of a small group may round to 0: its elements become zeros, not 0 / 0.
        scaled = torch.where(scale == 0, 0, over_scale(wide, scale, cast)) if cast.two_levels else wide / scale
        self._add_noise(scaled, hit, fmt, generator)
        saturated = (scaled.abs() > fmt.max * BEYOND).sum()
        scaled.clamp_(-fmt.max, fmt.max)
        flipped = None
        if self.kind == "bit_flip":
            # A flip acts on codes, which this cast does not store, so the hit rows are encoded and decoded.
            flipped = fmt.decode(_flipped(fmt.encode(scaled[hit]), fmt.bits, generator), torch.float32)
        elif self.kind in ("nan", "inf"):
            scale.index_fill_(0, hit, float(self.kind))
        values = fmt.round(scaled)
        if flipped is not None:
            values[hit] = flipped
        values.mul_(scale)
        nonfinite += (~lost & ~values.isfinite()).sum()
        return values, scale, CastStats(groups, saturated, nonfinite)

    def _hit_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the indices of the hit rows."""
        order = torch.randperm(count, generator=generator, device=generator.device)
        return order[: max(1, round(self.rows_frac * count))]

    def _scale(self, sound: Tensor, stale: Tensor | None) -> Tensor:
        """Return the broken float32 scales of the hit rows. `stale` is the scale (scalar) of the previous steps."""
        broken = sound
        if self.kind == "scale_up":
            broken = sound * self.magnitude
        elif self.kind == "scale_down":
            broken = sound / self.magnitude
        elif self.kind == "stale_scale":
            assert stale is not None
            broken = torch.where(sound.isnan(), sound, stale / self.magnitude)
        # A group below the smallest scale of two levels is zeros, broken or not.
        return torch.where(sound == 0, sound, broken.clamp(min=TINY))

    def _add_noise(self, scaled: Tensor, hit: Tensor, fmt: Format, generator: torch.Generator) -> None:
        if self.kind == "noise":
            rough = scaled[hit]
            uniform = uniform_noise(rough, generator)  # in [0, 1); the noise is in units of the grid's step
            scaled[hit] = rough + (2 * uniform - 1) * self.magnitude * fmt.step(rough)


def _flipped(codes: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Return `codes` (N, D) of `bits` bits with one random bit of one random code flipped in each row."""
    rows, width = codes.shape
    column = torch.randint(width, (rows, 1), generator=generator, device=codes.device)
    bit = torch.randint(bits, (rows, 1), generator=generator, device=codes.device)
    flips = (torch.ones_like(bit) << bit).to(torch.uint8)
    return codes ^ torch.zeros_like(codes).scatter_(1, column, flips)


class Injector:
    """A fault in one operator's low path. The schedule arms it for a step, and the operator queries it."""

    def __init__(self, fault: Fault, history: Tensor | None) -> None:
        self._fault, self._history = fault, history
        self._seed: int | None = None

    def arm(self, seed: int | None) -> None:
        """Arm the fault with `seed` until the next call, or disarm it if `seed` is None."""
        self._seed = seed

    def for_step(self, input: Tensor, remember: bool = True) -> Injector | None:
        """Return the fault if it is armed. If the fault needs a history, record the largest magnitude of `input`."""
        if remember and self._history is not None:
            # This may run several times per step: per micro-batch and per recomputation. Non-finite values must not
            # enter.
            largest = input.detach().abs().amax().double().nan_to_num_(nan=0.0, posinf=0.0)
            self._history[0] = torch.maximum(self._history[0], largest)
        return None if self._seed is None else self

    def compress(self, input: Tensor, fmt: Format, stochastic: bool) -> tuple[Tensor, Tensor]:
        """Return the broken copy of `input` (..., D), which is the same in every call of a step."""
        rows = input.detach().reshape(-1, input.shape[-1])
        return self._fault.compress(rows, fmt, self._generator(rows), stochastic, self._largest_before())

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
    ) -> tuple[Tensor, Tensor, CastStats]:
        """Return the broken cast of `x` (N, D), see `Fault.quantize`. It hits the same rows in every call of a step."""
        return self._fault.quantize(x, cast, contraction_dim, reference, self._generator(x), self._largest_before())

    def _generator(self, x: Tensor) -> torch.Generator:
        assert self._seed is not None
        return torch.Generator(x.device).manual_seed(self._seed)

    def _largest_before(self) -> Tensor | None:
        """Return the largest magnitude of the previous steps, or of the current step if there are none."""
        if self._history is None:
            return None
        # Entry 0 is the step under way, the others are the previous steps.
        before = self._history[1:].amax()
        return torch.where(before > 0, before, self._history[0]).float()


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
        # A new step moves the history by one; a step that is computed again leaves it as it is.
        if self._history is not None and step != self._step:
            self._history.copy_(self._history.roll(1, dims=1))
            self._history[:, 0] = 0
        self._step = step
        # A seed for each step and operator: a resumed or recomputed step meets the same fault.
        armed = {i for i, spans in self._spans.items() if any(start <= step <= end for start, end in spans)}
        for (index, group), injector in zip(self._group.items(), self._injectors, strict=True):
            numbers = np.random.SeedSequence([self._seed, step, index])
            injector.arm(int(numbers.generate_state(1, np.uint64)[0]) if group in armed else None)

    def end_step(self, take_largest: Callable[[Tensor], None]) -> None:
        """Call after each step of several processes, to share what stale_scale has recorded.

        `take_largest` reduces a tensor to its maximum over the processes, in place.
        """
        if self._history is not None:
            # Each process sees its own tokens, but all must derive the same stale scale.
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
        # The gap between windows is geometric, so that a window may begin in any step that is free.
        start = end + int(generator.geometric(1 / (1000 / rate - duration + 1)))
        if start > steps:
            return spans
        end = start + duration - 1
        spans.append((start, min(end, steps)))
