"""A diagnosis on the terminal: a heat map in shades, the GEMMs that matter, and what the plan and usual rules leave.

A shade says how much of the largest value it is: █ half and more, ▓ a fifth, ▒ a twentieth, ░ less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gnmr.console import NARROW
from gnmr.errors import printable
from gnmr.measure.gemm_costs import PathCost, format_nats
from gnmr.plan.diagnosis import Diagnosis, token_line
from gnmr.plan.page import ChoiceRow, View, budget_rows, choice_rows, recipes_line, shade, short, time_name, times_line

_SHADES = " ░▒▓█"
_STYLES = ("dim", "blue", "cyan", "yellow", "bold red")
_STEPS = (0.05, 0.2, 0.5)
_WIDE = 100
"""Columns from which two tables stand side by side."""
_MOST = 12
"""Kinds of operators, and operators outside layers, of a heat map."""


def story(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    """Yield the heat map, then the GEMMs that matter beside what the plan and the usual rules leave.

    Args:
        diagnosis: what is told.
        width: columns of the terminal, which says how many layers share a cell, and whether tables stand side by side.
    """
    view, choices = View(diagnosis), choice_rows(diagnosis)
    yield from _heat_map(view, width)
    tables = [_top_table(view, width)]
    if choices:
        tables += [_choices_table(choices, diagnosis), _budgets_table(diagnosis, choices)]
    # A wide terminal has room for the two other tables beside the one of GEMMs.
    if choices and width >= _WIDE and max(len(view.name(row)) for row in view.top) < 30:
        side_by_side, right = Table.grid(padding=(0, 2)), Table.grid()
        for table in (tables[1], Text(), tables[2]):
            right.add_row(table)
        side_by_side.add_row(tables[0], right)
        tables = [side_by_side]
    for table in tables:
        yield Text()
        yield table
    if diagnosis.chooses:
        yield from map(Text, filter(None, [recipes_line(diagnosis), times_line(diagnosis)]))
    if tokens := token_line(diagnosis):
        yield Text(tokens)


def _heat_map(view: View, width: int) -> Iterator[Text]:
    """Draw a row of shades for each kind, one character for a layer, or for several if they have no room."""
    yield Text(f"{view.unit} by layer: █ 50% of the largest or more, ▓ 20%, ▒ 5%, ░ less")
    rows_of = {kind: [row for rows in by_layer.values() for row in rows] for kind, by_layer in view.kinds.items()}
    largest_kinds = sorted(rows_of, key=lambda kind: -view.sum(rows_of[kind]))[:_MOST]
    margin = min(max(map(len, largest_kinds), default=0), width // 3)
    # The cells get the width that names and numbers leave, and 8 characters at least.
    layers_a_cell = math.ceil(len(view.layers) / max(width - margin - (24 if width >= NARROW else 15), 8)) or 1
    cells = [view.layers[at : at + layers_a_cell] for at in range(0, len(view.layers), layers_a_cell)]
    if cells:
        step = 10 if len(cells) > 10 else 1
        heads = "".join(str(cell[0])[:step].ljust(step) for cell in cells[::step])
        note = f"{layers_a_cell} layers a cell" if layers_a_cell > 1 else ""
        yield Text(f"{'':{margin}} {heads.rstrip():{len(cells)}} {note}".rstrip(), style="dim")
    for kind in (kind for kind in view.kinds if kind in largest_kinds):
        line = Text(f"{kind[-margin:]:{margin}} ")
        for cell in cells:
            # A cell of several layers shows the largest of them.
            line.append(*_mark(max(view.sum(view.kinds[kind].get(layer, ())) for layer in cell), view.largest))
        rows = rows_of[kind]
        value, pinned = view.sum(rows), view.pinned(rows)
        planned = rows[0].operator in view.diagnosis.operators and math.isfinite(view.diagnosis.total)
        share = f"{value / (view.diagnosis.total or 1.0):.0%}" if planned else "-"
        words = f" {short(value):>7} {share:>4}"
        yield line.append(f"{words} {pinned:3} kept" if pinned and width >= NARROW else words, style="dim")
    if more := len(rows_of) - len(largest_kinds):
        yield Text(f"... and {more} kinds of operators more", style="dim")
    if view.outside:
        line = Text()
        for row in sorted(view.outside, key=lambda row: -row.value)[:_MOST]:
            line.append(f"{printable(row.operator)} {short(row.value)} ").append(*_mark(row.value, view.largest))
            line.append(" kept  " if view.pinned([row]) else "  ")
        yield line.append(f"and {len(view.outside) - _MOST} more" if len(view.outside) > _MOST else "")


def _mark(value: float, largest: float) -> tuple[str, str]:
    at = shade(value, largest, _STEPS)
    return _SHADES[at], _STYLES[at]


def _top_table(view: View, width: int) -> Table:
    table = _table("fprop of", "nats", "±", *(["on"] if width >= NARROW else []))
    for row in view.top:
        value = Text(f"{'≈ ' if row.measured is None else ''}{short(row.value)} ")
        value.append(*_mark(row.value, view.top[0].value))
        relative = _relative((row.interval[1] - row.interval[0]) / 2, row.value)
        cells: list[Text | str] = [view.name(row), value, relative, view.on(row)]
        table.add_row(*cells[: len(table.columns)])
    return table


def _choices_table(choices: Sequence[ChoiceRow], diagnosis: Diagnosis) -> Table:
    """Show the KL that the plan and the usual rules leave: measured, or else estimated."""
    plan = choices[1]
    table = _table(f"{plan.extra:+.1%} {time_name(diagnosis)}", _remaining(diagnosis))
    for row in (row for row in choices if row.rescue is None):
        table.add_row(row.label, _cell(row.measured or row.estimated), style="bold" if row is plan else None)
    return table


def _budgets_table(diagnosis: Diagnosis, choices: Sequence[ChoiceRow]) -> Table:
    """Show what plans of several budgets leave, and those on each of several rescues alone."""
    (_, *alone), rows = budget_rows(diagnosis, choices)
    table = _table(time_name(diagnosis).replace("GEMM ", ""), _remaining(diagnosis), *alone)
    for extra, costs in rows:
        table.add_row(f"{extra:+.1%}", *map(_cell, costs), style="bold" if extra == choices[1].extra else None)
    return table


def _remaining(diagnosis: Diagnosis) -> str:
    return f"{'nats' if diagnosis.measured.kl is None else 'KL'} left"


def _relative(half: float, value: float) -> str:
    """Return half the width of a 95% interval as a share of the value: small values have long numbers."""
    return f"{half / abs(value):.0%}" if value and math.isfinite(half / value) else ""


def _cell(cost: PathCost | float) -> str:
    if not isinstance(cost, PathCost):
        return f"≈ {format_nats(cost)}"
    width = _relative(cost.noise, cost.nats)
    return f"{format_nats(cost.nats)} ± {width}" if width else format_nats(cost.nats)


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "on" else "right", no_wrap=True)
    return table
