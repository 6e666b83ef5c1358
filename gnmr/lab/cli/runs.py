"""`gnmr runs [FOLDER...]`: which runs there are, how they ended, their perplexity and the GEMM FLOPs they spent."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gnmr.console import NARROW, for_tables, print_plain
from gnmr.errors import UserError, plural, printable
from gnmr.lab.cli.parser import Parser, whole
from gnmr.records.find import LATEST, TRIAL, changed, find_runs, last_step
from gnmr.records.reader import check_rows, read_json, read_jsonl
from gnmr.records.untrusted import exists

_TEXT = f"""\
FOLDER is a run folder, or any folder above run folders (default: runs). The newest run is listed last. In place of a
run's folder, `{LATEST}` is the newest one below runs/ that is no trial (debug=smoke, or fewer than {TRIAL} steps):

  gnmr report {LATEST}            gnmr replay {LATEST} alpha=2.0            gnmr audit {LATEST}
"""


@dataclass(frozen=True)
class _RunRow:
    folder: Path
    changed: float
    """When its records were written last, seconds since the epoch."""
    status: str
    steps: int = 0
    perplexity: float = math.nan
    """Of the last evaluation; NaN where there is none."""
    spent: float = math.nan
    """Share of the GEMMs' arithmetic on the recovery path; NaN where it is not known."""

    def cells(self, root: str) -> tuple[Text, Text, str, str, str, str]:
        """Return the texts of the table's columns; names are relative to `root`."""
        return (
            Text(printable(os.path.relpath(self.folder, root))),
            Text(self.status, _STYLES.get(self.status, "yellow")),
            f"{self.steps:,}",
            "–" if math.isnan(self.perplexity) else f"{self.perplexity:.2f}",
            "–" if math.isnan(self.spent) else f"{self.spent:.1%}",
            f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}",
        )


_STYLES = {"done": "green", "failed": "red", "damaged": "red"}


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError without a run."""
    parser = Parser("runs", "[FOLDER...] [last=N]", _TEXT)
    parser.option("last", whole(1), "show the newest N runs; null: all of them", 30)
    options = parser.parse(argv)
    folders = [Path(word) for word in options.words] or [Path("runs")]
    if not options.words and not folders[0].is_dir():
        raise UserError("runs: there is no folder runs/ here; gnmr demo or gnmr train make one, or name another")
    runs = sorted(find_runs(folders), key=changed)
    rows = [_row(folder) for folder in (runs[-options.last :] if options.last else runs)]
    console, root = for_tables(), os.path.commonpath(folders) or "."
    console.print(_narrow(rows, root) if console.width < NARROW else _table(rows, root))
    if hidden := len(runs) - len(rows):
        print_plain(console, f"{plural(hidden, 'older run')} hidden; last=null shows all")
    return 0


def _row(folder: Path) -> _RunRow:
    """Return the row of a run; damaged records make one too."""
    # A run with damaged records is listed, or nobody would notice it.
    try:
        check_rows(folder, [row["step"] for row in read_jsonl(folder / "steps.jsonl")])
        summary = read_json(folder / "summary.json") or {}
        perplexity = _number(summary.get("final_val_ppl"))
        # A run that is not finished has no final perplexity, but that of its last evaluation.
        if math.isnan(perplexity) and (evaluations := read_jsonl(folder / "eval.jsonl")):
            perplexity = _number(evaluations[-1].get("val_ppl"))
        steps = int(_number(summary.get("steps"), last_step(folder)))
        spent = _number(summary.get("spent_gemm_frac"))
        return _RunRow(folder, changed(folder), _status(folder, summary), steps, perplexity, spent)
    except UserError:
        return _RunRow(folder, changed(folder), "damaged")


def _status(folder: Path, summary: dict[str, Any]) -> str:
    if exists(folder / "FAILED"):
        return "failed"
    if exists(folder / "DONE"):
        return "done"
    return "interrupted" if summary.get("status") == "interrupted" else "unfinished"


def _number(value: Any, otherwise: float = math.nan) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _table(rows: list[_RunRow], root: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0))
    table.add_column(f"run, below {printable(root)}", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("steps", "ppl", "GEMM\nFLOPs", "written"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells(root))
    return table


def _narrow(rows: list[_RunRow], root: str) -> Group:
    """Return three lines for each run: its name, how it ended, and when."""
    lines = [Text(f"runs below {printable(root)}", "bold")]
    for row in rows:
        name, status, steps, perplexity, spent, written = row.cells(root)
        figures = f", {steps} steps, ppl {perplexity}, GEMM FLOPs spent {spent}"
        lines += [name, Text.assemble("  ", status, figures), Text(f"  {written}", "dim")]
    return Group(*lines)
