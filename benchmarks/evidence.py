"""The evidence on prices, forks, fairness and divergence from nothing: bases, truths, forks, runs, survivors, tables.

    python benchmarks/evidence.py night [OUT]    everything that docs/results has of it: hours (make evidence)
    python benchmarks/evidence.py quick [OUT]    the same way on the shipped base: minutes (make evidence-quick)
    python benchmarks/evidence.py night --dry    the steps and how long they take; runs nothing

Each step is a command, told before it runs, with its output in OUT/NAME.log and its figures in OUT/NAME.json (OUT:
runs/evidence/night or quick); OUT/NAME.done says that it is done. Steps run side by side, --jobs of them, one thread
each. A second call leaves out what is done and goes on within what is not: forks are kept one by one, bases from their
last checkpoint. At the end tables.py writes OUT/docs; copied to benchmarks/results and docs/results they are the
committed ones. Whole runs lie in OUT/scratch; packed (`gnmr pack`) they are those of a claim. A step that fails stops
none of those beside it, but what needs it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASES = {f"seed{seed}_{steps}": (seed, steps) for seed, steps in ((0, 100), (0, 500), (0, 1000), (0, 600), (1, 600))}
"""Seed and steps of each."""
PAIR = ("seed0_600", "seed1_600")
STEP, FORK, SMALL_FORK, TRUTH, SAMPLED, CADENCE, RUN = 0.2, 14.0, 7.0, 60.0, 20.0, 300.0, 70.0
"""CPU seconds here (AMD EPYC, one thread): a step of a base, a fork of 40 steps of a base and of the shipped one, a
low path's truth, a base's sampling and its cadences, a run from scratch of two layers."""
IN_FP32 = 1.6
"""Where a CPU has no 16-bit products: how much longer it takes, by forks of 4-bit inputs."""
RUNS = 60
"""Of conf/sweep/from_scratch.yaml."""
DIVERGENCE = {"search": 120.0, "survival": 900.0}
"""CPU seconds of parts of divergence.py."""
_GNMR = ("-m", "gnmr")
SLOWER = {"nvfp4": 2.2, "nvfp4_curve": 2.2, "regime_mxfp4": 1.6}
"""Of scenes: how much longer a fork takes."""


@dataclass(frozen=True)
class Step:
    """A command."""

    name: str
    words: tuple[str, ...]
    """Behind `python`."""
    seconds: float
    """Of CPU, for what is left of it."""
    where: Path | None = None
    """Where it is run; None for OUT/bases."""


def bases(_out: Path) -> list[Step]:
    """What forks begin from."""
    plain = (
        *_GNMR,
        "train",
        "experiment=fork_base",
        "model.outlier_channels.number=2",
        "model.outlier_channels.gain=20",
        "training.threads=1",
        "records.wandb=off",
    )
    return [
        Step(
            f"base-{name}",
            (*plain, f"training.seed={seed}", f"training.steps={steps}", f"run_dir={name}"),
            STEP * steps,
        )
        for name, (seed, steps) in BASES.items()
    ]


def night(out: Path) -> list[Step]:
    """Behind the bases: the longest first."""
    pair = ",".join(PAIR)
    steps = [
        bench(out, "price-truth-early", "price", "truth", "seed0_100,seed0_500", TRUTH * 2 * 9),
        bench(out, "price-truth-late", "price", "truth", "seed0_1000,seed1_600", TRUTH * 2 * 9),
        bench(out, "price-sampling", "price", "sampling", pair, SAMPLED * 2),
        bench(out, "price-atlas", "price", "atlas", "seed0_600", FORK * 3 * (28 * 3 + 1), 3),
        bench(out, "price-cadence", "price", "cadence", pair, CADENCE * 2),
        bench(out, "price-shares", "price", "shares", pair, SAMPLED * 2),
        *(spend(out, scene, pair, 5) for scene in _scenes()),
        fair(out, 5),
        replace(bench(out, "fair-lengths", "fair", "lengths", "shipped", 10.0), where=ROOT),
        *(divergence(out, part, seconds) for part, seconds in DIVERGENCE.items()),
    ]
    return sorted([*steps, *scratch(out)], key=lambda step: -step.seconds)


def reports(out: Path) -> list[Step]:
    """Behind the runs."""
    there = (*_GNMR, "report", str(out / "scratch"), f"out={out / 'docs' / 'scratch'}")
    return [Step("report-scratch", there, 10.0)]


def quick(out: Path) -> list[Step]:
    """The shipped base alone: few tokens against all, and few arms where 2 bits open a gap within 40 steps."""
    return [
        spend(out, "regime_quick", "shipped", 3),
        bench(out, "price-sampling", "price", "sampling", "shipped", SAMPLED / 2),
    ]


def bench(out: Path, name: str, what: str, part: str, run: str, seconds: float, repeats: int | None = None) -> Step:
    """A part of a benchmark."""
    words = (*_GNMR, "bench", what, f"only={part}", f"run={run}", "training.threads=1", f"runs_dir={out / name}")
    more = (f"out={out / name}.json",)
    return Step(name, (*words, *((f"repeats={repeats}",) if repeats else ()), *more), seconds)


def spend(out: Path, scene: str, run: str, orders: int) -> Step:
    """Forks of a scene; those that are there are not counted."""
    from gnmr.lab.bench.scenes import SCENES

    there = _rows(out / f"spend-{scene}" / "bench" / "spend.jsonl")
    left = max(len(SCENES[scene].arms()) * orders * len(run.split(",")) - there, 0)
    each = (SMALL_FORK if run == "shipped" else FORK) * SLOWER.get(scene, 1.0)
    return bench(out, f"spend-{scene}", "spend", scene, run, left * each, orders)


def fair(out: Path, seeds: int) -> Step:
    """Forks of 40 steps under two optimizers, and runs of 200 steps; those that are there are not counted."""
    from gnmr.lab.bench.fair import FAMILIES, MORE, WHOLE, arms_of

    runs = {(optimizer, arm) for optimizer, pairs in (FAMILIES | MORE).values() for arm in arms_of(pairs)}
    each = {"forks": 4 * FORK, "scratch,more": len(runs) * WHOLE[-1] * STEP}
    left = max(1 - _rows(out / "fair" / "bench" / "fair.jsonl") / (seeds * (4 + len(runs))), 0)
    seconds = seeds * sum(each.values()) * left
    return bench(out, "fair", "fair", "forks,scratch,more", "seed0_600", seconds, seeds)


def divergence(out: Path, part: str, seconds: float) -> Step:
    """A part of divergence.py, which goes on within its own file."""
    name = f"divergence-{part}"
    return Step(name, (str(ROOT / "benchmarks" / "divergence.py"), str(out / f"{name}.json"), part), seconds)


def scratch(out: Path) -> Iterator[Step]:
    """Whole runs of two layers and of four; a cell that is done is left out by the sweep itself."""
    for name, layers in (("from_scratch", 2), ("from_scratch_4", 4)):
        sweep = (*_GNMR, "train", "-m", "sweep=from_scratch", f"model.num_layers={layers}", f"experiment_name={name}")
        quiet = ("training.threads=1", "records.wandb=off", f"runs_dir={out / 'scratch'}")
        left = max(RUNS - len([*(out / "scratch" / name).glob("*/DONE")]), 0)
        yield Step(name, (*sweep, *quiet), left * RUN * layers / 2)


def _rows(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def _scenes() -> list[str]:
    from gnmr.lab.bench.scenes import SCENES

    return [scene for scene in SCENES if scene != "regime_quick"]


FORMS = {"night": (bases, night, reports), "quick": (quick,)}
"""Stages: those of one run side by side, the next one behind them."""


def stages(form: str, out: Path) -> Iterator[list[Step]]:
    """Steps that are left, stage by stage."""
    for stage in FORMS[form]:
        yield [step for step in stage(out) if not (out / f"{step.name}.done").exists()]


class Playing:
    """Runs steps, and says how long is left."""

    def __init__(self, out: Path, jobs: int, total: float, pace: float) -> None:
        """`total` seconds, each of which takes `pace` here."""
        self.out, self.jobs, self.left = out, jobs, total
        self.failed: list[str] = []
        self._pace, self._lock = pace, threading.Lock()

    def __call__(self, steps: Sequence[Step]) -> None:
        """One stage."""
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self._step, steps))

    def _step(self, step: Step) -> None:
        self._say(f"begins  {step.name}: python {' '.join(step.words)}".replace(f"{self.out}/", ""))
        began = time.monotonic()
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        with (self.out / f"{step.name}.log").open("a") as log:
            command = [sys.executable, *step.words]
            where = step.where or self.out / "bases"
            ran = subprocess.run(command, cwd=where, env=env, stdout=log, stderr=log, check=False)
        if ran.returncode == 0:
            for rows in (self.out / step.name / "bench").glob("*.jsonl"):
                shutil.copyfile(rows, self.out / f"{step.name}.jsonl")
            (self.out / f"{step.name}.done").touch()
        took = time.monotonic() - began
        with self._lock:
            self.left -= step.seconds
            self._pace = (self._pace + took / max(step.seconds, 1.0)) / 2
            if ran.returncode:
                self.failed.append(step.name)
        told = f"failed with exit code {ran.returncode}, see {step.name}.log:" if ran.returncode else "done   "
        self._say(f"{told} {step.name}, {_time(took)}; {_time(self.left * self._pace / self.jobs)} left")

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)


def _seconds(stage: Sequence[Step], jobs: int) -> float:
    """Of a stage: a step is never less than itself."""
    each = [step.seconds for step in stage]
    return max(sum(each) / jobs, max(each, default=0.0))


def _pace() -> tuple[float, str]:
    """What a second of a step takes here, and by which machine."""
    from gnmr.precision import half

    lacking = half.lacking()
    return IN_FP32 if lacking else 1.0, f"by an AMD EPYC {'without' if lacking else 'with'} 16-bit products"


def _time(seconds: float) -> str:
    if seconds > 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--dry", action="store_true", help="list the steps and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="steps side by side; default: one a core")
    given = parser.parse_args(argv)
    out, jobs = (given.out or ROOT / "runs" / "evidence" / given.form).resolve(), max(given.jobs, 1)
    todo = list(stages(given.form, out))
    pace, machine = _pace()
    for step in (step for stage in todo for step in stage):
        print(f"{_time(step.seconds * pace):>8}  {step.name}")
    total, long = sum(_seconds(stage, 1) for stage in todo), sum(_seconds(stage, jobs) for stage in todo)
    print(f"{sum(map(len, todo))} steps, about {_time(long * pace)} with {jobs} side by side ({machine}); into {out}")
    if given.dry:
        return 0
    (out / "bases").mkdir(parents=True, exist_ok=True)
    play, began = Playing(out, jobs, total, pace), time.monotonic()
    for stage in stages(given.form, out):
        if not play.failed:
            play(stage)
    tables = subprocess.run([sys.executable, ROOT / "benchmarks" / "tables.py", out, out / "docs"], check=False)
    told = f"failed: {', '.join(play.failed)}" if play.failed else "done"
    print(f"{told}, {_time(time.monotonic() - began)}; {out}/docs")
    return int(bool(play.failed or tables.returncode))


if __name__ == "__main__":
    sys.exit(main())
