"""`gnmr report RUN...`: recorded runs as tables and plots; with claims= the results of a file of claims."""

from __future__ import annotations

from pathlib import Path

from gnmr.cli.words import Parser, path, text
from gnmr.console import Terminal, print_plain
from gnmr.errors import printable
from gnmr.lab.paper.tables import paper_tables
from gnmr.lab.records.find import named
from gnmr.lab.report import report
from gnmr.lab.report.results import results

_USAGE = """\
RUN... [out=DIR] [html=FILE] [wandb=PROJECT] [against=ARM] [--no-plots] [--strict]
       gnmr report claims=FILE [out=DIR] [--check]"""
_TEXT = """\
RUN is a run folder, or any folder above run folders. Arms stand side by side with their spread over seeds, the paper's
figures beside runs of the paper's scales. Runs in progress, killed and failed are read too.

claims=FILE takes no RUN: it tests the claims of the file on its table of runs, writes a page with a table for each claim,
and fills in the marked numbers of the texts that the file names (docs/claims.yaml). --check writes nothing and ends
with exit code 1 if a file is not what the table gives.
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for a path that holds no run."""
    terminal = Terminal()
    parser = Parser("report", _USAGE, _TEXT)
    parser.option("out", path, "folder for report.md and the PNGs; default: report/ in RUN's folder")
    parser.option("claims", path, "file of claims; out: the page, default results.md beside it")
    parser.option("html", path, "also one self-contained page for a browser")
    parser.option("wandb", text, "also a report in this W&B project (needs wandb-workspaces; gnmr sync sends the runs)")
    parser.option("against", text, "the arm that all others are tested against; default: the static low path")
    parser.flag("no-plots", "tables only")
    parser.flag("strict", "refuse runs of one experiment and scale that cannot be compared")
    parser.flag("check", "with claims: compare, and write nothing")
    given = parser.parse(argv)
    if given.claims is not None:
        if given.words or given.html or given.wandb or given.against or given.strict:
            parser.error("claims=FILE names its records itself, and has no RUN, html, wandb, against or strict")
        out = given.out or given.claims.parent / "results.md"
        wrong = results(given.claims, out, lambda line: print_plain(terminal, line), check=given.check)
        for line in wrong:
            print_plain(terminal, printable(line))
        return int(bool(wrong))
    if given.check:
        parser.error("--check is of claims=FILE")
    if not given.words:
        parser.error("name a run folder, or a folder above run folders")
    report(
        [Path(named(word)) for word in given.words],
        given.out,
        terminal,
        plots=not given.no_plots,
        against=given.against,
        strict=given.strict,
        html=given.html,
        wandb=given.wandb,
        further=paper_tables,
    )
    return 0
