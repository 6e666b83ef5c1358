"""Casts of a tensor to the values of a format, simulated: scaled, rounded to the nearest values, scaled back.

Groups of elements with one scale are those of a `Cast` (`recipes.py`). A group that holds a NaN or an Inf comes back as
NaN throughout: a cast never turns a non-finite number into a finite one. Nothing here waits for the device, but on
CPUs, where looking at a value waits for nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.precision.cast_stats import CastStats
from gnmr.precision.formats import FORMATS, Format
from gnmr.precision.recipes import HADAMARD, Cast
from gnmr.precision.scaling import (
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
"""Makes of max|x| the magnitude that becomes the format's largest (delayed scales, and of two levels the tensor's);
None: that very one."""

_AT_ONCE = 2**18
"""Elements that each thread of a CPU takes at a time, so that they stay in its cache between the dozen passes."""
_MOST = 2**26
"""Elements that any other device takes at a time: the work buffers are 8 bytes for each."""

SIGNS = tuple(random.Random(16).choices((1, -1), k=HADAMARD))
"""Of the rotation: random, the same in all operators and steps (2509.25149, appendix C) and in all runs."""
_ROTATIONS: dict[torch.device, Tensor] = {}
"""By device, made once."""
_E4M3 = FORMATS["e4m3"]
_LARGEST = torch.finfo(torch.float32).max
_TOP_OF_FOUR_OVER_SIX = 256.0
"""What the largest group's E4M3 number becomes where 6 is kept: 1.5 times that is an E4M3 number too."""
BEYOND = 1 + 2.0**-20
"""Times the format's largest value: beyond that a number counts as saturated. The largest of a tensor, divided by its
own scale, may come out a rounding error above the format's."""


def quantize(
    x: Tensor,
    cast: Cast,
    contraction_dim: int,
    reference: Reference = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, CastStats]:
    """(`x` (N, D) in the nearest values of `cast`, same dtype; what the cast found).

    Of a cast with `hadamard` the values are those of `rotated`, in its dtype; it may have more rows or columns. A
    `stochastic` one draws from `generator`, on the device of x, and rounds to nearest without.

    `contraction_dim`: the dimension of x that its GEMM contracts, for `tile`, `mx` and `nv`. Without a `reference` a
    delayed scale is that of the tensor.
    """
    given = x
    if cast.hadamard:
        x = rotated(x, contraction_dim)  # a new tensor, on which the values are written
    rows, columns = x.shape
    group = cast.group(contraction_dim)
    height, width = group[0] or 1, group[1] or columns
    cut = -rows % height or -columns % width
    padded = F.pad(x, (0, -columns % width, 0, -rows % height)) if cut else x
    # As groups (rows, rows of a group, columns, columns of a group).
    groups = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    values = groups if cast.hadamard else torch.empty_like(groups, memory_format=torch.contiguous_format)
    on_cpu = x.device.type == "cpu"
    # Pieces of one size: a short last one would cost its dozen calls for little.
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
    inverse = _inverse(scale) if cast.power_of_two or cast.two_levels else None
    limit, saturated = None, torch.zeros((), dtype=torch.int64, device=x.device)
    if saturates := _may_saturate(cast):
        limit = _limit(scale, cast)
        # Looked at first where that waits for nothing; of two levels, groups whose scale is 0 have to be clamped.
        saturates = cast.two_levels or not on_cpu or bool((largest > limit).any())
    by_part = [
        [of_all] * len(parts) if of_all is None or one_scale else split(of_all) for of_all in (scale, inverse, limit)
    ]

    wide = torch.empty_like(values[:at_once], dtype=torch.float32)
    scratch = torch.empty_like(wide, dtype=torch.int32)
    noise: Sequence[Tensor | None] = [None] * len(parts)
    if cast.stochastic and generator is not None:
        noise, noise_room = split(random_bits(groups, generator)), torch.empty_like(wide)
    for part, out, steps, scale, inverse, limit in zip(parts, split(values), noise, *by_part, strict=True):
        worked, room = wide[: len(part)], scratch[: len(part)]
        # Copied first: mixed-dtype arithmetic is slow on CPUs.
        source = part if part.dtype == torch.float32 else worked.copy_(part)
        if saturates:
            magnitudes = torch.abs(source, out=room.view(torch.float32))
            # 1.0 or 0.0: on CPUs much faster than bool.
            beyond = torch.gt(magnitudes, limit, out=magnitudes)
            saturated += beyond.sum((1, 2, 3)).sum(dtype=torch.int64)
        over_scale(source, scale, cast, out=worked, inverse=inverse)
        if saturates:
            worked.clamp_(-cast.format.max, cast.format.max)
        if steps is not None:
            steps = noise_room[: len(part)].copy_(steps).add_(0.5)
        rounded = cast.format.round(worked, room, steps)
        if out.dtype == torch.float32:
            torch.mul(rounded, scale, out=out)
        else:
            out.copy_(rounded.mul_(scale))
    values = values.view(padded.shape)
    if cut:  # a copy: a view would hold the padding too
        values = values[:rows, :columns].clone(memory_format=torch.contiguous_format)
    nonfinite = count_nonfinite(given) if finite is None else None
    return values, CastStats(largest, saturated if _may_saturate(cast) else None, nonfinite)


def rotated(x: Tensor, contraction_dim: int, back: bool = False) -> Tensor:
    """`x` (N, D), each `HADAMARD` elements along the contracted dimension times the matrix H S, a new tensor.

    H is Sylvester's Hadamard matrix over 4, S the diagonal matrix of `SIGNS`: orthonormal, so that the product of two
    operands that are both rotated is what it was. Computed in float32 and rounded to the dtype of x; of float16, which
    cannot hold four times its largest number, the result stays in float32. Filled up with zeros to whole groups.
    `back`: by the transpose.
    """
    short = -x.shape[contraction_dim] % HADAMARD
    x = x.detach()
    if short:
        x = F.pad(x, (0, 0, 0, short) if contraction_dim == 0 else (0, short))
    matrix = _rotation(x.device).t() if back else _rotation(x.device)
    # As groups (groups, 16, D), or (groups, 16) of lines.
    groups = x.reshape(-1, HADAMARD, x.shape[1]) if contraction_dim == 0 else x.reshape(-1, HADAMARD)
    dtype = rotated_dtype(x.dtype)
    found = torch.empty_like(groups, dtype=dtype, memory_format=torch.contiguous_format)
    at_once = max(1, (_AT_ONCE if x.device.type == "cpu" else _MOST) // max(1, groups[:1].numel()))
    wide = torch.empty_like(found[:at_once], dtype=torch.float32)
    turned = torch.empty_like(wide)
    for piece, out in zip(groups.split(at_once), found.split(at_once), strict=True):
        worked, result = wide[: len(piece)].copy_(piece), turned[: len(piece)]
        # With `out` autocast leaves it in float32.
        if contraction_dim == 0:
            torch.bmm(matrix.expand(len(piece), -1, -1), worked, out=result)
        else:
            torch.mm(worked, matrix.t(), out=result)
        out.copy_(result)
    return found.view(x.shape)


def rotated_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what `rotated` makes of a tensor in `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


def random_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """int8 in the shape of `like` and on its device, uniform over all values: eight of a draw of 64 bits, which CPUs
    make one after the other. So probabilities of stochastic rounding are multiples of 1/256."""
    draws = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    if not like.is_meta:
        draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int8)[: like.numel()].view(like.shape)


def _rotation(device: torch.device) -> Tensor:
    """(16, 16) float32: H S."""
    if device not in _ROTATIONS:
        rows = [[(-1) ** (i & j).bit_count() * SIGNS[j] / 4 for j in range(HADAMARD)] for i in range(HADAMARD)]
        _ROTATIONS[device] = torch.tensor(rows, device=device)
    return _ROTATIONS[device]


def scaled(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Reference
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(`x` (N, D) divided by its scales, float32, none beyond the format's largest value; scale; max|group|; elements
    that saturate, a scalar or None), the first three as `as_groups` has them: `quantize` without its
    rounding and in whole tensors, as GPUs and compilers want it.
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
    """The float32 scales of the groups of a tensor, all of them, with these largest magnitudes; NaN for NaN and Inf.

    `reference`: of a scale of all of the tensor. `finite`: `largest_if_finite` of them, where it was asked before.
    `dtype`: of the tensor, which has to hold the values. `contraction_dim`: of the GEMM, along which the lines of
    `nv_row` lie; None: all of it is one. `pieces`: the elements, equally many groups each but the last, whose errors
    decide between 4 and 6; None: 6.
    """
    if cast.two_levels:
        return _two_level_scale(largest, cast, reference, finite, contraction_dim, pieces)
    if reference is not None:
        largest = reference(largest)
    if cast.power_of_two:
        return _power_of_two_scale(largest, cast, dtype)
    return scale_of(largest, cast.format, torch.float32)


def over_scale(
    x: Tensor, scale: Tensor, cast: Cast, out: Tensor | None = None, inverse: Tensor | None = None
) -> Tensor:
    """The float32 `x` divided by its scales as the cast does it; `out`: see torch.div. `inverse`: `_inverse` of the
    scales, where it is there already."""
    if cast.power_of_two or cast.two_levels:
        # By a power of two: the same number, and much faster for so small groups. For two levels it is the published
        # rule, and a group whose scale is 0 is to become 0, not NaN.
        return torch.mul(x, _inverse(scale) if inverse is None else inverse, out=out)
    return torch.div(x, scale, out=out)


def _inverse(scale: Tensor) -> Tensor:
    """What numbers are multiplied by to divide them by these scales; finite for a scale of 0."""
    return scale.reciprocal().clamp_(max=_LARGEST)


def _may_saturate(cast: Cast) -> bool:
    """Whether elements may lie beyond the format's largest value."""
    return cast.power_of_two or cast.scale == "delayed" or cast.two_levels


def _limit(scale: Tensor, cast: Cast) -> Tensor:
    """The magnitudes beyond which elements of groups with these scales saturate."""
    limit = scale * (cast.format.max * BEYOND)
    # Below the smallest scale they become 0: that is no saturation.
    return limit.masked_fill_(scale == 0, torch.inf) if cast.two_levels else limit


def scale_of_each(x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Tensor, Tensor]:
    """(scale (N, D) float32 of each element of `x` (N, D), max|group| of every group); see `quantize`."""
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (1, 3))
    scale = scale_under(cast, largest, reference, None, x.dtype, contraction_dim, [groups])
    return as_matrix(scale.expand_as(groups), x).contiguous(), largest


def as_groups(x: Tensor, cast: Cast, contraction_dim: int) -> Tensor:
    """`x` (N, D) as (rows, rows of a group, columns, columns of a group), filled up with copies of its last ones; with
    zeros, which have no error, for four over six."""
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
    """What `as_groups` made of a matrix of the shape of `x`, as that matrix again."""
    return groups.reshape(groups.shape[0] * groups.shape[1], -1)[: x.shape[0], : x.shape[1]]


def _power_of_two_scale(largest: Tensor, cast: Cast, dtype: torch.dtype) -> Tensor:
    """Return the E8M0 scales of groups with these largest magnitudes, computed on the bits of float32 numbers.

    A scale is never below the smallest normal float32 (2^-126; E8M0 has 2^-127 too), and never so large that
    scale * format.max leaves the range of `dtype`: there the largest elements saturate, as they would become Inf.
    """
    exponent = math.frexp(cast.format.max)[1] - 1
    if cast.scale == "mx_floor":
        scale = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-exponent
    else:  # up to the next power of two: what is below one carries into the exponent's bits
        over = over_max(largest, cast.format).view(torch.int32)
        scale = ((over + 0x007FFFFF) & 0x7F800000).view(torch.float32)
    top = math.frexp(torch.finfo(dtype).max)[1] - 1
    return scale.clamp_(min=TINY, max=2.0 ** (top - exponent)).add_(nan_unless_finite(largest))


def _two_level_scale(
    largest: Tensor,
    cast: Cast,
    reference: Reference,
    finite: Tensor | None,
    contraction_dim: int | None,
    pieces: Sequence[Tensor] | None,
) -> Tensor:
    """E4M3 numbers, zero and subnormal ones too, times one float32 number of all of the groups that are finite, or of
    those of a line."""
    fmt, bad = cast.format, nan_unless_finite(largest) if finite is None else None
    sound = largest if bad is None else torch.where(bad == 0, largest, 0)
    if cast.scale == "nv_row" and contraction_dim is not None:
        of_tensor = sound.amax(2 if contraction_dim else 0, keepdim=True)
    else:
        of_tensor = sound.amax() if finite is None else finite
        of_tensor = of_tensor if reference is None else reference(of_tensor)
    top = _TOP_OF_FOUR_OVER_SIX if cast.four_over_six else _E4M3.max
    encode = torch.full_like(of_tensor, top * fmt.max).div_(of_tensor).clamp_(max=1 / TINY)
    # In these orders, as Transformer Engine does it: the group's own magnitude is rounded twice, and once.
    if cast.four_over_six:
        numbers = _four_or_six(over_max(largest, fmt) * encode, of_tensor, encode, fmt, pieces)
    else:
        numbers = _E4M3.round((largest * (encode * (1 / fmt.max))).clamp_(max=_E4M3.max))
    scale = numbers.mul_(encode.reciprocal())
    return scale if bad is None else scale.add_(bad)


def _four_or_six(
    exact: Tensor, of_tensor: Tensor, encode: Tensor, fmt: Format, pieces: Sequence[Tensor] | None
) -> Tensor:
    """Return the groups' E4M3 numbers, from `exact` or from 1.5 times that, whichever has the smaller error.

    Errors are computed and added up in the order of Transformer Engine's kernels, so that a tie there is one here:
    along the lines, then of 16 x 16 over halves of the rows.
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
