"""`gnmr report RUN...`: recorded runs as tables and plots."""

from __future__ import annotations

from pathlib import Path

from gnmr.commands.words import Parser, path, text
from gnmr.paper.tables import paper_tables
from gnmr.records.pack import unpacked
from gnmr.report import report
from gnmr.terminal import Terminal

_TEXT = """\
RUN is a run folder, any folder above run folders, or a pack (gnmr pack), of which 'PACK/int4_*' are some runs. Arms
stand side by side with their spread over seeds, the paper's
figures beside runs of the paper's scales. Runs in progress, killed and failed are read too.
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for a path that holds no run."""
    parser = Parser("report", "RUN... [out=DIR] [html=FILE] [against=ARM] [--no-plots] [--strict]", _TEXT)
    parser.option("out", path, "folder for report.md and the PNGs; default: report/ in RUN's folder")
    parser.option("html", path, "also one self-contained page for a browser")
    parser.option("against", text, "the arm that all others are tested against; default: the static low path")
    parser.flag("no-plots", "tables only")
    parser.flag("strict", "refuse runs of one experiment and scale that cannot be compared")
    given = parser.parse(argv)
    if not given.words:
        parser.error("name a run folder, a folder above run folders, or a pack")
    with unpacked(Path(word) for word in given.words) as found:
        report(
            found.paths,
            given.out,
            Terminal(),
            plots=not given.no_plots,
            against=given.against,
            strict=given.strict,
            html=given.html,
            further=paper_tables,
            told=found.told,
        )
    return 0
