"""Recorded runs as one table and one page. Reads run folders, never the trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from gnmr.console import print_plain
from gnmr.errors import UserError, printable, writing
from gnmr.lab.records.find import find_runs
from gnmr.lab.report.comparisons import compare, refuse_rivals
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import Table, as_markdown
from gnmr.lab.report.runs import Run, load
from gnmr.lab.report.table import arm_tables, run_table
from gnmr.records import output
from gnmr.records.untrusted import Damaged, first_line, text

_T = TypeVar("_T")


def report(
    paths: list[Path],
    out: Path | None,
    console: Console,
    *,
    strict: bool = False,
    html: Path | None = None,
) -> None:
    """Print the table of each comparison, and write it to `out`/report.md and the page to `html`.

    Args:
        paths: run folders, or folders above run folders.
        out: by default report/ in the path, or in the common parent of several.
        strict: refuse runs of one experiment and scale that cannot be compared.
        html: by default `out`/report.html.

    Raises `UserError` if a path is missing or holds no run, and if a file cannot be written.
    """
    root = _common(paths)
    folder = root / "report" if out is None else out
    page = folder / "report.html" if html is None else html
    _check_places(folder, page, own=out is None, named=html is not None)
    left_out: dict[Path, str] = {}
    runs = _load(find_runs(paths), left_out)

    def make(runs: list[Run]) -> tuple[list[str], list[Table], str]:
        from gnmr.lab.report.page import render_page

        comparisons = compare(runs)
        if strict:
            refuse_rivals(comparisons)
        sentences = [f"**{as_markdown(c.name)}.** {as_markdown(headline(c).sentence)}\n" for c in comparisons]
        return sentences, arm_tables(comparisons), render_page(comparisons, runs, page.parent)

    (sentences, tables, html_text), runs = _without_damage(runs, left_out, make)
    try:  # before the tables are printed: whoever reads them may have left
        for place in (page.parent, folder):
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
        lost = [as_markdown(f"Left out: {place}: {why}") + "\n" for place, why in left_out.items()]
        parts = ["# Report\n", *sentences, *(table.markdown() for table in (*tables, run_table(runs, root))), *lost]
        output.write_text(folder / "report.md", "\n".join(parts), follow=False)
        output.write_text(page, html_text, follow=html is not None)
    finally:
        for table in tables:
            table.print(console)
    for line in (f"Report: {folder / 'report.md'}", f"Page: {page}"):
        print_plain(console, printable(line))


def _check_places(folder: Path, page: Path, *, own: bool, named: bool) -> None:
    """Raise UserError if the report cannot be written. A link below the runs' folder may be another user's.

    `own`: the folder's place is ours to choose; `named`: the page was named by the user.
    """
    with writing(page):
        if page.is_dir():
            raise UserError(f"{page}: is a folder; the page is a file, such as {page / 'report.html'}")
    if own and folder.is_symlink():
        raise UserError(f"{folder}: is a symbolic link; name the folder for the report with out=DIR")
    for file, follow in ((page, named), (folder / "report.md", False)):
        if file.parent.is_dir():
            output.check(file, follow=follow)


def _load(folders: list[Path], left_out: dict[Path, str]) -> list[Run]:
    runs = []
    for folder in folders:
        try:
            runs.append(load(folder).check())
        except UserError as error:
            _leave_out(folder, error, left_out)
    return _some(runs, left_out)


def _without_damage(
    runs: list[Run], left_out: dict[Path, str], make: Callable[[list[Run]], _T]
) -> tuple[_T, list[Run]]:
    """Return what `make` makes of the runs, without those for which it fails alone: damage that no check found."""
    try:
        return make(runs), runs
    except Exception as error:
        if isinstance(error, UserError) and not isinstance(error, Damaged):
            raise  # a mistake in the request
        sound = []
        for run in runs:
            try:
                make([run])
                sound.append(run)
            except Exception as why:
                if isinstance(why, UserError) and not isinstance(why, Damaged):
                    sound.append(run)
                else:
                    _leave_out(run.folder, why, left_out)
        if len(sound) == len(runs):
            raise
    return make(_some(sound, left_out)), sound


def _leave_out(folder: Path, error: Exception, left_out: dict[Path, str]) -> None:
    why = text(first_line(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: "))
    left_out[folder] = why
    warnings.warn(printable(f"{folder} left out: {why}"), stacklevel=2)


def _some(runs: list[Run], left_out: dict[Path, str]) -> list[Run]:
    if not runs:
        raise UserError("; ".join(f"{place}: {why}" for place, why in left_out.items()))
    return runs


def _common(paths: list[Path]) -> Path:
    """Return the path itself as it was given, or the parent of all; the first if they share nothing but the root."""
    common = Path(os.path.commonpath([os.path.realpath(path) for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))
