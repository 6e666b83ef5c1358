"""Recorded runs as one table and one page. Reads run folders, never the trainer."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from rich.console import Console

from gnmr.console import print_plain
from gnmr.errors import UserError, plural, printable, writing
from gnmr.lab.report.comparisons import compare, refuse_rivals
from gnmr.lab.report.headline import headline
from gnmr.lab.report.html_page import render_page
from gnmr.lab.report.layout import as_markdown
from gnmr.lab.report.recorded_run import Run, load
from gnmr.lab.report.table import arm_tables, run_table
from gnmr.records import output
from gnmr.records.find import find_runs
from gnmr.records.untrusted import first_line, text


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
    _check_places(folder, page, default_folder=out is None)
    runs, left_out = list[Run](), list[str]()
    for place in find_runs(paths):
        # A damaged run is left out with a warning, and the report is about the others.
        try:
            run = load(place).check()
            run.units()  # large, so that it is not kept
            runs.append(run)
        except UserError as error:
            why = text(first_line(error).removeprefix(f"{place}/").removeprefix(f"{place}: "))
            left_out.append(f"{place}: {why}")
            warnings.warn(printable(f"{place} left out: {why}"), stacklevel=2)
    if not runs:
        raise UserError("; ".join(left_out))
    comparisons = compare(runs)
    if strict:
        refuse_rivals(comparisons)
    sentences = [(comparison.name, headline(comparison).sentence) for comparison in comparisons]
    tables = [*arm_tables(comparisons), run_table(runs, root)]
    html_text = render_page(comparisons, runs, page.parent)
    try:  # before the tables are printed: whoever reads them may have left
        for place in (page.parent, folder):
            with writing(place):
                place.mkdir(parents=True, exist_ok=True)
        losses = [as_markdown(f"Left out: {line}") + "\n" for line in left_out]
        leads = [f"**{as_markdown(name)}.** {as_markdown(sentence)}\n" for name, sentence in sentences]
        sections = ["# Report\n", *leads, *(table.markdown() for table in tables), *losses]
        output.write_text(folder / "report.md", "\n".join(sections))
        output.write_text(page, html_text)
    finally:
        # Sentences and tables are printed even if a file could not be written.
        name_each = len(sentences) > 1 and everything
        for name, sentence in sentences if everything else sentences[:1]:
            lead = printable(f"{name}: {sentence}" if name_each else sentence)
            print_plain(console, f"{lead}\n", by_words=console.is_terminal)
        for table in tables if everything else tables[:1]:
            table.print(console, notes=everything)
    if not everything:
        more = f", and {plural(len(sentences) - 1, 'other comparison')}" if len(sentences) > 1 else ""
        print_plain(console, f"All tables and notes{more}: --all", by_words=console.is_terminal)
    for line in (f"Report: {folder / 'report.md'}", f"Page: {page}"):
        print_plain(console, printable(line))


def _check_places(folder: Path, page: Path, *, default_folder: bool) -> None:
    """Raise UserError if the report cannot be written. A link below the runs' folder may be another user's."""
    with writing(page):
        if page.is_dir():
            raise UserError(f"{page}: is a folder; the page is a file, such as {page / 'report.html'}")
    if default_folder and folder.is_symlink():
        raise UserError(f"{folder}: is a symbolic link; name the folder for the report with out=DIR")
    for file in (page, folder / "report.md"):
        if file.parent.is_dir():
            output.check(file)


def _common(paths: list[Path]) -> Path:
    """Return the given path itself, or the parent of all; the first if they share only the root."""
    common = Path(os.path.commonpath([os.path.realpath(path) for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))
