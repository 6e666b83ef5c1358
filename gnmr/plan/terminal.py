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
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.page import Left, View, budgets, choices, recipes_line, shade, short, spent

_SHADES = " ░▒▓█"
_STYLES = ("dim", "blue", "cyan", "yellow", "bold red")
_STEPS = (0.05, 0.2, 0.5)
_WIDE = 100
"""Columns from which two tables stand side by side."""
_MOST = 12
"""Kinds of operators, and operators outside layers, of a heat map."""
_MOST_RESCUES = 3
"""Recipes that have a column."""


def story(found: Diagnosis, width: int) -> Iterator[RenderableType]:
    """Yield the heat map, then the GEMMs that matter beside what the plan and the usual rules leave."""
    view, left = View(found), choices(found)
    yield from _heat_map(view, width)
    tables = [_top_table(view, width)]
    if left:
        tables += [_choices_table(left, found), _budgets_table(found, left)]
    if left and width >= _WIDE and max(len(view.name(row)) for row in view.top) < 30:
        beside, right = Table.grid(padding=(0, 2)), Table.grid()
        for table in (tables[1], Text(), tables[2]):
            right.add_row(table)
        beside.add_row(tables[0], right)
        tables = [beside]
    for table in tables:
        yield Text()
        yield table
    if found.chooses:
        yield Text(recipes_line(found))


def _heat_map(view: View, width: int) -> Iterator[Text]:
    """Draw a row of shades for each kind, one character for a layer, or for several if they have no room."""
    yield Text(f"{view.unit} by layer: █ 50% of the largest or more, ▓ 20%, ▒ 5%, ░ less")
    rows = {kind: [row for rows in by_layer.values() for row in rows] for kind, by_layer in view.kinds.items()}
    shown = sorted(rows, key=lambda kind: -view.sum(rows[kind]))[:_MOST]
    margin = min(max(map(len, shown), default=0), width // 3)
    together = math.ceil(len(view.layers) / max(width - margin - (24 if width >= NARROW else 15), 8)) or 1
    cells = [view.layers[at : at + together] for at in range(0, len(view.layers), together)]
    if cells:
        step = 10 if len(cells) > 10 else 1
        heads = "".join(str(cell[0])[:step].ljust(step) for cell in cells[::step])
        note = f"{together} layers a cell" if together > 1 else ""
        yield Text(f"{'':{margin}} {heads.rstrip():{len(cells)}} {note}".rstrip(), style="dim")
    for kind in (kind for kind in view.kinds if kind in shown):
        line = Text(f"{kind[-margin:]:{margin}} ")
        for cell in cells:
            line.append(*_mark(max(view.sum(view.kinds[kind].get(layer, ())) for layer in cell), view.largest))
        value, pins = view.sum(rows[kind]), view.pins(rows[kind])
        known = rows[kind][0].operator in view.found.operators and math.isfinite(view.found.total)
        share = f"{value / (view.found.total or 1.0):.0%}" if known else "-"
        words = f" {short(value):>7} {share:>4}"
        yield line.append(f"{words} {pins:3} kept" if pins and width >= NARROW else words, style="dim")
    if more := len(rows) - len(shown):
        yield Text(f"... and {more} kinds of operators more", style="dim")
    if view.others:
        line = Text()
        for row in sorted(view.others, key=lambda row: -row.value)[:_MOST]:
            line.append(f"{printable(row.operator)} {short(row.value)} ").append(*_mark(row.value, view.largest))
            line.append(" kept  " if view.pins([row]) else "  ")
        yield line.append(f"and {len(view.others) - _MOST} more" if len(view.others) > _MOST else "")


def _mark(value: float, largest: float) -> tuple[str, str]:
    at = shade(value, largest, _STEPS)
    return _SHADES[at], _STYLES[at]


def _top_table(view: View, width: int) -> Table:
    table = _table("fprop of", "nats", "±")
    if width >= NARROW:
        table.add_column("on", no_wrap=True)
    for row in view.top:
        estimated = "≈ " * (row.measured is None)
        value = Text(f"{estimated}{short(row.value)} ").append(*_mark(row.value, view.top[0].value))
        half = (row.interval[1] - row.interval[0]) / 2
        on = [view.on(row)] * (width >= NARROW)
        table.add_row(view.name(row), value, _relative(half, row.value), *on)
    return table


def _choices_table(left: Sequence[Left], found: Diagnosis) -> Table:
    """Show the KL that the plan and the usual rules leave: measured, or else estimated."""
    losses = found.measured.kl is not None and any(one.measured and one.measured.cost is not None for one in left)
    table = _table(f"{left[1].extra:+.1%} {spent(found)}", _left(found), *["loss"] * losses)
    for one in (one for one in left if one.rescue is None):
        found_left = one.measured
        cells = [f"≈ {format_nats(one.estimated)}" if found_left is None else _with_relative(found_left)]
        cells += ["-" if found_left is None or found_left.cost is None else f"{found_left.cost:+.2g}"] * losses
        table.add_row(one.label, *cells, style="bold" if one is left[1] else None)
    return table


def _budgets_table(found: Diagnosis, left: Sequence[Left]) -> Table:
    """Show what plans of several budgets leave, and those on each of several rescues alone."""
    plan, *alone = [one for one in left[1:] if one is left[1] or one.rescue is not None][: 1 + _MOST_RESCUES]
    table = _table(spent(found).replace("GEMM ", ""), _left(found), *(one.label for one in alone))
    for extra, measured in budgets(found):
        own = [one.measured if extra == plan.extra else None for one in alone]
        cells = [f"≈ {format_nats(found.choice(extra).after)}" if measured is None else _with_relative(measured)]
        for single, one in zip(alone, own, strict=True):
            cells.append(_with_relative(one) if one else f"≈ {format_nats(found.choice(extra, single.rescue).after)}")
        table.add_row(f"{extra:+.1%}", *cells, style="bold" if extra == plan.extra else None)
    return table


def _left(found: Diagnosis) -> str:
    return f"{'nats' if found.measured.kl is None else 'KL'} left"


def _relative(half: float, value: float) -> str:
    """Return half the width of a 95% interval as a share of the value: small values have long numbers."""
    return f"{half / abs(value):.0%}" if value and math.isfinite(half / value) else ""


def _with_relative(one: PathCost) -> str:
    width = _relative(one.noise, one.nats)
    return f"{format_nats(one.nats)} ± {width}" if width else format_nats(one.nats)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
