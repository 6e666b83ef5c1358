"""Compression of rows to few bits: one scale per row (a token), and codes packed into bytes.

    scale = max|row| / format.max          stored in the input's own 16 bits (float32 for float16 and float32 inputs)
    codes = format.encode(row / scale)     packed: two int4 in a byte, four int2, eight int3 in three bytes, ...

Under a `RangeFormat` each group of elements of a row has two numbers instead of a scale:

    step, low = (max(group) - min(group)) / format.max, min(group)        all steps of a row, then all lows
    codes     = format.encode((group - low) / step)

With stochastic rounding this is ActNN's quantizer (2104.14129: 2 bits, groups of 256). ActNN's groups continue over the
tokens of a sequence; here they end with the token, so that each token is compressed separately.

Special rows:

- A row of zeros comes back as zeros, because the scale is at least the smallest normal float32. If the largest
  magnitude lies below format.max times that number, the row loses digits and finally becomes zero.
- If the largest magnitude is within 1% of the largest float32, it may come back as Inf (the scale is rounded), never
  smaller.
- If a row has any NaN or Inf, the scale is NaN and the *whole* row comes back as NaN. A low path never turns a
  non-finite input into a finite one.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import Parameter

from gnmr.formats.dispatch_modes import always_recomputed
from gnmr.formats.number_formats import Format, RangeFormat

TINY = torch.finfo(torch.float32).tiny
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by number of bytes."""


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales of rows in `dtype`.

    Returns: bfloat16 for bfloat16: it has float32's range, and encoding divides by the rounded scale. Else float32.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@always_recomputed
def compress(rows: Tensor, fmt: Format, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Compress rows to few bits. Does not wait for the device.

    Args:
        rows: (N, D), any floating dtype.
        fmt: the format of the codes.
        generator: source of stochastic rounding, on the device of rows; None: round to nearest.

    Returns:
        The packed codes, (N, `row_bytes`) uint8, and their scales, (N, `scales_of`) in `scale_dtype`.
    """
    # Make one explicit float32 copy and work on it in place: mixed-dtype arithmetic is slow on CPUs.
    scaled = rows.to(torch.float32, copy=True)
    if isinstance(fmt, RangeFormat):
        # Steps and smallest values are rounded to their stored dtype before elements are encoded with them.
        scale = _ranges(scaled, fmt, scale_dtype(rows.dtype))
        step, low = _of_each(scale.float(), fmt, scaled.shape[1])
        scaled.sub_(low).div_(step)
    else:
        scale = row_scale(scaled, fmt, scale_dtype(rows.dtype))
        scaled.div_(scale.float())
    noise = None if generator is None else uniform_noise(scaled, generator)
    return pack(fmt.encode(scaled, noise), fmt.bits), scale


def uniform_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return the noise of `Format.encode`.

    Returns: uniform float32 numbers in [0, 1), in the shape and on the device of `like` (the generator's).
    """
    return torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)


def _ranges(rows: Tensor, fmt: RangeFormat, dtype: torch.dtype) -> Tensor:
    """Return the steps of the G groups of each row of `rows` (N, D), then their smallest values: (N, 2 G) in `dtype`.

    `rows` is float32. A row with a NaN or an Inf gives NaN.
    """
    short = -rows.shape[1] % fmt.group
    complete = torch.cat([rows, rows[:, -1:].expand(-1, short)], dim=1) if short else rows
    low, high = torch.aminmax(complete.view(len(rows), -1, fmt.group), dim=2)
    step = over_max(high, fmt).sub_(over_max(low, fmt)).clamp_(min=TINY)  # subtracting first could overflow
    step += nan_unless_finite(largest_magnitude(rows, (1,)))
    return torch.cat([step, low], dim=1).to(dtype)


def _of_each(scale: Tensor, fmt: RangeFormat, width: int) -> tuple[Tensor, Tensor]:
    """Return the step and the smallest value of each element, (N, width) both, from the result of `_ranges`."""
    step, low = (numbers.repeat_interleave(fmt.group, dim=1)[:, :width] for numbers in scale.chunk(2, dim=1))
    return step, low


def row_scale(rows: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return the scale of each of the `rows` (N, D), which are float32.

    Returns: (N, 1) in `dtype`; NaN for a row with a NaN or an Inf.
    """
    return scale_of(largest_magnitude(rows, (1,)), fmt, dtype)


def largest_magnitude(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return max|x| over the dimensions `dims`, in ascending order.

    Returns: magnitudes in the dtype of `x`, with size 1 in `dims`; NaN if there is a NaN.
    """
    few = dims[-1] == x.dim() - 1 and 1 < x.shape[-1] < 64
    if (
        few and x.element_size() == 2 and x.device.type == "cpu"
    ):  # CPUs compare so few neighbors one by one, in 32 bits three times as fast
        return largest_of(x.float().abs_(), dims).to(x.dtype)
    return largest_of(x.abs(), dims)


def largest_of(magnitudes: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the same for numbers that are magnitudes: none has a sign bit, not even a NaN."""
    # Reduce the number of dimensions, which is also faster.
    dims = tuple(dim for dim in dims if magnitudes.shape[dim] > 1) or dims
    # The bits of magnitudes have the order of the magnitudes, with NaN above all. CPUs compare integers much faster.
    bits = magnitudes.view(_BITS[magnitudes.element_size()])
    if dims == (1, 3):  # square groups: not the neighbors first, which CPUs compare one by one
        bits, dims = bits.amax(1, keepdim=True), (3,)
    return bits.amax(dims, keepdim=True).view(magnitudes.dtype)


def scale_of(largest: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Return the scales that map float32 magnitudes to format.max.

    Returns: scales in `dtype`, in the shape of `largest`, at least the smallest normal float32; NaN for NaN and Inf.
    """
    scale = over_max(largest, fmt).clamp_(min=TINY).to(dtype)
    return scale.add_(nan_unless_finite(largest))


def over_max(largest: Tensor, fmt: Format) -> Tensor:
    """Return float32 magnitudes divided by the format's largest value.

    The divisor is a tensor: GPUs multiply by the reciprocal of a number, which rounds twice and gives other scales than
    on CPUs.

    Returns: float32 in the shape of `largest`.
    """
    return largest / torch.full_like(largest, fmt.max)


def is_traced(x: Tensor) -> bool:
    """Return whether `x` stands for a tensor in a graph that is being compiled, or is another library's kind."""
    return type(x) not in (Tensor, Parameter)


def is_inspectable(x: Tensor) -> bool:
    """Return whether the elements of `x` can be inspected without waiting: on CPUs, unless `x` is traced."""
    return x.device.type == "cpu" and not is_traced(x)


def largest_if_finite(magnitudes: Tensor) -> Tensor | None:
    """Return the largest magnitude, a scalar; None if one is not finite or they are not inspectable."""
    if not is_inspectable(magnitudes) or magnitudes.numel() == 0:
        return None
    largest = magnitudes.amax()
    return largest if math.isfinite(largest.item()) else None


def nan_unless_finite(x: Tensor) -> Tensor:
    """Return 0 for a finite number, else NaN; on CPUs ten times faster than `isfinite` and what follows from it."""
    return x - x


def count_nonfinite(x: Tensor, largest: Tensor | None = None) -> Tensor | None:
    """Count the elements of a tensor that are Inf or NaN.

    Args:
        x: any floating dtype and shape.
        largest: its largest magnitudes. If all are finite, CPUs do not inspect the elements; None: not known.

    Returns:
        An int64 scalar on the device of x; None: there are none.
    """
    if largest is not None and largest_if_finite(largest) is not None:
        return None
    bad = nan_unless_finite(x)
    # Only NaN differs from itself.
    return (bad != bad).sum()


@always_recomputed
def decompress(packed: Tensor, scale: Tensor, fmt: Format, width: int, dtype: torch.dtype) -> Tensor:
    """Restore the rows that `compress` compressed.

    Args:
        packed: (N, `row_bytes`) uint8.
        scale: (N, `scales_of`).
        fmt: the format of the codes.
        width: elements of a row, D.
        dtype: dtype of the result.

    Returns:
        (N, D) in `dtype`.
    """
    if isinstance(fmt, RangeFormat):
        step, low = _of_each(scale.float(), fmt, width)
        return fmt.decode(unpack(packed, fmt.bits, width), torch.float32).mul_(step).add_(low).to(dtype)
    # bfloat16 is decoded directly, because it has float32's range. The scale of a float16 row need not be a float16
    # number.
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    return fmt.decode(unpack(packed, fmt.bits, width), wide).mul_(scale).to(dtype)


@cache  # called for every operator in every step
def row_bytes(width: int, bits: int) -> int:
    """Return the size of a packed row of `width` codes of `bits` (1 to 8) bits.

    Returns: bytes, without those of the scale.
    """
    return sum(-(-width * plane // 8) for plane in _planes(bits))


def scales_of(width: int, fmt: Format) -> int:
    """Return how many numbers in `scale_dtype` accompany a packed row of `width` codes.

    Returns: 1, the scale; under a `RangeFormat` 2 per group.
    """
    return 2 * -(-width // fmt.group) if isinstance(fmt, RangeFormat) else 1


def _planes(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes that store codes of `bits` bits.

    Codes whose width does not divide 8 are split into planes whose widths do: 3 = 2 + 1 bits, 6 = 4 + 2 bits.
    """
    return tuple(plane for plane in (8, 4, 2, 1) if bits & plane)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (N, D), which are uint8 below 2^bits, into bytes.

    Returns: (N, `row_bytes`) uint8; `codes` itself for 8 bits.
    """
    packed_planes, low = [], 0
    for plane in _planes(bits):
        bits_of_plane = codes if plane == bits else (codes >> low) & (2**plane - 1)
        packed_planes.append(_pack_plane(bits_of_plane, plane))
        low += plane
    return packed_planes[0] if len(packed_planes) == 1 else torch.cat(packed_planes, dim=1)


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    width = codes.shape[1]
    columns = -(-width // per_byte)
    # Byte j holds the codes j, j + columns, j + 2 columns, ...: contiguous slices suit vector units.
    packed = codes[:, :columns].clone()
    for k in range(1, per_byte):
        slice_k = codes[:, k * columns : (k + 1) * columns]
        packed[:, : slice_k.shape[1]] |= slice_k << (k * bits)
    return packed


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """Return the codes of rows of `width` codes, the inverse of `pack`."""
    codes: Tensor | None = None
    start, low = 0, 0
    for plane in _planes(bits):
        size = -(-width * plane // 8)
        bits_of_plane = _unpack_plane(packed[:, start : start + size], plane, width)
        codes = bits_of_plane if codes is None else codes | (bits_of_plane << low)
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
        slice_k = codes[:, k * columns : (k + 1) * columns]
        if slice_k.shape[1]:
            torch.bitwise_and(packed[:, : slice_k.shape[1]] >> (k * bits), 2**bits - 1, out=slice_k)
    return codes
