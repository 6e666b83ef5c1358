"""Prices against the truth: what one operator in low precision costs the loss, and what one GEMM in 16 bits gains.

    python benchmarks/price.py OUT.json truth --base RUN           the base with one operator in low precision
    python benchmarks/price.py OUT.json forks --base RUN           forks of the base with one GEMM in 16 bits
    python benchmarks/price.py OUT.json truth --low nvfp4,mxfp4    other low paths

The base is a run folder or `shipped`. Scores are measured on `MEASURED` validation sequences, and the loss on
`HELD_OUT` others. Beside the price stand the scores that other work ranks by. Each row is the Spearman
correlation of a score with the truth; `share` is the part of the whole loss increase that lies in the operators that
the score ranks highest, at 10% of the GEMM FLOPs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from gnmr.doctor.knapsack import arithmetic, by_score
from gnmr.lab.config import Config
from gnmr.lab.train.build import Parts, validation
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.step import loss_of
from gnmr.measure.errors import measure_errors
from gnmr.measure.price import measure_prices
from gnmr.names import GEMMS
from gnmr.precision.conversion import operator_shapes
from timing import write

MEASURED, HELD_OUT, SHARE = 16, 96, 0.1
OWN = {"fprop": "price", "dgrad": "dgrad error", "wgrad": "wgrad error"}
"""The score that belongs to each GEMM."""


def forked(forks: Forks, low: str, *words: str) -> Config:
    """Return the config of a fork that stays on this low path; formats of activations are read in the forward pass."""
    site = ["precision.site=forward"] if low in ("int4", "int2") else []
    static = [f"precision.low={low}", "precision.recovery=bf16", "controller.signal=always_low"]
    return forks.config(*static, *site, *words)


def sequences(parts: Parts, count: int) -> Any:
    """Return (count, T + 1) validation sequences."""
    return validation(parts.config, parts.corpus, count)


def scored(parts: Parts) -> dict[str, np.ndarray]:
    """Return the scores of all operators by name, (operators,) each, on the high-precision path."""
    plan, model = parts.converted, parts.model
    model.eval()
    for operator in plan.operators:
        operator.switch(True)
    meter = measure_prices(plan, ["price_fprop", "price_dgrad", "price_wgrad"], tokens=1)
    probe = measure_errors(plan, ["gap_low", "mse"])
    batches = sequences(parts, MEASURED).split(parts.config.training.batch_size)
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()
    own, seen = meter.by_operator(), probe.read()
    norms = np.array([float(operator.weight.grad.norm()) for operator in plan.operators])  # type: ignore[union-attr]
    plan.shared.prices = plan.shared.probe = None
    model.zero_grad(set_to_none=True)
    return {
        "price": own["fprop"].numpy().copy(),
        "dgrad error": own["dgrad"].numpy().copy(),
        "wgrad error": own["wgrad"].numpy() * norms**2,
        "gradient norm": norms,
        "update norm": np.array([update_norm(parts.optimizer, operator.weight) for operator in plan.operators]),
        "gap": seen["gap_low"].numpy(),
        "mse": seen["mse"].numpy(),
    }


def update_norm(optimizer: torch.optim.Optimizer, weight: Tensor) -> float:
    """Return the norm of Adam's last update over the learning rate."""
    state = optimizer.state[weight]
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    step = float(state["step"])
    first, second = state["exp_avg"].double() / (1 - beta1**step), state["exp_avg_sq"].double() / (1 - beta2**step)
    return float((first / (second.sqrt() + 1e-8)).norm())


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b)[0]) if np.ptp(a) and np.ptp(b) else 0.0


def increases(parts: Parts) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the loss increase of each operator alone, its standard error, and the increase of all at once, in nats."""
    operators, model = parts.converted.operators, parts.model
    held_out = sequences(parts, MEASURED + HELD_OUT)[MEASURED:].split(parts.config.training.batch_size)

    def losses() -> np.ndarray:
        with torch.no_grad():
            return np.array([float(loss_of(model, batch)) for batch in held_out])

    high, found = losses(), []
    for operator in operators:
        operator.switch(False)
        found.append(losses() - high)
        operator.switch(True)
    for operator in operators:
        operator.switch(False)
    each = np.array(found)
    return each.mean(axis=1), each.std(axis=1, ddof=1) / each.shape[1] ** 0.5, float((losses() - high).mean())


def pins_of(parts: Parts, score: np.ndarray, budget: float, gemms: Sequence[str]) -> dict[str, list[str]]:
    """Return the pins that fill a budget with the operators of the highest score per FLOP."""
    costs = arithmetic(operator_shapes(parts.model, parts.config.precision))
    names = [operator.operator_name for operator in parts.converted.operators]
    rates = {name: float(value) / costs[name, "fprop"] for name, value in zip(names, score, strict=True)}
    return by_score(rates, {}, costs, budget, gemms=gemms).pins


def truth(forks: Forks, low: str, _orders: int) -> Iterator[dict[str, Any]]:
    """Yield how well each score ranks the true loss increases."""
    parts = forks.parts(forked(forks, low))
    scores = scored(parts)
    rises, errors, together = increases(parts)
    names = [operator.operator_name for operator in parts.converted.operators]
    for score, values in (scores | {"truth": rises}).items():
        if score in ("dgrad error", "wgrad error"):
            continue
        kept = [name in pins_of(parts, values, SHARE, GEMMS[:1]) for name in names]
        share = float(rises[kept].sum() / rises.sum())
        yield {"low": low, "score": score, "spearman": spearman(values, rises), "share": share}
    clear = int((rises > 2 * errors).sum())
    sums = {"prices": float(scores["price"].sum()), "increases": float(rises.sum()), "all_at_once": together}
    yield {"low": low, "operators": len(names), "above_two_standard_errors": clear, **sums}


def forks_of(forks: Forks, low: str, orders: int) -> Iterator[dict[str, Any]]:
    """Yield how well each score ranks the gains of single GEMMs, by the validation loss after a fork's low stretch."""
    scores = scored(parts := forks.parts(forked(forks, low)))
    names = [operator.operator_name for operator in parts.converted.operators]

    def loss(order: int, pins: Mapping[str, list[str]]) -> float:
        config = forked(forks, low, f"fork.order={order}", "fork.heal=0")
        config = replace(config, precision=replace(config.precision, pins=dict(pins)))
        return forks(config, phases=("low",)).validation["low"].high

    never = [loss(order, {}) for order in range(orders)]
    for gemm in GEMMS:
        gains = np.array([[never[k] - loss(k, {name: [gemm]}) for k in range(orders)] for name in names])
        pairs = [spearman(gains[:, i], gains[:, j]) for i in range(orders) for j in range(i)]
        between = float(np.mean(pairs)) if pairs else None
        for score in dict.fromkeys((OWN[gemm], "price", "gradient norm", "update norm", "gap", "mse")):
            rank = spearman(scores[score], gains.mean(axis=1))
            yield {"low": low, "gemm": gemm, "score": score, "spearman": rank, "spearman_of_two_orders": between}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=("truth", "forks"))
    parser.add_argument("--base", default="shipped")
    parser.add_argument("--low", default="sim_e2m1,nvfp4")
    parser.add_argument("--orders", type=int, default=3, help="data orders of forks")
    asked = parser.parse_args()
    forks, run = Forks(asked.base, print), truth if asked.part == "truth" else forks_of
    found = [row for low in asked.low.split(",") for row in run(forks, low, asked.orders)]
    write(asked.out, [{"base": forks.base.name, **row} for row in found])


if __name__ == "__main__":
    main()
