"""`gnmr bench [NAME...] [overrides]`: what the controller and the paths cost on this machine.

Nothing here is asserted: a figure that misses its target says so, and the exit code stays 0. Importing this package
costs no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.errors import UserError

if TYPE_CHECKING:
    from gnmr.bench.setting import Setting

# Name: (module, function, what it measures).
BENCHMARKS = {
    "controller": ("gnmr.bench.controller", "step_cost", "norms, signal, policy and records in a training step"),
    "decision": ("gnmr.bench.controller", "decision", "signal and policy alone, for 10,000 units"),
    "saved": ("gnmr.bench.saved", "saved", "steps with saved activations of 4 and 8 bits against 16, and their bytes"),
    "signals": ("gnmr.bench.signals", "signals", "whole steps under signals that look beyond the norms"),
    "recipe": ("gnmr.bench.recipe", "recipe", "steps under recipes against 16 bits, and steps that switch every block"),
    "mixture": (
        "gnmr.bench.mixture",
        "mixture",
        "a mixture of experts against a dense MLP of as many operations",
    ),
    "hf": ("gnmr.bench.hf", "hf", "our 16-bit model against Hugging Face's LLaMA of the same shape"),
    "startup": ("gnmr.bench.process", "startup", "gnmr --help, and gnmr train to its first step"),
    "memory": ("gnmr.bench.process", "memory", "peak memory of gnmr train"),
    "theory": ("gnmr.paper.theory", "theory", "the paper's theorems 1 and 2 as numbers: recovery gaps, false triggers"),
}

_HELP = """\
usage: gnmr bench [NAME ...] [overrides] [repeats=N] [clock=wall|cpu] [run=FOLDER] [out=FILE.json]

{names}

  NAME       default: all of them, one after the other
  overrides  as for gnmr train; default: its default run (scale=cpu)
  repeats    measurements of each figure; default: the benchmark's own choice
  clock      wall (default), or cpu: CPU time of all threads, for a machine that is busy with other things; best with
             training.threads=1. startup is measured by the wall clock always
  run        theory: a run folder, whose recorded norms are counted and resampled too
  out        the figures as JSON, with commit, machine, versions and date

Arms of a comparison take turns in one process, so that a machine that is busy with other things slows them alike. A
figure is the median; its spread is that of the middle half, or the 95 % interval of the median (bootstrap) for ratios.

  gnmr bench controller decision
  gnmr bench saved scale=60m training.batch_size=2 repeats=5 out=saved-60m.json
  gnmr bench theory run=runs/act_quant_stress/RUN out=theory.json
"""


def main(argv: list[str]) -> int:
    """The command; returns its exit code. UserError for an unknown name or a value without sense."""
    if "-h" in argv or "--help" in argv:
        print(_HELP.format(names="\n".join(f"  {name:<11}{what}" for name, (_, _, what) in BENCHMARKS.items())), end="")
        return 0
    asked = _parse(argv)

    import torch

    from gnmr.bench.figures import Figure, describe_machine, record, show, writer
    from gnmr.bench.setting import Setting
    from gnmr.launch import compose
    from gnmr.terminal import for_tables

    write = writer(asked.out)
    setting = Setting(compose(asked.overrides), asked.overrides, asked.repeats, asked.clock)
    chosen = _measurable(asked.names, setting)
    if setting.config.training.threads is not None:
        torch.set_num_threads(setting.config.training.threads)
    machine = describe_machine()
    console = for_tables()
    found: dict[str, list[Figure]] = {}
    for name in chosen:
        found[name] = _function(name)(setting)
        _function(name, "show_", show)(name, found[name], console)
    write(record(found, shlex.join(["gnmr", "bench", *argv]), machine))
    if asked.out is not None:
        print(f"figures: {asked.out}")
    return 0


@dataclass
class _Asked:
    """The words of the command line, sorted."""

    names: list[str]
    overrides: list[str]
    repeats: int | None = None
    clock: str = "wall"
    out: Path | None = None


def _parse(argv: list[str]) -> _Asked:
    asked = _Asked([], [])
    for word in argv:
        key, sign, value = word.partition("=")
        if word in BENCHMARKS:
            asked.names += [] if word in asked.names else [word]
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
    return asked


_OF_OUR_MODELS = ("saved", "recipe", "mixture", "theory", "hf")


def _measurable(names: list[str], setting: Setting) -> list[str]:
    """The named benchmarks, UserError if one cannot be measured here; without names all that can be."""
    chosen = []
    for name in names or BENCHMARKS:
        try:
            if setting.config.model.checkpoint is not None and name in _OF_OUR_MODELS:
                raise UserError(f"bench {name}: is for models of ours, not for model.name=pretrained")
            _function(name, "check_")(setting)
        except UserError as error:
            if names:
                raise
            setting.say(f"left out: {error}")
        else:
            chosen.append(name)
    return chosen


def _function(name: str, prefix: str = "", otherwise: Callable[..., Any] = lambda _setting: None) -> Callable[..., Any]:
    """A benchmark's function, or with a prefix the one that goes with it; `otherwise` where there is none."""
    module, function, _ = BENCHMARKS[name]
    return getattr(import_module(module), prefix + function, otherwise)
