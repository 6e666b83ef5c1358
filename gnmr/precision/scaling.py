"""Rows of few bits: one scale a row (a token), codes packed into bytes.

    scale = max|row| / format.max          stored in the input's own 16 bits (float32 for float16 and float32 inputs)
    codes = format.encode(row / scale)     packed: two int4 in a byte, four int2, eight int3 in three bytes, ...

Under a `RangeFormat` each group of elements of a row has two numbers in place of a scale:

    step, low = (max(group) - min(group)) / format.max, min(group)        all steps of a row, then all lows
    codes     = format.encode((group - low) / step)

With stochastic rounding that is ActNN's quantizer (2104.14129: 2 bits, groups of 256), whose groups go on over the
tokens of a sequence; here they end with the token, so that a token's copy is its own.

Special rows:
- all zero: comes back as zeros, for the scale has a floor at the smallest normal float32. A row whose largest magnitude
  lies below format.max times that floor loses digits and finally becomes zero.
- a largest magnitude within 1% of the largest float32: may come back as Inf (the scale is rounded), never smaller.
- any NaN or Inf: the scale is NaN and the *whole* row comes back as NaN. A low path never turns a non-finite input into
  a finite one.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from gnmr.precision.formats import Format, RangeFormat

TINY = torch.finfo(torch.float32).tiny
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a number of so many bytes."""


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 rows keep a bfloat16 scale: it has float32's range, and encoding divides by the rounded scale."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def compress(rows: Tensor, fmt: Format, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """(packed (N, row_bytes) uint8, scale (N, `scales_of`)) of `rows` (N, D), any floating dtype.

    Rounds to nearest without a `generator`, stochastically with one. Does not wait for the device.
    """
    # One float32 copy, worked on in place. (An explicit copy first: mixed-dtype arithmetic is slow on CPUs.)
    scaled = rows.to(torch.float32, copy=True)
    if isinstance(fmt, RangeFormat):
        scale = _ranges(scaled, fmt, scale_dtype(rows.dtype))
        step, low = _of_each(scale.float(), fmt, scaled.shape[1])
        scaled.sub_(low).div_(step)
    else:
        scale = row_scale(scaled, fmt, scale_dtype(rows.dtype))
        scaled.div_(scale.float())
    noise = None if generator is None else torch.rand(scaled.shape, generator=generator, device=scaled.device)
    return pack(fmt.encode(scaled, noise), fmt.bits), scale


def _ranges(rows: Tensor, fmt: RangeFormat, dtype: torch.dtype) -> Tensor:
    """(N, 2 G) in `dtype`: the steps of the G groups of each of the float32 `rows` (N, D), then their smallest values.

    NaN for a row with a NaN or an Inf.
    """
    short = -rows.shape[1] % fmt.group
    whole = torch.cat([rows, rows[:, -1:].expand(-1, short)], dim=1) if short else rows
    low, high = torch.aminmax(whole.view(len(rows), -1, fmt.group), dim=2)
    step = over_max(high, fmt).sub_(over_max(low, fmt)).clamp_(min=TINY)  # a difference first could overflow
    step += nan_unless_finite(largest_magnitude(rows, (1,)))
    return torch.cat([step, low], dim=1).to(dtype)


def _of_each(scale: Tensor, fmt: RangeFormat, width: int) -> tuple[Tensor, Tensor]:
    """Of `_ranges` the step and the smallest value of each element, (N, width) both."""
    step, low = (part.repeat_interleave(fmt.group, dim=1)[:, :width] for part in scale.chunk(2, dim=1))
    return step, low


def row_scale(rows: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """(N, 1) in `dtype`: the scale of each of the float32 `rows` (N, D); NaN for a row with a NaN or an Inf."""
    return scale_of(largest_magnitude(rows, (1,)), fmt, dtype)


def largest_magnitude(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """max|x| over `dims`, which stay as dimensions of size 1; NaN where there is a NaN."""
    few = dims[-1] == x.dim() - 1 and 1 < x.shape[-1] < 64
    if few and x.element_size() == 2:  # CPUs compare so few neighbors one by one, in 32 bits three times as fast
        return largest_of(x.float().abs_(), dims).to(x.dtype)
    return largest_of(x.abs(), dims)


def largest_of(magnitudes: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The same of numbers that are magnitudes already: none has a sign, be it that of a NaN."""
    # Over as few dimensions as there are, which is faster too.
    dims = tuple(dim for dim in dims if magnitudes.shape[dim] > 1) or dims
    # Their bits are ordered as they are, with NaN above all: on CPUs integers are compared much faster.
    bits = magnitudes.view(_BITS[magnitudes.element_size()])
    if dims == (1, 3):  # of squares: not the neighbors first, which CPUs compare one by one
        bits, dims = bits.amax(1, keepdim=True), (3,)
    return bits.amax(dims, keepdim=True).view(magnitudes.dtype)


def scale_of(largest: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """The scale in `dtype` under which the float32 magnitudes `largest` become the format's; NaN for NaN and Inf."""
    scale = over_max(largest, fmt).clamp_(min=TINY).to(dtype)
    return scale.add_(nan_unless_finite(largest))


def over_max(largest: Tensor, fmt: Format) -> Tensor:
    """Return the magnitudes `largest` divided by the format's. The divisor is a tensor: GPUs multiply by the reciprocal
    of a number, which rounds twice, so that their scales were not those of CPUs."""
    return largest / torch.full_like(largest, fmt.max)


def largest_if_finite(magnitudes: Tensor) -> Tensor | None:
    """The largest of all of them, a scalar; None where one is not finite, and on any device but CPUs, where looking
    would wait."""
    if magnitudes.device.type != "cpu" or magnitudes.numel() == 0:
        return None
    found = magnitudes.amax()
    return found if math.isfinite(found.item()) else None


def nan_unless_finite(x: Tensor) -> Tensor:
    """0 for a finite number, else NaN: on CPUs ten times faster than `isfinite` and what follows from it."""
    return x - x


def count_nonfinite(x: Tensor, largest: Tensor | None = None) -> Tensor | None:
    """How many elements of `x` are Inf or NaN: a scalar (int64) on its device.

    On CPUs elements are looked at only where one of the `largest` magnitudes, if they are given, is not finite.
    None: there are none.
    """
    if largest is not None and largest_if_finite(largest) is not None:
        return None
    bad = nan_unless_finite(x)
    return (bad != bad).sum()


def decompress(packed: Tensor, scale: Tensor, fmt: Format, width: int, dtype: torch.dtype) -> Tensor:
    """The rows (N, width) in `dtype` that `compress` made `packed` and `scale` of."""
    if isinstance(fmt, RangeFormat):
        step, low = _of_each(scale.float(), fmt, width)
        return fmt.decode(unpack(packed, fmt.bits, width), torch.float32).mul_(step).add_(low).to(dtype)
    # In bfloat16 directly: same range as float32. The scale of a float16 row need not be a float16 number.
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    return fmt.decode(unpack(packed, fmt.bits, width), wide).mul_(scale).to(dtype)


@cache  # asked for every operator in every step
def row_bytes(width: int, bits: int) -> int:
    """Bytes of a packed row of `width` codes, its scale not counted."""
    return sum(-(-width * plane // 8) for plane in _planes(bits))


def scales_of(width: int, fmt: Format) -> int:
    """Numbers beside a packed row of `width` codes: its scale, or a step and a smallest value a group."""
    return 2 * -(-width // fmt.group) if isinstance(fmt, RangeFormat) else 1


def _planes(bits: int) -> tuple[int, ...]:
    """Codes whose width does not divide 8 are stored as planes that do: 3 = 2 + 1 bits, 6 = 4 + 2 bits."""
    return tuple(plane for plane in (8, 4, 2, 1) if bits & plane)


def pack(codes: Tensor, bits: int) -> Tensor:
    """(N, D) codes (uint8, below 2^bits) -> (N, row_bytes) uint8."""
    parts, low = [], 0
    for plane in _planes(bits):
        part = codes if plane == bits else (codes >> low) & (2**plane - 1)
        parts.append(_pack_plane(part, plane))
        low += plane
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    width = codes.shape[1]
    columns = -(-width // per_byte)
    # Byte j holds the codes j, j + columns, j + 2 columns, ...: contiguous slices, which vector units like.
    packed = codes[:, :columns].clone()
    for k in range(1, per_byte):
        part = codes[:, k * columns : (k + 1) * columns]
        packed[:, : part.shape[1]] |= part << (k * bits)
    return packed


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `pack` for rows of `width` codes."""
    codes: Tensor | None = None
    start, low = 0, 0
    for plane in _planes(bits):
        size = -(-width * plane // 8)
        part = _unpack_plane(packed[:, start : start + size], plane, width)
        codes = part if codes is None else codes | (part << low)
        start, low = start + size, low + plane
    assert codes is not None
    return codes


def _unpack_plane(packed: Tensor, bits: int, width: int) -> Tensor:
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    codes = packed.new_empty(packed.shape[0], width)
    columns = packed.shape[1]
    for k in range(per_byte):
        part = codes[:, k * columns : (k + 1) * columns]
        if part.shape[1]:
            torch.bitwise_and(packed[:, : part.shape[1]] >> (k * bits), 2**bits - 1, out=part)
    return codes
