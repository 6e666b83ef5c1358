"""`gnmr pack RUN... out=FILE.parquet`: the records of many runs in one file."""

from __future__ import annotations

import os
from pathlib import Path

from gnmr import __version__
from gnmr.cli.words import Parser, path, text
from gnmr.lab.records.find import find_runs, named
from gnmr.lab.records.pack import write_pack
from gnmr.lab.train.provenance import commit
from gnmr.records import output

_TEXT = """\
RUN is a run folder, or any folder above run folders. gnmr report and gnmr replay read the pack as they read folders,
and FILE.parquet/RUN is one of its runs: gnmr report 'FILE.parquet/int4_*'. Checkpoints are not packed. The same
folders give the same bytes.
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for a path that holds no run, and for damaged records."""
    parser = Parser("pack", "RUN... out=FILE.parquet [without=NAME,...] [when=DATE]", _TEXT)
    parser.option("out", path, "the pack")
    parser.option("without", text, "records to leave out: steps.jsonl, RUN/ratios.parquet; * and ? allowed")
    parser.option("when", text, "a date to write into the pack")
    given = parser.parse(argv)
    if not given.words or given.out is None or given.out.suffix != ".parquet":
        parser.error("name run folders and out=FILE.parquet")
    output.check(given.out, f"out={given.out}")
    paths = [Path(named(word)) for word in given.words]
    folders = find_runs(paths)
    root = Path(os.path.commonpath([place.resolve() for place in paths]))
    names = {os.path.relpath(folder.resolve(), root): folder for folder in folders}
    if "." in names:
        names = {root.name: root}
    about = {"gnmr": __version__, "commit": commit(), "from": given.words, "when": given.when}
    with output.replacing(given.out, f"out={given.out}") as file:
        left_out = write_pack(file, names, given.without.split(",") if given.without else (), about)
    lost = f", {left_out} files left out" if left_out else ""
    print(f"{given.out}: {len(names)} runs, {given.out.stat().st_size:,} bytes{lost}")
    return 0
