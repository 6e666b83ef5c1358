"""A table and its numbers as text, once, for the terminal, Markdown and the page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from gnmr.errors import printable
from gnmr.lab.report.statistics import Stat

NOTHING = "-"


@dataclass
class Table:
    """Cells as text; the first column is the rows' name. Lines below list missing values, then explain the rows."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What is missing, failed or cannot be compared: printed wherever the table is."""

    def without_empty(self, optional: Iterable[str]) -> Table:
        """Return the table without those of the optional columns in which no row has anything."""
        columns = [(heading, *cells) for heading, *cells in zip(self.columns, *self.rows, strict=True)]
        keep = [column for column in columns if column[0] not in optional or {*column[1:]} - {NOTHING}]
        headings, *rows = map(list, zip(*keep, strict=True))
        return Table(self.title, headings, rows, self.notes, self.warnings)

    def print(self, console: Console, notes: bool = True) -> None:
        """Print the table with its warnings and, unless told not to, its notes.

        On a narrow terminal the rows' names are wrapped, and columns that do not fit follow in a table below.
        """
        console.print(Text(printable(self.title), style="bold"))
        for places in self._blocks(console.width):
            table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
            for place in places:
                justify: JustifyMethod = "right" if place else "left"
                table.add_column(_shown(self.columns[place]), justify=justify, no_wrap=place > 0)
            for row in self.rows:
                table.add_row(*[_shown(row[place]) for place in places])
            console.print(table)
        for line in (*self.warnings, *(self.notes if notes else ())):
            console.print(Text(printable(line)))
        console.print()

    def _blocks(self, width: int) -> list[list[int]]:
        """The columns in as many tables as the width needs, the rows' names first in each."""
        texts = [[heading, *cells] for heading, *cells in zip(self.columns, *self.rows, strict=True)]
        needs = [max(len(line) for text in column for line in text.splitlines()) + 2 for column in texts]
        needs[0] = max(len(word) for text in texts[0] for word in text.split()) + 2
        blocks = [[0]]
        for place in range(1, len(needs)):
            if len(blocks[-1]) > 1 and sum(needs[other] for other in [*blocks[-1], place]) > width:
                blocks.append([0])
            blocks[-1].append(place)
        return blocks

    def markdown(self) -> str:
        """Title, rows and notes as Markdown."""
        ruler = " | ".join(["---", *["---:"] * (len(self.columns) - 1)])
        lines = [f"### {as_markdown(self.title)}", "", _row(self.columns), f"| {ruler} |", *map(_row, self.rows)]
        if below := [*self.warnings, *self.notes]:
            lines += ["", *[f"- {as_markdown(line)}" for line in below]]
        return "\n".join(lines) + "\n"


def _row(values: Iterable[str]) -> str:
    return "| " + " | ".join(map(as_markdown, values)) + " |"


def as_markdown(text: str) -> str:
    """The text as Markdown shows it, in one line: no link, no code, no HTML, no cell of its own."""
    return re.sub(r"([\\`|\[\]<>&*$])", r"\\\1", printable(text))


def _shown(text: str) -> Text:
    """For the terminal; lines stay."""
    return Text("\n".join(map(printable, text.split("\n"))))


def measure(value: Stat | None, digits: int, unit: str = "") -> str:
    """Mean ± sample standard deviation, which a single value does not have."""
    if value is None:
        return NOTHING
    spread = "" if value.sd is None else f" ± {value.sd:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}{unit}"


def counted(noun: str, items: Iterable[object]) -> str:
    """Return the items after their name: "seed 0", "seeds 0, 1" or "no seed"."""
    texts = list(map(str, items))
    return f"{noun}{'s' if len(texts) > 1 else ''} {', '.join(texts)}" if texts else f"no {noun}"


def percent(share: float | None, digits: int | None = None, sign: str = "") -> str:
    """Return 0.1 as 10.0%; by default with three decimals below 1%, as the paper's table 3 has them, else one."""
    if share is None:
        return NOTHING
    if digits is None:
        digits = 3 if 0 < share < 0.01 else 1
    return f"{100 * share:{sign}z.{digits}f}%"


def relative(difference: float) -> str:
    """Return a difference of losses as percent of the other's perplexity: 0.1 as +10.5%."""
    return percent(math.expm1(min(difference, 700.0)), 1, "+")  # e^710 overflows


def whole_percent(share: float | None) -> str:
    """Return a share of the loss gap without decimals: 0.79 as 79%."""
    return percent(share, 0)


def interval_text(ends: Iterable[float], show: Callable[[float], str], between: str = " to ") -> str:
    """Return the ends of an interval as `show` writes them, without their percent signs."""
    return between.join(show(end).removesuffix("%") for end in ends)


def count(number: float | None) -> str:
    """1_300_000_000 -> 1.3B; 2048 -> 2,048."""
    if number is None:
        return NOTHING
    for limit, suffix in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:,.0f}"
