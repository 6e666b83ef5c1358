"""What a benchmark hands back: figures with their spread, as a table for the reader and as JSON for the record."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from gnmr import __version__
from gnmr.records import output

_BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    """The median of the measurements, unless the name says otherwise."""
    unit: str
    """x (a ratio), % (a share, kept as a fraction), s, ms, MiB."""
    low: float | None = None
    high: float | None = None
    spread: str | None = None
    """What lies between low and high; null for a number that is counted and not timed."""
    n: int = 1
    """Measurements behind the value."""
    target: float | None = None
    """The most that it should be; null for a figure that explains another."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is within its target; None for a figure without one."""
        return None if self.target is None else self.value <= self.target


def median(
    name: str,
    samples: np.ndarray,
    unit: str,
    *,
    target: float | None = None,
    note: str = "",
    interval: bool = False,
) -> Figure:
    """The median of `samples` (n,) with their quartiles; with `interval` the 95 % bootstrap interval of the median."""
    if interval:
        draws = np.random.default_rng(0).choice(samples, (_BOOTSTRAP_DRAWS, len(samples)))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        spread = "95 % bootstrap interval of the median"
    else:
        low, high = np.quantile(samples, (0.25, 0.75))
        spread = "quartiles"
    return Figure(name, float(np.median(samples)), unit, float(low), float(high), spread, len(samples), target, note)


def show(title: str, figures: Sequence[Figure], console: Console) -> None:
    """Prints the figures of one benchmark, and their notes below."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("figure")
    for heading in ("value", "at most", "spread", "n"):
        table.add_column(heading, justify="right" if heading in ("value", "n") else "left", no_wrap=True)
    for figure in figures:
        table.add_row(figure.name, _text(figure.value, figure.unit), _target(figure), _range(figure), str(figure.n))
    console.print(table)
    for figure in figures:
        if figure.note:
            console.print(f"  {figure.name.strip()}: {figure.note}", style="dim", markup=False, highlight=False)


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    verdict = "[green]met[/green]" if figure.met else "[red]not met[/red]"
    return f"{_text(figure.target, figure.unit)} {verdict}"


def _range(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return ""
    low, high = _text(figure.low, figure.unit), _text(figure.high, figure.unit)
    return f"{low.rstrip(' %xMiBms')} .. {high}"


def _text(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.2%}"
    if unit == "x":
        return f"{value:.3f}x"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def record(figures: dict[str, list[Figure]], command: str, machine: dict[str, Any]) -> dict[str, Any]:
    """The JSON tree of a session: every figure and what it needs beside it to be believed."""
    from gnmr.lab.train.provenance import told_command

    return {
        "command": told_command(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine,
        "figures": [
            {"bench": bench, **asdict(figure), "met": figure.met}
            for bench, found in figures.items()
            for figure in found
        ],
    }


def describe_machine() -> dict[str, Any]:
    """Versions, commit and machine, and how busy it is."""
    import torch

    from gnmr.lab.train.provenance import commit
    from gnmr.precision import half
    from gnmr.records.machine import cpu_name

    return {
        "commit": commit(),
        "gnmr": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "products": half.told(),
            "load_average": list(os.getloadavg()),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def writer(out: Path | None) -> Callable[[dict[str, Any]], None]:
    """Checks the place before anything is measured and returns what writes there; nothing without `out`.

    Numbers that are not finite are written as words, as in records (`files.encode`).
    """
    if out is None:
        return lambda _tree: None
    output.check(out, f"out={out}")
    return partial(output.write_json, out, what=f"out={out}")
