"""Matrices of eight-bit codes and their product on hardware that multiplies them.

Scales are one of a tensor, or one of a group of elements: 1x128 tiles, 128x128 blocks, or 1x32 under a power of two
(mx). Groups go through `torch.nn.functional.scaled_mm`, which wants their scales laid out as cuBLAS reads them:

    tile    (lines, groups) float32, the lines of one group of columns next to each other; lines a multiple of 4
    block   (groups, lines / 128) float32, groups filled up to a multiple of 4 and next to each other
    mx      bytes (e8m0) in pieces of 128 lines x 4 groups, filled up with zeros, each piece as 32 x (4 x 4)

A line is a row of the first operand or a column of the second, both of which lie in one piece along the dimension that
the product contracts; a group is 128 or 32 elements of a line.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnmr.paths.recipes import MX, TILE

MULTIPLE = 16
"""What the hardware wants every dimension of an eight-bit product to be a multiple of."""
E8M0 = torch.float8_e8m0fnu
_FOUR = 4


class Codes(NamedTuple):
    """A matrix in a format of eight bits: codes * scale."""

    codes: Tensor
    """(N, D), of the format's own dtype."""
    scale: Tensor
    """A scalar in float32; or of each group, (N / height, D / width): float32 of tiles and blocks, e8m0 of mx."""

    def t(self) -> Codes:
        """The transpose: views."""
        return Codes(self.codes.t(), self.scale.t())

    def values(self) -> Tensor:
        """(N, D) float32."""
        scale = self.scale.float()
        for dim, count in enumerate(self.scale.shape):
            size = self.codes.shape[dim]
            length = next(each for each in (1, MX, TILE) if -(-size // each) == count)
            if length > 1:
                scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
        return self.codes.float() * scale


def product(a: Tensor | Codes, b: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    """a (M, K) times b (K, N), both plain or both codes, in `dtype`. Does not wait for the device."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor) and isinstance(b, Tensor), "`fp8.missing` refuses"
        return a @ b
    if a.scale.dim():
        return _group_product(a, b.t(), dtype)
    # Rows of a and columns of b lie in one piece, and so does what fills them up.
    rows, columns = a.codes.contiguous(), b.codes.t().contiguous()
    if short := -rows.shape[1] % MULTIPLE:
        rows, columns = (_filled(each, 0, short) for each in (rows, columns))
    return torch._scaled_mm(rows, columns.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype)


def _group_product(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """a (M, K) times the transpose of b (N, K), whose groups lie along K."""
    count, groups = len(a.codes), a.scale.shape[1]
    lines = TILE if _is_block(a) else MULTIPLE
    found = []
    for each, fill in ((a, -count % lines), (b, 0)):
        mx = each.scale.dtype == E8M0
        short = groups * (MX if mx else TILE) - each.codes.shape[1]
        layout, scaling = (_mx, F.ScalingType.BlockWise1x32) if mx else (_tile, F.ScalingType.BlockWise1x128)
        if _is_block(each):
            layout, scaling = _block, F.ScalingType.BlockWise128x128
        codes = _filled(each.codes.contiguous(), fill, short)
        found.append((codes, layout(each.scale, len(codes)), scaling))
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if a.scale.dtype == E8M0 else F.SwizzleType.NO_SWIZZLE
    (rows, scale_a, scaling_a), (columns, scale_b, scaling_b) = found
    whole = F.scaled_mm(rows, columns.t(), scale_a, scaling_a, scale_b, scaling_b, swizzle, swizzle, output_dtype=dtype)
    return whole[:count]


def _is_block(a: Codes) -> bool:
    return len(a.scale) != len(a.codes)


def _filled(x: Tensor, lines: int, columns: int) -> Tensor:
    """A contiguous matrix of one byte an element with so many lines and columns of zeros behind."""
    return F.pad(x.view(torch.uint8), (0, columns, 0, lines)).view(x.dtype) if lines or columns else x


def _tile(scale: Tensor, lines: int) -> Tensor:
    """(lines, groups)."""
    laid = scale.new_zeros(scale.shape[1], lines)
    laid[:, : len(scale)] = scale.t()
    return laid.t()


def _block(scale: Tensor, _lines: int) -> Tensor:
    """(groups, lines / 128)."""
    groups = scale.shape[1]
    laid = scale.new_zeros(len(scale), groups + -groups % _FOUR)
    laid[:, :groups] = scale
    return laid.t()


def _mx(scale: Tensor, _lines: int) -> Tensor:
    """In one dimension."""
    whole = _filled(scale.contiguous(), -len(scale) % TILE, -scale.shape[1] % _FOUR)
    pieces = whole.view(len(whole) // TILE, _FOUR, TILE // _FOUR, whole.shape[1] // _FOUR, _FOUR)
    return pieces.permute(0, 3, 2, 1, 4).reshape(-1)
