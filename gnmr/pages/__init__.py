"""One look for all HTML pages of the package: a page extends `base.html.j2`, loads nothing, and opens from disk.

The base has the header, the styles, dark mode, phones and print; `parts.html.j2` has the summary that stands first on
every page. `findings.html.j2` is a whole page of them with tables (`gnmr audit`, `gnmr blame`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gnmr.errors import printable

_FOLDER = Path(__file__).parent
_WIDE, _HIGH = 1000, 200
"""Size of a chart, which the page stretches."""


class Figure(NamedTuple):
    """A tile: a number, its name, and what it refers to."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of a page of findings; the first cell of a row is its name."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    lead: str = ""
    folded: bool = False
    """True if the table is opened by a click on its title."""


@dataclass(frozen=True)
class Chart:
    """A line over steps, with steps that are marked."""

    title: str
    steps: Sequence[float]
    values: Sequence[float]
    """One for each step; NaN and infinities are gaps."""
    marks: Sequence[tuple[int, str]]
    """The step and the cause of each mark."""

    @property
    def span(self) -> tuple[float, float]:
        """Return the first and the last step."""
        return self.steps[0], self.steps[-1]

    @property
    def levels(self) -> tuple[float, float]:
        """Return the lowest and the highest finite value; a value above twice the median of all leaves the picture."""
        finite = sorted(value for value in self.values if math.isfinite(value)) or [0.0]
        low, high = finite[0], min(finite[-1], 2 * finite[len(finite) // 2]) if finite[0] > 0 else finite[-1]
        return low, high if high > low else low + 1

    @property
    def path(self) -> str:
        """Return the line as an SVG path in a picture of `_WIDE` by `_HIGH`, a value of every `every` steps or less."""
        (low, high), pieces, pen = self.levels, [], "M"
        every = max(1, len(self.steps) // _WIDE)
        for place in range(0, len(self.steps), every):
            # The largest of several neighbors, so that no spike is lost.
            value = max((v for v in self.values[place : place + every] if math.isfinite(v)), default=math.nan)
            if math.isnan(value):
                pen = "M"
                continue
            y = max(0.0, min(1.0, (high - value) / (high - low)))
            pieces.append(f"{pen}{self.x(self.steps[place]):.1f},{_HIGH * y:.1f}")
            pen = "L"
        return "".join(pieces)

    def x(self, step: float) -> float:
        """Return where a step is in the picture.

        Returns:
            The distance from the left edge, from 0 for the first step to `_WIDE` for the last one.
        """
        first, last = self.span
        return _WIDE * (step - first) / (last - first or 1)


def render(template: str, folder: Path = _FOLDER, filters: tuple[Callable[..., str], ...] = (), **values: Any) -> str:
    """Return the page.

    Args:
        template: name of the template.
        folder: the folder with the template.
        filters: functions that the template uses as filters, by their names.
        values: the variables of the template.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([folder, _FOLDER])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {function.__name__: function for function in (printable, *filters)}
    return environment.get_template(template).render(values)


def findings_page(
    command: str,
    title: str,
    card: dict[str, str],
    verdict: str,
    figures: list[Figure],
    tables: list[PageTable],
    origin: str,
    chart: Chart | None = None,
) -> str:
    """Return a page of findings.

    Args:
        command: the command of gnmr that found them.
        title: what it examined, for the title of the window.
        card: subject, model and machine, by name; empty texts are left out.
        verdict: the verdict in one sentence.
        figures: the tiles.
        tables: the tables, the most important one first.
        origin: the command line that its numbers come from.
        chart: a chart above the tables.
    """
    return render(
        "findings.html.j2",
        command=command,
        title=f"gnmr {command}: {title}",
        card=[(name, text) for name, text in card.items() if text],
        verdict=verdict,
        figures=figures,
        tables=tables,
        origin=origin,
        chart=chart if chart is not None and len(chart.steps) > 1 else None,
    )
