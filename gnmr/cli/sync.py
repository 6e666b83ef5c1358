"""`gnmr sync RUN...`: recorded runs, such as a whole sweep's, to Weights & Biases."""

from __future__ import annotations

from pathlib import Path

from gnmr.cli.words import Parser, one_of, path, text, whole
from gnmr.console import Terminal, print_plain
from gnmr.errors import UserError, printable
from gnmr.lab.records.find import find_runs, named
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.runs import load
from gnmr.lab.report.wandb_runs import send

_USAGE = "RUN... [project=NAME] [mode=auto|online|offline] [out=DIR] [every=STEPS]"
_TEXT = """\
RUN is a run folder, or any folder above run folders. Each run is filed under its arm (job_type,
tag, config.arm), its seeds in one group, with its header in config; beside its own numbers it gets the loss minus that
of the 16-bit arm of the same seed. A run keeps its id: what W&B has of it already stays. mode=auto is online where you
are logged in, else offline: then the command that uploads the files is printed.
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for a path that holds no run."""
    terminal = Terminal()
    parser = Parser("sync", _USAGE, _TEXT)
    parser.option("project", text, "W&B's project, or ENTITY/PROJECT; default: WANDB_PROJECT, else gnmr")
    parser.option("mode", one_of("auto", "online", "offline"), "whether W&B's servers are asked", "auto")
    parser.option("out", path, "folder for W&B's files; default: wandb/ in each run's folder")
    parser.option("every", whole(1), "steps between the points of a unit's lines and its rows in the table", 10)
    given = parser.parse(argv)
    if not given.words:
        parser.error("name a run folder, or a folder above run folders")
    runs = [load(folder).check() for folder in find_runs(Path(named(word)) for word in given.words)]
    if given.out is not None:
        try:
            given.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out={given.out}: cannot be made ({error.strerror or error})") from error

    def say(line: str) -> None:
        print_plain(terminal, printable(line))

    where = send(compare(runs), project=given.project, mode=given.mode, folder=given.out, every=given.every, say=say)
    for line in where:
        say(line)
    return 0 if where else 1
