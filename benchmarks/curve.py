"""A plot of several arms with 95% intervals: an SVG that follows the light or dark scheme of its reader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

LEFT, RIGHT, TOP, BOTTOM = 56.0, 500.0, 50.0, 356.0
"""Edges of the plot in a picture of 700 x 420; the names of the arms are to the right of it."""
MARKS = ("M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", "M-4-4h8v8h-8z", "M0-5.5L5 4h-10z", "M0-6L5.5 0 0 6-5.5 0z")
"""One marker per arm, so that color is not the only difference."""


def svg(
    arms: Mapping[str, np.ndarray],
    whole: tuple[float, str, bool],
    *,
    across: str,
    up: str,
    percent: bool = False,
    places: Mapping[str, float] | None = None,
) -> str:
    """Return the picture.

    Args:
        arms: by name, (n, 3) points from left to right: x, y, half the width of its interval.
        whole: a value that is drawn as a dashed line, its name, and whether this stands at the left end.
        across: label of the x-axis.
        up: label of the y-axis.
        percent: whether y is a fraction.
        places: x by label of the x-axis; without it x is an additional fraction, and every point tells it.
    """
    every = np.concatenate(list(arms.values()))
    low, high = (fn([0.0, whole[0], *(every[:, 1] + side * every[:, 2])]) for fn, side in ((min, -1), (max, 1)))
    most, high = float(every[:, 0].max()) * 1.03, high + 0.04 * (high - low)

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * value / most, 1)

    def told(at: float) -> str:
        return "" if places else f" at +{at:.1%}"

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    drawn: list[dict[str, Any]] = []
    for number, (label, points) in enumerate(arms.items()):
        line = "M" + "L".join(f"{x(at)} {y(value)}" for at, value, _ in points)
        bars = [
            (x(at), y(value), y(value - half), y(value + half), f"{value:.3g} ± {half:.2g}{told(at)}")
            for at, value, half in points
        ]
        end, mark = bars[-1][:2], MARKS[number]
        drawn.append({"number": number, "label": label, "line": line, "points": bars, "mark": mark, "end": end})
    drawn.sort(key=lambda arm: arm["end"][1])
    lowest = TOP
    for left, arm in zip(range(len(drawn) - 1, -1, -1), drawn, strict=True):  # names may not overlap
        arm["at"] = min(max(arm["end"][1], lowest), BOTTOM - 20 * left)
        lowest = arm["at"] + 20
    named = places or {f"+{value * 100:.4g}%" if value else "0": value for value in ticks(0.0, most)}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("curve.svg.j2")
    return template.render(
        arms=sorted(drawn, key=lambda arm: -arm["number"]),  # the first is drawn on top
        rows=[(y(value), f"{value:.0%}" if percent else f"{value:.6g}") for value in ticks(low, high)],
        columns=[(x(value), label) for label, value in named.items()],
        whole=(y(whole[0]), *whole[1:]),
        across=across,
        up=up,
        left=LEFT,
        right=RIGHT,
        bottom=BOTTOM,
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power * 5.001 >= high - low)
    return [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
