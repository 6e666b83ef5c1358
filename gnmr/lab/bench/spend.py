"""What recovery buys: the share of the gap from always-low to always-high that an arm closes, against what it spends.

`only=` names scenes (`gnmr.lab.bench.scenes`) or groups of them: lasting, passing, table11, regimes, quick. Every fork of a
base trains `training.steps` on the low path with its arm's GEMMs on the recovery path, on the same data as the others
of its order; its loss is the validation loss on the 16-bit path afterwards. An arm fills the budget, a share of the
GEMM arithmetic, with the operators that it ranks highest per cost, of which the scene's GEMMs are recovered:

    price, gradient norm, update norm, gap, MSE    scores of the base, measured once before the fork: a pin
    random, first, last, first_last                the usual guesses: a pin
    NAME, each step                                signals of a controller, which chooses anew in every step
    NAME, held                                     the same with a set that holds for 20 steps
    fprop, dgrad, wgrad                            of every operator, beyond these budgets

Each fork is a row in `runs_dir/bench/spend.jsonl`, written when it is done; a second call goes on where the first one
stopped. The positive control comes first, always against never in all blocks: where it is not shown, no other arm is
made. Blocks come one after the other, all arms of each, so that what was stopped early is a whole design of fewer
blocks. Forks of one base and order share their data: they are a block. All arms, budgets and blocks of a scene are
one model, gap closed = arm + block, with one residual (`report.family`); where that model is refused, each arm is told
by its own differences. Each is tested against the scene's `ours` at the same budget, p adjusted by Holm over all of
these. Scores that rank as the price does (ModelOpt's, squares by element) are held against the truth alone
(`gnmr bench price`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gnmr.doctor.knapsack import GUESSES, guess
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.price import Ranked, bases, forked, per_cost, ranked
from gnmr.lab.bench.rows import Rows
from gnmr.lab.bench.scenes import BOUNDS, SCENES, WHOLE, Scene
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.report.family import Contrast, Family, Fit, judge, modelled
from gnmr.lab.report.statistics import LEVEL, holm, smallest_shift
from gnmr.lab.train.fork import Forks
from gnmr.names import GEMMS

ORDERS = 5
_FILE = Path("bench", "spend.jsonl")


@dataclass(frozen=True)
class Fork:
    """One cell: what it is, without its outcome."""

    base: str
    low: str
    """The scene."""
    arm: str
    budget: float
    order: int


def cells(base: str, name: str, scene: Scene, order: int) -> list[Fork]:
    """Of one block of a scene."""
    return [Fork(base, name, arm, budget, order) for arm, budget in scene.arms()]


def spent(setting: Setting, name: str) -> list[Figure]:
    """Of a scene the gap closed by each arm at each budget, mean over bases and orders; `repeats` orders. Goes on with
    what is recorded."""
    scene, file = SCENES[name], Path(setting.config.runs_dir) / _FILE
    opened, found, figures = dict(bases(setting)), dict[str, Ranked](), list[Figure]()
    known = Rows(file, Fork, opened)
    blocks = [(base, order) for order in range(setting.repeats or ORDERS) for base in opened]

    def made(what: str, block: tuple[str, int], chosen: list[Fork]) -> None:
        base, order = block
        todo = [cell for cell in chosen if cell not in known]
        if todo and base not in found:
            found[base] = ranked(opened[base], scene)
        for cell in setting.over(todo, f"spend: {base}, {name}, order {order}{what}") if todo else ():
            known.put(cell, _run(opened[base], cell, scene, found[base]))

    each = {(base, order): cells(base, name, scene, order) for base, order in blocks}
    bounds = {block: [cell for cell in of if cell.arm in BOUNDS] for block, of in each.items()}
    for block, of in bounds.items():
        made(", positive control", block, of)
    control = _control([cell for of in bounds.values() for cell in of], known)
    if control.p_gate is not None:  # None: too few blocks
        note = "shown" if control.gate else "not shown: no other arm is made"
        figures = [Figure(f"{name}: positive control, p", control.p_gate, "", n=len(blocks), note=note)]
        each = each if control.gate else bounds
    for block, of in each.items():
        made("", block, of)
    return figures + _figures(scene, [cell for of in each.values() for cell in of], known)


def _control(bounds: list[Fork], known: Mapping[Fork, dict[str, Any]]) -> Family:
    """Always against never: a test before all others."""
    values = {arm: {(c.base, c.order): known[c]["loss"] for c in bounds if c.arm == arm} for arm in BOUNDS}
    return judge(values, (), low="never", high="always")


def _run(forks: Forks, cell: Fork, scene: Scene, found: Ranked) -> dict[str, Any]:
    """Makes the fork: what came out."""
    config = _config(forks, cell, scene, found)
    result = forks(config, phases=("low",))
    row = {"share": result.spent, "pins": config.precision.pins, "steps": len(result.losses)}
    losses = {"loss": result.validation["low"].high, "own_loss": result.validation["low"].low}
    return row | losses | {"broken": config.faults.targets if scene.stress else None}


def _config(forks: Forks, cell: Fork, scene: Scene, found: Ranked) -> Config:
    words = [*scene.words, f"fork.order={cell.order}", "fork.heal=0"]
    if scene.stress:
        broken = random.Random(f"{cell.base} {cell.order}").choice(found.operators)
        words += [f"faults.targets=[{broken}]", *(f"faults.{word}" for word in scene.stress)]
    if (control := scene.control(cell.arm)) is not None:
        cap = (f"budget={cell.budget}", "max_o=null") if scene.units is None else (f"max_o={scene.units}",)
        for word in ("routing=ranked", *cap, *control):
            words.append(f"+controller.{word[1:]}" if word.startswith("+") else f"controller.{word}")
        words += [f"precision.recovers=[{','.join(scene.recovers)}]"] if scene.recovers != GEMMS else []
        return forked(forks, scene.low, *words)
    config = forked(forks, scene.low, *words)
    return replace(config, precision=replace(config.precision, pins=_pins(cell, scene, found)))


def _pins(cell: Fork, scene: Scene, found: Ranked) -> dict[str, list[str]]:
    names, gemms = found.operators, scene.recovers
    if cell.arm in (*BOUNDS, *WHOLE):
        every = {"never": [], "always": list(GEMMS)}.get(cell.arm, cell.arm.split(", "))
        return {name: every for name in names if every}
    if cell.arm in GUESSES:
        return guess(cell.arm, {}, found.costs, cell.budget, gemms=gemms, seed=cell.order).pins
    return per_cost(names, found.scores[cell.arm], found.costs, cell.budget, gemms).pins


def _figures(scene: Scene, forks: list[Fork], known: Mapping[Fork, dict[str, Any]]) -> list[Figure]:
    """Of each arm and budget the mean share of the gap over blocks, its 95 % interval, and p against `ours`.

    By the pooled residual; where equal spread or the sum of arm and block is refused, by each arm's own differences.
    """
    name, gaps, closed = forks[0].low, _gaps(forks, known), closed_by(forks, known)
    blocks = {base: len({cell.order for cell in forks if cell.base == base}) for base in gaps}
    n, model = sum(blocks.values()), modelled(closed)
    figures = [Figure(f"{name}, {base}: gap, nats", gap, "", n=blocks[base]) for base, gap in gaps.items()]
    p = dict[tuple[str, float], float]()
    if model is not None and set(closed) > {*BOUNDS.items()}:
        of_all = f"residual {model.sd:.1%}, {model.freedom} degrees of freedom"
        spread = "each arm's own spread" if model.own else of_all
        p, least = _tested(model, scene), smallest(model, scene)
        figures.append(
            Figure(
                f"{name}: smallest effect at 80 % power",
                least,
                "%",
                n=n,
                note=spread,
            )
        )
    for (arm, budget), found in closed.items():
        if arm in BOUNDS:
            continue
        spent = np.mean([known[cell]["share"] for cell in forks if (cell.arm, cell.budget) == (arm, budget)])
        value, (low, high) = float(np.mean([*found.values()])), _interval(model, (arm, budget))
        against = f", p against {scene.ours} {p[arm, budget]:.1g}" if (arm, budget) in p else ""
        figures.append(
            Figure(
                f"{name}: {arm} at {budget:.1%}",
                value,
                "%",
                low,
                high,
                "95 % interval, " + ("by Fieller, own spread" if model and model.own else "pooled spread"),
                n,
                note=f"spends {spent:.1%}{against}",
            )
        )
    return figures


def _gaps(forks: Sequence[Fork], known: Mapping[Fork, dict[str, Any]]) -> dict[str, float]:
    """Of each base never less always, nats, mean over orders."""
    losses: dict[tuple[str, str], list[float]] = {}
    for cell in forks:
        losses.setdefault((cell.base, cell.arm), []).append(known[cell]["loss"])
    bases = dict.fromkeys(cell.base for cell in forks)
    return {base: float(np.mean(losses[base, "never"]) - np.mean(losses[base, "always"])) for base in bases}


def closed_by(forks: Sequence[Fork], known: Mapping[Fork, dict[str, Any]]) -> dict[tuple[str, float], dict[Any, float]]:
    """Of each arm and budget, by block, the share that it closes of its base's mean gap."""
    gaps, closed = _gaps(forks, known), dict[tuple[str, float], dict[Any, float]]()
    never = {(cell.base, cell.order): known[cell]["loss"] for cell in forks if cell.arm == "never"}
    for cell in forks:
        block = cell.base, cell.order
        closed.setdefault((cell.arm, cell.budget), {})[block] = (never[block] - known[cell]["loss"]) / gaps[cell.base]
    return closed


def _interval(model: Fit | None, key: tuple[str, float]) -> tuple[float | None, float | None]:
    """95 %, of an arm's mean over blocks. By the pooled residual; of arms told by their own differences by Fieller, as
    the gap is a block's own too: what breaks differs. None where it is not told."""
    if model is None:
        return None, None
    if model.own:
        found = model.closed(key, *BOUNDS.items())
        return found[1] if found is not None and found[1] is not None else (None, None)
    values = [*model.values[key].values()]
    half = float(stats.t.ppf(1 - LEVEL / 2, model.freedom)) * model.sd / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def _rivals(model: Fit, scene: Scene) -> dict[tuple[str, float], Contrast | None]:
    """Each arm minus `ours` at its budget."""
    keys = [key for key in model.values if key[0] not in (scene.ours, *BOUNDS, *WHOLE)]  # type: ignore[index]
    return {key: model.between(key, (scene.ours, key[1])) for key in keys}  # type: ignore[index,misc]


def _tested(model: Fit, scene: Scene) -> dict[tuple[str, float], float]:
    """p of each arm against `ours` at its budget, two-sided, adjusted by Holm."""
    found = _rivals(model, scene)
    told = holm([None if one is None else one.p for one in found.values()])
    return dict(zip(found, told, strict=True))  # type: ignore[arg-type]


def smallest(model: Fit, scene: Scene, budget: float | None = None) -> float:
    """The difference to `ours` that one test shows with 80 % power: the median over arms, and budgets without one."""
    found = _rivals(model, scene).items()
    known = [one for (_, at), one in found if one is not None and budget in (None, at)]
    return float(np.median([one.error * smallest_shift(one.freedom) for one in known]))


PARTS = {name: partial(spent, name=name) for name in SCENES}
