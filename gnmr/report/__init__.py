"""Recorded runs as tables and plots. Reads run folders, never the trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from gnmr import output
from gnmr.errors import UserError, printable, writing
from gnmr.records.find import find_runs
from gnmr.report.comparisons import Comparison, choose_baseline, compare, refuse_rivals
from gnmr.report.faults import fault_tables
from gnmr.report.layout import Table, as_markdown
from gnmr.report.runs import Run, load
from gnmr.report.tables import Further, run_table, tables
from gnmr.untrusted import Damaged, first_line, text


def report(
    paths: list[Path],
    out: Path | None,
    console: Console,
    *,
    plots: bool = True,
    against: str | None = None,
    strict: bool = False,
    html: Path | None = None,
    further: Further = lambda _: [],
    told: Callable[[object], str] = str,
) -> None:
    """Prints the tables, writes them to `out`/report.md and the plots beside it as PNG; with `html` that page too.

    Args:
        out: None: report/ in the path, or in the common parent of several.
        against: label or name of the arm that the others are tested against.
        strict: refuse runs of one experiment and scale that cannot be compared.
        further: makes tables of all comparisons.
        told: how a path is shown (`gnmr.records.pack.Unpacked`).

    Raises `UserError` for a path that is missing or holds no run, for an `out` that cannot be written, and for an
    `against` that no arm fits or that is missing where it would be needed.
    """
    root = _common([Path(told(path)) for path in paths])
    folder = _folder_of(root) if out is None else out
    written = folder / "report.md"
    _check_places(folder, out, html)
    left_out: dict[Path, str] = {}

    def compared(runs: list[Run]) -> list[Comparison]:
        comparisons = compare(runs)
        if strict:
            refuse_rivals(comparisons)
        if against is not None:
            choose_baseline(comparisons, against)
        return comparisons

    def as_tables(runs: list[Run]) -> list[Table]:
        comparisons = compared(runs)
        return [*tables(comparisons, further), *fault_tables(comparisons)]

    def as_plots(runs: list[Run]) -> list[Path]:
        from gnmr.report.plots import draw  # matplotlib takes a second to import

        return draw(compared(runs), written.parent)

    def as_page(runs: list[Run]) -> None:
        from gnmr.report.html import write_html  # plotly too

        comparisons = compared(runs)
        assert html is not None
        write_html(comparisons, runs, html, tables=further(comparisons))

    runs = _load(find_runs(paths), left_out, told)
    runs, found = _shown(runs, as_tables, left_out)
    for table in found:
        table.print(console)
    try:
        written.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{written.parent}: cannot write the report ({error.strerror or error})") from error
    images = _shown(runs, as_plots, left_out)[1] if plots else []
    if html is not None:
        _shown(runs, as_page, left_out)
    lost = [f"Left out: {place}: {why}" for place, why in left_out.items()]
    output.write_text(written, _markdown([*found, run_table(runs, root)], lost, images), follow=False)
    _say_where(console, written, html, images)


def _say_where(console: Console, written: Path, html: Path | None, images: list[Path]) -> None:
    lines = [f"Report: {written}", *([f"Page: {html}"] if html is not None else []), *(["Plots:"] if images else [])]
    for line in (*lines, *(f"  {image}" for image in images)):
        console.print(Text(printable(line)), soft_wrap=True)


def _folder_of(root: Path) -> Path:
    """report/ in the runs' folder, of X.parquet in the folder X beside it."""
    pack = next((one for one in (root, *root.parents) if one.is_file()), None)
    return (root if pack is None else pack.with_suffix("") / root.relative_to(pack)) / "report"


def _check_places(folder: Path, out: Path | None, html: Path | None) -> None:
    """UserError where the report cannot be written. Below the runs' folder may lie another user's link."""
    if html is not None:
        with writing(html):
            if html.is_dir():
                raise UserError(f"{html}: is a folder; the page is a file, such as {html / 'report.html'}")
    if html is not None and (html.parent.is_dir() or html.parent != folder):  # the report's own folder is made
        output.check(html)
    if out is None and folder.is_symlink():
        raise UserError(f"{folder}: is a symbolic link; name the folder for the report with out=DIR")
    if folder.is_dir():
        output.check(folder / "report.md", follow=False)


_T = TypeVar("_T")


def _load(folders: list[Path], left_out: dict[Path, str], told: Callable[[object], str]) -> list[Run]:
    runs = []
    for folder in folders:
        place = Path(told(folder))
        try:
            runs.append(load(folder, place).check())
        except UserError as error:
            _leave_out(place, told(first_line(error)), left_out)
    if not runs:
        raise UserError("; ".join(f"{place}: {why}" for place, why in left_out.items()))
    return runs


def _shown(runs: list[Run], show: Callable[[list[Run]], _T], left_out: dict[Path, str]) -> tuple[list[Run], _T]:
    """What `show` makes of the runs, and the runs without those for which it fails (damage that no check found)."""
    while True:
        try:
            return runs, show(runs)
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, Damaged):
                raise
            culprits = _culprits(runs, show)
            if not culprits:
                raise  # a defect of ours, not of a run
        for run, why in culprits:
            _leave_out(run.place, first_line(why).replace(str(run.folder), str(run.place)), left_out)
        runs = [run for run in runs if run.place not in left_out]
        if not runs:
            raise UserError("; ".join(f"{place}: {why}" for place, why in left_out.items()))


def _culprits(runs: list[Run], show: Callable[[list[Run]], Any]) -> list[tuple[Run, Exception]]:
    """The runs that cannot be shown by themselves, and why."""
    try:
        show(runs)
    except UserError as error:
        if not isinstance(error, Damaged):
            return []  # a mistake in the request
        failed: Exception = error
    except Exception as error:
        failed = error
    else:
        return []
    if len(runs) == 1:
        return [(runs[0], failed)]
    half = len(runs) // 2
    return _culprits(runs[:half], show) + _culprits(runs[half:], show)


def _leave_out(place: Path, line: str, left_out: dict[Path, str]) -> None:
    why = text(line.removeprefix(f"{place}/").removeprefix(f"{place}: "))
    left_out[place] = why
    warnings.warn(printable(f"{place} left out: {why}"), stacklevel=2)


def _common(paths: list[Path]) -> Path:
    """The path itself as it was given, or the parent of all; the first where they share nothing but the root."""
    common = Path(os.path.commonpath([os.path.realpath(path) for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))


def _markdown(found: list[Table], left_out: list[str], images: list[Path]) -> str:
    parts = ["# Report\n", *[table.markdown() for table in found], *[f"{as_markdown(line)}\n" for line in left_out]]
    if images:
        parts.append("### Plots\n\n" + "\n\n".join(f"![{image.stem}]({image.name})" for image in images) + "\n")
    return "\n".join(parts)
