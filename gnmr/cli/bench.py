"""`gnmr bench [NAME...] [overrides]`: what the controller and the paths cost on this machine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from gnmr.cli.words import Parser, names_of, one_of, path, runs, whole
from gnmr.errors import UserError, nearest
from gnmr.lab.bench import BENCHMARKS, RENAMED, measurable, parts_of

if TYPE_CHECKING:
    from gnmr.lab.bench.figures import Figure

_TEXT = """\
benchmarks (default: all but price, spend, fair, parallel, compressed, rise and hook, one after the other):
{names}

Overrides of the config are those of gnmr train; default: its default run (scale=cpu).

Arms of a comparison take turns in one process, so that a machine that is busy with other things slows them alike. A
figure is the median; its spread is that of the middle half, or the 95 % interval of the median (bootstrap) for ratios.

  gnmr bench step decision
  gnmr bench paths only=saved scale=60m training.batch_size=2 repeats=5 out=saved-60m.json
  gnmr bench theory run=runs/act_quant_stress/RUN out=theory.json
"""


def _parser() -> Parser:
    names = "\n".join(f"  {name:<11}{bench.what}" for name, bench in BENCHMARKS.items())
    parts = "; ".join(f"{name}: {', '.join(one.parts)}" for name, one in BENCHMARKS.items() if len(one.parts) > 1)
    usage = "[NAME...] [only=PART,...] [overrides] [repeats=N] [clock=wall|cpu] [run=FOLDER] [out=FILE.json]"
    parser = Parser("bench", usage, _TEXT.format(names=names), keys=True)
    parser.option("only", names_of, f"parts of the named benchmarks: {parts}", [])
    parser.option("repeats", whole(1), "measurements of each figure; default: the benchmark's own choice")
    parser.option(
        "clock",
        one_of("wall", "cpu"),
        "cpu: CPU time of all threads, for a machine that is busy with other things; best with training.threads=1. "
        "startup is measured by the wall clock always",
        "wall",
    )
    parser.option(
        "run",
        runs,
        "theory: a run folder, whose recorded norms are counted and resampled too; price, spend: bases, with commas",
    )
    parser.option("out", path, "the figures as JSON, with commit, machine, versions and date")
    return parser


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for an unknown name or a value without sense."""
    parser = _parser()
    given = parser.parse(argv)
    overrides = [word for word in given.words if "=" in word or word.startswith("~")]
    names = list(dict.fromkeys(word for word in given.words if word not in overrides))
    if old := [name for name in names if name in RENAMED and name not in BENCHMARKS]:
        raise UserError(f"bench {old[0]}: is now gnmr bench {RENAMED[old[0]]}")
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}{nearest(unknown[0], BENCHMARKS)}")
    only = parts_of(names, given.only)
    if given.run is not None:
        quoted = given.run.replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"run_dir='{quoted}'")

    import torch

    from gnmr.console import for_tables
    from gnmr.lab.bench.figures import describe_machine, record, writer
    from gnmr.lab.bench.setting import Setting
    from gnmr.lab.config.compose import compose
    from gnmr.precision import half

    write = writer(given.out)
    setting = Setting(compose(overrides), overrides, given.repeats, given.clock)
    chosen = measurable(names, only, setting)
    if setting.config.training.threads is not None:
        torch.set_num_threads(setting.config.training.threads)
    half.provide()  # before any part builds a model, so that all are measured alike
    machine = describe_machine()
    console = for_tables()
    found: dict[str, list[Figure]] = {}
    for part in chosen:
        figures = part.measure(setting)
        found.setdefault(part.bench, []).extend(figures)
        part.show(part.title, figures, console)
    write(record(found, shlex.join(["gnmr", "bench", *argv]), machine))
    if given.out is not None:
        print(f"figures: {given.out}")
    return 0
