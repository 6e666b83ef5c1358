"""Casts written out by hand: loops over groups, a search over a table of values. Shares nothing with the package."""

from __future__ import annotations

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
    length = {"tile": 128, "mx": 32, "nv": 16}.get(scale, 0)
    height, width = {
        "tensor": (rows, columns),
        "delayed": (rows, columns),
        "row": (1, columns),
        "block": (128, 128),
        "nv2d": (16, 16),
    }.get(scale) or ((length, 1) if dim == 0 else (1, length))
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def scale_of_two_levels(own: float, tensor: float, name: str) -> np.float32:
    """Of a block with the largest magnitude `own` in a tensor with `tensor`: equations (2) to (4) of 2509.25149's
    appendix C, in float32."""
    if own == 0:
        return np.float32(0)
    encode = np.float32(448 * MAX[name]) / np.float32(tensor)
    number = nearest(np.array([np.float32(own) / np.float32(MAX[name]) * encode]), "e4m3").astype(np.float32)[0]
    return number * (np.float32(1) / encode)


def under_two_levels(group: np.ndarray, scale: np.float32, name: str) -> np.ndarray:
    """Equation (5): multiplied by the scale's reciprocal, rounded, and back."""
    if scale == 0:
        return np.zeros_like(group)
    return nearest(group * (np.float32(1) / scale), name).astype(np.float32) * scale


def slow_cast(x: Tensor, word: str | None, dim: int, largest: float | None = None) -> Tensor:
    """`x` (N, D) in the cast that `word` says, in x's dtype; `largest`: the magnitude of a delayed scale."""
    if word is None:
        return x
    name, scale_kind = word.split("/")
    source = x.detach().float().numpy()
    result = np.empty_like(source)
    sound = [np.abs(source[place]).max() for place in groups(source.shape, scale_kind, dim)]
    tensor = max([each for each in sound if np.isfinite(each)], default=0)
    for place in groups(source.shape, scale_kind, dim):
        group = source[place]
        own = np.abs(group).max() if largest is None else np.float32(largest)
        if not np.isfinite(np.abs(group).max()):
            result[place] = np.nan
            continue
        if scale_kind == "mx":
            scale = np.float32(2.0 ** (np.floor(np.log2(own)) - EXPONENT_OF_MAX[name])) if own > 0 else np.float32(1)
        elif scale_kind in ("nv", "nv2d"):
            result[place] = under_two_levels(group, scale_of_two_levels(own, tensor, name), name)
            continue
        else:
            scale = np.float32(own) / np.float32(MAX[name]) if own > 0 else np.float32(1)
        result[place] = nearest(group / scale, name).astype(np.float32) * scale
    return torch.from_numpy(result).to(x.dtype)


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
