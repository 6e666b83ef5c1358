"""Figures of the theory checks: a number with its spread, and the tables that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One number."""

    name: str
    value: float
    """The median of the measurements, unless the name says otherwise."""
    unit: str
    """x (a ratio), % (a share, kept as a fraction), or none."""
    low: float | None = None
    high: float | None = None
    spread: str | None = None
    """What lies between low and high; null for a number that is counted."""
    n: int = 1
    """Measurements behind the value."""
    target: float | None = None
    """The most that it should be; null for a figure that explains another."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is within its target; None for a figure without one."""
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True, kw_only=True)
class TableFigure(Figure):
    """A figure that is shown as one cell of a table."""

    table: str
    row: str
    column: str
    sharper: float | None = None
    """A bound beside `target`."""

    def text(self) -> str:
        """Return a share in percent without the sign: value/sharper/target, as far as they are there."""
        if self.unit != "%":
            return f"{self.value:.3g}"
        numbers = [100 * number for number in (self.value, self.sharper, self.target) if number is not None]
        return "/".join("<.01" if 0 < n < 0.01 else f"{n:.2g}" if abs(n) < 10 else f"{n:.0f}" for n in numbers)


def median(name: str, samples: np.ndarray, unit: str, *, target: float | None = None, note: str = "") -> Figure:
    """Return the median of `samples` (n,) with their quartiles."""
    low, high = np.quantile(samples, (0.25, 0.75))
    value = float(np.median(samples))
    return Figure(name, value, unit, float(low), float(high), "quartiles", len(samples), target, note)


def in_table(figure: Figure, *, table: str, row: str, column: str, sharper: float | None = None) -> TableFigure:
    """Return the figure as a cell of the named table."""
    return TableFigure(**asdict(figure), table=table, row=row, column=column, sharper=sharper)


def show_tables(figures: Sequence[Figure], console: Console) -> None:
    """Print single figures a line each, and cells as the tables that they make up."""
    for figure in figures:
        if not isinstance(figure, TableFigure):
            value = f"{figure.value:.2%}" if figure.unit == "%" else f"{figure.value:.3f}{figure.unit}"
            verdict = {None: "", True: f"  at most {figure.target}: met", False: f"  at most {figure.target}: NOT MET"}
            line = f"{figure.name}: {value} (n={figure.n}){verdict[figure.met]}  {figure.note}"
            console.print(line.rstrip(), markup=False, highlight=False)
    cells = [figure for figure in figures if isinstance(figure, TableFigure)]
    for name in dict.fromkeys(cell.table for cell in cells):
        own = {(cell.row, cell.column): cell for cell in cells if cell.table == name}
        columns = list(dict.fromkeys(column for _, column in own))
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for row in dict.fromkeys(row for row, _ in own):
            table.add_row(row, *(own[row, column].text() if (row, column) in own else "" for column in columns))
        console.print(table)
