"""`gnmr report RUN...`: recorded runs as tables and plots. Reads run folders, never the trainer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from gnmr.errors import UserError
from gnmr.report.comparisons import Comparison, choose_baseline, compare, refuse_rivals
from gnmr.report.faults import fault_tables
from gnmr.report.layout import Table
from gnmr.report.runs import Run, find_runs, load
from gnmr.report.tables import paper_tables_of, run_table, tables
from gnmr.terminal import Terminal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"report: {message} (gnmr report --help)")


def main(argv: list[str]) -> int:
    """`gnmr report` without its first word. Raises `UserError` for a path that holds no run."""
    parser = _Parser(
        prog="gnmr report",
        description="Tables and plots of recorded runs: arms side by side with their spread over seeds, the paper's "
        "figures beside runs of the paper's scales. Runs in progress, killed and failed are read too.",
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or any folder above run folders")
    add("--out", metavar="DIR", type=Path, help="folder for report.md and the PNGs (default: report/ in RUN's folder)")
    add("--no-plots", dest="plots", action="store_false", help="tables only")
    add("--against", metavar="ARM", help="the arm that all others are tested against (default: the static low path)")
    add("--strict", action="store_true", help="refuse runs of one experiment and scale that cannot be compared")
    add("--html", metavar="FILE", type=Path, help="also one self-contained page for a browser")
    parser.epilog = "out=DIR, against=ARM and html=FILE will do too."
    as_flags = [f"--{word}" if word.startswith(("html=", "out=", "against=")) else word for word in argv]
    given = parser.parse_args(as_flags)
    report(given.runs, given.out, Terminal(), given.plots, given.against, given.strict, given.html)
    return 0


def report(
    paths: list[Path],
    out: Path | None,
    console: Console,
    plots: bool = True,
    against: str | None = None,
    strict: bool = False,
    html: Path | None = None,
) -> None:
    """Prints the tables, writes them to `out`/report.md and the plots beside it as PNG; with `html` that page too.

    `out` None: report/ in the path, or in the common parent of several. `against`: label or name of the arm that the
    others are tested against. Raises `UserError` for a path that is missing or holds no run, for an `out` that cannot
    be written, for an `against` that no arm fits or that is missing where it would be needed, and, where `strict`, for
    runs of one experiment and scale that cannot be compared.
    """
    if html is not None and html.is_dir():
        raise UserError(f"{html}: is a folder; the page is a file, such as {html / 'report.html'}")
    runs, unreadable = _load(find_runs(paths))
    root = _common(paths)
    out = out if out is not None else root / "report"
    comparisons = compare(runs)
    if strict:
        refuse_rivals(comparisons)
    if against is not None:
        choose_baseline(comparisons, against)
    found = [*tables(comparisons), *fault_tables(comparisons)]
    for table in found:
        table.print(console)
    for line in unreadable:
        console.print(Text(line))
    try:
        out.mkdir(parents=True, exist_ok=True)
        images = _plots(comparisons, out) if plots else []
        written = out / "report.md"
        written.write_text(_markdown([*found, run_table(runs, root)], unreadable, images), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: cannot write the report ({error.strerror or error})") from error
    if html is not None:
        from gnmr.report.html import write_html  # plotly too

        write_html(comparisons, runs, html, tables=paper_tables_of(comparisons))
    console.print(Text(f"Report: {written}"), soft_wrap=True)
    if html is not None:
        console.print(Text(f"Page: {html}"), soft_wrap=True)
    if images:
        console.print(Text("Plots:"))
        for image in images:
            console.print(Text(f"  {image}"), soft_wrap=True)


def _load(folders: list[Path]) -> tuple[list[Run], list[str]]:
    runs, unreadable = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except UserError as error:
            unreadable.append(f"Left out: {error}")
    if not runs:
        raise UserError("; ".join(unreadable))
    return runs, unreadable


def _common(paths: list[Path]) -> Path:
    """The path itself as it was given, or the parent of all; the first where they share nothing but the root."""
    common = Path(os.path.commonpath([path.resolve() for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))


def _plots(comparisons: list[Comparison], out: Path) -> list[Path]:
    from gnmr.report.plots import draw  # matplotlib takes a second to import

    return draw(comparisons, out)


def _markdown(found: list[Table], unreadable: list[str], images: list[Path]) -> str:
    parts = ["# Report\n", *[table.markdown() for table in found], *[f"{line}\n" for line in unreadable]]
    if images:
        parts.append("### Plots\n\n" + "\n\n".join(f"![{image.stem}]({image.name})" for image in images) + "\n")
    return "\n".join(parts)
