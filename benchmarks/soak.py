"""Several processes that are killed again and again: what they leave is what undisturbed ones leave, to the last bit.

    python benchmarks/soak.py OUT.json                           4 processes, 10,000 steps, 24 kills
    python benchmarks/soak.py OUT.json --steps 120 --kills 4     a minute of it on idle cores

A tiny model under torchrun. At random steps, by turns: SIGKILL to one rank; SIGTERM to one rank, at which all save and
end; SIGKILL to rank 0 while a checkpoint is being written; SIGKILL to torchrun and all ranks. After the first three
torchrun starts all ranks again, after the last the same command is given again. Beside it runs the same training
undisturbed. Records, validation, events, units, weights, moments, controller and generators of both are compared,
but no times and not who was slowest. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))

from everything import differences, everything

from gnmr.records.reader import read_json
from golden import make_inputs
from timing import header

SIZES = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=1", "model.num_heads=2"]
SIZES += ["data.name=text", "data.vocab_size=300", "data.path=babble.txt", "training.seq_len=16"]
SIZES += ["training.batch_size=1", "training.eval_sequences=2", "training.threads=1", "optim.lr=0.003"]
SIZES += ["controller.alpha=1.05", "controller.beta=1.02", "controller.max_o=2", "controller.warmup_frac=0"]
SIZES += ["records.live=off", "records.wandb=off"]
KINDS = ("one rank", "SIGTERM to one rank", "rank 0 in a checkpoint", "all and torchrun")


@dataclass
class Kill:
    """What was done to a run, and when."""

    kind: str
    rank: int
    """Of one rank; 0 where all are meant."""
    step: int
    """The last that was in the records; planned, then as it was."""


class Run:
    """One training by torchrun."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        every = max(given.steps // 100, 10)
        steps = [f"training.steps={given.steps}", f"training.checkpoint_every={every}"]
        steps += [f"training.eval_every={10 * every}", f"training.accumulation={given.processes}"]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={given.processes}"]
        torchrun += [f"--max-restarts={given.kills}", "-m", "gnmr", "train", "experiment=act_quant_stress"]
        place = [f"parallel={given.parallel}", f"run_dir={folder}"]
        self._command = [sys.executable, "-m", *torchrun, *SIZES, *steps, *place]
        self.folder, self.starts = folder, 0
        self._errors = folder.with_suffix(".stderr")
        self.start()

    def start(self) -> None:
        """For the first time, or again."""
        self.starts += 1
        with self._errors.open("a") as errors:
            self.torchrun = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=errors)

    def ranks(self) -> dict[int, int]:
        """Process ids of those that live now."""
        parent, found = self.torchrun.pid, dict[int, int]()
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
        return found

    def step(self) -> int:
        """The last one in the records; 0 before the first."""
        try:
            with (self.folder / "steps.jsonl").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
                return max((int(json.loads(line)["step"]) for line in file.read().split(b"\n")[1:-1]), default=0)
        except (OSError, ValueError):
            return 0

    def writing(self) -> bool:
        """Whether a checkpoint is on its way."""
        return any((self.folder / "checkpoints").glob(".writing-*"))

    def until(self, kill: Kill) -> None:
        """Waits until it is time. RuntimeError where the run ended before."""
        in_checkpoint = kill.kind == KINDS[2]
        while self.step() < kill.step or (in_checkpoint and not self.writing()):
            if self.torchrun.poll() is not None:
                raise RuntimeError(f"ended with exit code {self.torchrun.returncode} before {kill}: {self.errors()}")
            time.sleep(0.002 if in_checkpoint and self.step() >= kill.step else 0.05)

    def hit(self, kill: Kill) -> None:
        """Does it."""
        kill.step, ranks = self.step(), self.ranks()
        sent = signal.SIGTERM if kill.kind == KINDS[1] else signal.SIGKILL
        if kill.kind == KINDS[3]:
            self.torchrun.kill()
        for rank in ranks if kill.kind == KINDS[3] else {kill.rank} & ranks.keys():
            os.kill(ranks[rank], sent)
        if kill.kind == KINDS[3]:
            self.torchrun.wait()
            self.start()

    def errors(self, words: str = "") -> list[str]:
        """Lines of stderr with these words."""
        return [line for line in self._errors.read_text().splitlines() if words in line]


def plan(given: argparse.Namespace) -> list[Kill]:
    """The kills of a soak, by step: kinds by turns, steps and ranks drawn."""
    draw = random.Random(given.seed)
    steps = sorted(draw.sample(range(1, given.steps * 19 // 20), given.kills))
    kinds = [KINDS[i % len(KINDS)] for i in range(given.kills)]
    draw.shuffle(kinds)
    ranks = [draw.randrange(given.processes) if kind in KINDS[:2] else 0 for kind in kinds]
    return [Kill(*each) for each in zip(kinds, ranks, steps, strict=True)]


def compared(run: Run, undisturbed: Run, steps: int) -> list[str]:
    """Where the two differ, and rows that are missing or twice there."""
    left = [everything(one.folder) for one in (run, undisturbed)]
    for found in left:
        for row in found["steps"]:
            del row["slowest_rank"]
    lost = [row["step"] for row in left[0]["steps"]] != list(range(1, steps + 1))
    return ["steps.jsonl has rows too few or too many"] * lost + differences(*left)


def soak(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both runs, and what came of them."""
    began, kills = time.monotonic(), plan(given)
    for name in ("disturbed", "undisturbed"):
        (folder / name).mkdir()
    run = Run(folder / "disturbed" / "run", given)
    undisturbed = Run(folder / "undisturbed" / "run", given)
    try:
        for number, kill in enumerate(kills, 1):
            if time.monotonic() - began > 60 * given.minutes:
                kills = kills[: number - 1]
                break
            run.until(kill)
            run.hit(kill)
            print(f"{number} of {len(kills)}: {kill}", flush=True)
        codes = [run.torchrun.wait(), undisturbed.torchrun.wait()]
    finally:
        for one in (run, undisturbed):
            if one.torchrun.poll() is None:
                one.torchrun.terminate()
                one.torchrun.wait()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {run.errors()[-5:]} {undisturbed.errors()[-5:]}")
    header = read_json(run.folder / "header.json") or {}
    resumed = [one["after_step"] for one in header.get("resumed", [])]
    return {
        "steps": given.steps,
        "processes": given.processes,
        "parallel": given.parallel,
        "seed": given.seed,
        "kills_planned": given.kills,
        "trained_parameters": header["trained_parameters"],
        "kills": [asdict(kill) for kill in kills],
        "starts_by_hand": run.starts,
        "resumed_after": resumed,
        "disagreements": len(run.errors("ranks disagree") + run.errors("differ between ranks")),
        "differences": compared(run, undisturbed, given.steps),
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after so many no more kills are begun")
    given = parser.parse_args()
    out = given.out.resolve()
    origin = header()
    with tempfile.TemporaryDirectory(prefix="gnmr-soak-") as name:
        os.chdir(name)
        os.environ["GNMR_CACHE"] = str(Path(name, "cache"))
        make_inputs(Path(name))
        found = soak(given, Path(name))
    out.write_text(json.dumps(origin | found, indent=1) + "\n")
    apart, other = found["disagreements"], found["differences"]
    print(f"{len(found['kills'])} kills, {len(found['resumed_after'])} resumptions, {apart} disagreements", end="; ")
    print(f"{len(other)} differences {other[:5]}")
    return 1 if other or apart else 0


if __name__ == "__main__":
    sys.exit(main())
