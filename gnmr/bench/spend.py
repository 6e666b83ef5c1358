"""What recovery buys: the share of the gap from always-low to always-high that an arm closes, against what it spends.

Every fork of a base trains `training.steps` on the low path with its arm's GEMMs in 16 bits, on the same data as the
others of its order; its loss is the validation loss on the 16-bit path afterwards. An arm fills the budget, a share of
the GEMM arithmetic, with `fprop` alone of the operators that it ranks highest per cost (of formats with whole
operators):

    price, gradient norm, update norm, gap, MSE    scores of the base, measured once before the fork: a pin
    random, first, last, first_last                the usual guesses: a pin
    GNMR, price: each step                         signals of a controller, which chooses anew in every step
    fprop, dgrad, wgrad                            of every operator, beyond these budgets

Each fork is a row in `runs_dir/bench/spend.jsonl`, written when it is done; a second call goes on where the first one
stopped. Forks of one base and order share their data: they are a block. All arms, budgets and blocks of a low path are
one model, gap closed = arm + block, with one residual (`report.statistics.two_way`); each arm is tested against `price`
at the same budget, p adjusted by Holm over all of these. Scores that rank as the price does (ModelOpt's, squares by
element) are held against the truth alone (`gnmr bench price`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gnmr.bench.figures import Figure
from gnmr.bench.price import Truth, bases, forked, measured
from gnmr.bench.setting import Setting
from gnmr.config import Config
from gnmr.disk import replacing
from gnmr.doctor.choice import GUESSES, arithmetic, by_score, guess
from gnmr.errors import UserError
from gnmr.paths.conversion import operator_shapes
from gnmr.report.statistics import LEVEL, holm, smallest_effect, two_way
from gnmr.training.build import Parts
from gnmr.training.fork import Forks
from gnmr.training.provenance import commit
from gnmr.vocabulary import FORMATS, GEMMS

LOW = ("sim_e2m1", "nvfp4", "int4")
BUDGETS = (0.025, 0.05, 0.075, 0.10, 0.15, 0.25)
ORDERS = 5
BOUNDS = {"never": 0.0, "always": 1.0}
WHOLE = {"fprop": 1 / 3, "dgrad": 1 / 3, "wgrad": 1 / 3, "dgrad, wgrad": 2 / 3}
"""One or two GEMMs of all operators, and their budget; of recipes alone."""
PINS = ("price", "gradient norm", "update norm", "gap", "MSE")
CONTROLLERS = {"GNMR, each step": "gnmr_delta", "price, each step": "price"}
"""Signal by arm."""
ARMS = (*PINS, *GUESSES, *CONTROLLERS)
OURS = "price"
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
    """Of one base and low path, order by order, the bounds first."""
    whole = {} if low in FORMATS else WHOLE
    arms = [*BOUNDS.items(), *whole.items(), *((arm, budget) for budget in BUDGETS for arm in ARMS)]
    return [Fork(base, low, arm, budget, order) for order in range(orders) for arm, budget in arms]


def spend(setting: Setting) -> list[Figure]:
    """Gap closed by each arm at each budget, mean over bases and orders; `repeats` orders. Goes on with what is
    recorded."""
    file = Path(setting.config.runs_dir) / _FILE
    known = {Fork(**row["fork"]): row for row in _rows(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:  # without a last line that was cut off
        whole.write("".join(json.dumps(row) + "\n" for row in known.values()).encode())
    orders, names = setting.repeats or ORDERS, []
    for base, forks in bases(setting):
        names.append(base)
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
    return [figure for low in LOW for figure in _figures(low, [c for b in names for c in cells(b, low, orders)], known)]


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
    config = _config(forks, cell, parts, found)
    result = forks(config, phases=("low",))
    row = {"fork": asdict(cell), "share": result.spent, "pins": config.paths.pins, "steps": len(result.losses)}
    losses = {"loss": result.validation["low"].high, "own_loss": result.validation["low"].low}
    return row | losses | {"commit": commit()}


def _config(forks: Forks, cell: Fork, parts: Parts, found: Truth) -> Config:
    words, gemms = [f"fork.order={cell.order}", "fork.heal=0"], GEMMS if cell.low in FORMATS else GEMMS[:1]
    if cell.arm in CONTROLLERS:
        words += [f"controller.signal={CONTROLLERS[cell.arm]}", "controller.routing=ranked", "controller.max_o=null"]
        words += [f"controller.budget={cell.budget}", f"paths.recovers=[{','.join(gemms)}]"]
        return forked(forks, cell.low, *words)
    config = forked(forks, cell.low, *words)
    return replace(config, paths=replace(config.paths, pins=_pins(cell, gemms, parts, found)))


def _pins(cell: Fork, gemms: tuple[str, ...], parts: Parts, found: Truth) -> dict[str, list[str]]:
    names = found.operators
    if cell.arm in (*BOUNDS, *WHOLE):
        every = {"never": [], "always": list(GEMMS)}.get(cell.arm, cell.arm.split(", "))
        return {name: every for name in names if every}
    costs = arithmetic(operator_shapes(parts.model, parts.config.paths))
    if cell.arm in GUESSES:
        return guess(cell.arm, {}, costs, cell.budget, gemms=gemms, seed=cell.order).pins
    scores = zip(names, found.scores[cell.arm].tolist(), strict=True)
    rates = {name: score / costs[name, "fprop"] for name, score in scores}
    return by_score(rates, {}, costs, cell.budget, gemms=gemms).pins


def _figures(low: str, forks: list[Fork], known: Mapping[Fork, dict[str, Any]]) -> list[Figure]:
    """Of each arm and budget the mean share of the gap over blocks, its 95 % interval by the pooled residual, and p
    against `OURS`."""
    blocks = list(dict.fromkeys((cell.base, cell.order) for cell in forks))

    def losses(base: str, arm: str) -> dict[int, float]:
        chosen = (cell for cell in forks if (cell.base, cell.arm) == (base, arm))
        return {cell.order: known[cell]["loss"] for cell in chosen}

    never = {base: losses(base, "never") for base, _ in blocks}
    gaps = {base: np.mean([*never[base].values()]) - np.mean([*losses(base, "always").values()]) for base in never}
    closed: dict[tuple[str, float], dict[int, float]] = {}
    for cell in forks:
        share = (never[cell.base][cell.order] - known[cell]["loss"]) / gaps[cell.base]
        closed.setdefault((cell.arm, cell.budget), {})[blocks.index((cell.base, cell.order))] = float(share)
    n, residual = len(blocks), two_way([*closed.values()])
    figures = [Figure(f"{low}, {base}: gap, nats", float(gap), "", n=len(never[base])) for base, gap in gaps.items()]
    if residual is None:
        half, p = 0.0, dict[tuple[str, float], float]()
    else:
        sd, freedom = residual
        half, p = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * sd / n**0.5, _tested(closed, sd, freedom, n)
        told = f"residual {sd:.1%}, {freedom} degrees of freedom"
        figures.append(
            Figure(f"{low}: smallest effect at 80 % power", smallest_effect(sd, freedom, n), "%", n=n, note=told)
        )
    for (arm, budget), found in closed.items():
        if arm in BOUNDS:
            continue
        spent = np.mean([known[c]["share"] for c in forks if (c.arm, c.budget) == (arm, budget)])
        value = float(np.mean([*found.values()]))
        against = f", p against {OURS} {p[arm, budget]:.1g}" if (arm, budget) in p else ""
        figures.append(
            Figure(
                f"{low}: {arm} at {budget:.1%}",
                value,
                "%",
                value - half,
                value + half,
                "95 % interval, pooled residual",
                n,
                note=f"spends {spent:.1%}{against}",
            )
        )
    return figures


def _tested(
    closed: Mapping[tuple[str, float], Mapping[int, float]], sd: float, freedom: int, n: int
) -> dict[tuple[str, float], float]:
    """p of each arm against `OURS` at its budget, two-sided, adjusted by Holm."""
    means = {key: float(np.mean([*found.values()])) for key, found in closed.items()}
    rivals = [key for key in means if key[0] not in (OURS, *BOUNDS, *WHOLE)]
    t = [(means[key] - means[OURS, key[1]]) / (sd * (2 / n) ** 0.5) for key in rivals]
    return dict(zip(rivals, holm([float(2 * stats.t.sf(abs(one), freedom)) for one in t]), strict=True))  # type: ignore[arg-type]


PARTS = {"spend": spend}
