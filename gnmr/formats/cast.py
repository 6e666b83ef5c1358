"""Simulated casts of a tensor to the values of a format: scale, round to the nearest values, scale back.

A `Cast` (`recipes.py`) defines which elements share a scale. If a group contains a NaN or an Inf, the whole group
becomes NaN: a cast never turns a non-finite number into a finite one. Nothing here waits for an accelerator. Values are
inspected only on CPUs, where inspection costs no synchronization.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.formats.cast_stats import CastStats
from gnmr.formats.number_formats import FORMATS, FloatFormat, Format
from gnmr.formats.recipes import HADAMARD, Cast
from gnmr.formats.scaling import (
    TINY,
    count_nonfinite,
    largest_if_finite,
    largest_magnitude,
    largest_of,
    nan_unless_finite,
    over_max,
    scale_of,
)

Reference: TypeAlias = Callable[[Tensor], Tensor] | None
"""Map max|x| to the magnitude that becomes the format's largest value; None: max|x| itself.

It serves delayed scales and, in two-level scaling, the tensor's scale.
"""

_AT_ONCE = 2**18
"""Elements per CPU thread and piece, so that a piece stays in cache between the dozen passes."""
_MOST = 2**26
"""Elements per piece on other devices; the work buffers take 8 bytes per element."""

SIGNS = tuple(random.Random(16).choices((1, -1), k=HADAMARD))
"""Random signs of the rotation: the same in all operators, steps (2509.25149, appendix C) and runs."""
_ROTATIONS: dict[torch.device, Tensor] = {}
"""Rotation matrix by device, made once."""
_E4M3 = FORMATS["e4m3"]
_FAR = 2.0**90
"""Magnitudes from 1 / _FAR to _FAR are far from the limits of float32 and bfloat16."""
_LARGEST = torch.finfo(torch.float32).max
_TOP_OF_FOUR_OVER_SIX = 256.0
"""The E4M3 number of the largest group if 6 is kept; 1.5 times this number is an E4M3 number too."""
BEYOND = 1 + 2.0**-20
"""An element counts as saturated if it exceeds the format's largest value times this factor.

The largest element of a tensor, divided by its own scale, may exceed the format's largest value by a rounding error.
"""


def quantize(
    x: Tensor,
    cast: Cast,
    contraction_dim: int,
    reference: Reference = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, CastStats]:
    """Return (`x` in the nearest values of `cast` and in its own dtype, statistics of the cast).

    If the cast has `hadamard`, the values are those of `rotated`, in its dtype; there may be more rows or columns.

    Args:
        x: (N, D), any floating dtype.
        cast: the format, the granularity of its scale, and the rounding.
        contraction_dim: the dimension of x that its GEMM contracts, read by `tile`, `mx` and `nv`.
        reference: source of a delayed scale; None: the tensor's own largest magnitude.
        generator: source of stochastic rounding, on the device of x; None: round to nearest.
    """
    given = x
    if cast.hadamard:
        x = rotated(x, contraction_dim)  # a new tensor, which is overwritten below
    rows, columns = x.shape
    group = cast.group(contraction_dim)
    height, width = group[0] or 1, group[1] or columns
    cut = -rows % height or -columns % width
    padded = F.pad(x, (0, -columns % width, 0, -rows % height)) if cut else x
    # Groups have the shape (rows, rows per group, columns, columns per group).
    groups = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    values = groups if cast.hadamard else torch.empty_like(groups, memory_format=torch.contiguous_format)
    on_cpu = x.device.type == "cpu"
    # All pieces have one size: a short last piece would cost a dozen calls for little work.
    pieces = padded.numel() / (_AT_ONCE * torch.get_num_threads() if on_cpu else _MOST)
    at_once = math.ceil(len(groups) / max(1, round(pieces) if on_cpu else math.ceil(pieces)))

    def split(whole: Tensor) -> Sequence[Tensor]:
        return (whole,) if at_once >= len(whole) else whole.split(at_once)

    parts, one_scale = split(groups), group == (None, None)
    found = [largest_magnitude(part, (0, 1, 2, 3) if one_scale else (1, 3)) for part in parts]
    largest = (found[0] if len(found) == 1 else torch.cat(found)).float()
    if one_scale and len(found) > 1:
        largest = largest_of(largest, (0,))
    finite = largest_if_finite(largest)
    scale = scale_under(cast, largest, reference, finite, x.dtype, contraction_dim, parts)
    drawn = generator if cast.stochastic else None
    normal = limit = None
    if drawn is None and reference is None:
        normal = _smallest_normal(scale, largest, finite, cast, x.dtype)
    if _may_saturate(cast) and (normal is None or cast.scale != "mx"):  # mx saturates at the limits of the dtype only
        limit = _limit(scale, cast)
        # On CPUs values are inspected first, because that waits for nothing. With two levels, groups of scale 0 are
        # clamped.
        if on_cpu and not cast.two_levels and not (largest > limit).any():
            limit = None

    def each(of_all: Tensor | None) -> Sequence[Any]:
        return [of_all] * len(parts) if of_all is None or one_scale else split(of_all)

    outs, saturated = split(values), None
    if normal is not None and limit is None:
        assert isinstance(cast.format, FloatFormat)
        scratch = torch.empty_like(outs[0])
        for part, out, least in zip(parts, outs, split(normal), strict=True):
            cast.format.round_unscaled(part, least, scratch[: len(part)], out)
    else:
        noise = None if drawn is None else random_bits(groups, drawn)
        noises = [None] * len(parts) if noise is None else split(noise)
        inverse = _inverse(scale) if cast.power_of_two or cast.two_levels else None
        saturated = _round_parts(cast, parts, outs, noises, each(scale), each(inverse), each(limit))
    values = values.view(padded.shape)
    if cut:  # copy: a view would keep the padding alive
        values = values[:rows, :columns].clone(memory_format=torch.contiguous_format)
    nonfinite = count_nonfinite(given) if finite is None else None
    return values, CastStats(largest, saturated, nonfinite)


def _smallest_normal(
    scale: Tensor, largest: Tensor, finite: Tensor | None, cast: Cast, dtype: torch.dtype
) -> Tensor | None:
    """Return the smallest normal value of each group in `dtype`, for `round_unscaled`, or None if it cannot round.

    It can if scales are powers of two, and the largest magnitude of each group is zero or far from the limits of
    `dtype`. On devices other than CPUs that is not inspected: the result is None.
    """
    fmt = cast.format
    if not cast.power_of_two or not isinstance(fmt, FloatFormat) or dtype not in (torch.bfloat16, torch.float32):
        return None
    if finite is None or finite.item() > _FAR:
        return None
    if largest.amin().item() < 1 / _FAR and ((largest > 0) & (largest < 1 / _FAR)).any():
        return None
    return (scale * 2.0 ** (1 - fmt.bias)).clamp_(min=TINY).to(dtype)


def _round_parts(
    cast: Cast,
    parts: Sequence[Tensor],
    outs: Sequence[Tensor],
    noise: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    inverses: Sequence[Tensor | None],
    limits: Sequence[Tensor | None],
) -> Tensor | None:
    """Write the nearest values of each part to its place in `outs`, and return how many elements saturated, if any can.

    `noise` is that of `random_bits`, `inverses` are those of the scales if they are known, and `limits` the magnitudes
    beyond which elements saturate; None: none does.
    """
    wide = torch.empty_like(outs[0], dtype=torch.float32)
    scratch = torch.empty_like(wide, dtype=torch.int32)
    noise_room = None if noise[0] is None else torch.empty_like(wide)
    saturated = None if limits[0] is None else torch.zeros((), dtype=torch.int64, device=wide.device)
    for part, out, steps, scale, inverse, limit in zip(parts, outs, noise, scales, inverses, limits, strict=True):
        worked, room = wide[: len(part)], scratch[: len(part)]
        # Copy first: mixed-dtype arithmetic is slow on CPUs.
        source = part if part.dtype == torch.float32 else worked.copy_(part)
        if saturated is not None:
            magnitudes = torch.abs(source, out=room.view(torch.float32))
            # The mask is 1.0 or 0.0 because bool is much slower on CPUs.
            beyond = torch.gt(magnitudes, limit, out=magnitudes)
            saturated += beyond.sum((1, 2, 3)).sum(dtype=torch.int64)
        over_scale(source, scale, cast, out=worked, inverse=inverse)
        if limit is not None:
            worked.clamp_(-cast.format.max, cast.format.max)
        if steps is not None and noise_room is not None:
            steps = noise_room[: len(part)].copy_(steps).add_(0.5)
        rounded = cast.format.round(worked, room, steps)
        if out.dtype == torch.float32:
            torch.mul(rounded, scale, out=out)
        else:
            out.copy_(rounded.mul_(scale))
    return saturated


def rotated(x: Tensor, contraction_dim: int, back: bool = False) -> Tensor:
    """Return a new tensor: `x` (N, D) with each `HADAMARD` elements along the contracted dimension multiplied by H S.

    H is Sylvester's Hadamard matrix divided by 4, and S is the diagonal matrix of `SIGNS`. H S is orthonormal, so the
    product of two rotated operands is unchanged. The rotation is computed in float32 and rounded to the dtype of x. A
    float16 input gives a float32 result, because float16 cannot hold four times its largest number. Incomplete groups
    are padded with zeros. `back` multiplies by the transpose.
    """
    short = -x.shape[contraction_dim] % HADAMARD
    x = x.detach()
    if short:
        x = F.pad(x, (0, 0, 0, short) if contraction_dim == 0 else (0, short))
    matrix = _rotation(x.device).t() if back else _rotation(x.device)
    # Groups have the shape (groups, 16, D), or (groups, 16) within lines.
    groups = x.reshape(-1, HADAMARD, x.shape[1]) if contraction_dim == 0 else x.reshape(-1, HADAMARD)
    dtype = rotated_dtype(x.dtype)
    found = torch.empty_like(groups, dtype=dtype, memory_format=torch.contiguous_format)
    at_once = max(1, (_AT_ONCE if x.device.type == "cpu" else _MOST) // max(1, groups[:1].numel()))
    wide = torch.empty_like(found[:at_once], dtype=torch.float32)
    turned = torch.empty_like(wide)
    for piece, out in zip(groups.split(at_once), found.split(at_once), strict=True):
        worked, result = wide[: len(piece)].copy_(piece), turned[: len(piece)]
        # With `out`, autocast leaves the product in float32.
        if contraction_dim == 0:
            torch.bmm(matrix.expand(len(piece), -1, -1), worked, out=result)
        else:
            torch.mm(worked, matrix.t(), out=result)
        out.copy_(result)
    return found.view(x.shape)


def rotated_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `rotated` returns for a tensor in `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


def random_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return int8 in the shape and on the device of `like`, uniform over all values.

    Each draw of 64 bits gives eight numbers, because CPUs draw one after the other. Probabilities of stochastic
    rounding are therefore multiples of 1/256.
    """
    draws = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    if not like.is_meta:
        draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int8)[: like.numel()].view(like.shape)


def _rotation(device: torch.device) -> Tensor:
    """Return H S, (16, 16) float32."""
    if device not in _ROTATIONS:
        rows = [[(-1) ** (i & j).bit_count() * SIGNS[j] / 4 for j in range(HADAMARD)] for i in range(HADAMARD)]
        _ROTATIONS[device] = torch.tensor(rows, dtype=torch.float32, device=device)
    return _ROTATIONS[device]


def scaled(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (`x` (N, D) divided by its scales, scale, max|group|, number of saturated elements or None).

    The first three have the shape of `as_groups`. The first is float32 and does not exceed the format's largest value.
    The count is a scalar. This is `quantize` without its rounding and on whole tensors, as GPUs and compilers want it.
    """
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (1, 3))
    scale = scale_under(cast, largest, reference, None, x.dtype, contraction_dim, [groups])
    saturated = None
    if _may_saturate(cast):
        saturated = as_matrix(groups.abs() > _limit(scale, cast), x).sum()
    return over_scale(groups, scale, cast).clamp_(-cast.format.max, cast.format.max), scale, largest, saturated


def scale_under(
    cast: Cast,
    largest: Tensor,
    reference: Reference = None,
    finite: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    contraction_dim: int | None = None,
    pieces: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the float32 scales of all groups of a tensor with these largest magnitudes; NaN for NaN and Inf.

    Args:
        cast: the format and the granularity of its scale.
        largest: max|group| of every group.
        reference: source of a scale for the whole tensor.
        finite: `largest_if_finite` of `largest`, if it is known already.
        dtype: dtype of the tensor, which has to hold the values.
        contraction_dim: dimension that the GEMM contracts, along which the lines of `nv_row` lie; None: the whole
            tensor is one line.
        pieces: the elements, with equally many groups in each piece but the last. Their errors decide between 4 and 6;
            None: 6.
    """
    if cast.two_levels:
        return _two_level_scale(largest, cast, reference, finite, contraction_dim, pieces)
    if reference is not None:
        largest, finite = reference(largest), None
    if cast.power_of_two:
        return _power_of_two_scale(largest, cast, dtype, finite)
    return scale_of(largest, cast.format, torch.float32)


def over_scale(
    x: Tensor, scale: Tensor, cast: Cast, out: Tensor | None = None, inverse: Tensor | None = None
) -> Tensor:
    """Divide the float32 `x` by its scales as the cast defines it. `inverse`: `_inverse` of the scales, if known."""
    if cast.power_of_two or cast.two_levels:
        # Multiply by a power of two: the same number, and much faster for small groups. For two levels this is the
        # published rule, and a group of scale 0 must become 0, not NaN.
        return torch.mul(x, _inverse(scale) if inverse is None else inverse, out=out)
    return torch.div(x, scale, out=out)


def _inverse(scale: Tensor) -> Tensor:
    """Return the factors that divide numbers by these scales; finite for a scale of 0."""
    return scale.reciprocal().clamp_(max=_LARGEST)


def _may_saturate(cast: Cast) -> bool:
    """Return whether elements may lie beyond the format's largest value."""
    return cast.power_of_two or cast.scale == "delayed" or cast.two_levels


def _limit(scale: Tensor, cast: Cast) -> Tensor:
    """Return the magnitudes beyond which elements of groups with these scales saturate."""
    limit = scale * (cast.format.max * BEYOND)
    # Groups below the smallest scale become 0, which is not saturation.
    return F.threshold(limit, 0, math.inf, inplace=True) if cast.two_levels else limit


def scale_of_each(x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Tensor, Tensor]:
    """Return (scale of each element of `x`, (N, D) float32; max|group| of every group); see `quantize`."""
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (1, 3))
    scale = scale_under(cast, largest, reference, None, x.dtype, contraction_dim, [groups])
    return as_matrix(scale.expand_as(groups), x).contiguous(), largest


def as_groups(x: Tensor, cast: Cast, contraction_dim: int) -> Tensor:
    """Return `x` (N, D) as groups (rows, rows per group, columns, columns per group).

    Incomplete groups are padded with copies of the last elements. Four over six pads with zeros, which have no error.
    """
    rows, columns = x.shape
    group = cast.group(contraction_dim)
    height, width = group[0] or rows, group[1] or columns
    if cast.four_over_six:
        x = F.pad(x, (0, -columns % width, 0, -rows % height))
        rows, columns = x.shape
    if short := -rows % height:
        x = torch.cat([x, x[-1:].expand(short, -1)])
    if short := -columns % width:
        x = torch.cat([x, x[:, -1:].expand(-1, short)], dim=1)
    return x.view(x.shape[0] // height, height, x.shape[1] // width, width)


def as_matrix(groups: Tensor, x: Tensor) -> Tensor:
    """Undo `as_groups`: return the matrix in the shape of `x`."""
    return groups.reshape(groups.shape[0] * groups.shape[1], -1)[: x.shape[0], : x.shape[1]]


def _power_of_two_scale(largest: Tensor, cast: Cast, dtype: torch.dtype, finite: Tensor | None) -> Tensor:
    """Return the E8M0 scales of groups with these largest magnitudes, computed on the bits of float32 numbers.

    A scale is at least the smallest normal float32, 2^-126, although E8M0 has 2^-127 too. A scale is also small enough
    that scale * format.max stays in the range of `dtype`. At that limit the largest elements saturate instead of
    becoming Inf.
    """
    fraction, exponent = math.frexp(cast.format.max)
    # A mantissa beyond that of format.max carries into the exponent; mx_floor never rounds up.
    carry = 0 if cast.scale == "mx_floor" else int((1 - fraction) * 2**24) - 1
    bits = (largest.view(torch.int32) + carry).bitwise_and_(0x7F800000).sub_((exponent - 1) << 23)
    top = min(128, math.frexp(torch.finfo(dtype).max)[1]) - exponent
    scale = bits.clamp_(1 << 23, (top + 127) << 23).view(torch.float32)
    return scale if finite is not None else scale.add_(nan_unless_finite(largest))


def _two_level_scale(
    largest: Tensor,
    cast: Cast,
    reference: Reference,
    finite: Tensor | None,
    contraction_dim: int | None,
    pieces: Sequence[Tensor] | None,
) -> Tensor:
    """Return the groups' E4M3 numbers times one float32 number of all finite groups, or of the finite groups of a line.

    The E4M3 numbers may be zero or subnormal.
    """
    fmt, bad = cast.format, nan_unless_finite(largest) if finite is None else None
    sound = largest if bad is None else torch.where(bad == 0, largest, 0)
    if cast.scale == "nv_row" and contraction_dim is not None:
        of_tensor = sound.amax(2 if contraction_dim else 0, keepdim=True)
    else:
        of_tensor = sound.amax() if finite is None else finite
        of_tensor = of_tensor if reference is None else reference(of_tensor)
    top = _TOP_OF_FOUR_OVER_SIX if cast.four_over_six else _E4M3.max
    encode = torch.full_like(of_tensor, top * fmt.max).div_(of_tensor).clamp_(max=1 / TINY)
    # The order of operations is Transformer Engine's: the group's own magnitude is rounded twice, and once.
    if cast.four_over_six:
        numbers = _four_or_six(over_max(largest, fmt) * encode, of_tensor, encode, fmt, pieces)
    else:
        numbers = _E4M3.round((largest * (encode * (1 / fmt.max))).clamp_(max=_E4M3.max))
    scale = numbers.mul_(encode.reciprocal())
    return scale if bad is None else scale.add_(bad)


def _four_or_six(
    exact: Tensor, of_tensor: Tensor, encode: Tensor, fmt: Format, pieces: Sequence[Tensor] | None
) -> Tensor:
    """Return the groups' E4M3 numbers, from `exact` or from 1.5 times `exact`, whichever has the smaller error.

    Errors are computed and summed in the order of Transformer Engine's kernels, so that ties agree. The sum runs along
    the lines, and for 16 x 16 groups then over halves of the rows.
    """
    six, four = (_E4M3.round((exact * up).clamp_(max=_E4M3.max)) for up in (1.0, 1.5))
    if pieces is None:
        return six
    over, at_once, chosen = torch.full_like(of_tensor, _TOP_OF_FOUR_OVER_SIX * fmt.max), len(pieces[0]), []
    for piece, *both in zip(pieces, six.split(at_once), four.split(at_once), strict=True):
        x, errors = piece.float(), []
        for numbers in both:
            values = fmt.round((x * _inverse(numbers * encode.reciprocal())).clamp_(-fmt.max, fmt.max))
            error = values.mul_(numbers).mul_(of_tensor).div_(over).sub_(x).abs_()
            if error.shape[3] == 1:
                error = error.transpose(1, 3)
            total = reduce(torch.add, error.unbind(3))
            while total.shape[1] > 1:
                total = torch.add(*total.chunk(2, dim=1))
            errors.append(total.unsqueeze(3))
        chosen.append(torch.where(errors[1] < errors[0], both[1], both[0]))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
