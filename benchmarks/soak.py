"""Soak test: ranks that are killed repeatedly leave the same result as undisturbed ranks, to the last bit.

    python benchmarks/soak.py OUT.json                           4 processes, 10,000 steps, 24 kills
    python benchmarks/soak.py OUT.json --steps 120 --kills 4     a minute of it on idle cores

Two trainings of a tiny model run under torchrun, one of them undisturbed. At random steps the other one is killed in
one of the ways `KINDS`, in turn. If all processes are killed, the same command is given again; otherwise torchrun
restarts the ranks. Records, weights, moments, controller and generators of both are compared, except times and the
slowest rank. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))

from everything import differences, everything

from gnmr.records.reader import read_json
from golden import make_inputs
from timing import header

WORDS = (
    "experiment=act_quant_stress model.hidden_size=32 model.intermediate_size=48 model.num_layers=1 model.num_heads=2 "
    "data.name=text data.vocab_size=300 data.path=babble.txt training.seq_len=16 training.batch_size=1 "
    "training.eval_sequences=2 training.threads=1 optim.lr=0.003 controller.alpha=1.05 controller.beta=1.02 "
    "controller.max_o=2 controller.warmup_frac=0 records.live=off records.wandb=off"
)
KINDS = ONE, TERM, SAVING, ALL = "one rank", "SIGTERM to one rank", "rank 0 in a checkpoint", "all and torchrun"


class Run:
    """One training by torchrun."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        every = max(given.steps // 100, 10)
        words = f"{WORDS} training.steps={given.steps} training.checkpoint_every={every}"
        words += f" training.eval_every={10 * every} training.accumulation={given.processes} parallel={given.parallel}"
        torchrun = f"torch.distributed.run --standalone --nproc-per-node={given.processes}"
        torchrun += f" --max-restarts={given.kills} -m gnmr train"
        self._command = [sys.executable, "-m", *torchrun.split(), *words.split(), f"run_dir={folder}"]
        self.folder, self.starts, self._errors = folder, 0, folder.with_suffix(".stderr")
        self.start()

    def start(self) -> None:
        """Run the command, for the first time or again."""
        self.starts += 1
        with self._errors.open("a") as errors:
            self.torchrun = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=errors)

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the running ranks."""
        parent, found = self.torchrun.pid, dict[int, int]()
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended in the meantime
            found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
        return found

    def step(self) -> int:
        """Return the last recorded step, 0 before the first."""
        try:
            with (self.folder / "steps.jsonl").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
                return max((int(json.loads(line)["step"]) for line in file.read().split(b"\n")[1:-1]), default=0)
        except (OSError, ValueError):
            return 0

    def kill(self, kind: str, rank: int, step: int) -> dict[str, Any]:
        """Wait for the step, kill, and return a description. Raises RuntimeError if the run ended before the step."""
        while self.step() < step or (kind == SAVING and not any((self.folder / "checkpoints").glob(".writing-*"))):
            if self.torchrun.poll() is not None:
                raise RuntimeError(f"exit code {self.torchrun.returncode} before {kind}, {step}: {self.errors()[-5:]}")
            time.sleep(0.002 if self.step() >= step else 0.05)
        done, ranks = {"kind": kind, "rank": rank, "step": self.step()}, self.ranks()
        if kind == ALL:
            self.torchrun.kill()
        for one in ranks if kind == ALL else {rank} & ranks.keys():
            os.kill(ranks[one], signal.SIGTERM if kind == TERM else signal.SIGKILL)
        if kind == ALL:
            self.torchrun.wait()
            self.start()
        return done

    def errors(self, words: str = "") -> list[str]:
        """Return the lines of stderr that contain `words`."""
        return [line for line in self._errors.read_text().splitlines() if words in line]


def planned(given: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return (kind, rank, step) of each kill, by step: kinds in turn, random steps and ranks."""
    draw = random.Random(given.seed)
    steps = sorted(draw.sample(range(1, given.steps * 19 // 20), given.kills))
    kinds = [KINDS[i % len(KINDS)] for i in range(given.kills)]
    draw.shuffle(kinds)
    ranks = [draw.randrange(given.processes) if kind in (ONE, TERM) else 0 for kind in kinds]
    return list(zip(kinds, ranks, steps, strict=True))


def soak(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train both runs and return the comparison."""
    began, kills = time.monotonic(), []
    for name in ("disturbed", "undisturbed"):
        (folder / name).mkdir()
    run, undisturbed = (Run(folder / name / "run", given) for name in ("disturbed", "undisturbed"))
    try:
        for kill in planned(given):
            kills.append(run.kill(*kill))
            print(f"{len(kills)} of {given.kills}: {kills[-1]}", flush=True)
        codes = [run.torchrun.wait(), undisturbed.torchrun.wait()]
    finally:
        for one in (run, undisturbed):
            if one.torchrun.poll() is None:
                one.torchrun.terminate()
                one.torchrun.wait()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {run.errors()[-5:]} {undisturbed.errors()[-5:]}")
    left = [everything(one.folder, "slowest_rank") for one in (run, undisturbed)]
    lost = [row["step"] for row in left[0]["steps"]] != list(range(1, given.steps + 1))
    found = read_json(run.folder / "header.json") or {}
    return {
        **{name: getattr(given, name) for name in ("steps", "processes", "parallel", "seed")},
        "trained_parameters": found["trained_parameters"],
        "kills": kills,
        "starts_by_hand": run.starts,
        "resumed_after": [one["after_step"] for one in found.get("resumed", [])],
        "disagreements": len(run.errors("ranks disagree") + run.errors("differ between ranks")),
        "differences": ["steps.jsonl has rows too few or too many"] * lost + differences(*left),
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=lambda word: Path(word).resolve())
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    given, origin = parser.parse_args(), header()
    with tempfile.TemporaryDirectory(prefix="gnmr-soak-") as name:
        os.chdir(name)
        os.environ["GNMR_CACHE"] = f"{name}/cache"
        make_inputs(Path(name))
        found = soak(given, Path(name))
    given.out.write_text(json.dumps(origin | found, indent=1) + "\n")
    print({name: found[name] for name in ("resumed_after", "disagreements", "differences")})
    return 1 if found["differences"] or found["disagreements"] else 0


if __name__ == "__main__":
    sys.exit(main())
