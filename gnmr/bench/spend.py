"""What recovery buys: the share of the gap from always-low to always-high that an arm closes, against what it spends.

    lasting     4-bit paths, whose error is there in every step: pins of the base, and controllers
    passing     an FP8 path that costs next to nothing, of which one operator breaks for 20 of 40 steps: another one
                in every block, 1.8 % of the operator-steps

Every fork of a base trains `training.steps` on the low path with its arm's GEMMs in 16 bits, on the same data as the
others of its order; its loss is the validation loss on the 16-bit path afterwards. An arm fills the budget, a share of
the GEMM arithmetic, with the operators that it ranks highest per cost, of which the scene's GEMMs are recovered:

    price, gradient norm, update norm, gap, MSE    scores of the base, measured once before the fork: a pin
    random, first, last, first_last                the usual guesses: a pin
    NAME, each step                                signals of a controller, which chooses anew in every step
    fprop, dgrad, wgrad                            of every operator, beyond these budgets

Each fork is a row in `runs_dir/bench/spend.jsonl`, written when it is done; a second call goes on where the first one
stopped. Forks of one base and order share their data: they are a block. All arms, budgets and blocks of a scene are
one model, gap closed = arm + block, with one residual (`report.family`); where that model is refused, each arm is told
by its own differences. Each is tested against the scene's `ours` at the same budget, p adjusted by Holm over all of
these. Scores that rank as the price does (ModelOpt's, squares by element) are held against the truth alone
(`gnmr bench price`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gnmr.bench.figures import Figure
from gnmr.bench.price import Truth, bases, forked, measured, pins_per_cost
from gnmr.bench.setting import Setting
from gnmr.config import Config
from gnmr.disk import replacing
from gnmr.doctor.choice import GUESSES, arithmetic, guess
from gnmr.errors import UserError
from gnmr.paths.conversion import operator_shapes
from gnmr.report.family import Contrast, Fit, fit
from gnmr.report.statistics import LEVEL, holm, smallest_shift
from gnmr.training.build import Parts
from gnmr.training.fork import Forks
from gnmr.training.provenance import commit
from gnmr.vocabulary import GEMMS


@dataclass(frozen=True)
class Scene:
    """A low path and the arms that are tried on it."""

    low: str
    budgets: tuple[float, ...] = (0.025, 0.05, 0.075, 0.10, 0.15, 0.25)
    recovers: tuple[str, ...] = ("fprop",)
    """GEMMs of an operator that a budget buys."""
    pins: tuple[str, ...] = ("price", "gradient norm", "update norm", "gap", "MSE")
    """Scores of the base."""
    controllers: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"GNMR": ("signal=gnmr_delta",), "price": ("signal=price",)}
    )
    """Words for `controller.` by name."""
    whole: bool = True
    """Whether single GEMMs of all operators are tried too."""
    stress: tuple[str, ...] = ()
    """Words for `stress.`; hits one operator, another one in every block."""
    ours: str = "price"

    def arms(self) -> list[tuple[str, float]]:
        """(name, budget) of each, the bounds first."""
        each = [*self.pins, *GUESSES, *map(_anew, self.controllers)]
        fixed = BOUNDS | (WHOLE if self.whole else {})
        return [*fixed.items(), *((arm, budget) for budget in self.budgets for arm in each)]


BOUNDS = {"never": 0.0, "always": 1.0}
WHOLE = {"fprop": 1 / 3, "dgrad": 1 / 3, "wgrad": 1 / 3, "dgrad, wgrad": 2 / 3}
"""One or two GEMMs of all operators, and their budget; of recipes alone."""


def _anew(name: str) -> str:
    return f"{name}, each step"


LASTING = {
    "sim_e2m1": Scene("sim_e2m1"),
    "nvfp4": Scene("nvfp4"),
    "int4": Scene("int4", recovers=GEMMS, whole=False),
}
PASSING = {
    "broken": Scene(
        "fp8_hybrid",
        budgets=(0.025, 0.05, 0.10),
        recovers=("fprop", "wgrad"),  # those that read the input, which breaks
        pins=("price",),
        controllers={
            "price": ("signal=pin_excess", "+options.every=1"),
            "gap": ("signal=gap",),
            "MSE": ("signal=mse",),
            "gradient norm": ("signal=grad_norm",),
            "update norm": ("signal=update_norm",),
            "GNMR": ("signal=gnmr_delta",),
            "random": ("signal=random",),
        },
        whole=False,
        stress=("kind=scale_down", "magnitude=64", "windows=[[21,20]]"),
        ours=_anew("price"),
    )
}
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


def cells(base: str, name: str, scene: Scene, orders: int) -> list[Fork]:
    """Of one base and scene, order by order."""
    return [Fork(base, name, arm, budget, order) for order in range(orders) for arm, budget in scene.arms()]


def lasting(setting: Setting) -> list[Figure]:
    """Gap closed by each arm at each budget, mean over bases and orders; `repeats` orders. Goes on with what is
    recorded."""
    return _spend(setting, LASTING)


def passing(setting: Setting) -> list[Figure]:
    """The same where an operator breaks for a while."""
    return _spend(setting, PASSING)


def _spend(setting: Setting, scenes: Mapping[str, Scene]) -> list[Figure]:
    file = Path(setting.config.runs_dir) / _FILE
    known = {Fork(**row["fork"]): row for row in _rows(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as whole:  # without a last line that was cut off
        whole.write("".join(json.dumps(row) + "\n" for row in known.values()).encode())
    orders, names = setting.repeats or ORDERS, []
    for base, forks in bases(setting):
        names.append(base)
        for name, scene in scenes.items():
            todo = [cell for cell in cells(base, name, scene, orders) if cell not in known]
            if todo:
                parts = forks.parts(forked(forks, scene.low))
                found = measured(parts, setting, f"spend: {base}, {name}, prices")
                with file.open("a") as rows:
                    for cell in setting.over(todo, f"spend: {base}, {name}, forks"):
                        known[cell] = _run(forks, cell, scene, parts, found)
                        rows.write(json.dumps(known[cell]) + "\n")
                        rows.flush()
    return [
        figure
        for name, scene in scenes.items()
        for figure in _figures(scene, [cell for base in names for cell in cells(base, name, scene, orders)], known)
    ]


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


def _run(forks: Forks, cell: Fork, scene: Scene, parts: Parts, found: Truth) -> dict[str, Any]:
    """Makes the fork: its row."""
    config = _config(forks, cell, scene, parts, found)
    result = forks(config, phases=("low",))
    row = {"fork": asdict(cell), "share": result.spent, "pins": config.paths.pins, "steps": len(result.losses)}
    losses = {"loss": result.validation["low"].high, "own_loss": result.validation["low"].low}
    return row | losses | {"broken": config.stress.targets if scene.stress else None, "commit": commit()}


def _config(forks: Forks, cell: Fork, scene: Scene, parts: Parts, found: Truth) -> Config:
    words = [f"fork.order={cell.order}", "fork.heal=0"]
    if scene.stress:
        broken = random.Random(f"{cell.base} {cell.order}").choice(found.operators)
        words += [f"stress.targets=[{broken}]", *(f"stress.{word}" for word in scene.stress)]
    if (signal := {_anew(name): more for name, more in scene.controllers.items()}.get(cell.arm)) is not None:
        words += [f"+controller.{word[1:]}" if word.startswith("+") else f"controller.{word}" for word in signal]
        words += [f"controller.budget={cell.budget}", "controller.routing=ranked", "controller.max_o=null"]
        words += [f"paths.recovers=[{','.join(scene.recovers)}]"]
        return forked(forks, scene.low, *words)
    config = forked(forks, scene.low, *words)
    return replace(config, paths=replace(config.paths, pins=_pins(cell, scene, parts, found)))


def _pins(cell: Fork, scene: Scene, parts: Parts, found: Truth) -> dict[str, list[str]]:
    names, gemms = found.operators, scene.recovers
    if cell.arm in (*BOUNDS, *WHOLE):
        every = {"never": [], "always": list(GEMMS)}.get(cell.arm, cell.arm.split(", "))
        return {name: every for name in names if every}
    costs = arithmetic(operator_shapes(parts.model, parts.config.paths))
    if cell.arm in GUESSES:
        return guess(cell.arm, {}, costs, cell.budget, gemms=gemms, seed=cell.order).pins
    return pins_per_cost(names, found.scores[cell.arm], costs, cell.budget, gemms)


def _figures(scene: Scene, forks: list[Fork], known: Mapping[Fork, dict[str, Any]]) -> list[Figure]:
    """Of each arm and budget the mean share of the gap over blocks, its 95 % interval, and p against `ours`.

    By the pooled residual; where equal spread or the sum of arm and block is refused, by each arm's own differences.
    """
    blocks, name = list(dict.fromkeys((cell.base, cell.order) for cell in forks)), forks[0].low

    def losses(base: str, arm: str) -> dict[int, float]:
        chosen = (cell for cell in forks if (cell.base, cell.arm) == (base, arm))
        return {cell.order: known[cell]["loss"] for cell in chosen}

    never = {base: losses(base, "never") for base, _ in blocks}
    gaps = {base: np.mean([*never[base].values()]) - np.mean([*losses(base, "always").values()]) for base in never}
    closed: dict[tuple[str, float], dict[int, float]] = {}
    for cell in forks:
        share = (never[cell.base][cell.order] - known[cell]["loss"]) / gaps[cell.base]
        closed.setdefault((cell.arm, cell.budget), {})[blocks.index((cell.base, cell.order))] = float(share)
    n, model = len(blocks), fit(closed)
    figures = [Figure(f"{name}, {base}: gap, nats", float(gap), "", n=len(never[base])) for base, gap in gaps.items()]
    p = dict[tuple[str, float], float]()
    if model is not None:
        model = replace(model, own=model.refused)
        of_all = f"residual {model.sd:.1%}, {model.freedom} degrees of freedom"
        spread = "each arm's own spread" if model.own else of_all
        p, least = _tested(model, scene), _smallest(model, scene)
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


def _smallest(model: Fit, scene: Scene) -> float:
    """The difference to `ours` that one test shows with 80 % power: the median over arms and budgets."""
    known = [one for one in _rivals(model, scene).values() if one is not None]
    return float(np.median([one.error * smallest_shift(one.freedom) for one in known]))


PARTS = {"lasting": lasting, "passing": passing}
