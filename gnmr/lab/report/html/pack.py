"""Numbers small enough for a page: typed arrays deflated into base64, JSON with few digits and no NaN."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

_KEPT_BITS = 12
"""Of a float32's 23 bits of mantissa: a relative error of at most 2^-13, and half the bytes when deflated."""


def packed(array: np.ndarray) -> dict[str, str]:
    """A uint8, uint16, int32 or float32 array in C order as {"type", "data"}; float32 loses digits, never NaN or inf.

    The page turns it back with `unpack` in page.html. Raises ValueError for another dtype.
    """
    if array.dtype not in (np.uint8, np.uint16, np.int32, np.float32):
        raise ValueError(f"dtype {array.dtype}: uint8, uint16, int32 or float32 can be packed")
    if array.dtype == np.float32:
        array = shortened(array)
    data = zlib.compress(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes(), 6)
    return {"type": array.dtype.name, "data": base64.b64encode(data).decode("ascii")}


def shortened(values: np.ndarray) -> np.ndarray:
    """float32 rounded to `_KEPT_BITS` of mantissa; NaN and inf stay, and no finite number becomes inf."""
    drop = 23 - _KEPT_BITS
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (((bits + np.uint32(1 << (drop - 1))) >> drop) << drop).view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(rounded), rounded, values)


def numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Floats with so many significant digits, for JSON; None for what is not finite."""
    return [number(value, digits) for value in values]


def number(value: float | None, digits: int = 5) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def script_json(tree: Any) -> str:
    """JSON that is safe inside a <script> element, whatever names it contains."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
