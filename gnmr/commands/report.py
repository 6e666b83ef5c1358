"""`gnmr report RUN...`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from gnmr.errors import UserError
from gnmr.paper.tables import paper_tables
from gnmr.report import report
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
    report(
        given.runs,
        given.out,
        Terminal(),
        plots=given.plots,
        against=given.against,
        strict=given.strict,
        html=given.html,
        further=paper_tables,
    )
    return 0
