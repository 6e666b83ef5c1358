"""Compressed gradients: the share of the gap from never recovering to dense gradients that an arm closes.

Two virtual workers send their gradients (`gnmr.distributed.compressed`), of a base's matrices `RANK` rows each. Every
fork of a base trains `training.steps` with its arm, on the same data as the others of its order; its loss is the
validation loss afterwards.

    never, dense                 the bounds: everything on the low path in every step, gradients sent whole
    random basis, no feedback    never recovering, with another basis, or with what is not sent lost
    GNMR, gap, random units      a controller that recovers by its ranking, anew in each step, under one budget of
                                 numbers; gap is what the step's gradient lacks (mean_i ||H_i - P R_i||^2)
    pin                          the same matrices in every step, those with the largest gap per number in the mean of a
                                 continuation of the base that never recovers, on other data
    pin and excess               a controller by signal=pin_excess of that gap: levels, and what exceeds them
    more rows                    never recovering, at the largest rank that sends no more than that budget
    PowerSGD                     torch's, at the largest rank that sends no more than that budget: two dense steps, then
                                 every matrix, embedding and head too

Each fork is a row in `runs_dir/bench/compressed.jsonl`, written when it is done; a second call goes on where the first
one stopped. Forks of one base and order are a block; all arms are one family (`report.family`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnmr.control.policy import Budget, decide
from gnmr.distributed.compressed import GreedyLore, Traffic
from gnmr.distributed.powersgd import numbers
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.price import bases
from gnmr.lab.bench.rows import Rows
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.report.family import Family, judge
from gnmr.lab.train.build import empty_model, training_blocks
from gnmr.lab.train.compression import greedylore_spec
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.steps import Steps
from gnmr.names import select

RANK, BUDGET = 1, 0.1
STEPS, REFRESH = 24, 24
WORKERS = 2
ORDERS = 5
PIN_ORDER = 1000
"""Of the data on which a pin is chosen."""
DENSE_STEPS = 2
"""Of PowerSGD: torch's least."""
_LOW = ("compression.name=greedylore", "compression.dense_steps=0", "controller.signal=always_low")
_ROUTED = ("controller.routing=ranked", f"controller.budget={BUDGET}", "controller.max_o=null")
ARMS: dict[str, tuple[str, ...]] = {
    "never": (),
    "dense": ("compression.name=none", "compression.dense_steps=1000", "compression.workers=null"),
    "random basis": ("compression.basis=random",),
    "no feedback": ("compression.feedback=false",),
    "GNMR": ("controller.signal=gnmr_delta", *_ROUTED),
    "gap": ("controller.signal=gap", *_ROUTED),
    "random units": ("controller.signal=random", *_ROUTED),
    "more rows": (),
    "pin": (),
    "pin and excess": (
        "controller.signal=pin_excess",
        "+controller.options.evidence=gap_low",
        "+controller.options.every=1",
        *_ROUTED,
    ),
    "PowerSGD": ("compression.name=powersgd", f"compression.dense_steps={DENSE_STEPS}"),
}
"""Words of each beside `_LOW`."""
CONTRASTS = (
    ("random basis", "never"),
    ("no feedback", "never"),
    ("GNMR", "random units"),
    ("gap", "random units"),
    ("random units", "more rows"),
    ("gap", "more rows"),
    ("pin", "random units"),
    ("pin and excess", "random units"),
    ("gap", "pin"),
    ("PowerSGD", "more rows"),
    ("gap", "PowerSGD"),
)
"""Tested, each against the second."""
_FILE = Path("bench", "compressed.jsonl")


@dataclass(frozen=True)
class Fork:
    """One cell: what it is, without its outcome."""

    base: str
    arm: str
    order: int


def forks(setting: Setting) -> list[Figure]:
    """Gap closed by each arm, mean over bases and orders; `repeats` orders. Goes on with what is recorded."""
    file = Path(setting.config.runs_dir) / _FILE
    made = dict(bases(setting))
    known = Rows(file, Fork, made)
    cells = [Fork(base, arm, order) for order in range(setting.repeats or ORDERS) for base in made for arm in ARMS]
    todo = [cell for cell in cells if cell not in known]
    pins: dict[str, list[str]] = {}
    for base in {cell.base: None for cell in todo if cell.arm == "pin"}:
        setting.say(f"compressed: {base}, what its gradients lack")
        pins[base] = pinned(made[base], config_of(made[base], Fork(base, "never", PIN_ORDER), setting))
    for cell in setting.over(todo, "compressed: forks"):
        known.put(cell, _run(made[cell.base], cell, setting, pins.get(cell.base, [])))
    return figures([known[cell] for cell in cells])


def _run(made: Forks, cell: Fork, setting: Setting, pins: list[str]) -> dict[str, Any]:
    """Makes the fork: what came out."""
    config = config_of(made, cell, setting)
    if cell.arm == "pin":
        config = sent_whole(config, pins)
    result = made(config, phases=("low",))
    row: dict[str, Any] = {"sent": result.sent, "promoted": result.promotion_frac, "steps": len(result.losses)}
    row |= {"pins": pins} if cell.arm == "pin" else {}
    return row | {"loss": result.validation["low"].high}


def pinned(made: Forks, config: Config) -> list[str]:
    """The units that fill the budget by their mean gap per number, in a fork of that config."""
    parts = made.parts(config)
    compressed = parts.compressed
    assert isinstance(compressed, GreedyLore)
    compressed.measuring = True
    steps = Steps(parts, training_blocks(config, parts.corpus, None, parts.branch))
    gaps = torch.zeros(len(compressed.units()), dtype=torch.float64)
    for step in range(1, config.training.steps + 1):
        steps(step)
        gaps += compressed.gap().cpu()
    costs = [float(unit.cost) for unit in compressed.units()]
    budget = Budget.of(BUDGET * sum(costs), costs, gaps.device)
    every = torch.ones_like(gaps, dtype=torch.bool)
    chosen = decide(gaps, every, every, torch.zeros_like(every, dtype=torch.int64), len(costs), 0, 0.0, budget).active
    return [unit.name for unit, kept in zip(compressed.units(), chosen.tolist(), strict=True) if kept]


def sent_whole(config: Config, pins: Sequence[str]) -> Config:
    """That config, in which these modules' gradients are not compressed."""
    chosen, _ = select(dict(empty_model(config)[0].named_modules()), config.compression.targets)
    targets = [name for name in chosen if name not in pins]
    return replace(config, compression=replace(config.compression, targets=targets))


def config_of(made: Forks, cell: Fork, setting: Setting) -> Config:
    """Of a fork: the base's batch, cut into a micro-batch a worker. Of a pin without its pins."""
    training = made.base.config.training
    blocks = training.batch_size * training.accumulation
    words = [
        *(f"training.batch_size={blocks // WORKERS}", f"training.accumulation={WORKERS}", f"training.steps={STEPS}"),
        *("precision.low=bf16", "precision.recovery=null", f"fork.order={cell.order}", "fork.heal=0"),
        *(f"compression.rank={RANK}", f"compression.refresh_every={REFRESH}", f"compression.workers={WORKERS}"),
        f"training.threads={'null' if setting.config.training.threads is None else setting.config.training.threads}",
    ]
    keys = {word.lstrip("+").partition("=")[0] for word in ARMS[cell.arm]}
    words += [word for word in _LOW if word.partition("=")[0] not in keys]
    words = [word for word in words if word.partition("=")[0] not in keys]
    config = made.config(*words, *ARMS[cell.arm])
    if cell.arm == "more rows":
        return replace(config, compression=replace(config.compression, rank=RANK + extra_rows(config)))
    if cell.arm == "PowerSGD":
        return replace(config, compression=replace(config.compression, rank=powersgd_rank(config)))
    return config


def extra_rows(config: Config) -> int:
    """By how many rows the rank may be higher for the numbers of the budget."""
    traffic = Traffic.of(empty_model(config)[0], greedylore_spec(config), config.compression.targets)
    row = (traffic.low - traffic.overhead) / config.compression.rank  # of all matrices
    return int(BUDGET * (traffic.matrices - row * config.compression.rank) / row)


def powersgd_rank(config: Config) -> int:
    """The largest with which PowerSGD sends no more in all steps than the budget; 1 where none does."""
    model, spec = empty_model(config)[0], greedylore_spec(config)
    shapes = [one.shape for one in model.parameters()]
    traffic = Traffic.of(model, spec, config.compression.targets)
    most = STEPS * traffic.mean(spec, BUDGET) - DENSE_STEPS * traffic.dense
    ranks, steps = range(1, max(map(max, shapes))), STEPS - DENSE_STEPS
    return max((rank for rank in ranks if steps * numbers(shapes, rank) <= most), default=1)


def figures(rows: list[Mapping[str, Any]]) -> list[Figure]:
    """Of each arm the mean share of the gap over blocks and its 95 % interval, and the tests of `CONTRASTS`."""
    values: dict[str, dict[Any, float]] = {arm: {} for arm in ARMS}
    sent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for one in rows:
        cell = one["fork"]
        values[cell["arm"]][cell["base"], cell["order"]] = one["loss"]
        sent[cell["arm"]].append(one["sent"])
    family = judge(values, CONTRASTS, low="never", high="dense")
    found = _gap(family)
    for row in family.rows:
        if row.closed is None:
            continue
        low, high = row.closed[1] or (None, None)
        p = "" if row.p is None else f"; {row.verdict} against {row.control}, p {row.p:.2g}"
        equal = "" if row.p_equal is None else f"; p that they differ by a tenth of the gap {row.p_equal:.2g}"
        note = f"sends {np.mean(sent[row.arm]):.1%}{p}{equal}"
        name = f"{row.arm} against {row.control}: gap closed"
        found.append(Figure(name, row.closed[0], "%", low, high, "95 % interval, by Fieller", row.n, note=note))
    return found


def _gap(family: Family) -> list[Figure]:
    """The positive control, and what the family could have shown."""
    gap, smallest = family.gap, family.smallest(len(CONTRASTS))
    if gap is None:
        return []
    told = f"p {family.p_gate:.2g}" if family.p_gate is not None else "not tested"
    if family.fit is not None:
        told += "; each arm's own spread" if family.fit.own else f"; one residual, {family.fit.sd:.4f} nats"
    found = [Figure("gap, never - dense, nats", gap.estimate, "", *gap.interval, "95 % interval", family.n, note=told)]
    if smallest:
        note = "of the family's largest, at Holm's first step"
        found.append(Figure("smallest effect at 80 % power", max(smallest), "%", n=family.n, note=note))
    return found


PARTS = {"compressed": forks}
