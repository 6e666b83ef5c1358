"""How long a training step takes under one choice of paths or controller against another, on CPUs or on one CUDA GPU.

    python benchmarks/step.py OUT.json --only controller --rounds 40
    python benchmarks/step.py OUT.json --only controller --clock cpu training.threads=1
    python benchmarks/step.py OUT.json --only paths --arms '^(bf16|int4|nvfp4)$' model=llama_350m data=stdlib

An arm is words behind `gnmr train`; overrides that hold for all arms stand behind the options. The arms of a part take
turns, and each is compared with the part's first one:

    controller   a bare loop over the low path; the router with thresholds that no unit reaches; each signal
    paths        every format and recipe against BF16, with the bytes kept for backward and the peak memory of a GPU
    compiled     BF16 and FP8 under torch.compile, and the controller on them; minutes of compilation
    share        the step of `gnmr train` with its records: what norms, decision and records take of it, timed where it
                 runs, over the median step of the bare loop (on CPUs)

An arm that this model or machine cannot run is a row with `refused`. `--clock cpu training.threads=1` counts the CPU
time of one thread, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gnmr.control import Controller
from gnmr.control.norms import UnitNorms
from gnmr.errors import UserError
from gnmr.lab.config.compose import compose
from gnmr.lab.records.recorder import Recorder
from gnmr.lab.train import rows
from gnmr.lab.train.build import Parts, assemble, first_batch, train_step
from gnmr.lab.train.step import loss_of, objective_of
from gnmr.names import FORMATS, RECIPES
from gnmr.precision.cost import Cost
from gnmr.records.rows import event_rows, unit_rows
from timing import alternate, clock_of, spread, write

SIGNALS = ("gnmr_delta", "price", "mse", "grad_norm", "oracle")
HARDWARE = ("fp8_hybrid", "fp8_delayed", "deepseek_v3")
"""Recipes that a GPU with FP8 multiplies itself."""
BARE = "no controller"


def static(low: str, *words: str) -> tuple[str, ...]:
    """Return the words of an arm with every operator on `low` and nothing to recover to."""
    return (f"precision.low={low}", "precision.recovery=null", "controller.warmup_frac=0", *words)


EAGER, COMPILED = "training.compile=false", "training.compile=true"
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "controller": {
        BARE: (),
        "monitoring": ("controller.alpha=1e9", "controller.beta=1e9"),
        **{name: (f"controller.signal={name}",) for name in SIGNALS},
    },
    "paths": {name: static(name) for name in dict.fromkeys(("bf16", *FORMATS, *RECIPES))}
    | {f"{name}, scaled_mm": static(name, "precision.backend=scaled_mm") for name in HARDWARE},
    "compiled": {
        "BF16": static("bf16", EAGER),
        "BF16, compiled": static("bf16", COMPILED),
        "FP8": static("fp8_hybrid", EAGER),
        "FP8, compiled": static("fp8_hybrid", COMPILED),
        "FP8, compiled, controlling": (
            *("precision.low=fp8_hybrid", "precision.recovery=bf16", "precision.unit=block", COMPILED),
            *("controller.max_o=1", "controller.alpha=1", "controller.beta=null"),
        ),
    },
}


def bare_step(parts: Parts) -> Callable[[], object]:
    """Return forward, loss, backward and AdamW on one batch, without controller and records."""
    batch = first_batch(parts)

    def step() -> None:
        losses = []
        for block in batch:
            loss = loss_of(parts.model, block)
            (objective_of(parts.model, loss) / len(batch)).backward()
            losses.append(loss.detach())
        parts.converted.end_step()
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        float(torch.stack(losses).mean())

    return step


def run_step(parts: Parts) -> Callable[[], Any]:
    """Return the step of `gnmr train` on one batch."""
    take_step, batch = train_step(parts), first_batch(parts)
    return lambda: take_step(batch, parts.config.optim.lr)


INSIDE = (
    (UnitNorms, "__call__", "norms"),
    *((Controller, name, "decision") for name in ("measure", "observe", "apply")),
    *((Cost, name, "records") for name in ("saved_bytes", "predicted_bytes", "spent")),
)
"""(owner, function, part) of what a step has because of the controller and its records."""


def share(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the share of a step that each part of controller and records takes, and that of all of them."""
    config = compose([*asked.overrides, "records.wandb=off", "records.live=off"])
    clock, taken = clock_of(torch.device("cpu"), asked.clock), dict[str, list[float]]()

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = clock()
            try:
                return work(*given, **named)
            finally:
                taken[part][-1] += clock() - began

        return run

    with tempfile.TemporaryDirectory(prefix="gnmr-step-") as folder, ExitStack() as stack:
        parts = assemble(config, Path(folder), print)
        bare, take_step, counters = bare_step(parts), run_step(parts), rows.Counters()
        recorder = stack.enter_context(Recorder(rows.run_info(parts, "step"), config.records, None))
        recorder.start("", {}, {})
        for owner, name, part in INSIDE:
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))

        def record(result: Any) -> None:
            recorder.step(rows.step_row(result, counters, 0.0), unit_rows(result.decision))
            recorder.events(event_rows(result.decision))

        record = timed("records", record)

        def controlled() -> None:
            for part in ("norms", "decision", "records"):
                taken.setdefault(part, []).append(0.0)
            counters.step += 1
            record(take_step())

        seconds = alternate({BARE: bare, "with records": controlled}, range(-2, asked.rounds), clock)
    usual = float(np.median(seconds[BARE]))
    shares = {part: np.array(each[2:]) / usual for part, each in taken.items()}
    shares["all"] = np.sum(list(shares.values()), axis=0)
    return [{"part": "share", "arm": BARE, "seconds": spread(seconds[BARE])}] + [
        {"part": "share", "arm": part, "share": spread(values)} for part, values in shares.items()
    ]


def memory(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Take a step and return the bytes that it kept for backward, and a GPU's peak above what was allocated before."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    result = step()
    found = {"saved_bytes": result.saved_bytes, "saved_bytes_predicted": result.saved_bytes_predicted}
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def measure(part: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of the part's first arm, the ratio of every other arm to it, and what each arm keeps."""
    steps: dict[str, Callable[[], object]] = {}
    found: list[dict[str, Any]] = []
    device = torch.device("cpu")
    for arm, words in PARTS[part].items():
        if not re.search(asked.arms, arm):
            continue
        try:
            parts = assemble(compose([*asked.overrides, *words]), Path(), print)
        except UserError as error:
            found.append({"part": part, "arm": arm, "refused": str(error)})
            continue
        device, step = parts.device, bare_step(parts) if arm == BARE else run_step(parts)
        if part == "paths":
            found.append({"part": part, "arm": arm, **memory(step, device)})
        steps[arm] = step
    seconds = alternate(steps, range(-2, asked.rounds), clock_of(device, asked.clock))
    first = next(iter(seconds.values()), None)
    for arm, values in seconds.items():
        found.append({"part": part, "arm": arm, "seconds": spread(values), "ratio": spread(values / first)})
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of the config, as for gnmr train")
    parser.add_argument("--only", choices=[*PARTS, "share"], help="one part; without it controller and paths")
    parser.add_argument("--arms", metavar="REGEX", default="", help="only the arms whose names match (re.search)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_intermixed_args()
    torch._dynamo.config.recompile_limit = 64  # compiled arms share the code of one block
    if asked.only == "share":
        write(asked.out, share(asked))
        return
    found = [row for part in ([asked.only] if asked.only else ["controller", "paths"]) for row in measure(part, asked)]
    write(asked.out, found)


if __name__ == "__main__":
    main()
