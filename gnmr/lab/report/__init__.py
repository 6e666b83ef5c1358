"""Recorded runs as tables and plots. Reads run folders, never the trainer."""

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
from gnmr.lab.report.comparisons import Comparison, choose_baseline, compare, refuse_rivals
from gnmr.lab.report.faults import fault_tables
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import Table, as_markdown
from gnmr.lab.report.runs import Run, load
from gnmr.lab.report.tables import Further, run_table, tables
from gnmr.lab.report.wandb_report import api, write_wandb
from gnmr.records import output
from gnmr.records.untrusted import Damaged, first_line, text


def report(
    paths: list[Path],
    out: Path | None,
    console: Console,
    *,
    plots: bool = True,
    against: str | None = None,
    strict: bool = False,
    html: Path | None = None,
    wandb: str | None = None,
    further: Further = lambda _: [],
) -> None:
    """Prints the tables, writes them to `out`/report.md and the plots beside it as PNG; with `html` that page too, with
    `wandb` a report in that W&B project.

    Args:
        out: None: report/ in the path, or in the common parent of several.
        against: label or name of the arm that the others are tested against.
        strict: refuse runs of one experiment and scale that cannot be compared.
        further: makes tables of all comparisons.

    Raises `UserError` for a path that is missing or holds no run, for an `out` that cannot be written, and for an
    `against` that no arm fits or that is missing where it would be needed.
    """
    root = _common(paths)
    folder = _folder_of(root) if out is None else out
    _check_places(folder, out, html)
    wandb_api = None if wandb is None else api(wandb)

    def compared(runs: list[Run]) -> list[Comparison]:
        comparisons = compare(runs)
        if strict:
            refuse_rivals(comparisons)
        if against is not None:
            choose_baseline(comparisons, against)
        return comparisons

    runs = _Runs(find_runs(paths), str, compared)
    found = runs.shown(lambda these, _: [*tables(these, further), *fault_tables(these)])
    images: list[Path] = []
    written = folder / "report.md"
    try:  # before tables are shown: whoever reads them may have left
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot write the report ({error.strerror or error})") from error
        if plots:
            from gnmr.lab.report.plots import draw  # matplotlib takes a second to import

            images = runs.shown(lambda these, _: draw(these, folder))
        if html is not None:
            from gnmr.lab.report.html import write_html  # plotly too

            runs.shown(lambda these, all_: write_html(these, all_, html, tables=further(these)))
        sentences = runs.shown(lambda these, _: [(one.name, headline(one).sentence) for one in these])
        output.write_text(
            written, _markdown(sentences, [*found, run_table(runs.runs, root)], runs.left_out, images), follow=False
        )
    finally:
        for table in found:
            table.print(console)
    page, pictures = [f"Page: {html}"] if html is not None else [], ["Plots:"] if images else []
    if wandb_api is not None:
        address = runs.shown(lambda these, _: write_wandb(these, str(wandb), wandb_api))
        page.append(f"W&B: {address}")
    for line in (f"Report: {written}", *page, *pictures, *(f"  {image}" for image in images)):
        print_plain(console, printable(line))


def _folder_of(root: Path) -> Path:
    """report/ in the runs' folder."""
    return root / "report"


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


class _Runs:
    """Runs that can be shown; one that cannot be read or shown is left out, with a warning.

    UserError where none is left.
    """

    def __init__(
        self,
        folders: list[Path],
        told: Callable[[object], str],
        compared: Callable[[list[Run]], list[Comparison]],
    ) -> None:
        self.runs: list[Run] = []
        self.left_out: dict[Path, str] = {}
        self._compared = compared
        for folder in folders:
            place = Path(told(folder))
            try:
                self.runs.append(load(folder, place).check())
            except UserError as error:
                self._leave_out(place, told(first_line(error)))
        self._check()

    def shown(self, show: Callable[[list[Comparison], list[Run]], _T]) -> _T:
        """What `show` makes of comparisons and runs; without those for which it fails (damage that no check found)."""

        def attempt(runs: list[Run]) -> _T:
            return show(self._compared(runs), runs)

        while True:
            try:
                return attempt(self.runs)
            except Exception as error:
                culprits = _culprits(self.runs, attempt) if _damage(error) else []
                if not culprits:
                    raise  # a mistake in the request, or a defect of ours and not of a run
            for run, why in culprits:
                self._leave_out(run.place, first_line(why).replace(str(run.folder), str(run.place)))
            self.runs = [run for run in self.runs if run.place not in self.left_out]
            self._check()

    def _leave_out(self, place: Path, line: str) -> None:
        self.left_out[place] = why = text(line.removeprefix(f"{place}/").removeprefix(f"{place}: "))
        warnings.warn(printable(f"{place} left out: {why}"), stacklevel=2)

    def _check(self) -> None:
        if not self.runs:
            raise UserError("; ".join(f"{place}: {why}" for place, why in self.left_out.items()))


def _damage(error: Exception) -> bool:
    """Whether an error may be a run's; else it is a mistake in the request."""
    return isinstance(error, Damaged) or not isinstance(error, UserError)


def _culprits(runs: list[Run], attempt: Callable[[list[Run]], object]) -> list[tuple[Run, Exception]]:
    """The runs that cannot be shown by themselves, and why."""
    try:
        attempt(runs)
    except Exception as error:
        if len(runs) == 1:
            return [(runs[0], error)] if _damage(error) else []
        half = len(runs) // 2
        return _culprits(runs[:half], attempt) + _culprits(runs[half:], attempt) if _damage(error) else []
    return []


def _common(paths: list[Path]) -> Path:
    """The path itself as it was given, or the parent of all; the first where they share nothing but the root."""
    common = Path(os.path.commonpath([os.path.realpath(path) for path in paths]))
    if len(paths) == 1 or common == Path(common.anchor):
        return paths[0]
    return common if any(path.is_absolute() for path in paths) else Path(os.path.relpath(common))


def _markdown(told: list[tuple[str, str]], found: list[Table], left_out: dict[Path, str], images: list[Path]) -> str:
    """`told`: each comparison's name and sentence."""
    sentences = [f"**{as_markdown(name)}.** {as_markdown(sentence)}\n" for name, sentence in told]
    lost = [as_markdown(f"Left out: {place}: {why}") + "\n" for place, why in left_out.items()]
    parts = ["# Report\n", *sentences, *[table.markdown() for table in found], *lost]
    if images:
        parts.append("### Plots\n\n" + "\n\n".join(f"![{image.stem}]({image.name})" for image in images) + "\n")
    return "\n".join(parts)
