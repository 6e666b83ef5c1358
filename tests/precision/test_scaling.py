"""Packing is lossless and as small as promised; scales are per token; special rows are defined."""

from __future__ import annotations

import math

import pytest
import torch

from gnmr.formats.number_formats import FORMATS, RangeFormat
from gnmr.formats.scaling import compress, decompress, largest_magnitude, pack, row_bytes, scales_of, unpack

FEW_BITS = [name for name, fmt in FORMATS.items() if fmt.bits < 16]


def round_trip(rows: torch.Tensor, name: str, generator: torch.Generator | None = None) -> torch.Tensor:
    packed, scale = compress(rows, FORMATS[name], generator)
    return decompress(packed, scale, FORMATS[name], rows.shape[1], rows.dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 64, 191])
def test_packing_is_lossless_for_every_width(bits: int, width: int) -> None:
    codes = torch.randint(0, 2**bits, (17, width), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (17, row_bytes(width, bits)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, width), codes)


def test_int4_by_hand() -> None:
    row = torch.tensor([[7.0, -7.0, 3.5, 2.5, 0.0, -0.4, 1.5, -6.6]])
    packed, scale = compress(row, FORMATS["int4"])
    assert scale.item() == 1.0
    assert decompress(packed, scale, FORMATS["int4"], 8, torch.float32).tolist() == [[7, -7, 4, 2, 0, 0, 2, -7]]
    assert packed.tolist() == [[15 | 8 << 4, 1 | 8 << 4, 12 | 10 << 4, 10 | 1 << 4]]


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_row_with_a_nonfinite_number_comes_back_as_nan_and_no_other_row_does(name, bad, stochastic) -> None:
    rows = torch.randn(4, 12, dtype=torch.bfloat16)
    rows[2, 5] = bad
    back = round_trip(rows, name, torch.Generator().manual_seed(0) if stochastic else None)
    assert back[2].isnan().all()
    assert back[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("name", FEW_BITS)
def test_the_smallest_and_largest_numbers(name: str) -> None:
    largest = torch.tensor([[0.98 * torch.finfo(torch.bfloat16).max, 1.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(round_trip(largest, name)[0, 0], largest[0, 0], rtol=2**-6, atol=0)
    smallest = torch.full((1, 4), 1e-44)
    assert round_trip(smallest, name).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_magnitude_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [[1.0, -3.0, 2.0], [0.0, -0.0, 0.0], [1.0, math.nan, math.inf], [1.0, -math.inf, 2.0]], dtype=dtype
    )
    found = largest_magnitude(x, (1,))
    torch.testing.assert_close(found, torch.tensor([[3.0], [0.0], [math.nan], [math.inf]], dtype=dtype), equal_nan=True)


def test_a_group_spans_its_smallest_to_its_largest_value_by_hand() -> None:
    """Groups of four; the third one is two elements."""
    fmt = RangeFormat.of("int2", 4)
    row = torch.tensor([[-1.0, 2.0, 0.4, 0.6, 5.0, 5.0, 5.0, 5.0, 0.0, -30.0]])
    packed, scale = compress(row, fmt)
    assert scale.tolist() == [[1.0, torch.finfo(torch.float32).tiny, 10.0, -1.0, 5.0, -30.0]]
    assert unpack(packed, 2, 10).tolist() == [[0, 3, 1, 2, 0, 0, 0, 0, 3, 0]]
    assert decompress(packed, scale, fmt, 10, torch.float32).tolist() == [[-1, 2, 0, 1, 5, 5, 5, 5, 0, -30]]
    assert scale.shape[1] == scales_of(10, fmt) == 6 and scales_of(10, FORMATS["int2"]) == 1


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranges_of_every_width_and_dtype(bits: int, dtype: torch.dtype) -> None:
    fmt = RangeFormat.of(f"int{bits}", 32)
    rows = (torch.randn(16, 75, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    rows[3, 40] = math.nan
    rows[5] = 0
    back = decompress(*compress(rows, fmt), fmt, 75, dtype)
    assert back.dtype == dtype and back[3].isnan().all() and torch.equal(back[5], rows[5])
    for start in (0, 32, 64):
        group, got = (x[:, start : start + 32].float() for x in (rows, back))
        step = (group.amax(1) - group.amin(1)) / fmt.max
        ends = 0.51 * step + 2**-7 * group.abs().amax(1)  # of a scale and a result in 16 bits
        assert ((group - got).abs().amax(1) <= ends)[~group.isnan().any(1) & ~got.isnan().any(1)].all()


@pytest.mark.parametrize("name", ["int2", "int2/32", "e2m1", "e4m3"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """The mean of many draws within five standard errors of every element, which nearest rounding is far from."""
    fmt = RangeFormat.of("int2", 32) if "/" in name else FORMATS[name]
    row = torch.randn(1, 96, generator=torch.Generator().manual_seed(1))
    draws, generator = 4000, torch.Generator().manual_seed(2)
    back = decompress(*compress(row.expand(draws, -1), fmt, generator), fmt, 96, torch.float32)
    error = back.std(dim=0) / draws**0.5
    assert ((back.mean(dim=0) - row[0]).abs() <= 5 * error + 1e-5).all()
    nearest = decompress(*compress(row, fmt), fmt, 96, torch.float32)[0]
    assert ((nearest - row[0]).abs() > 5 * error + 1e-5).float().mean() > 0.5
    assert len(back[:, 0].unique()) == 2, "one of its two neighbours each time"
