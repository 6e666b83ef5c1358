"""A diagnosis as tables for the terminal, and as one page of HTML that loads nothing.

A cell's shade, a character and a colour, says how much of the largest in its column it is: █ half and more, ▓ a fifth,
▒ a twentieth, ░ less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from gnmr.console import NARROW
from gnmr.doctor.diagnosis import LABELS, Diagnosis, Measured, Row, nats
from gnmr.errors import printable
from gnmr.names import GEMMS

_SHADES = " ░▒▓█"
_STEPS = (0.05, 0.2, 0.5)
_STYLES = ("dim", "blue", "cyan", "yellow", "bold red")
ALL_COLUMNS = 100
"""Columns of a terminal from which all of the table's are shown."""
SHOWN = 30
"""Operators of a table on the terminal."""


def shade(value: float, largest: float) -> int:
    """0 (nothing) to 4."""
    if not value > 0:
        return 0
    return 1 + sum(value >= step * largest for step in _STEPS)


_HEADINGS = ("fprop", "± 95 %", "share", "input", "weight", "dgrad", "wgrad", "kept")
_CHOICES = ("fprop in 16 bits", "of the GEMM time", "price left", "measured", "whole operators: price left")


def _columns(width: int) -> tuple[str, ...]:
    """Which of the columns a terminal has room for beside whole names; what is left out is in diagnosis.json."""
    if width < NARROW:
        return "fprop", "kept"
    return _HEADINGS if width >= ALL_COLUMNS else ("fprop", "share", "dgrad", "wgrad", "kept")


def operators_table(found: Diagnosis, kept: Mapping[str, Sequence[str]], width: int = ALL_COLUMNS) -> Table:
    """Show operators, the most expensive fprop first. `kept`: GEMMs that stay on the recovery path, fprop alone as ●.
    width: columns of the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("operator", overflow="fold")
    shown = _columns(width)
    for heading in shown:
        table.add_column(heading, justify="left" if heading == "kept" else "right", no_wrap=True)
    rows = {(row.operator, row.gemm): row for row in found.rows}
    largest = _largest(found)
    start = "model." if all(name.startswith("model.") for name in found.operators) else ""
    for row in found.worst()[:SHOWN]:
        own = list(kept.get(row.operator, ()))
        cells: dict[str, Text | str] = {gemm: _shaded(rows[row.operator, gemm], largest[gemm]) for gemm in GEMMS} | {
            "± 95 %": _short((row.interval[1] - row.interval[0]) / 2),
            "share": f"{found.saved[row.operator, 'fprop'] / found.total:.0%}" if found.total > 0 else "-",
            "input": _short(row.input or 0.0),
            "weight": _short(row.weight or 0.0),
            "kept": "●" if own == ["fprop"] else ",".join(own),
        }
        table.add_row(Text(printable(row.operator.removeprefix(start))), *(cells[heading] for heading in shown))
    return table


def choices_table(found: Diagnosis, width: int = ALL_COLUMNS) -> Table:
    """Show what the plan and the usual guesses leave at the same cost; in a narrow terminal without that of whole
    operators."""
    shown = (0, 2, 3) if width < NARROW else range(len(_CHOICES))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i in shown:
        table.add_column(_CHOICES[i], justify="right" if i else "left", no_wrap=i == 0)
    for row in _choices(found):
        table.add_row(*(row[i] for i in shown))
    return table


def totals(found: Diagnosis) -> list[str]:
    """Lines below the tables."""
    lines = [f"measured: {_measured(found.measured, found)}"]
    if found.held_out is not None:
        lines.append("; ".join([f"held out: {_measured(found.held_out, found)}", *filter(None, [found.rival()])]))
    if (more := found.interaction) is not None:
        warning = ", which is large: a failure that only the assembled model shows" if found.interacts else ""
        lines.append(f"all GEMMs alone add up to {nats(found.total)} nats; interaction {more:+.2g}{warning}")
    if found.beside:
        highest = sorted(found.beside, key=lambda row: -row.value)[:5]
        told = ", ".join(f"{row.operator} {_short(row.value)}" for row in highest)
        lines.append(f"beside the plan, each alone: {told}")
    stable = found.stability()
    halves = f"the order of one half of the batches and the other: Spearman {stable.halves:.2f}"
    if not found.pins:
        halves += f"; the top {stable.top} by price per cost are the same in {stable.same:.0%} of bootstrap draws"
    lines.append(halves)
    for gemm in ("dgrad", "wgrad"):
        worst = [row for row in found.worst(gemm)[:3] if row.value > 0]
        told = ", ".join(f"{row.operator} {_short(row.value)} (bias {row.bias or 0.0:+.1g})" for row in worst)
        lines.append(f"largest relative squared errors of {gemm}: {told or 'none'}")
    return [*lines, *found.left_out()]


def page(found: Diagnosis, title: str, origin: Mapping[str, object]) -> str:
    """The page: verdict, heat map of operators x GEMMs in the model's order, choices, totals, where it comes from."""
    kept = found.pins or found.choice().pins
    largest = _largest(found)
    rows = []
    for at in range(0, len(found.rows), len(GEMMS)):
        own = found.rows[at : at + len(GEMMS)]
        pinned = kept.get(own[0].operator, ())
        cells = "".join(
            f'<td class="s{shade(row.value, largest[row.gemm])}" title="{escape(_hint(row))}">'
            f"{_short(row.value)}{' ●' if row.gemm in pinned else ''}</td>"
            for row in own
        )
        rows.append(f"<tr><th>{escape(printable(own[0].operator))}</th>{cells}</tr>")
    tables = [_table(("operator", "fprop, nats", "dgrad", "wgrad"), rows)]
    if choices := _choices(found):
        numbers = ["".join(f"<td>{cell}</td>" for cell in row[1:-1]) for row in choices]
        named = zip(choices, numbers, strict=True)
        tables.append(_table(_CHOICES[:-1], [f"<tr><th>{escape(row[0])}</th>{cells}</tr>" for row, cells in named]))
    lines = "".join(f"<li>{escape(line)}</li>" for line in totals(found))
    told = "".join(f"<li>{escape(key)}: {escape(printable(value))}</li>" for key, value in origin.items())
    return _PAGE.format(
        title=escape(printable(title)),
        verdict=escape(found.verdict()),
        tables="\n".join(tables),
        totals=lines,
        origin=told,
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
.verdict {{ font-size: 1.1rem; }}
table {{ border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th {{ text-align: left; font-weight: 500; padding: .2rem 1rem .2rem 0; }}
td {{ text-align: right; padding: .2rem .7rem; border: 1px solid #fff; }}
.s1 {{ background: #fff3e6; }} .s2 {{ background: #fdd0a2; }} .s3 {{ background: #fd8d3c; }}
.s4 {{ background: #a63603; color: #fff; }}
li {{ color: #555; font-size: .88rem; }}
</style></head><body>
<h1>{title}</h1>
<p class="verdict">{verdict}.</p>
<p>fprop: nats a token, on the loss now. dgrad, wgrad: relative squared error of the gradient that is handed on. The
darker, the more of the largest in its column. ● is in 16 bits under the plan.</p>
{tables}
<ul>{totals}</ul>
<ul>{origin}</ul>
</body></html>
"""


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _choices(found: Diagnosis) -> list[tuple[str, ...]]:
    """Return the cells of `_CHOICES` for the plan and the guesses; [] under pins."""
    whole = {} if found.pins else found.guesses(gemms=GEMMS)
    rows = []
    for name, own in found.compared().items():
        left = float(np.mean([one.after for one in whole[name]])) if name in whole else None
        numbers = (own["price_left"], own["kl_left"] if own["kl_left"] is not None else own["loss_left"], left)
        rows.append((LABELS[name], f"{own['share']:.1%}", *("-" if one is None else nats(one) for one in numbers)))
    return rows


def _largest(found: Diagnosis) -> dict[str, float]:
    return {gemm: max(row.value for row in found.rows if row.gemm == gemm) for gemm in GEMMS}


def _shaded(row: Row, largest: float) -> Text:
    place = shade(row.value, largest)
    return Text(f"{_short(row.value)} {_SHADES[place]}", style=_STYLES[place])


def _hint(row: Row) -> str:
    ends = f"95 %: {_short(row.interval[0])} to {_short(row.interval[1])}"
    if row.gemm == "fprop":
        return f"{ends}; input alone {_short(row.input or 0.0)}, weight alone {_short(row.weight or 0.0)}"
    return f"{ends}; bias {row.bias or 0.0:+.1g}"


def _measured(one: Measured, found: Diagnosis) -> str:
    words = []
    if one.kl is not None:
        words.append(f"KL {nats(one.kl)} ± {nats(one.noise)} nats a token ({one.sequences} sequences)")
    if one.cost is not None:
        noise = f" ± {one.loss_noise:.4f}" if np.isfinite(one.loss_noise) else ""
        losses = f"{found.recovery} {one.high:.4f}, {found.recipe} {one.low:.4f}"
        words.append(f"loss {one.cost:+.4f}{noise} ({losses}; {one.batches} batches)")
    return ", ".join(words)


def _short(value: float) -> str:
    """Two digits that count."""
    return "0" if value == 0 else f"{value:.2g}"
