"""Figures that make up tables of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from gnmr.lab.bench.figures import Figure, show


@dataclass(frozen=True, kw_only=True)
class TableFigure(Figure):
    """A figure that is shown as one cell of a table."""

    table: str
    row: str
    column: str
    sharper: float | None = None
    """A bound beside `target`."""

    def text(self) -> str:
        """Where it is a share, in percent without the sign: value/sharper/target, as far as they are there."""
        if self.unit != "%":
            return f"{self.value:.3g}"
        numbers = [100 * number for number in (self.value, self.sharper, self.target) if number is not None]
        return "/".join("<.01" if 0 < n < 0.01 else f"{n:.2g}" if abs(n) < 10 else f"{n:.0f}" for n in numbers)


def in_table(figure: Figure, *, table: str, row: str, column: str, sharper: float | None = None) -> TableFigure:
    """The figure as a cell of the named table."""
    return TableFigure(**asdict(figure), table=table, row=row, column=column, sharper=sharper)


def show_tables(title: str, figures: Sequence[Figure], console: Console) -> None:
    """As `figures.show`; cells as the tables that they make up."""
    cells = [figure for figure in figures if isinstance(figure, TableFigure)]
    show(title, [figure for figure in figures if not isinstance(figure, TableFigure)], console)
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
