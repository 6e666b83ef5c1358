"""Read measured times of GEMMs, as Transformer Engine's benchmarks/gemm/benchmark_gemm.py prints them.

    Fprop Shapes:
    Op                     Shape                       BF16 ms   MXFP8 ms   NVFP4 ms
    MLP Up                 8192x4096x16384               0.700      0.390      0.250

A shape is M x K x N, with K the inputs and N the outputs of an operator in fprop, and M its tokens; dgrad is M x N x K
and wgrad K x M x N. Rows without one of the lines `Fprop Shapes:`, `Dgrad Shapes:` and `Wgrad Shapes:` above are of
fprop, and columns that are no time in ms are not read. A column is a precision of Transformer Engine or a recipe of
ours. `benchmarks/gemm_times.py` writes the same form.

The times become entries `RECIPE:GEMM:INPUTSxOUTPUTS` of `PathSpec.times`, which are relative. Shapes that were not
measured have 1 : 2 : 4 by bits. So the measured times are scaled such that their sum is the one that 1 : 2 : 4 gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from gnmr.errors import UserError
from gnmr.formats.recipes import RECIPES
from gnmr.records.untrusted import Damaged, content, first_line

PRECISIONS = {
    "BF16": "bf16",
    "FP8Cur": "fp8_hybrid",
    "FP8Current": "fp8_hybrid",
    "FP8Del": "fp8_delayed",
    "FP8Delayed": "fp8_delayed",
    "FP8Block": "deepseek_v3",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}
"""Recipe of each precision that Transformer Engine names."""
_MAX_BYTES = 1 << 20
_SECTION = re.compile(r"\s*(Fprop|Dgrad|Wgrad) Shapes:")
_ROW = re.compile(r"(?:^|.*?\s)(\d{1,9})x(\d{1,9})x(\d{1,9})\s+(\S.*)$")


class _Measured(NamedTuple):
    """The time of one GEMM on one recipe."""

    milliseconds: float
    tokens: int
    multiplications: int


def read_gemm_times(path: str | PathLike[str]) -> dict[str, float]:
    """Return relative times by recipe, GEMM and shape, from a table of measured times (see the module).

    Of a shape that was measured with several numbers of tokens, the largest number counts.

    Raises:
        UserError: the file cannot be read, or has no such table; one line that names it.
    """
    from gnmr.conversion.cost import gemm_time

    try:
        text = content(Path(path).expanduser().resolve(), _MAX_BYTES).decode("utf-8", "replace")
    except FileNotFoundError as error:
        right = "there is no such file; name a table of times, or BITS:TIME or RECIPE:TIME, as 8:1.8,mxfp8:1.9"
        raise UserError(f"times={path}: {right}") from error
    except (Damaged, OSError, ValueError) as error:
        raise UserError(f"times={path}: cannot be read ({first_line(error)})") from error
    measured = _table(path, text.splitlines())
    if not measured:
        right = "has no times: a header of Shape and columns such as 'MXFP8 ms', and rows MxKxN below it"
        raise UserError(f"times={path}: {right} (Transformer Engine's benchmark_gemm.py prints them)")
    # Relative times: in total, the measured GEMMs take as long as by the bits of their operands.
    expected = math.fsum(
        time.multiplications * gemm_time(RECIPES[recipe], gemm) for (recipe, gemm, _), time in measured.items()
    )
    unit = math.fsum(time.milliseconds for time in measured.values()) / expected
    return {
        f"{recipe}:{gemm}:{shape}": time.milliseconds / time.multiplications / unit
        for (recipe, gemm, shape), time in measured.items()
    }


def without_times(operators: Iterable[tuple[int, int]], recipes: Iterable[str], times: Iterable[str]) -> list[str]:
    """Return the shapes, as INPUTSxOUTPUTS, whose fprop was not measured on all of these recipes.

    The result is empty if no time is of a shape.
    """
    known = {key for key in times if ":" in key}
    if not known:
        return []
    recipes = list(recipes)
    shapes = dict.fromkeys(f"{inputs}x{outputs}" for inputs, outputs in operators)
    return [shape for shape in shapes if any(f"{recipe}:fprop:{shape}" not in known for recipe in recipes)]


def _table(path: object, lines: Iterable[str]) -> dict[tuple[str, str, str], _Measured]:
    """Return what was measured, by recipe, GEMM and INPUTSxOUTPUTS."""
    measured: dict[tuple[str, str, str], _Measured] = {}
    gemm, columns = "fprop", list[tuple[str, str]]()
    for number, line in enumerate(lines, 1):
        # The rows before the first heading are of fprop.
        if section := _SECTION.match(line):
            gemm = section[1].lower()
        if header := _columns(line.split()):
            columns = header
            if unknown := [name for name, unit in columns if unit == "ms" and _recipe(name) is None]:
                known = f"{', '.join(PRECISIONS)}, or a recipe"
                raise UserError(f"times={path}: line {number}: {unknown[0]} is no precision; they are {known}")
        elif columns and (row := _ROW.match(line)):
            # M x K x N of a product that contracts over K, which are the tokens in wgrad.
            first, middle, last = (int(size) for size in row.groups()[:3])
            inputs, outputs, tokens = {
                "fprop": (middle, last, first),
                "dgrad": (last, middle, first),
                "wgrad": (first, last, middle),
            }[gemm]
            values = row[4].split()
            if len(values) != len(columns):
                right = f"has {len(values)} values for {len(columns)} columns"
                raise UserError(f"times={path}: line {number}: {right}")
            for (name, unit), value in zip(columns, values, strict=True):
                recipe, milliseconds = _recipe(name), _number(value)
                key = f"{recipe}", gemm, f"{inputs}x{outputs}"
                # Of no time, as N/A, nothing is known.
                if unit == "ms" and milliseconds > 0 and not (key in measured and measured[key].tokens > tokens):
                    measured[key] = _Measured(milliseconds, tokens, first * middle * last)
    return measured


def _columns(words: list[str]) -> list[tuple[str, str]]:
    """Return (precision, unit) of the columns of a header, without the one of shapes; [] if it is no header."""
    if "Shape" not in words:
        return []
    columns, names = [], words[words.index("Shape") + 1 :]
    while names:
        name = names.pop(0)
        columns.append((name, names.pop(0) if name != "Speedup" and names else ""))
    return columns if any(unit == "ms" for _, unit in columns) else []


def _recipe(name: str) -> str | None:
    return PRECISIONS.get(name, name if name in RECIPES else None)


def _number(word: str) -> float:
    """Return a number above 0; 0 for what is none."""
    try:
        value = float(word)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0
