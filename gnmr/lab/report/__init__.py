"""Recorded runs as one table and one page. Reads run folders, never the trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from gnmr.console import print_plain
from gnmr.errors import UserError, plural, printable, writing
from gnmr.lab.report.comparisons import compare, refuse_rivals
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import Table, as_markdown
from gnmr.lab.report.recorded_run import Run, load
from gnmr.lab.report.table import arm_tables, run_table
from gnmr.records import output
from gnmr.records.find import find_runs
from gnmr.records.untrusted import Damaged, first_line, text


def report(
    paths: list[Path],
    out: Path | None,
    console: Console,
    *,
    strict: bool = False,
    html: Path | None = None,
    everything: bool = False,
) -> None:
    """Print the sentence and the arms of the largest comparison; write all to `out`/report.md and the page `html`.

    Args:
        paths: run folders, or folders above run folders.
        out: by default report/ in the path, or in the common parent of several.
        console: where the sentence and the tables are printed.
        strict: refuse runs of one experiment and scale that cannot be compared.
        html: by default `out`/report.html.
        everything: print all comparisons, tables and notes.

    Raises:
        UserError: a path is missing or holds no run, or a file cannot be written.
    """
    root = _common(paths)
    folder = root / "report" if out is None else out
    page = folder / "report.html" if html is None else html
    _check_places(folder, page, own=out is None, named=html is not None)
    runs, left_out = list[Run](), dict[Path, str]()
    for place in find_runs(paths):
        with _leaving_out(place, left_out, UserError):
            runs.append(load(place).check())

    def make(runs: list[Run]) -> tuple[list[tuple[str, str]], list[Table], str]:
        from gnmr.lab.report.html_page import render_page

        if not runs:
            raise UserError("; ".join(f"{place}: {why}" for place, why in left_out.items()))
        comparisons = compare(runs)
        if strict:
            refuse_rivals(comparisons)
        sentences = [(one.name, headline(one).sentence) for one in comparisons]
        return sentences, arm_tables(comparisons), render_page(comparisons, runs, page.parent)

    try:
        sentences, tables, html_text = make(runs)
    except Exception as error:  # damage that no check found: the runs for which it fails alone are left out
        if isinstance(error, UserError) and not isinstance(error, Damaged):
            raise  # a mistake in the request
        for run in runs:
            with _leaving_out(run.folder, left_out, Exception):
                make([run])
        sound = [run for run in runs if run.folder not in left_out]
        if len(sound) == len(runs):
            raise
        runs = sound
        sentences, tables, html_text = make(runs)
    try:  # before the tables are printed: whoever reads them may have left
        for place in (page.parent, folder):
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
        lost = [as_markdown(f"Left out: {place}: {why}") + "\n" for place, why in left_out.items()]
        leads = [f"**{as_markdown(name)}.** {as_markdown(sentence)}\n" for name, sentence in sentences]
        tables.append(run_table(runs, root))
        parts = ["# Report\n", *leads, *(table.markdown() for table in tables), *lost]
        output.write_text(folder / "report.md", "\n".join(parts), follow=False)
        output.write_text(page, html_text, follow=html is not None)
    finally:
        several = len(sentences) > 1 and everything
        for name, sentence in sentences if everything else sentences[:1]:
            lead = printable(f"{name}: {sentence}" if several else sentence)
            print_plain(console, f"{lead}\n", by_words=console.is_terminal)
        for table in tables if everything else tables[:1]:
            table.print(console, notes=everything)
    if not everything:
        more = f", and {plural(len(sentences) - 1, 'other comparison')}" if len(sentences) > 1 else ""
        print_plain(console, f"All tables and notes{more}: --all", by_words=console.is_terminal)
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


@contextmanager
def _leaving_out(folder: Path, left_out: dict[Path, str], caught: type[Exception]) -> Iterator[None]:
    """Warn that a run cannot be shown, and go on without it."""
    try:
        yield
    except caught as error:
        left_out[folder] = why = text(first_line(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: "))
        warnings.warn(printable(f"{folder} left out: {why}"), stacklevel=4)


def _common(paths: list[Path]) -> Path:
    """Return the given path itself, or the parent of all; the first if they share only the root."""
    common = Path(os.path.commonpath([os.path.realpath(path) for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))
