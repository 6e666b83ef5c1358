"""Simulated casts of a tensor to the values of a format: scale, round to the nearest values, scale back.

A `Cast` (`recipes.py`) defines which elements share a scale. If a group contains a NaN or an Inf, the whole group
becomes NaN: a cast never turns a non-finite number into a finite one. Nothing here waits for an accelerator. Values are
inspected only on CPUs, where inspection costs no synchronization, and never while torch.compile traces a cast.
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

from gnmr.formats.cast_stats import CastStats
from gnmr.formats.number_formats import FORMATS, FloatFormat, Format
from gnmr.formats.recipes import HADAMARD, Cast
from gnmr.formats.scaling import (
    TINY,
    count_nonfinite,
    is_inspectable,
    is_traced,
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
    """Round a matrix to the values of a cast.

    Args:
        x: (N, D), any floating dtype.
        cast: the format, the granularity of its scale, and the rounding.
        contraction_dim: the dimension of x that its GEMM contracts, read by `tile`, `mx` and `nv`.
        reference: source of a delayed scale; None: the tensor's own largest magnitude.
        generator: source of stochastic rounding, on the device of x; None: round to nearest.

    Returns:
        The nearest values, (N, D) in the dtype of x, and statistics of the cast. If the cast has `hadamard`, the values
        are those of `rotated`, in its dtype; there may be more rows or columns.
    """
    values, _, stats = _quantize(x, cast, contraction_dim, reference, generator)
    return values, stats


def quantize_to_codes(
    x: Tensor, cast: Cast, contraction_dim: int, reference: Reference = None
) -> tuple[Tensor, Tensor, CastStats]:
    """Round a matrix as `quantize` does, and leave values and scales apart, as hardware multiplies them.

    Args:
        x: (N, D), any floating dtype.
        cast: a format with a type of PyTorch, such as E4M3; neither rotated nor stochastic.
        contraction_dim: the dimension of x that its GEMM contracts.
        reference: source of a delayed scale; None: the tensor's own largest magnitude.

    Returns:
        The codes, (N, D) in the format's own dtype; the float32 scales of all groups, in the shape of `as_groups`
        without elements; statistics of the cast.
    """
    assert isinstance(cast.format, FloatFormat) and cast.format.native is not None
    return _quantize(x, cast, contraction_dim, reference, None, cast.format.native)


def _quantize(
    x: Tensor,
    cast: Cast,
    contraction_dim: int,
    reference: Reference,
    generator: torch.Generator | None,
    codes: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, CastStats]:
    """Return (values of `x`, or its codes in the dtype `codes`; scales of all groups; statistics); see `quantize`."""
    source = rotated(x, contraction_dim) if cast.hadamard else x
    groups = as_groups(source, cast, contraction_dim)
    at_once = _groups_at_once(groups)
    pieces = groups.split(at_once)

    # Scales: each group's largest magnitude becomes the largest value of the format.
    if cast.one_scale:
        per_piece = [largest_magnitude(piece, (0, 1, 2, 3)) for piece in pieces]
        largest = (per_piece[0] if len(pieces) == 1 else largest_of(torch.cat(per_piece), (0,))).float()
    else:
        per_piece = [largest_magnitude(piece, (1, 3)) for piece in pieces]
        largest = (per_piece[0] if len(pieces) == 1 else torch.cat(per_piece)).float()
    finite = largest_if_finite(largest)
    scale = scale_under(cast, largest, reference, finite, source.dtype, contraction_dim, pieces)
    noise = random_bits(groups, generator) if cast.stochastic and generator is not None else None
    unscaled = noise is None and reference is None and _rounds_unscaled(largest, finite, cast, source.dtype)
    limit = _limit(scale, largest, cast, unscaled)

    # Rounding, piece by piece: x / scale to the nearest value, times scale.
    values = torch.empty_like(groups, dtype=codes or source.dtype, memory_format=torch.contiguous_format)
    saturated = None if limit is None else torch.zeros((), dtype=torch.int64, device=x.device)
    work_dtype = source.dtype if unscaled and limit is None else torch.float32
    work, scratch = (torch.empty_like(pieces[0], dtype=work_dtype) for _ in range(2))  # memory of all pieces
    for number, piece in enumerate(pieces):
        rows = slice(number * at_once, number * at_once + len(piece))
        out, piece_scale = values[rows], scale if cast.one_scale else scale[rows]
        # A compiler plans memory itself.
        scaled, room = (None, None) if is_traced(x) else (work[: len(piece)], scratch[: len(piece)])
        if unscaled and limit is None:
            assert isinstance(cast.format, FloatFormat) and room is not None
            smallest_normal = (piece_scale * 2.0 ** (1 - cast.format.bias)).clamp_(min=TINY).to(piece.dtype)
            cast.format.round_unscaled(piece, smallest_normal, room, out)
            continue
        # CPUs are slow between two dtypes.
        wide = piece.float() if scaled is None or piece.dtype == torch.float32 else scaled.copy_(piece)
        if limit is not None and saturated is not None:
            # The mask is 1.0 or 0.0, because bool is much slower on CPUs.
            beyond = torch.abs(wide, out=room).gt_(limit if cast.one_scale else limit[rows])
            saturated += beyond.sum((1, 2, 3)).sum(dtype=torch.int64)
        scaled = over_scale(wide, piece_scale, cast, out=scaled)
        if limit is not None:
            scaled.clamp_(-cast.format.max, cast.format.max)
        rounded = cast.format.round(scaled, room, None if noise is None else noise[rows].float().add_(0.5))
        out.copy_(rounded if codes else rounded.mul_(piece_scale))
    nonfinite = count_nonfinite(x) if finite is None else None
    return as_matrix(values, source), scale, CastStats(largest, saturated, nonfinite)


def _groups_at_once(groups: Tensor) -> int:
    """Return how many of the first dimension of `groups` make a piece."""
    if is_traced(groups):
        return max(1, len(groups))  # the compiler fuses the passes
    if groups.device.type == "cpu":  # equal pieces: a short last one would cost a dozen calls for little work
        pieces = max(1, round(groups.numel() / (_AT_ONCE * torch.get_num_threads())))
    else:
        pieces = max(1, math.ceil(groups.numel() / _MOST))
    return max(1, math.ceil(len(groups) / pieces))


def _rounds_unscaled(largest: Tensor, finite: Tensor | None, cast: Cast, dtype: torch.dtype) -> bool:
    """Return whether `round_unscaled` can round a tensor in `dtype` with these largest magnitudes.

    It can if scales are powers of two, and the largest magnitude of each group is zero or far from the limits of
    `dtype`. Where that cannot be inspected, the result is False.
    """
    if not cast.granularity.power_of_two or not isinstance(cast.format, FloatFormat):
        return False
    if dtype not in (torch.bfloat16, torch.float32) or finite is None or finite.item() > _FAR:
        return False
    return largest.amin().item() >= 1 / _FAR or not ((largest > 0) & (largest < 1 / _FAR)).any()


def _limit(scale: Tensor, largest: Tensor, cast: Cast, unscaled: bool) -> Tensor | None:
    """Return the magnitudes beyond which elements of groups with these scales saturate; None: none saturates."""
    rule = cast.granularity
    if not (rule.power_of_two or rule.delayed or rule.two_levels):
        return None
    if unscaled and not rule.rounds_down:  # scales that are rounded up saturate at the limits of the dtype alone
        return None
    # Elements of a group saturate above scale * format.max, which depends on the group.
    limit = scale * (cast.format.max * BEYOND)
    if rule.two_levels:
        # A group below the smallest scale becomes 0, which is not saturation.
        return F.threshold(limit, 0, math.inf, inplace=True)
    if is_inspectable(largest) and not (largest > limit).any():
        return None
    return limit


def as_groups(x: Tensor, cast: Cast, contraction_dim: int, fill: float = 0.0) -> Tensor:
    """Return the groups of elements that share a scale.

    Args:
        x: (N, D).
        cast: its granularity. If all elements share one scale, each row is a "group" here.
        contraction_dim: the dimension of x that its GEMM contracts.
        fill: fills incomplete groups.

    Returns:
        (groups of rows, rows per group, groups of columns, columns per group), a view of x unless groups are cut.
    """
    rows, columns = x.shape
    height, width = cast.group(contraction_dim)
    height, width = height or 1, width or columns
    if -rows % height or -columns % width:
        x = F.pad(x, (0, -columns % width, 0, -rows % height), value=fill)
    return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)


def as_matrix(groups: Tensor, x: Tensor) -> Tensor:
    """Undo `as_groups`.

    Returns: (N, D) contiguous, in the shape of `x` and the dtype of `groups`, without what filled incomplete groups.
    """
    matrix = groups.view(groups.shape[0] * groups.shape[1], -1)
    if matrix.shape == x.shape:
        return matrix
    # Copy: a view would keep the padding alive.
    return matrix[: x.shape[0], : x.shape[1]].clone(memory_format=torch.contiguous_format)


def scale_of_each(x: Tensor, cast: Cast, contraction_dim: int, reference: Reference) -> tuple[Tensor, Tensor]:
    """Return the scale of each element, as `quantize` takes it.

    Args:
        x: (N, D), any floating dtype, which has to hold the values; rotated already if the cast has `hadamard`.
        cast: the format and the granularity of its scale.
        contraction_dim: the dimension of x that its GEMM contracts.
        reference: source of a delayed scale; None: the tensor's own largest magnitude.

    Returns:
        The scales, (N, D) float32; max|group| of every group, float32 in the shape of `as_groups` without elements.
    """
    groups = as_groups(x.float(), cast, contraction_dim)
    largest = largest_magnitude(groups, (0, 1, 2, 3) if cast.one_scale else (1, 3))
    scale = scale_under(cast, largest, reference, None, x.dtype, contraction_dim, [groups])
    return as_matrix(scale.expand_as(groups).contiguous(), x), largest


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
    if cast.granularity.unscaled:  # an element that is not finite stays what it is, and its neighbors too
        return torch.ones_like(largest)
    if cast.two_levels:
        return _two_level_scale(largest, cast, reference, finite, contraction_dim, pieces)
    if reference is not None:
        largest, finite = reference(largest), None
    if cast.granularity.power_of_two:
        return _power_of_two_scale(largest, cast, dtype, finite)
    return scale_of(largest, cast.format, torch.float32)


def over_scale(x: Tensor, scale: Tensor, cast: Cast, out: Tensor | None = None) -> Tensor:
    """Divide float32 numbers by their scales, which are broadcast, as the cast defines it.

    Returns: float32 in the shape of `x`, in `out` if that is given. A two-level scale of 0 gives finite numbers.
    """
    if cast.granularity.power_of_two or cast.two_levels:
        # Multiply by a power of two: the same number, and much faster for small groups. For two levels this is the
        # published rule, and a group of scale 0 must become 0, not NaN.
        return torch.mul(x, _inverse(scale), out=out)
    return torch.div(x, scale, out=out)


def _inverse(scale: Tensor) -> Tensor:
    """Return the factors that divide numbers by these scales; finite for a scale of 0."""
    return scale.reciprocal().clamp_(max=_LARGEST)


def _power_of_two_scale(largest: Tensor, cast: Cast, dtype: torch.dtype, finite: Tensor | None) -> Tensor:
    """Return the E8M0 scales of groups with these largest magnitudes, computed on the bits of float32 numbers.

    A scale is at least the smallest normal float32, 2^-126, although E8M0 has 2^-127 too. A scale is also small enough
    that scale * format.max stays in the range of `dtype`. At that limit the largest elements saturate instead of
    becoming Inf.
    """
    # format.max = fraction * 2^exponent with 1/2 <= fraction < 1, so floor(log2 format.max) is exponent - 1.
    fraction, exponent = math.frexp(cast.format.max)
    # A mantissa beyond that of format.max carries into the exponent, so that the scale is rounded up.
    carry = 0 if cast.granularity.rounds_down else int((1 - fraction) * 2**24) - 1
    bits = (largest.view(torch.int32) + carry).bitwise_and_(0x7F800000).sub_((exponent - 1) << 23)
    # The largest scale is 2^top: times format.max, which is below 2^exponent, it stays in the range of the dtype.
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
    # A group with a NaN or an Inf must not decide the scale of the others.
    sound = largest if bad is None else torch.where(bad == 0, largest, 0)
    if cast.granularity.per_line and contraction_dim is not None:
        of_tensor = sound.amax(2 if contraction_dim else 0, keepdim=True)
    else:
        of_tensor = sound.amax() if finite is None else finite
        of_tensor = of_tensor if reference is None else reference(of_tensor)
    top = _TOP_OF_FOUR_OVER_SIX if cast.granularity.four_over_six else _E4M3.max
    # encode = top * format.max / max|tensor|; the limit keeps it finite for a tensor of zeros.
    encode = torch.full_like(of_tensor, top * fmt.max).div_(of_tensor).clamp_(max=1 / TINY)
    # The order of operations is Transformer Engine's: the group's own magnitude is rounded twice, and once.
    if cast.granularity.four_over_six:
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
    for piece, *choices in zip(pieces, six.split(at_once), four.split(at_once), strict=True):
        x, errors = piece.float(), []
        for numbers in choices:
            values = fmt.round((x * _inverse(numbers * encode.reciprocal())).clamp_(-fmt.max, fmt.max))
            # |value * number / encode - x| with encode = 256 * 6 / max|tensor|
            error = values.mul_(numbers).mul_(of_tensor).div_(over).sub_(x).abs_()
            # Groups that are columns: the elements to sum move to the last dimension.
            if error.shape[3] == 1:
                error = error.transpose(1, 3)
            total = reduce(torch.add, error.unbind(3))
            while total.shape[1] > 1:
                total = torch.add(*total.chunk(2, dim=1))
            errors.append(total.unsqueeze(3))
        chosen.append(torch.where(errors[1] < errors[0], choices[1], choices[0]))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def rotated(x: Tensor, contraction_dim: int, back: bool = False) -> Tensor:
    """Multiply each `HADAMARD` elements along the contracted dimension by H S (2509.25149, appendix C).

    H is Sylvester's Hadamard matrix divided by 4, and S is the diagonal matrix of `SIGNS`. H S is orthonormal, so the
    product of two rotated operands is unchanged. The rotation is computed in float32 and rounded once.

    Args:
        x: (N, D), any floating dtype.
        contraction_dim: the dimension of x that its GEMM contracts; padded with zeros to a multiple of `HADAMARD`.
        back: multiply by the transpose, which undoes the rotation.

    Returns:
        A new tensor in `rotated_dtype`, padding included, without a graph.
    """
    short = -x.shape[contraction_dim] % HADAMARD
    x = x.detach()
    if short:
        x = F.pad(x, (0, 0, 0, short) if contraction_dim == 0 else (0, short))
    matrix = _rotation(x.device).t() if back else _rotation(x.device)
    # Groups have the shape (groups, 16, D), or (groups, 16) within lines.
    groups = x.reshape(-1, HADAMARD, x.shape[1]) if contraction_dim == 0 else x.reshape(-1, HADAMARD)
    dtype = rotated_dtype(x.dtype)
    rotated_groups = torch.empty_like(groups, dtype=dtype, memory_format=torch.contiguous_format)
    at_once = max(1, (_AT_ONCE if x.device.type == "cpu" else _MOST) // max(1, groups[:1].numel()))
    wide = torch.empty_like(rotated_groups[:at_once], dtype=torch.float32)
    turned = torch.empty_like(wide)
    for piece, out in zip(groups.split(at_once), rotated_groups.split(at_once), strict=True):
        worked, result = wide[: len(piece)].copy_(piece), turned[: len(piece)]
        # With `out`, autocast leaves the product in float32.
        if contraction_dim == 0:
            torch.bmm(matrix.expand(len(piece), -1, -1), worked, out=result)
        else:
            torch.mm(worked, matrix.t(), out=result)
        out.copy_(result)
    return rotated_groups.view(x.shape)


def rotated_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `rotated` returns for a tensor in `dtype`.

    Returns: float32 for float16, which cannot hold four times its largest number; else `dtype`.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def random_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return int8 in the shape and on the device of `like`, uniform over all values.

    Each draw of 64 bits gives eight numbers, because CPUs draw one after the other. Probabilities of stochastic
    rounding are therefore multiples of 1/256.
    """
    draws = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    if not like.is_meta:
        # With these bounds PyTorch draws from all 64-bit integers.
        draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int8)[: like.numel()].view(like.shape)


def _rotation(device: torch.device) -> Tensor:
    """Return H S, (16, 16) float32."""
    if device not in _ROTATIONS:
        rows = [[(-1) ** (i & j).bit_count() * SIGNS[j] / 4 for j in range(HADAMARD)] for i in range(HADAMARD)]
        _ROTATIONS[device] = torch.tensor(rows, dtype=torch.float32, device=device)
    return _ROTATIONS[device]
