"""Every code point of every format against an independent table, and rounding against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnmr.formats.number_formats import FORMATS, Format

# OCP Microscaling Formats v1.0, tables of FP4 and FP6 (non-negative half, in the order of their codes).
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3 = [
    *[0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875],
    *[2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5],
]
E3M2 = [
    *[0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75],
    *[2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28],
]
FEW_BITS = [name for name, fmt in FORMATS.items() if fmt.bits < 16]


def ieee(code: int, exponent_bits: int, mantissa_bits: int, nan_codes: set[int], inf_code: int | None) -> float:
    """Value of an FP8 code by the rules of the OCP FP8 specification."""
    sign = -1.0 if code >> 7 else 1.0
    magnitude = code & 0x7F
    if magnitude in nan_codes:
        return math.nan
    if magnitude == inf_code:
        return sign * math.inf
    exponent, mantissa = magnitude >> mantissa_bits, magnitude % 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)


TABLES: dict[str, list[float]] = {
    "int2": [-2, -1, 0, 1],
    "int3": [-4, -3, -2, -1, 0, 1, 2, 3],
    "int4": [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7],
    "int8": list(range(-128, 128)),
    "e2m1": E2M1 + [-v for v in E2M1],
    "e2m3": E2M3 + [-v for v in E2M3],
    "e3m2": E3M2 + [-v for v in E3M2],
    "e4m3": [ieee(c, 4, 3, {0x7F}, None) for c in range(256)],
    "e5m2": [ieee(c, 5, 2, {0x7D, 0x7E, 0x7F}, 0x7C) for c in range(256)],
}


@pytest.mark.parametrize("name", FEW_BITS)
def test_every_code_point(name: str) -> None:
    codes = torch.arange(2 ** FORMATS[name].bits).to(torch.uint8)
    table = torch.tensor(TABLES[name], dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):  # which holds every value exactly
        values = FORMATS[name].decode(codes, dtype).float()
        torch.testing.assert_close(values, table, rtol=0, atol=0, equal_nan=True)


def brute_force(x: Tensor, fmt: Format) -> Tensor:
    """Nearest value of the table, of two equally near ones that with the even code (without the sign bit)."""
    table = {v: code for code, v in enumerate(TABLES[fmt.name]) if math.isfinite(v) and abs(v) <= fmt.max}
    nearest = []
    for value in x.double().tolist():
        best = min(abs(value - v) for v in table)
        ties = [v for v in table if abs(value - v) == best]
        nearest.append(next((v for v in ties if table[v] % 2 == 0), ties[0]))
    return torch.tensor(nearest, dtype=torch.float32)


@pytest.mark.parametrize("name", FEW_BITS)
def test_rounding_to_nearest_with_ties_to_even(name: str) -> None:
    fmt = FORMATS[name]
    values = torch.tensor(
        sorted({v for v in TABLES[name] if math.isfinite(v) and abs(v) <= fmt.max}), dtype=torch.float32
    )
    middles = (values[:-1] + values[1:]) / 2  # exact in float32
    generator = torch.Generator().manual_seed(0)
    anywhere = (torch.rand(300, generator=generator) * 2 - 1) * fmt.max
    small = (torch.rand(100, generator=generator) * 2 - 1) * min(values[values > 0].min() * 6, fmt.max)
    x = torch.cat([values, middles, torch.nextafter(middles, values[1:]), torch.nextafter(middles, values[:-1])])
    x = torch.cat([x, anywhere, small])
    got = fmt.decode(fmt.encode(x.clone()), torch.float32)
    torch.testing.assert_close(got, brute_force(x, fmt), rtol=0, atol=0)
    assert torch.equal(fmt.round(x.clone()), got), "without the codes too"
