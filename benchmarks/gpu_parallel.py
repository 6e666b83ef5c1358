"""Several GPUs of one machine, in at most ten minutes: what was tried on CPUs with gloo alone.

    python benchmarks/gpu_parallel.py OUT.json              all GPUs that are there
    python benchmarks/gpu_parallel.py OUT.json --gpus 4

One start of a process a GPU, one small file, written anew after each check, so that a hang leaves what was before it:

    nccl     the sum of a step has the same bits in all ranks, those of the sum on the host
    runs     20 steps of a 130 M model under DDP, FSDP2 and HSDP (4 GPUs or more) against one process with as many
             micro-batches: losses, sets, weights equal wherever they should be
    fp8      the same with FP8 GEMMs of the hardware (compute capability 8.9 or newer)
    speed    steps with control against steps without, the sum over ranks, tokens a second

Exit code 2, in one line, on a machine without GPUs; 1 where a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnmr.bench import parallel
from gnmr.bench.figures import describe_machine
from gnmr.config import Config
from gnmr.config.compose import compose
from gnmr.distributed import digests
from gnmr.distributed.launch import launch
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.world import ALONE, World, joined
from gnmr.errors import RunFailed, UserError
from gnmr.training.build import assemble, training_blocks
from gnmr.training.provenance import told_command
from gnmr.training.steps import Steps

SECONDS = 540
WORDS = ["experiment=act_quant_stress", "scale=130m", "data.name=text", "data.vocab_size=4096", "training.seq_len=1024"]
WORDS += ["training.batch_size=4", "training.steps=20", "training.eval_blocks=2", "controller.alpha=1.05"]
WORDS += ["controller.beta=1.02", "controller.warmup_frac=0", "optim.warmup_frac=0.1", "records.wandb=off"]
FP8 = ["paths.low=fp8_hybrid", "paths.recovery=bf16", "paths.backend=scaled_mm"]
CLOSE = 2e-2
"""Relative difference up to which two sums of BF16 losses are called equal: ranks add in another order."""


@dataclass(frozen=True)
class Plan:
    """What is to be checked; all that a process needs to know."""

    words: list[str]
    fp8: list[str]
    cuda: bool
    steps: int
    rounds: int
    out: str
    head: dict[str, Any]
    alone: dict[str, Any]
    """What one process found, by check (`traced`)."""


def kinds(size: int) -> list[str]:
    """How so many processes can share a model."""
    return ["ddp", "fsdp", *(["hsdp"] if size >= 4 and size % 2 == 0 else [])]


def traced(words: Sequence[str], size: int, parallel: str, world: World, steps: int) -> dict[str, Any]:
    """The first steps of a run with a micro-batch for each of `size` processes: losses, sets, digest of the weights."""
    config = _config(words, size, parallel)
    parts = assemble(config, Path(), lambda _: None, world)
    take_step = Steps(parts, training_blocks(config, parts.corpus, None))
    losses, sets = list[float](), list[list[int]]()
    for step in range(1, steps + 1):
        result = take_step(step)
        losses.append(result.loss)
        sets.append(np.flatnonzero(result.decision.in_force).tolist())
    weights = dict(parts.model.named_parameters())
    return {"losses": losses, "sets": sets, "digest": digests.of_run(weights, world, steps)}


def _config(words: Sequence[str], size: int, parallel: str) -> Config:
    config = compose(list(words))
    return replace(config, parallel=parallel, training=replace(config.training, accumulation=size))


def against(alone: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """How far a run of several processes is from that of one."""
    ours, theirs = (np.array(one["losses"]) for one in (found, alone))
    apart = float(np.max(np.abs(ours / theirs - 1))) if np.isfinite(ours).all() else float("inf")
    other = sum(a != b for a, b in zip(found["sets"], alone["sets"], strict=True))
    return {
        "passed": apart <= CLOSE,
        "losses_apart": apart,
        "steps_with_other_sets": other,
        "same_weights": found["digest"] == alone["digest"],
    }


def sums_of_ranks(world: World, device: torch.device) -> dict[str, Any]:
    """Whole numbers and fractions summed by `Ranks`, against the same on the host; every rank has the same bits."""
    draws = [
        torch.rand(10_000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(8)
    ]
    own = torch.stack([torch.arange(10_000) + world.rank, draws[world.rank % 8]]).to(device, torch.float64)
    found = Ranks().sum({"numbers": own})["numbers"].cpu()
    whole = world.size * torch.arange(10_000) + sum(range(world.size))
    fractions = torch.stack([draws[rank % 8] for rank in range(world.size)]).sum(0)
    near = bool(torch.allclose(found[1], fractions, rtol=1e-14, atol=0))
    same = len(set(world.gather(found.numpy().tobytes()))) == 1
    return {"passed": bool(torch.equal(found[0], whole.double())) and near and same, "same_bits_in_all_ranks": same}


def speed(plan: Plan, kind: str, world: World) -> dict[str, Any]:
    """Control's share of a step, and tokens a second without it; of this rank."""
    config = _config(plan.words, world.size, kind)
    found = parallel.of_process(config, world, plan.rounds)
    bare = float(np.median(found["bare"]))
    tokens = config.training.batch_size * config.training.seq_len
    return {
        "passed": True,
        "step_over_step_without": float(np.median(found["controlled"] / found["bare"])),
        "its_sum_of_a_step": float(np.median(found["sum"]) / bare),
        "step_without_s": bare,
        "tokens_per_s_of_a_gpu": tokens / bare,
        "bytes_of_the_sum": int(found["bytes"][0]),
    }


def checks(plan: Plan, world: World) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names and what they do, in order; all ranks play each together."""
    device = torch.device("cuda", torch.cuda.current_device()) if plan.cuda else torch.device("cpu")
    yield "nccl" if plan.cuda else "gloo", lambda: sums_of_ranks(world, device)
    for what, words in (("runs", plan.words), ("fp8", plan.fp8)):
        for kind in kinds(world.size) if words else ():
            yield f"{what}, {kind}", partial(compared, plan, what, words, kind, world)
    for kind in kinds(world.size):
        yield f"speed, {kind}", partial(speed, plan, kind, world)


def compared(plan: Plan, what: str, words: list[str], kind: str, world: World) -> dict[str, Any]:
    """Losses of the ranks against those of one process."""
    return against(plan.alone[what], traced(words, world.size, kind, world, plan.steps))


def of_rank(plan: Plan) -> tuple[str, Any]:
    """One of the processes: plays all checks; rank 0 writes. A check that raises ends them."""
    signal.alarm(SECONDS)  # a hang in a collective cannot be interrupted otherwise
    try:
        with joined(plan.cuda) as world:
            return "done", played(plan, world)
    except UserError as error:
        return "mistake", str(error)
    except RunFailed as error:
        return "failed", str(error)


def played(plan: Plan, world: World) -> dict[str, Any]:
    """What came of every check, by name."""
    found: dict[str, Any] = {}
    for name, check in checks(plan, world):
        began = time.monotonic()
        with world.agreed():
            found[name] = check()
        found[name]["seconds"] = round(time.monotonic() - began, 1)
        if world.first:
            write(plan, world.size, found, finished=False)
    if world.first:
        write(plan, world.size, found, finished=True)
    return found


def write(plan: Plan, size: int, found: dict[str, Any], finished: bool) -> None:
    """The result so far."""
    tree = {**plan.head, "processes": size, "finished": finished, "checks": found}
    Path(plan.out).write_text(json.dumps(tree, indent=1) + "\n")


def make_text(path: Path) -> None:
    """Some 600,000 words of babble."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(3000)]
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(50_000)))


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    given = parser.parse_args(argv)
    there = torch.cuda.device_count()
    if there < 2 or not 2 <= given.gpus <= there:
        print(f"gpu_parallel: needs 2 GPUs or more, here are {there}", file=sys.stderr)
        return 2
    head = {
        "command": told_command(shlex.join(["python", "benchmarks/gpu_parallel.py", *argv])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_machine(),
    }
    with tempfile.TemporaryDirectory(prefix="gnmr-gpu-") as name:
        make_text(Path(name, "babble.txt"))
        words = [*WORDS, f"data.path={name}/babble.txt", f"data.cache_dir={name}/cache"]
        fp8 = [*words, *FP8] if torch.cuda.get_device_capability() >= (8, 9) else []
        alone = {
            what: traced(asked, given.gpus, "none", ALONE, 20)
            for what, asked in (("runs", words), ("fp8", fp8))
            if asked
        }
        plan = Plan(words, fp8, True, 20, 30, str(given.out.resolve()), head, alone)
        try:
            found = launch(given.gpus, of_rank, plan)[0]
        except (UserError, RunFailed) as error:
            print(f"gpu_parallel: {error}; {given.out} has what came before", file=sys.stderr)
            return 1
    failed = [name for name, one in found.items() if not one["passed"]]
    print(f"{len(found)} checks, {len(failed)} failed {failed}: {given.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
