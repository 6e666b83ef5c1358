"""`gnmr report RUN...`: recorded runs as a table and a page; with claims= the results of a file of claims."""

from __future__ import annotations

from pathlib import Path

from gnmr.cli.parser import Parser, path
from gnmr.console import Terminal, for_tables, print_plain
from gnmr.errors import printable
from gnmr.lab.records.find import named
from gnmr.lab.report import report
from gnmr.lab.report.claims import results

_USAGE = """\
RUN... [out=DIR] [html=FILE] [--all] [--strict]
       gnmr report claims=FILE [out=PAGE] [--check]"""
_TEXT = """\
RUN is a run folder, or any folder above run folders. The first line says what low precision cost and what was
recovered. Then the arms are compared: their loss over the seeds, their difference to the arm that never recovers,
the share of the GEMM FLOPs that they recover, and which runs failed or are unfinished. --all prints every comparison,
with injected faults, runs and notes. All of it goes to report.md, and to a page for a browser beside it.

claims=FILE takes no RUN: it tests the claims of the file on its table of runs, writes a page with a table for each,
and fills in the marked numbers of the texts that the file names (docs/claims.yaml). --check writes nothing and ends
with exit code 1 if a file is not what the table gives.
"""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError if a path holds no run."""
    terminal = Terminal()
    parser = Parser("report", _USAGE, _TEXT)
    parser.option("out", path, "folder for report.md and the page; default: report/ in RUN's folder")
    parser.option("claims", path, "file of claims; out: the page, default results.md beside it")
    parser.option("html", path, "the page; default: report.html beside report.md")
    parser.flag("all", "print every comparison, all tables and their notes")
    parser.flag("strict", "refuse runs of one experiment and scale that cannot be compared")
    parser.flag("check", "with claims: compare, and write nothing")
    given = parser.parse(argv)
    if given.claims is not None:
        if given.words or given.html or given.strict or given.all:
            parser.error("claims=FILE names its records itself, and has no RUN, html, all or strict")
        out = given.out or given.claims.parent / "results.md"
        wrong = results(given.claims, out, lambda line: print_plain(terminal, line), check=given.check)
        for line in wrong:
            print_plain(terminal, printable(line))
        return int(bool(wrong))
    if given.check:
        parser.error("--check: only with claims=FILE")
    if not given.words:
        parser.error("name a run folder, or a folder above run folders")
    paths = [Path(named(word)) for word in given.words]
    report(paths, given.out, for_tables(), strict=given.strict, html=given.html, everything=given.all)
    return 0
