"""Growth of time and memory with the number of operators: controller, records, price, diagnose and plan.

    python benchmarks/growth.py OUT.json                      30, 300, 3,000 and 30,000 operators
    python benchmarks/growth.py OUT.json --operators 30 300

The model is synthetic: linears of width 16 in blocks of seven, each with a residual connection, on 32 tokens. Its own
arithmetic is negligible, so the result is the cost per operator. Each number of operators runs in a separate process.
Times are CPU seconds of one thread, which depend least on other work on the machine. `peak` is the largest resident
memory of the process up to the end of a part. The plan is chosen from random prices.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gnmr
from gnmr.names import GEMMS
from gnmr.plan.knapsack import choose
from timing import write

WIDTH, TOKENS, VOCABULARY, STEPS = 16, 32, 32, 5
WATCHED = 12
"""Number of first steps in which hooks check gradients for warnings (`gnmr.attachment.hints`)."""


class Block(nn.Module):
    """Seven linears, each added to its input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.operators = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for operator in self.operators:
            x = x + operator(x) / 16
        return nn.functional.normalize(x, dim=-1)


class Deep(nn.Module):
    """A language model with this many linears before its head."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(min(7, operators - first)) for first in range(0, operators, 7)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def grown(operators: int) -> list[dict[str, Any]]:
    """Return CPU seconds and peak memory of every part for a model of `operators` operators."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, rows = Deep(operators), list[dict[str, Any]]()
    batches = [torch.randint(VOCABULARY, (1, TOKENS)) for _ in range(4)]

    def timed(part: str, work: Callable[[], Any], times: int = 1) -> Any:
        seconds = []
        for _ in range(times):
            began = time.process_time()
            found = work()
            seconds.append(time.process_time() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append({"operators": operators, "part": part, "seconds": min(seconds), "peak_mib": round(peak)})
        return found

    def passes() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(batches[0])[0], batches[1][0]).backward()

    def first_step() -> None:
        passes()
        controller.step()

    path: dict[str, Any] = {"targets": ["blocks.*"], "low": "int4", "recovery": "int8", "max_o": 4}
    controller = timed("attach", lambda: gnmr.attach(model, **path))
    timed("first step, which counts GEMMs", first_step)
    timed("forward and backward, int4 saved", passes)
    for _ in range(WATCHED):
        controller.step()
    timed("controller.step()", controller.step, STEPS)
    timed("controller.state_dict()", controller.state_dict)
    controller.detach()
    with tempfile.TemporaryDirectory(prefix="gnmr-growth-") as folder:
        controller = gnmr.attach(model, **path, record=f"{folder}/run")
        passes()
        for _ in range(WATCHED):
            controller.step()
        timed("controller.step(), recording", controller.step, STEPS)
        timed("end of the records", controller.detach)
    draw = np.random.default_rng(0).lognormal(-12, 2, (operators, len(GEMMS)))
    items = {(f"{i}", gemm): price for i, own in enumerate(draw) for gemm, price in zip(GEMMS, own, strict=True)}
    prices = {item: {"nvfp4": nats, "mxfp8": nats / 50, "bf16": 0.0} for item, nats in items.items()}
    times = {item: {"nvfp4": 1.0, "mxfp8": 2.0, "bf16": 4.0} for item in items}
    timed("choice of a plan, budget +10%", lambda: choose(prices, times, "nvfp4", 0.1))
    controller = gnmr.attach(model, **path | {"signal": "price", "options": {"every": 1}})
    timed("first step with prices", first_step)
    controller.detach()
    settings: dict[str, Any] = {"targets": ["blocks.*"], "recipe": "fp8_hybrid", "confirm": 0}
    found = timed("diagnose, 2 batches", lambda: gnmr.diagnose(model, model, batches[:2], **settings))
    plan = found.plan(0.1)
    timed("attach(plan=...)", lambda: gnmr.attach(model, plan=plan).detach())
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--operators", type=int, nargs="+", default=[30, 300, 3_000, 30_000])
    asked = parser.parse_args()
    rows = []
    for operators in asked.operators:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            rows += process.submit(grown, operators).result()
    write(asked.out, rows)


if __name__ == "__main__":
    main()
