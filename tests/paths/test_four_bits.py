"""MXFP4 and NVFP4 code point for code point, at the edges of their scales, and against torchao."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from slow_casts import slow_cast
from torch import Tensor

from gnmr.paths.casting import quantize
from gnmr.paths.recipes import Cast

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The magnitudes (OCP MX 1.0, table 5); a code is the index and the sign."""
# (a number, what it is rounded to): values, the midpoints (to the even code), and numbers on either side of them.
ROUNDED = [(value, value) for value in E2M1]
for i, (low, high) in enumerate(pairwise(E2M1)):
    middle = (low + high) / 2
    ROUNDED += [(middle, low if i % 2 == 0 else high), (middle * (1 - 2**-10), low), (middle * (1 + 2**-10), high)]
ROUNDED += [(-number, -value) for number, value in ROUNDED]


def cast(x: Tensor, word: str, dim: int = 1) -> Tensor:
    return quantize(x, Cast.of(word), dim)[0]


@pytest.mark.parametrize("dim", [0, 1])
def test_every_code_point_and_tie_of_mxfp4_under_every_scale(dim: int) -> None:
    """2^-126 to 2^125, which is what the magnitudes of float32 can ask for (E8M0's 2^-127: `casting`)."""
    exponents = torch.arange(-126, 126)
    numbers, values = torch.tensor(ROUNDED).t()
    groups = torch.zeros(len(exponents), -(-len(numbers) // 31), 32)  # the last of each 32 decides on the scale
    groups[:, :, 31] = 6
    expected = groups.clone()
    for place, (number, value) in enumerate(zip(numbers, values, strict=True)):
        groups[:, place // 31, place % 31], expected[:, place // 31, place % 31] = number, value
    scale = torch.tensor([2.0**e for e in exponents.tolist()]).view(-1, 1)
    x, expected = groups.flatten(1) * scale, expected.flatten(1) * scale
    got = cast(x, "e2m1/mx", 1) if dim == 1 else cast(x.t().contiguous(), "e2m1/mx", 0).t()
    normal = expected.abs() >= torch.finfo(torch.float32).tiny  # CPUs may flush what lies below
    assert torch.equal(got[normal], expected[normal]) and (got[~normal] - expected[~normal]).abs().max() < 2.0**-126


def test_the_edges_of_mx_scales() -> None:
    """A group of zeros, numbers below the smallest scale, subnormal ones, and the largest there are."""
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(5, 32)
    x[1, 0], x[1, 1] = 2.0**-126, 2.0**-128  # the scale is 2^-126 and not 2^-128: half of it is a tie
    x[2] = 1e-44
    x[3, 0], x[3, 1] = largest, 2.0**125
    x[4, 0], x[4, 1] = -0.0, 1.0
    got = cast(x, "e2m1/mx")
    assert got[0].count_nonzero() == 0 and got[1, 0] == 2.0**-126 and got[1, 1] == 0 and got[2].count_nonzero() == 0
    assert got[3, 0] == 6 * 2.0**125 and got[3, 1] == 2.0**125, "the largest magnitude saturates: 6, not 8"
    assert got[4].tolist() == [0.0, 1.0, *([0.0] * 30)]
    for bad in (math.nan, math.inf, -math.inf):
        x[4, 7] = bad
        assert cast(x, "e2m1/mx")[4].isnan().all() and cast(x, "e2m1/mx")[:4].isfinite().all()


def test_groups_of_four_bits_that_the_edge_cuts() -> None:
    """Tokens need not be a multiple of 32: the last group is smaller."""
    x = torch.randn(77, 45, generator=torch.Generator().manual_seed(0))
    for dim in (0, 1):
        assert torch.equal(cast(x, "e2m1/mx", dim), slow_cast(x, "e2m1/mx", dim))


# ---- NVFP4 ----

E4M3 = [code / 8 * 2.0**-6 for code in range(8)]
E4M3 += [(1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(8, 127)]
"""The magnitudes from 0 to 448."""


@pytest.mark.parametrize("exponent", [-100, -3, 0, 90])
def test_every_code_point_of_nvfp4_under_every_block_scale(exponent: int) -> None:
    """With the tensor's scale 2^exponent. Ties only where the block's scale is a power of two, so that its reciprocal
    is exact."""
    numbers = {False: [pair for pair in ROUNDED if pair[0] == pair[1] or pair[0] * 4 % 1], True: ROUNDED}
    blocks, expected = [], []
    for scale in E4M3[1:]:
        own = numbers[math.log2(scale) % 1 == 0]
        for start in range(0, len(own), 15):
            block = [*own[start : start + 15], (6.0, 6.0)]
            block += [(0.0, 0.0)] * (16 - len(block))
            blocks.append([number * scale * 2.0**exponent for number, _ in block])
            expected.append([value * scale * 2.0**exponent for _, value in block])
    x, known = torch.tensor(blocks), torch.tensor(expected)
    assert x.abs().max() == 6 * 448 * 2.0**exponent and torch.equal(cast(x, "e2m1/nv"), known)
    assert torch.equal(cast(x.t().contiguous(), "e2m1/nv", 0).t(), known)
    if exponent == 0:
        square = torch.zeros(len(x) * 16, 16)  # each block with its elements in a column
        square[:, 3] = x.flatten()
        assert torch.equal(cast(square, "e2m1/nv2d")[:, 3], known.flatten())


def test_the_edges_of_nvfp4_scales() -> None:
    x = torch.zeros(8, 16)
    assert cast(x, "e2m1/nv").count_nonzero() == 0, "nothing but zeros"
    x[0, 0] = 6 * 448
    x[1, :2] = torch.tensor([6 * 2.0**-9, 2.0**-9])  # the smallest subnormal scale
    x[2, :2] = torch.tensor([6 * 2.0**-10, 2.0**-10])  # half of it: a tie, to 0
    x[3, :2] = torch.tensor([6 * 1.5 * 2.0**-9, 2.0**-9])  # a tie, to 2^-8
    x[4, :2] = torch.tensor([6 * 2.5 * 2.0**-9, 2.0**-9])  # a tie, to 2^-8: saturates at 12 * 2^-9
    x[5] = -1e-44
    x[6, :2] = torch.tensor([6 * 1.0625, 1.0])  # a tie, to 1
    got, stats = quantize(x, Cast.of("e2m1/nv"), 1)
    assert got[:2].equal(x[:2]) and not got[[2, 5, 7]].any()
    assert got[3, :2].tolist() == [4 * 2.0**-8, 2.0**-9] and got[4, :2].tolist() == [6 * 2.0**-8, 2.0**-9]
    assert got[6, :2].tolist() == [6.0, 1.0]
    assert stats.saturated == 2, "what a scale that was rounded down cannot hold, and not what becomes 0"
    tiny = torch.full((2, 16), 1e-44)
    assert not cast(tiny, "e2m1/nv").any(), "no scale below 2^-126"
    huge = torch.full((2, 16), torch.finfo(torch.float32).max)
    torch.testing.assert_close(cast(huge, "e2m1/nv"), huge, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("word", ["e2m1/nv", "e2m1/nv2d"])
def test_the_scale_of_a_tensor_is_that_of_its_finite_blocks(bad: float, word: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[40, 40] = 100.0  # the largest one, in the block that turns bad
    rest = x.clone()
    if word == "e2m1/nv":
        x[40, 41] = bad
        rest[40, 32:48] = 0
    else:
        rest[32:48, 32:48] = 0
        x[41, 41] = bad
    got = cast(x, word)
    assert got[40, 32:48].isnan().all() and got.isnan().sum() == (16 if word == "e2m1/nv" else 256)
    assert torch.equal(got.nan_to_num(0.0), cast(rest, word))


def scales_of_torchao(x: Tensor) -> Tensor:
    """`x` in NVFP4 and back by torchao, whose block scales are at least 2^-6, the smallest normal E4M3 number."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    of_tensor = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    return nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor).dequantize(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_that_of_torchao(dtype: torch.dtype) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 16:32] = 0
    x[:, 5] = (x[:, 5] * 8).round() / 8
    x[7, 7] = 6 * 448 * 2.0**-8  # the tensor's scale is a power of two, so that no order of rounding matters
    assert torch.equal(cast(x, "e2m1/nv"), scales_of_torchao(x))
    assert torch.equal(cast(x.t().contiguous(), "e2m1/nv", 0).t(), scales_of_torchao(x))
    x[7, 7] = 11.0
    ours, theirs = cast(x, "e2m1/nv").float(), scales_of_torchao(x).float()
    step = theirs.abs().clamp(min=x.abs().max().item() / 448 / 6)
    assert ((ours - theirs).abs() <= step / 2).all() and (ours != theirs).float().mean() < 5e-3, "float32's last digits"
