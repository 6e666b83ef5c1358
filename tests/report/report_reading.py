"""Cells of a table by the names of its rows and columns."""

from __future__ import annotations

from gnmr.lab.report.layout import Table


def row(table: Table, name: str) -> dict[str, str]:
    cells = next(row for row in table.rows if row[0] == name)
    return dict(zip([column.replace("\n", " ") for column in table.columns], cells, strict=True))


def notes(table: Table) -> str:
    return "\n".join(table.notes)
