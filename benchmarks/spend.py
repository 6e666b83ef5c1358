"""What recovery buys: the fraction of the BF16 loss gap that an arm recovers, against the GEMM FLOPs that it spends.

    python benchmarks/spend.py OUT.jsonl sim_e2m1 --base RUN,RUN --orders 5
    python benchmarks/spend.py OUT.jsonl quick                                # of the shipped base, minutes

A fork continues a base for 40 steps in low precision with the GEMMs of its arm in BF16. Its loss is the validation
loss in BF16 afterwards. Forks of one base and data order share their data: they are a block, the unit of a paired
test. An arm fills the budget, a fraction of the GEMM FLOPs, with the operators that it ranks highest per FLOP:

    never, always                           no GEMM in BF16, and all of them
    price, gradient norm, gap, mse, ...     pins by a score of the base, which is measured once
    random, first, last, first_last         pins by the usual guesses
    NAME, each step                         a controller, which chooses anew in every step

Every fork is one line of OUT.jsonl, written when it is done; the same command continues after an interruption.
`never` and `always` come first: without a gap between them no other arm is run.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from gnmr.doctor.knapsack import GUESSES, arithmetic, by_score, guess
from gnmr.lab.config import Config
from gnmr.lab.train.build import Parts, validation
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.loss import loss_of
from gnmr.lab.train.provenance import commit
from gnmr.measure.errors import measure_errors
from gnmr.measure.price import measure_prices
from gnmr.names import GEMMS
from gnmr.precision.conversion import operator_shapes

EACH = ", each step"
BOUNDS = {"never": 0.0, "always": 1.0}
SIGNALS = {
    "random": "controller.signal=random",
    "price": "controller.signal=price +controller.options.every=10",
    "pin excess": "controller.signal=pin_excess +controller.options.every=1",
    "GNMR": "controller.signal=gnmr_delta",
    "gap": "controller.signal=recovery_gap",
    "MSE": "controller.signal=mse",
    "gradient norm": "controller.signal=grad_norm",
}


@dataclass(frozen=True)
class Scene:
    """A low path and the arms that are tried on it."""

    low: str
    budgets: tuple[float, ...]
    recovers: tuple[str, ...] = GEMMS
    """GEMMs of an operator that a budget buys."""
    pins: tuple[str, ...] = ("price",)
    guesses: tuple[str, ...] = ("random",)
    controllers: tuple[str, ...] = ("GNMR",)
    fault: str = ""
    """Words of the fault, which hits one operator, another one in every block."""


SCORES = ("price", "gradient norm", "update norm", "gap", "mse")
FPROP = GEMMS[:1]
SCENES = {
    "sim_e2m1": Scene("sim_e2m1", (0.025, 0.05, 0.075, 0.10, 0.15, 0.25), FPROP, SCORES, GUESSES, ("GNMR", "price")),
    "nvfp4": Scene("nvfp4", (0.05, 0.10, 0.25), FPROP, ("price", "gap", "mse")),
    "int4": Scene("int4", (0.05, 0.10, 0.25), GEMMS, SCORES, GUESSES, ("GNMR", "price")),
    "broken": Scene(
        "fp8_hybrid",
        (0.025, 0.05, 0.10),
        ("fprop", "wgrad"),  # the GEMMs that read the input, which is broken
        controllers=("GNMR", "pin excess", "gap", "MSE", "gradient norm", "random"),
        fault="faults.kind=scale_down faults.magnitude=64 faults.windows=[[21,20]]",
    ),
    "quick": Scene("int2", (0.10,), controllers=("GNMR", "price", "random")),
}


def arms_of(scene: Scene) -> list[tuple[str, float]]:
    """Return (arm, budget) of all arms."""
    names = [*scene.pins, *scene.guesses, *(name + EACH for name in scene.controllers)]
    return [(name, budget) for budget in scene.budgets for name in names]


@dataclass(frozen=True)
class Cell:
    """A fork without its outcome."""

    base: str
    scene: str
    arm: str
    budget: float
    order: int


@dataclass(frozen=True)
class Ranked:
    """A base, and what its pins are chosen by."""

    forks: Forks
    parts: Parts
    scores: dict[str, np.ndarray]


def config_of(cell: Cell, scene: Scene, base: Ranked) -> Config:
    """Return the config of a fork."""
    words = [f"fork.order={cell.order}", "fork.heal=0"]
    names = [operator.operator_name for operator in base.parts.converted.operators]
    if scene.fault:
        broken = random.Random(f"{cell.base} {cell.order}").choice(names)
        words += [f"faults.targets=[{broken}]", *scene.fault.split()]
    if cell.arm.endswith(EACH):
        words += ["controller.routing=ranked", f"controller.budget={cell.budget}", "controller.max_o=null"]
        words += [*SIGNALS[cell.arm.removesuffix(EACH)].split(), f"precision.recovers=[{','.join(scene.recovers)}]"]
        return forked(base.forks, scene.low, *words)
    if cell.arm in BOUNDS:
        pins = {operator: list(GEMMS) for operator in names} if cell.arm == "always" else {}
    elif cell.arm in GUESSES:
        costs = arithmetic(operator_shapes(base.parts.model, base.parts.config.precision))
        pins = guess(cell.arm, {}, costs, cell.budget, gemms=scene.recovers, seed=cell.order).pins
    else:
        pins = pins_of(base.parts, base.scores[cell.arm], cell.budget, scene.recovers)
    config = forked(base.forks, scene.low, *words)
    return replace(config, precision=replace(config.precision, pins=pins))


def run(cell: Cell, scene: Scene, base: Ranked) -> dict[str, Any]:
    """Make the fork and return its row."""
    result = base.forks(config_of(cell, scene, base), phases=("low",))
    found = {"loss": result.validation["low"].high, "spent": result.spent, "steps": len(result.losses)}
    return asdict(cell) | found | {"checkpoint": base.forks.base.found.sha256[:12], "commit": commit()}


MEASURED = 16
"""Validation sequences that scores are measured on."""


def forked(forks: Forks, low: str, *words: str) -> Config:
    """Return the config of a fork that stays on this low path; formats of activations are read in the forward pass."""
    site = ["precision.site=forward"] if low in ("int4", "int2") else []
    static = [f"precision.low={low}", "precision.recovery=bf16", "controller.signal=always_low"]
    return forks.config(*static, *site, *words)


def scored(parts: Parts) -> dict[str, np.ndarray]:
    """Return the scores of all operators by name, (operators,) each, on the high-precision path."""
    plan, model = parts.converted, parts.model
    model.eval()
    for operator in plan.operators:
        operator.switch(True)
    meter = measure_prices(plan, ["price_fprop"], tokens=1)
    probe = measure_errors(plan, ["gap_low", "mse"])
    batches = validation(parts.config, parts.corpus, MEASURED).split(parts.config.training.batch_size)
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    weights, seen = [operator.weight for operator in plan.operators], probe.read()
    found = {
        "price": meter.by_operator()["fprop"].numpy().copy(),
        "gradient norm": np.array([float(weight.grad.norm()) for weight in weights]),  # type: ignore[union-attr]
        "update norm": np.array([update_norm(parts.optimizer, weight) for weight in weights]),
        "gap": seen["gap_low"].numpy(),
        "mse": seen["mse"].numpy(),
    }
    plan.shared.prices = plan.shared.probe = None
    model.zero_grad(set_to_none=True)
    return found


def update_norm(optimizer: torch.optim.Optimizer, weight: Tensor) -> float:
    """Return the norm of Adam's last update over the learning rate."""
    state = optimizer.state[weight]
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    step = float(state["step"])
    first, second = state["exp_avg"].double() / (1 - beta1**step), state["exp_avg_sq"].double() / (1 - beta2**step)
    return float((first / (second.sqrt() + 1e-8)).norm())


def pins_of(parts: Parts, score: np.ndarray, budget: float, gemms: Sequence[str]) -> dict[str, list[str]]:
    """Return the pins that fill a budget with the operators of the highest score per FLOP."""
    costs = arithmetic(operator_shapes(parts.model, parts.config.precision))
    names = [operator.operator_name for operator in parts.converted.operators]
    rates = {name: float(value) / costs[name, "fprop"] for name, value in zip(names, score, strict=True)}
    return by_score(rates, {}, costs, budget, gemms=gemms).pins


def recorded(out: Path) -> dict[Cell, dict[str, Any]]:
    """Return the rows of an earlier call; a last line that was cut off is removed from the file."""
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    if lines and not lines[-1].endswith("\n"):
        out.write_text("".join(lines := lines[:-1]))
    rows = [json.loads(line) for line in lines]
    return {Cell(*(row[key] for key in Cell.__dataclass_fields__)): row for row in rows}


def gaps_of(frame: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the loss of `never`, and what it lies above `always`, by base and order."""
    never, always = (frame[frame.arm == arm].set_index(["base", "order"]).loss for arm in BOUNDS)
    return never, (never - always).dropna()


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return, by arm and budget, the mean recovered fraction of the base's gap and its standard error over blocks."""
    frame = pd.DataFrame(rows)
    never, gaps = gaps_of(frame)
    gap, keys = gaps.groupby("base").mean(), zip(frame.base, frame.order, frame.loss, strict=True)
    frame["recovered"] = [(never[base, order] - loss) / gap[base] for base, order, loss in keys]
    told = {"spent": ("spent", "mean"), "recovered": ("recovered", "mean"), "error": ("recovered", "sem")}
    return frame.groupby(["arm", "budget"], sort=False).agg(**told, n=("recovered", "size"))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--base", default="shipped", help="run folders, with commas between them")
    parser.add_argument("--orders", type=int, default=3)
    asked = parser.parse_args()
    scene, known = SCENES[asked.scene], recorded(asked.out)
    bases = {}
    for name in asked.base.split(","):
        forks = Forks(name, print)
        parts = forks.parts(forked(forks, scene.low))
        bases[forks.base.name] = Ranked(forks, parts, scored(parts))
    blocks = [(base, order) for order in range(asked.orders) for base in bases]
    for arms in ([*BOUNDS.items()], arms_of(scene)):
        for base, order in blocks:
            for arm, budget in arms:
                if (cell := Cell(base, asked.scene, arm, budget, order)) in known:
                    continue
                known[cell] = run(cell, scene, bases[base])
                with asked.out.open("a") as rows:
                    rows.write(json.dumps(known[cell]) + "\n")
                print(f"{base}, order {order}, {arm}, {budget:.1%}: {known[cell]['loss']:.4f}", flush=True)
        gaps = gaps_of(pd.DataFrame(known.values()))[1]
        if len(gaps) > 1 and not stats.ttest_1samp(gaps, 0.0, alternative="greater").pvalue < 0.05:
            print(f"no gap (mean {gaps.mean():.4f} nats): no other arm is run")
            return
    print(table([*known.values()]).round(4).to_string())


if __name__ == "__main__":
    main()
