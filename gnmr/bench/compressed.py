"""Compressed gradients: the share of the gap from never recovering to dense gradients that an arm closes.

Two virtual workers send their gradients (`gnmr.distributed.compressed`), of a base's matrices `RANK` rows each. Every
fork of a base trains `training.steps` with its arm, on the same data as the others of its order; its loss is the
validation loss afterwards.

    never, dense                 the bounds: everything on the low path in every step, gradients sent whole
    random basis, no feedback    never recovering, with another basis, or with what is not sent lost
    GNMR, gap, random units      a controller that recovers by its ranking, anew in each step, under one budget of
                                 numbers; gap is what the step's gradient lacks (mean_i ||H_i - P R_i||^2)
    more rows                    never recovering, at the largest rank that sends no more than that budget

Each fork is a row in `runs_dir/bench/compressed.jsonl`, written when it is done; a second call goes on where the first
one stopped. Forks of one base and order are a block; all arms are one family (`report.family`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.bench.figures import Figure
from gnmr.bench.price import bases
from gnmr.bench.rows import put, resume
from gnmr.bench.setting import Setting
from gnmr.config import Config
from gnmr.distributed.compressed import Traffic
from gnmr.report.family import Family, judge
from gnmr.training.build import empty_model
from gnmr.training.compression import greedylore_spec
from gnmr.training.fork import Forks
from gnmr.training.provenance import commit

RANK, BUDGET = 1, 0.1
STEPS, REFRESH = 24, 24
WORKERS = 2
ORDERS = 5
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
}
"""Words of each beside `_LOW`."""
CONTRASTS = (
    ("random basis", "never"),
    ("no feedback", "never"),
    ("GNMR", "random units"),
    ("gap", "random units"),
    ("random units", "more rows"),
    ("gap", "more rows"),
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
    known = resume(file, Fork)
    made = dict(bases(setting))
    cells = [Fork(base, arm, order) for order in range(setting.repeats or ORDERS) for base in made for arm in ARMS]
    todo = [cell for cell in cells if cell not in known]
    for cell in setting.over(todo, "compressed: forks"):
        known[cell] = put(file, _run(made[cell.base], cell, setting))
    return figures([known[cell] for cell in cells])


def _run(made: Forks, cell: Fork, setting: Setting) -> dict[str, Any]:
    """Makes the fork: its row."""
    result = made(_config(made, cell, setting), phases=("low",))
    row = {"fork": asdict(cell), "sent": result.sent, "promoted": result.promotion_frac, "steps": len(result.losses)}
    return row | {"loss": result.validation["low"].high, "commit": commit()}


def _config(made: Forks, cell: Fork, setting: Setting) -> Config:
    """Of a fork: the base's batch, cut into a micro-batch a worker."""
    training = made.base.config.training
    blocks = training.batch_size * training.accumulation
    words = [
        *(f"training.batch_size={blocks // WORKERS}", f"training.accumulation={WORKERS}", f"training.steps={STEPS}"),
        *("paths.low=bf16", "paths.recovery=null", f"fork.order={cell.order}", "fork.heal=0"),
        *(f"compression.rank={RANK}", f"compression.refresh_every={REFRESH}", f"compression.workers={WORKERS}"),
        f"training.threads={'null' if setting.config.training.threads is None else setting.config.training.threads}",
    ]
    keys = {word.lstrip("+").partition("=")[0] for word in ARMS[cell.arm]}
    words += [word for word in _LOW if word.partition("=")[0] not in keys]
    words = [word for word in words if word.partition("=")[0] not in keys]
    config = made.config(*words, *ARMS[cell.arm])
    if cell.arm != "more rows":
        return config
    return replace(config, compression=replace(config.compression, rank=RANK + extra_rows(config)))


def extra_rows(config: Config) -> int:
    """By how many rows the rank may be higher for the numbers of the budget."""
    traffic = Traffic.of(empty_model(config)[0], greedylore_spec(config), config.compression.targets)
    row = (traffic.low - traffic.overhead) / config.compression.rank  # of all matrices
    return int(BUDGET * (traffic.matrices - row * config.compression.rank) / row)


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
        note = f"sends {np.mean(sent[row.arm]):.1%}{p}"
        name = f"{row.arm} against {row.control}: gap closed"
        found.append(Figure(name, row.closed[0], "%", low, high, "95 % interval, by Fieller", row.n, note=note))
    return found


def _gap(family: Family) -> list[Figure]:
    """The positive control, and what the family could have shown."""
    gap, smallest = family.gap, family.smallest(len(CONTRASTS))
    if gap is None:
        return []
    told = f"p {family.p_gate:.2g}" if family.p_gate is not None else "not tested"
    found = [Figure("gap, never - dense, nats", gap.estimate, "", *gap.interval, "95 % interval", family.n, note=told)]
    if smallest is not None:
        note = "of the family's largest, at Holm's first step"
        found.append(Figure("smallest effect at 80 % power", smallest, "%", n=family.n, note=note))
    return found


PARTS = {"compressed": forks}
