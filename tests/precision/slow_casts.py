"""Casts written out by hand: loops over groups, a search over a table of values. Shares nothing with the package."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch
from test_formats import TABLES
from torch import Tensor

MAX = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "e4m3": 448.0, "e5m2": 57344.0, "int4": 7.0, "int8": 127.0}
EXPONENT_OF_MAX = {"e2m1": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15, "int4": 2, "int8": 6}


@cache
def magnitudes(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The format's finite values from 0 to its largest, in order, and whether each has an even code."""
    table = [(value, code) for code, value in enumerate(TABLES[name]) if np.isfinite(value) and 0 <= value <= MAX[name]]
    table.sort()
    return np.array([value for value, _ in table]), np.array([code % 2 == 0 for _, code in table])


def nearest(scaled: np.ndarray, name: str) -> np.ndarray:
    """The nearest value of the format's table; of two equally near ones that with the even code."""
    values, even = magnitudes(name)
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), MAX[name])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    down = (magnitude - low < high - magnitude) | ((magnitude - low == high - magnitude) & even[above - 1])
    return np.where(down, low, high) * np.sign(scaled)


def groups(shape: tuple[int, int], scale: str, dim: int) -> list[tuple[slice, slice]]:
    """The elements with one scale, group by group."""
    rows, columns = shape
    length = {"tile": 128, "mx": 32, "mx_floor": 32}.get(scale, 16)
    height, width = {
        "tensor": (rows, columns),
        "delayed": (rows, columns),
        "row": (1, columns),
        "block": (128, 128),
        "nv2d": (16, 16),
        "nv2d_4over6": (16, 16),
    }.get(scale) or ((length, 1) if dim == 0 else (1, length))
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def scale_of_two_levels(own: float, tensor: float, name: str) -> np.float32:
    """Of a block with the largest magnitude `own` in a tensor with `tensor`: 2509.25149, appendix C, in float32. The
    block is multiplied by its reciprocal."""
    if own == 0:
        return np.float32(0)
    encode = np.float32(448 * MAX[name]) / np.float32(tensor)
    over = encode * (np.float32(1) / np.float32(MAX[name]))
    number = nearest(np.array([np.float32(own) * over]), "e4m3").astype(np.float32)[0]
    return number * (np.float32(1) / encode)


def four_or_six(group: np.ndarray, tensor: float) -> np.ndarray:
    """The finite `group` of a tensor with the largest magnitude `tensor` with 6 or 4 as its largest value, whichever
    has the smaller sum of absolute errors: 2512.02010, with 256 in place of 448 (there too) and Transformer Engine's
    error. Scales in float32, errors in float64."""
    if not (own := np.abs(group).max()):
        return np.zeros_like(group)
    encode = np.float32(256 * 6) / np.float32(tensor)
    found = []
    for up in (1.0, 1.5):
        exact = np.float32(own) / np.float32(6) * encode * np.float32(up)
        number = nearest(np.array([exact]), "e4m3").astype(np.float32)[0]
        scale = number * (np.float32(1) / encode)
        scaled = group * (np.float32(1) / scale) if scale > 0 else np.zeros_like(group)
        values = nearest(scaled, "e2m1")
        error = np.abs(values * float(number) * float(tensor) / 1536 - group).sum()
        found.append((error, values.astype(np.float32) * scale))
    return found[1][1] if found[1][0] < found[0][0] else found[0][1]


def drawn(generator: torch.Generator, shape: tuple[int, int]) -> np.ndarray:
    """What `generator` gives next as noise between -1/2 and 1/2: 8 bits for each element, 64 in a draw."""
    count = shape[0] * shape[1]
    one = torch.empty((), dtype=torch.int64)
    draws = [int(one.random_(-(2**63), None, generator=generator)) for _ in range(-(-count // 8))]
    numbers = [(draw >> 8 * i) & 0xFF for draw in draws for i in range(8)][:count]
    signed = np.array([number - 2**8 if number >= 2**7 else number for number in numbers])
    return ((signed + 0.5) / 2**8).reshape(shape)


def up_or_down(scaled: np.ndarray, name: str, noise: np.ndarray) -> np.ndarray:
    """The value below or above in the format's table: above if the noise is beyond 1/2 less the way there."""
    magnitude, _ = magnitudes(name)
    values = np.array(sorted({*magnitude, *-magnitude}))
    exact = np.clip(scaled.astype(np.float64), values[0], values[-1])
    above = np.clip(np.searchsorted(values, exact), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    return np.where(noise > 0.5 - (exact - low) / (high - low), high, low)


def slow_rotation(source: np.ndarray, dim: int) -> np.ndarray:
    """Each 16 elements along `dim` under random signs and then in Hadamard's matrix, by its recursive definition; zeros
    behind the last ones. In float64 and rounded: exact where the numbers have few enough bits."""
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.array(random.Random(16).choices((1, -1), k=16))
    lines = source.astype(np.float64) if dim == 0 else source.T.astype(np.float64)
    lines = np.concatenate([lines, np.zeros((-len(lines) % 16, lines.shape[1]))])
    parts = [matrix @ (signs[:, None] * lines[i : i + 16]) / 4 for i in range(0, len(lines), 16)]
    whole = np.concatenate(parts).astype(np.float32)
    return np.ascontiguousarray(whole if dim == 0 else whole.T)


def slow_cast(
    x: Tensor,
    word: str | None,
    dim: int,
    largest: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`x` (N, D) in the cast that `word` says, in x's dtype; `largest`: the magnitude of a delayed scale; `generator`:
    what a stochastic cast draws from."""
    if word is None:
        return x
    name, scale_kind, *more = word.split("/")
    if scale_kind == "none":
        return slow_bfloat16(x)
    source = x.detach().float().numpy()
    if "hadamard" in more:
        source = torch.from_numpy(slow_rotation(source, dim)).to(x.dtype).float().numpy()
    noise = drawn(generator, source.shape) if "stochastic" in more and generator is not None else None
    result = np.empty_like(source)
    places = groups(source.shape, scale_kind, dim)
    tensors: dict[int, float] = {}  # the largest magnitude by line where each has a number of its own, else of all
    for place in places:
        own, line = np.abs(source[place]).max(), place[1 - dim].start if scale_kind == "nv_row" else 0
        tensors[line] = max(tensors.get(line, 0), own if np.isfinite(own) else 0)
    for place in places:
        tensor = tensors[place[1 - dim].start if scale_kind == "nv_row" else 0]
        group = source[place]
        own = np.abs(group).max() if largest is None else np.float32(largest)
        if not np.isfinite(np.abs(group).max()):
            result[place] = np.nan
            continue
        if "4over6" in scale_kind:
            result[place] = four_or_six(group, tensor)
            continue
        if scale_kind in ("nv", "nv2d", "nv_row"):
            scale = scale_of_two_levels(own, tensor, name)
            scaled = group * (np.float32(1) / scale) if scale > 0 else np.zeros_like(group)
        else:
            scale = np.float32(1)
            if own > 0 and scale_kind == "mx_floor":
                scale = np.float32(2.0 ** (np.floor(np.log2(own)) - EXPONENT_OF_MAX[name]))
            elif own > 0 and scale_kind == "mx":
                mantissa, exponent = np.frexp(np.float32(own) / np.float32(MAX[name]))  # mantissa in [1/2, 1)
                scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
            elif own > 0:
                scale = np.float32(own) / np.float32(MAX[name])
            scaled = group / scale
        rounded = nearest(scaled, name) if noise is None else up_or_down(scaled, name, noise[place])
        result[place] = rounded.astype(np.float32) * scale
    return torch.from_numpy(result).to(x.dtype)


def slow_bfloat16(x: Tensor) -> Tensor:
    """`x` with the lower 16 bits of each finite float32 number rounded off, ties to even, in x's dtype."""
    bits = x.detach().float().numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return torch.from_numpy(rounded.view(np.float32)).to(x.dtype)


def slow_integers(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(codes (N, D) int64, scale (N, 1) float32) of the finite `x` (N, D)."""
    source = x.detach().float().numpy()
    largest = np.abs(source).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return nearest(source / scale, "int8").astype(np.int64), scale


def slow_integer_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of x (T, I) by codes, summed in int64."""
    (a, token), (b, channel) = slow_integers(x), slow_integers(weight)
    output = torch.from_numpy((a @ b.T).astype(np.float32) * (token * channel.T))
    return (output if bias is None else output + bias.detach().float()).to(x.dtype)
