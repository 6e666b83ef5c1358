"""What pins buy: the share of the gap from always-low to always-high that an arm closes, against what it spends.

Every fork of a base trains `training.steps` on the low path with its arm's GEMMs in 16 bits, on the same data as the
others of its order; its loss is the validation loss on the 16-bit path afterwards. An arm fills the budget, a share of
the GEMM arithmetic, with `fprop` alone of the operators that it ranks highest (of formats with whole operators):

    price, by elements       prices of the base, before the fork
    gradient norm, update norm, gap, MSE, underflow, ModelOpt's score
    random, first, last, first_last    the usual guesses

Each fork is a row in `runs_dir/bench/spend.jsonl`, written when it is done; a second call goes on where the first one
stopped. Compare forks of one order only: they share their data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.bench.figures import Figure
from gnmr.bench.price import SCORES, Truth, bases, forked, measured
from gnmr.bench.setting import Setting
from gnmr.disk import replacing
from gnmr.doctor.choice import GUESSES, Item, arithmetic, by_score, guess
from gnmr.errors import UserError
from gnmr.paths.conversion import operator_shapes
from gnmr.training.build import Parts
from gnmr.training.fork import Forks
from gnmr.vocabulary import FORMATS, GEMMS

LOW = ("sim_e2m1", "nvfp4", "int4")
BUDGETS = (0.025, 0.05, 0.075, 0.10, 0.15, 0.25)
ORDERS = 5
BOUNDS = {"never": 0.0, "always": 1.0}
_FILE = Path("bench", "spend.jsonl")


@dataclass(frozen=True)
class Fork:
    """One cell: what it is, without its outcome."""

    base: str
    low: str
    arm: str
    budget: float
    order: int


def cells(base: str, low: str, orders: int) -> list[Fork]:
    """Of one base and low path, the bounds of each order first."""
    arms = [(arm, budget) for budget in BUDGETS for arm in (*SCORES, *GUESSES)]
    return [Fork(base, low, arm, b, order) for order in range(orders) for arm, b in [*BOUNDS.items(), *arms]]


def spend(setting: Setting) -> list[Figure]:
    """Gap closed by each arm at each budget, mean over orders; `repeats` orders. Goes on with what is recorded."""
    file = Path(setting.config.runs_dir) / _FILE
    known = {Fork(**row["fork"]): row for row in _rows(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:  # without a last line that was cut off
        whole.write("".join(json.dumps(row) + "\n" for row in known.values()).encode())
    orders = setting.repeats or ORDERS
    figures = []
    for base, forks in bases(setting):
        for low in LOW:
            todo = [cell for cell in cells(base, low, orders) if cell not in known]
            if todo:
                parts = forks.parts(forked(forks, low))
                found = measured(parts, setting, f"spend: {base}, {low}, prices")
                with file.open("a") as rows:
                    for cell in setting.over(todo, f"spend: {base}, {low}, forks"):
                        known[cell] = _run(forks, cell, parts, found)
                        rows.write(json.dumps(known[cell]) + "\n")
                        rows.flush()
            figures += _figures(base, low, orders, known)
    return figures


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """What is recorded already; a last line that was cut off is not."""
    if not file.exists():
        return
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{file}: line {number} is no JSON; move the file away to begin anew") from None


def _run(forks: Forks, cell: Fork, parts: Parts, found: Truth) -> dict[str, Any]:
    """Makes the fork: its row."""
    config = forked(forks, cell.low, f"fork.order={cell.order}", "fork.heal=0")
    pins, share = _pins(cell, parts, found)
    config = replace(config, paths=replace(config.paths, pins=pins))
    result = forks(config, phases=("base", "low"))
    losses = {phase: asdict(one) for phase, one in result.validation.items()}
    return {"fork": asdict(cell), "share": share, "pins": pins, "validation": losses, "steps": len(result.losses)}


def _pins(cell: Fork, parts: Parts, found: Truth) -> tuple[dict[str, list[str]], float]:
    """(the arm's pins, their share of the GEMM arithmetic)."""
    names, gemms = found.operators, GEMMS if cell.low in FORMATS else GEMMS[:1]
    if cell.arm in BOUNDS:
        return ({name: list(GEMMS) for name in names} if cell.arm == "always" else {}), BOUNDS[cell.arm]
    costs = arithmetic(operator_shapes(parts.model, parts.config.paths))
    prices: dict[Item, float] = {}
    if cell.arm in GUESSES:
        chosen = guess(cell.arm, prices, costs, cell.budget, gemms=gemms, seed=cell.order)
    else:
        scores = dict(zip(names, found.scores[cell.arm].tolist(), strict=True))
        chosen = by_score(scores, prices, costs, cell.budget, gemms=gemms)
    return chosen.pins, chosen.share


def _figures(base: str, low: str, orders: int, known: dict[Fork, dict[str, Any]]) -> list[Figure]:
    """Of each arm and budget the mean share of the gap over orders; beside it the least and the largest."""

    def losses(arm: str, budget: float) -> np.ndarray:
        rows = [known[Fork(base, low, arm, budget, order)] for order in range(orders)]
        return np.array([row["validation"]["low"]["high"] for row in rows])

    never, always = (losses(arm, budget) for arm, budget in BOUNDS.items())
    gap = never - always
    figures = [
        Figure(f"{base}, {low}: gap, nats", float(gap.mean()), "", float(gap.min()), float(gap.max()), "range", orders)
    ]
    for budget in BUDGETS:
        for arm in (*SCORES, *GUESSES):
            closed = (never - losses(arm, budget)) / gap.mean()
            share = known[Fork(base, low, arm, budget, 0)]["share"]
            figures.append(
                Figure(
                    f"{base}, {low}: {arm} at {budget:.1%}",
                    float(closed.mean()),
                    "%",
                    float(closed.min()),
                    float(closed.max()),
                    "range",
                    orders,
                    note=f"spends {share:.1%}",
                )
            )
    return figures


PARTS = {"spend": spend}
