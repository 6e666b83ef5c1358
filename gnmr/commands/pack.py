"""`gnmr pack RUN... --out FILE.parquet`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from gnmr import __version__, output
from gnmr.errors import UserError
from gnmr.records.find import find_runs
from gnmr.records.pack import write_pack
from gnmr.training.provenance import commit


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"pack: {message} (gnmr pack --help)")


def main(argv: list[str]) -> int:
    """`gnmr pack` without its first word."""
    parser = _Parser(
        prog="gnmr pack",
        description="The records of many runs in one Parquet file, which gnmr report and gnmr replay read as they read "
        "folders: gnmr report FILE.parquet, and of some of its runs gnmr report 'FILE.parquet/int4_*'. Checkpoints are "
        "left out. The same folders give the same bytes.",
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or any folder above run folders")
    add("--out", metavar="FILE", type=Path, required=True, help="the pack, FILE.parquet")
    add(
        "--without",
        metavar="NAME,...",
        default="",
        help="records to leave out: steps.jsonl, 'RUN/ratios.parquet', *, ?",
    )
    add("--when", metavar="TEXT", help="a date to write into the pack")
    parser.epilog = "out=FILE, without=NAME and when=TEXT will do too."
    words = [f"--{word}" if word.startswith(("out=", "without=", "when=")) else word for word in argv]
    given = parser.parse_args(words)
    if given.out.suffix != ".parquet":
        raise UserError(f"pack: --out {given.out}: its name must end in .parquet")
    output.check(given.out)
    folders = find_runs(given.runs)
    root = Path(os.path.commonpath([path.resolve() for path in given.runs]))
    names = {os.path.relpath(folder.resolve(), root): folder for folder in folders}
    if "." in names:
        names = {root.name: root}
    about = {"gnmr": __version__, "commit": commit(), "from": [str(path) for path in given.runs], "when": given.when}
    with output.replacing(given.out) as file:
        left_out = write_pack(file, names, filter(None, given.without.split(",")), about)
    lost = f", {left_out} files left out" if left_out else ""
    print(f"{given.out}: {len(names)} runs, {given.out.stat().st_size:,} bytes{lost}")
    return 0
