"""`gnmr report RUN...`: recorded runs as a table and a page."""

from __future__ import annotations

from pathlib import Path

from gnmr.console import for_tables
from gnmr.lab.cli.parser import Parser, path
from gnmr.lab.report import report
from gnmr.records.find import named

_USAGE = "RUN... [out=DIR] [html=FILE] [--all] [--strict]"
_TEXT = """\
RUN is a run folder, or any folder above run folders. The first line says what low precision cost and what was
recovered. Then the arms are compared: their loss over the seeds, their difference to the arm that never recovers,
the share of the GEMM FLOPs that they recover, and which runs failed or are unfinished. --all prints every comparison,
with injected faults, runs and notes. All of it goes to report.md, and to a page for a browser beside it.
"""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError if a path holds no run."""
    parser = Parser("report", _USAGE, _TEXT)
    parser.option("out", path, "folder for report.md and the page; default: report/ in RUN's folder")
    parser.option("html", path, "the page; default: report.html beside report.md")
    parser.flag("all", "print every comparison, all tables and their notes")
    parser.flag("strict", "refuse runs of one experiment and scale that cannot be compared")
    options = parser.parse(argv)
    if not options.words:
        parser.error("name a run folder, or a folder above run folders")
    paths = [Path(named(word)) for word in options.words]
    report(paths, options.out, for_tables(), strict=options.strict, html=options.html, everything=options.all)
    return 0
