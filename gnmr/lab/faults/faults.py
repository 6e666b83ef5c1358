"""Faults in the low path of chosen units and steps (`schedule.py`): the ground truth for evaluating detection.

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

from dataclasses import dataclass

import torch
from torch import Tensor

from gnmr.formats.cast import BEYOND, Reference, over_scale, rotated, scale_of_each, scale_under
from gnmr.formats.cast_stats import CastStats
from gnmr.formats.number_formats import Format
from gnmr.formats.recipes import Cast
from gnmr.formats.scaling import TINY, over_max, pack, row_scale, scale_dtype, uniform_noise

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
        """Compress `rows` (N, D) like `scaling.compress`, but with the fault. Does not wait for the device.

        Returns (packed (N, row_bytes) uint8, scale (N, 1)). `largest` is the magnitude (scalar) from which stale_scale
        takes its scale.
        """
        scaled = rows.to(torch.float32, copy=True)
        hit = self._order(len(rows), generator)[: self._hits(len(rows))]
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
        """Quantize `x` (N, D) like `casting.quantize`, but with the fault. Does not wait for the device.

        Returns values and scales, (N, D) float32, and statistics. See `casting` for the `reference` of delayed scales,
        and `compress` for `largest`.
        """
        fmt, count, nonfinite = cast.format, len(x), (~x.isfinite()).sum()
        hit = self._order(count, generator)[: self._hits(count)]
        if cast.hadamard:
            x = rotated(x, contraction_dim)
        scale, groups = scale_of_each(x, cast, contraction_dim, reference)
        lost = scale.isnan()  # these share a scale with an Inf or NaN, independent of the fault
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
        """Return a permutation of the rows that begins with the hit rows."""
        return torch.randperm(count, generator=generator, device=generator.device)

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
            uniform = uniform_noise(rough, generator)
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
        before = self._history[1:].amax()
        return torch.where(before > 0, before, self._history[0]).float()
