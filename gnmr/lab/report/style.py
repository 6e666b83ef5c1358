"""Colours, axes and headings that all plots share."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's."""
LINES = ("-", "-", "--", ":", "--", ":", "-")
"""Of each colour: thin lines of these colours alone do not stay apart for colour-blind readers."""
_NEXT = {"-": "--", "--": ":", ":": "-"}
INK, FAINT, BAND = "#222222", "#8A8A8A", "#D9D9D9"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ECECEC",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 130,
    "text.parse_math": False,  # a name with a $ is no formula
}

Looks = dict[str, dict[str, Any]]
"""Colour and line style by arm label."""
Series = tuple[np.ndarray, np.ndarray]
"""Steps and values."""


def looks(labels: Iterable[str], sixteen_bit: Container[str] = ()) -> Looks:
    """A colour and a line each; used up, the colours come again with other lines. 16-bit arms are grey."""
    labels, lines, found = list(labels), list(LINES), {}
    for place, label in enumerate(label for label in labels if label not in sixteen_bit):
        at = place % len(COLOURS)
        found[label] = {"color": COLOURS[at], "ls": lines[at]}
        lines[at] = _NEXT[lines[at]]
    return {label: found.get(label, {"color": FAINT, "ls": "-"}) for label in labels}


def telling_apart(labels: Sequence[str]) -> list[str]:
    """The labels without the words that all of several words share, and without the leading parts that all with
    hyphens share.

    As they are where that would leave one empty or two alike.
    """
    words = [label.split() for label in labels]
    several = [set(one) for one in words if len(one) > 1]
    common = set.intersection(*several) if len(several) > 1 else set()
    kept = [[word for word in one if word not in common] for one in words]
    heads = [one[0].split("-")[:-1] for one in kept if one and "-" in one[0]]
    cut = 0
    while len(heads) > 1 and all(len(head) > cut and head[cut] == heads[0][cut] for head in heads):
        cut += 1
    first = [one[0].split("-") if one else [""] for one in kept]
    short = [" ".join(["-".join(a[cut:] if len(a) > 1 else a), *b[1:]]) for a, b in zip(first, kept, strict=True)]
    return short if all(short) and len(set(short)) == len(set(labels)) else list(labels)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, share: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).flat)


def head(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def foot(figure: Figure, text: str) -> None:
    """Where the numbers come from."""
    figure.supxlabel(text, x=0.995, ha="right", fontsize=7, color=FAINT)


def step_axis(axes: Axes, tokens_per_step: str = "") -> None:
    axes.set_xlabel("step" + (f" ({tokens_per_step} tokens each)" if tokens_per_step else ""))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))


def log_ticks(axis: Axis, subs: tuple[float, ...], told: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks of a logarithmic axis at these multiples of the powers of ten."""
    axis.set_major_locator(LogLocator(10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: told(value)))
    axis.set_minor_formatter(NullFormatter())


def legend_beside(axes: Axes, *entries: Iterable[Any]) -> None:
    """The legend, on the right of the axes; the figure grows until all of it is seen."""
    made = axes.legend(*entries, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure = axes.get_figure()
    if isinstance(figure, Figure):
        figure.set_figheight(max(figure.get_figheight(), 0.17 * len(made.get_texts()) + 0.8))


def of_steps(how: str, width: int) -> str:
    """What a binned axis says of its bins; nothing where a bin is one step."""
    return f", {how} of {width} steps" if width > 1 else ""
