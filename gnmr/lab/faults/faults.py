"""Faults in the low path of chosen units, in chosen steps (`schedule.py`): the truth that detection is held against.

A fault changes how rows (tokens) of an operator's input are quantized, scale = max|row| / format.max and codes =
Q(row / scale). Of a format that is the compressed copy; of a recipe the casts of the input, in every GEMM that reads
them (fprop and wgrad), and max is over whatever elements share a scale there.

    scale_up      scale * magnitude: small values underflow to zero
    scale_down    scale / magnitude: large values saturate at the format's largest one
    stale_scale   one scale for the tensor, from the largest magnitude of the `history` steps before this one (delayed
                  scaling), / magnitude: saturates when activations grew
    noise         up to +-magnitude steps of the grid, uniform, added before rounding
    bit_flip      one random bit of one random code of the row
    nan, inf      the scale that is stored is NaN, Inf: with site "saved" it shows in the unit's weight gradient, with
                  "forward" and under a recipe that casts fprop's input in the loss already

Values beyond the format's largest one are clamped to it. A row with a NaN or an Inf does not come back finite. A unit
on its recovery path is not hit, nor is another reader of the same tensor; evaluation is exact as ever.

Where a recipe's scale is that of several tokens (a tensor, a block, wgrad's tiles and mx groups), the
rows that are hit are cast under the broken scale and the others under the sound one, so that `rows_frac` means the same
everywhere; of a rotated input (wgrad of nvfp4) the rows are those of the rotated one, and a broken cast rounds
to nearest; `stale_scale` is the cast's own rule on the remembered magnitude, so a power of two under mx. The codes of
`scaled_mm` have one scale a group: unless all its rows are hit it stays the sound one, to which the broken rows are
rounded once more. An operator in recovery is not hit in the GEMMs either that it leaves to the low recipe; one whose
GEMMs are routed one by one (unit=gemm) is hit in those that are on the low path.

What is random depends on the schedule's seed, the step and the operator alone (and on the kind of device): resuming and
recomputing meet the same faults, and the micro-batches of a step the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr.precision.cast import BEYOND, Reference, over_scale, rotated, scale_of_each, scale_under
from gnmr.precision.cast_stats import CastStats
from gnmr.precision.formats import Format
from gnmr.precision.recipes import Cast
from gnmr.precision.scaling import TINY, over_max, pack, row_scale, scale_dtype

KINDS = ("scale_up", "scale_down", "stale_scale", "noise", "bit_flip", "nan", "inf")


@dataclass(frozen=True)
class Fault:
    """What breaks. ValueError for a senseless value."""

    kind: str
    magnitude: float = 1.0
    """See above; bit_flip, nan and inf have none."""
    rows_frac: float = 1.0
    """Fraction of the rows (tokens) that are hit; at least one of a tensor's rows is."""
    history: int = 16
    """Steps that stale_scale looks back."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: use one of {', '.join(KINDS)}")
        if not 0 < self.magnitude < float("inf"):
            raise ValueError(f"magnitude={self.magnitude}: must be a positive number")
        if not 0 < self.rows_frac <= 1:
            raise ValueError(f"rows_frac={self.rows_frac}: must be above 0 and at most 1")
        if self.history < 1:
            raise ValueError(f"history={self.history}: must be 1 or more")

    def compress(
        self,
        rows: Tensor,
        fmt: Format,
        generator: torch.Generator,
        stochastic: bool = False,
        largest: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `scaling.compress`, broken: (packed (N, row_bytes) uint8, scale (N, 1)) of `rows` (N, D).

        `largest`: the magnitude (scalar) from which stale_scale takes its scale. Does not wait for the device.
        """
        scaled = rows.to(torch.float32, copy=True)
        hit = self._order(len(rows), generator)[: self._hits(len(rows))]
        scale = row_scale(scaled, fmt, scale_dtype(rows.dtype))
        stale = None if largest is None else over_max(largest, fmt)
        scale[hit] = self._scale(scale[hit].float(), stale).to(scale.dtype)

        scaled.div_(scale.float())
        self._add_noise(scaled, hit, fmt, generator)
        noise = torch.rand(scaled.shape, generator=generator, device=scaled.device) if stochastic else None
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
        """As `casting.quantize`, broken: values and scales, (N, D) float32, of `x` (N, D), and statistics.

        `reference`: of delayed scales, see `casting`; `largest` as above. Does not wait for the device.
        """
        fmt, count, nonfinite = cast.format, len(x), (~x.isfinite()).sum()
        hit = self._order(count, generator)[: self._hits(count)]
        if cast.hadamard:
            x = rotated(x, contraction_dim)
        scale, groups = scale_of_each(x, cast, contraction_dim, reference)
        lost = scale.isnan()  # they share a scale with an Inf or NaN, fault or no fault
        scale[hit] = self._scale(scale[hit], None if largest is None else scale_under(cast, largest))

        wide = x.float()
        scaled = torch.where(scale == 0, 0, over_scale(wide, scale, cast)) if cast.two_levels else wide / scale
        self._add_noise(scaled, hit, fmt, generator)
        saturated = (scaled.abs() > fmt.max * BEYOND).sum()
        scaled.clamp_(-fmt.max, fmt.max)
        flipped = None
        if self.kind == "bit_flip":
            flipped = fmt.decode(_flipped(fmt.encode(scaled[hit]), fmt.bits, generator), torch.float32)
        elif self.kind in ("nan", "inf"):
            scale.index_fill_(0, hit, float(self.kind))
        values = fmt.round(scaled)
        if flipped is not None:
            values[hit] = flipped
        values.mul_(scale)
        nonfinite += (~lost & ~values.isfinite()).sum()
        return values, scale, CastStats(groups, saturated, nonfinite)

    def _hits(self, count: int) -> int:
        return max(1, round(self.rows_frac * count))

    def _order(self, count: int, generator: torch.Generator) -> Tensor:
        """The rows, those first that are hit."""
        return torch.randperm(count, generator=generator, device=generator.device)

    def _scale(self, sound: Tensor, stale: Tensor | None) -> Tensor:
        """What becomes of the float32 scales of the hit rows; `stale`: the scale (scalar) of the steps before."""
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
            uniform = torch.rand(rough.shape, generator=generator, device=scaled.device)
            scaled[hit] = rough + (2 * uniform - 1) * self.magnitude * fmt.step(rough)


def _flipped(codes: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """`codes` (N, D) of that many bits, one random bit of one random code of each row flipped."""
    rows, width = codes.shape
    column = torch.randint(width, (rows, 1), generator=generator, device=codes.device)
    bit = torch.randint(bits, (rows, 1), generator=generator, device=codes.device)
    flips = (torch.ones_like(bit) << bit).to(torch.uint8)
    return codes ^ torch.zeros_like(codes).scatter_(1, column, flips)


class Injector:
    """A fault in one operator's low path. The schedule arms it for a step; the operator asks it."""

    def __init__(self, fault: Fault, history: Tensor | None) -> None:
        self._fault, self._history = fault, history
        self._seed: int | None = None

    def arm(self, seed: int | None) -> None:
        """For the steps until the next call; None: not armed."""
        self._seed = seed

    def for_step(self, input: Tensor, remember: bool = True) -> Injector | None:
        """Return the fault if it is armed. Takes note of the size of `input` where the fault needs it."""
        if remember and self._history is not None:
            # Once more for a micro-batch, or for a recomputed forward pass. One bad step must not spoil the history.
            largest = input.detach().abs().amax().double().nan_to_num_(nan=0.0, posinf=0.0)
            self._history[0] = torch.maximum(self._history[0], largest)
        return None if self._seed is None else self

    def compress(self, input: Tensor, fmt: Format, stochastic: bool) -> tuple[Tensor, Tensor]:
        """Return the broken copy of `input` (..., D); the same each time it is asked for in a step."""
        rows = input.detach().reshape(-1, input.shape[-1])
        return self._fault.compress(rows, fmt, self._generator(rows), stochastic, self._largest_before())

    def quantize(
        self, x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
    ) -> tuple[Tensor, Tensor, CastStats]:
        """Return the broken cast of `x` (N, D), see `Fault.quantize`; it hits the same rows each time in a step."""
        return self._fault.quantize(x, cast, contraction_dim, reference, self._generator(x), self._largest_before())

    def _generator(self, x: Tensor) -> torch.Generator:
        assert self._seed is not None
        return torch.Generator(x.device).manual_seed(self._seed)

    def _largest_before(self) -> Tensor | None:
        """Of the steps before; without any, of this one."""
        if self._history is None:
            return None
        before = self._history[1:].amax()
        return torch.where(before > 0, before, self._history[0]).float()
