"""Time of a LLaMA step with gnmr attached at two commits, and the extra time to count its GEMMs.

    git worktree add ../before COMMIT
    python benchmarks/versions.py OUT.json --before ../before --starts 3

Each arm is a separate process with one thread, and its seconds are CPU time. The processes take turns, step by step.
They are started several times, because the memory layout of a process changes its speed by a percent:

    before      gnmr of the other checkout
    again       the same once more: the difference between two equal arms
    now         gnmr of this checkout, which counts the GEMMs of the first step
    uncounted   the same without that count

All arms see the same batch and begin with the same weights, so equal code has equal losses. `hooks` is the number of
hooks on the model's modules after the last step. `first` is the time of the first step, which the medians exclude.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

HERE = Path(__file__).resolve().parents[1]
WARM_UP = 3
"""Steps after each start that the medians exclude; the first of them counts the GEMMs."""


def attached_step(counted: bool, batch: int = 2, length: int = 128, **sizes: Any) -> tuple[Any, Callable[[], float]]:
    """Return a LLaMA of `gnmr train` with gnmr attached, and its training step, which returns the loss.

    The model is model=llama with these `sizes`.
    """
    import gnmr
    from gnmr.lab import models
    from gnmr.lab.config import ModelConfig

    if not counted:
        from gnmr.measure.coverage import Counting

        Counting.arm = lambda self: None  # type: ignore[method-assign]
    model = models.build(ModelConfig(**sizes), 4096, length)
    model.init_weights(torch.Generator().manual_seed(0))
    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(4096, (batch, length + 1), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, step


def hooks(model: torch.nn.Module) -> int:
    """Return the number of hooks around forward passes of the model's modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def serve(counted: bool) -> None:
    """Take a step for each line of stdin; answer with its CPU seconds, its loss and the number of remaining hooks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, step = attached_step(counted)
    for _ in sys.stdin:
        began = time.process_time()
        loss = step()
        print(time.process_time() - began, loss.hex(), hooks(model), flush=True)


def main() -> None:
    """Run the command."""
    from timing import alternate, spread, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--starts", type=int, default=3, help="how often the processes are started, each for all rounds"
    )
    asked = parser.parse_args()
    checkouts = {"before": asked.before, "again": asked.before, "now": HERE, "uncounted": HERE}
    replies: dict[str, list[tuple[str, ...]]] = {name: [] for name in checkouts}
    total = [0.0]

    def turn(name: str, child: subprocess.Popen[str]) -> None:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        replies[name].append(tuple(child.stdout.readline().split()))
        total[0] += float(replies[name][-1][0])

    every = []
    for _ in range(asked.starts):
        children = {name: _start(name, checkout) for name, checkout in checkouts.items()}
        arms = {name: partial(turn, name, child) for name, child in children.items()}
        every.append(alternate(arms, range(-WARM_UP, asked.rounds), lambda: total[0]))
        for child in children.values():
            child.communicate()
    seconds = {name: np.concatenate([one[name] for one in every]) for name in checkouts}
    commits = {name: _commit(checkout) for name, checkout in checkouts.items()}
    rows: list[dict[str, Any]] = []
    for name, values in seconds.items():
        first = [float(reply[0]) for reply in replies[name][:: WARM_UP + asked.rounds]]
        _, loss, left = replies[name][-1]
        said = {"arm": name, "commit": commits[name], "hooks": int(left), "loss": float.fromhex(loss)}
        said |= {"first": spread(first), "seconds": spread(values), "ratio": spread(values / seconds["before"])}
        rows.append(said)
    rows.append({"arm": "now / uncounted", "ratio": spread(seconds["now"] / seconds["uncounted"])})
    write(asked.out, rows)


def _start(name: str, checkout: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, __file__, "--serve", name]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _commit(checkout: Path) -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    return found.stdout.strip()[:10]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(counted=sys.argv[2] != "uncounted")
    else:
        main()
