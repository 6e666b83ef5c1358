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
