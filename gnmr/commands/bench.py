"""`gnmr bench [NAME...] [overrides]`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gnmr.bench import BENCHMARKS, RENAMED, measurable
from gnmr.errors import UserError

if TYPE_CHECKING:
    from gnmr.bench.figures import Figure

_HELP = """\
usage: gnmr bench [NAME ...] [only=PART,...] [overrides] [repeats=N] [clock=wall|cpu] [run=FOLDER]
                  [out=FILE.json]

{names}

  NAME       default: all of them, one after the other
  only       parts of the named benchmarks: {parts}
  overrides  as for gnmr train; default: its default run (scale=cpu)
  repeats    measurements of each figure; default: the benchmark's own choice
  clock      wall (default), or cpu: CPU time of all threads, for a machine that is busy with other things; best with
             training.threads=1. startup is measured by the wall clock always
  run        theory: a run folder, whose recorded norms are counted and resampled too
  out        the figures as JSON, with commit, machine, versions and date

Arms of a comparison take turns in one process, so that a machine that is busy with other things slows them alike. A
figure is the median; its spread is that of the middle half, or the 95 % interval of the median (bootstrap) for ratios.

  gnmr bench step decision
  gnmr bench paths only=saved scale=60m training.batch_size=2 repeats=5 out=saved-60m.json
  gnmr bench theory run=runs/act_quant_stress/RUN out=theory.json
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for an unknown name or a value without sense."""
    if "-h" in argv or "--help" in argv:
        names = "\n".join(f"  {name:<11}{bench.what}" for name, bench in BENCHMARKS.items())
        parts = "; ".join(f"{name}: {', '.join(one.parts)}" for name, one in BENCHMARKS.items() if len(one.parts) > 1)
        print(_HELP.format(names=names, parts=parts), end="")
        return 0
    asked = _parse(argv)

    import torch

    from gnmr.bench.figures import describe_machine, record, writer
    from gnmr.bench.setting import Setting
    from gnmr.config.compose import compose
    from gnmr.terminal import for_tables

    write = writer(asked.out)
    setting = Setting(compose(asked.overrides), asked.overrides, asked.repeats, asked.clock)
    chosen = measurable(asked.names, asked.only, setting)
    if setting.config.training.threads is not None:
        torch.set_num_threads(setting.config.training.threads)
    machine = describe_machine()
    console = for_tables()
    found: dict[str, list[Figure]] = {}
    for part in chosen:
        figures = part.measure(setting)
        found.setdefault(part.bench, []).extend(figures)
        part.show(part.title, figures, console)
    write(record(found, shlex.join(["gnmr", "bench", *argv]), machine))
    if asked.out is not None:
        print(f"figures: {asked.out}")
    return 0


@dataclass
class _Asked:
    """The words of the command line, sorted."""

    names: list[str]
    overrides: list[str]
    only: list[str] = field(default_factory=list)
    repeats: int | None = None
    clock: str = "wall"
    out: Path | None = None


def _parse(argv: list[str]) -> _Asked:
    asked = _Asked([], [])
    for word in argv:
        key, sign, value = word.partition("=")
        if word in BENCHMARKS:
            asked.names += [] if word in asked.names else [word]
        elif word in RENAMED:
            raise UserError(f"bench {word}: is now gnmr bench {RENAMED[word]}")
        elif key == "only" and sign:
            asked.only += value.split(",")
        elif key == "repeats" and sign:
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"{word}: must be a whole number of at least 1")
            asked.repeats = int(value)
        elif key == "clock" and sign:
            if value not in ("wall", "cpu"):
                raise UserError(f"{word}: must be wall or cpu")
            asked.clock = value
        elif key == "out" and sign:
            if not value:
                raise UserError("out=: give a file")
            asked.out = Path(value)
        elif key == "run" and sign:
            if not value:
                raise UserError("run=: give a run folder")
            quoted = value.replace("\\", "\\\\").replace("'", "\\'")
            asked.overrides.append(f"run_dir='{quoted}'")
        elif (sign or word.startswith("~")) and not word.startswith("-"):
            asked.overrides.append(word)
        else:
            raise UserError(f"bench: {word!r} is no benchmark: use {', '.join(BENCHMARKS)} (gnmr bench --help)")
    parts = [part for name in asked.names or BENCHMARKS for part in BENCHMARKS[name].parts]
    if unknown := [part for part in asked.only if part not in parts]:
        raise UserError(f"only={unknown[0]}: must be of {', '.join(parts)}")
    return asked
