"""Is it the method, or what stands around it? The stress of the evidence, held against a fairer one.

    forks       2-bit saved activations, never and always on the recovery path, from trained bases: what they cost after
                20 and 40 steps, under the bases' beta2 of 0.999 and under 0.95
    scratch     the same from the first step, 200 steps of a schedule of 1,000, and with a set, drawn or by gap, that is
                new in every step or held for 20: as the evidence was made (beta2 0.999) and with beta2 0.95; and
                rounded as ActNN does (ranges of groups, stochastic). By gap, as what is saved alone has no price
    more        from scratch: ranges and stochastic rounding each alone; gradients clipped at 1.0
    lengths     from the records in runs/reference: the gap after 250 and 500 steps, and annealed runs of 500 steps
                beside step 500 of 1,000

`run=` names the bases of the forks; blocks are orders of their data, and seeds from scratch: `repeats` of them. A
family is one model of all its arms (`gnmr.lab.report.family`). The bounds come first: where always is not shown to be
better than never no arm has a verdict. With fewer than three blocks nothing is tested.

A fork has the optimizer of its base. Where beta2 is another one, it is so from the fork's first step on, and the second
moments are scaled so that they are, corrected for their bias, what they were.

Each fork or run is a row in `runs_dir/bench/fair.jsonl`, written when it is done; a second call goes on where the first
one stopped. A figure of an arm is the share of the gap that it closes, with Fieller's 95 % interval; one of a contrast
the difference of two such shares, with p by Holm over the family.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.price import bases
from gnmr.lab.bench.rows import Rows
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config.compose import compose
from gnmr.lab.records.pack import unpacked
from gnmr.lab.report.family import Contrast, Family, fit, judge
from gnmr.lab.report.runs import load
from gnmr.lab.train.build import Parts, build_parts, open_data, training_blocks, validation
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.steps import Steps, validated

ORDERS, SEEDS = 3, 3
NEVER, ALWAYS = "never", "always"
FORKED, WHOLE = (20, 40), (100, 200)
"""Steps after which forks and runs are validated."""
RECENT = 20
"""Steps at the end over which it is counted how many second moments fell."""
SCRATCH = "scratch"
_RANKED, _LOW = "controller.routing=ranked", "controller.signal=always_low"
ARMS: dict[str, tuple[str, ...]] = {
    NEVER: (_LOW,),
    ALWAYS: ("controller.signal=always_high", "controller.warmup_frac=1.0"),
    "random": ("controller.signal=random", _RANKED),
    "random held": ("controller.signal=random", _RANKED, "controller.hold=20"),
    "by gap": ("controller.signal=gap", _RANKED),
    "by gap held": ("controller.signal=gap", _RANKED, "controller.hold=20"),
    "stochastic": (_LOW, "precision.rounding=stochastic"),
    "ranges": (_LOW, "precision.group=256"),
    "ranges, stochastic": (_LOW, "precision.group=256", "precision.rounding=stochastic"),
}
"""Words of a config; all under 2-bit saved activations and 8 bits on the recovery path."""
_SAVED = ("precision.low=int2", "precision.recovery=int8", "precision.site=saved")
_MODEL = ("model.outlier_channels.number=2", "model.outlier_channels.gain=20")
PLAIN, FORGETTING, CLIPPED = "beta2 0.999", "beta2 0.95", "clip 1.0"
"""Optimizers: that of the evidence, and what differs."""
_SETS = (
    *(("random held", "random"), ("random", NEVER), ("random held", NEVER)),
    *(("by gap held", "by gap"), ("by gap", "random"), ("by gap held", "random held")),
)
_Families = dict[str, tuple[str, tuple[tuple[str, str], ...]]]
FAMILIES: _Families = {
    "switching, beta2 0.999": (PLAIN, _SETS),
    "switching, beta2 0.95": (FORGETTING, _SETS),
    "rounding": (PLAIN, (("ranges, stochastic", NEVER),)),
}
MORE: _Families = {
    "rounding, its parts": (PLAIN, (("stochastic", NEVER), ("ranges", NEVER))),
    "clip 1.0": (CLIPPED, ()),
}
"""From scratch: optimizer, and arm and control of each test. A family's arms are those and the bounds."""
RECORDED = {
    NEVER: ("regime_map.parquet", "int2_int8-always_low-5001ee36-*"),
    ALWAYS: ("regime_map.parquet", "int2_int8-always_high-6e79da03-*"),
    "1,000 steps, 8 bits": ("act_quant_stress.parquet", "int8-*"),
    "1,000 steps, 16 bits": ("act_quant_stress.parquet", "bf16-*"),
}
"""Pack and names of recorded runs; the first two have schedules of 500 steps, all the rate 1.5e-3."""
_FILE = Path("bench", "fair.jsonl")


@dataclass(frozen=True)
class Cell:
    """One fork or run, without its outcome."""

    optimizer: str
    base: str
    arm: str
    order: int
    """Of the data of a fork; of a run its seed."""


Known = dict[Cell, dict[str, Any]]


def arms_of(contrasts: Sequence[tuple[str, str]]) -> list[str]:
    """The bounds, and what is tested."""
    tested = (arm for pair in contrasts for arm in reversed(pair))
    return list(dict.fromkeys([NEVER, ALWAYS, *tested]))


def _recorded(setting: Setting, opened: Mapping[str, Forks] | None = None) -> Rows[Cell]:
    return Rows(Path(setting.config.runs_dir) / _FILE, Cell, opened, "cell")


def _fork(forks: Forks, cell: Cell, setting: Setting) -> dict[str, Any]:
    """Makes the fork: what came out."""
    config = forks.config(
        *_SAVED, *ARMS[cell.arm], f"training.steps={FORKED[-1]}", f"fork.order={cell.order}", *_threads(setting)
    )
    parts = forks.parts(replace(config, fork=replace(config.fork, heal=0)))
    if cell.optimizer == FORGETTING:
        with_beta2(parts.optimizer, 0.95)
    return _trained(parts, FORKED)


def _run(cell: Cell, setting: Setting) -> dict[str, Any]:
    """Trains from scratch: what came out."""
    own = {FORGETTING: ["optim.betas=[0.9,0.95]"], CLIPPED: ["optim.clip_norm=1.0"]}.get(cell.optimizer, [])
    size = [f"training.steps={WHOLE[-1]}", f"training.seed={cell.order}"]
    words = ["experiment=fork_base", *_MODEL, *_SAVED, *ARMS[cell.arm], *own, *size, *_threads(setting)]
    config = compose(words)
    return _trained(build_parts(config, Path(), open_data(config, setting.say), setting.say), WHOLE)


def _trained(parts: Parts, lengths: Sequence[int]) -> dict[str, Any]:
    """Takes the steps: what came out, with the validation losses after `lengths`."""
    config, after, norms = parts.config, dict[str, float](), list[float]()
    steps = Steps(parts, training_blocks(config, parts.corpus, None, parts.branch))
    held_out, promoted, before = validation(config, parts.corpus, config.training.eval_sequences), 0, list[Tensor]()
    for step in range(1, lengths[-1] + 1):
        if step == lengths[-1] - RECENT + 1:
            before = [moment.clone() for moment in _second_moments(parts)]
        result = steps(step)
        norms.append(result.grad_norm_pre_clip)
        promoted += int(result.decision.in_force.sum())
        if step in lengths:
            after[str(step)] = validated(parts, held_out, step)["val_loss"]
    fell = [(new < old).float().mean() for new, old in zip(_second_moments(parts), before, strict=True)]
    return {
        "after": after,
        "promoted": promoted / (lengths[-1] * len(parts.controller.units)),
        "grad_norm": sorted(norms)[len(norms) // 2],
        "above_1": sum(norm > 1 for norm in norms) / len(norms),
        "second_moments_fell": float(torch.stack(fell).mean()),
    }


def with_beta2(optimizer: torch.optim.Optimizer, beta2: float) -> None:
    """Adam goes on under another beta2; its second moments, corrected for their bias, stay what they are."""
    for group in optimizer.param_groups:
        beta1, old = group["betas"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            step = float(state["step"])
            state["exp_avg_sq"].mul_((1 - beta2**step) / (1 - old**step))
        group["betas"] = (beta1, beta2)


def _second_moments(parts: Parts) -> list[Tensor]:
    """Adam's, of the operators' weights."""
    return [parts.optimizer.state[operator.weight]["exp_avg_sq"] for operator in parts.converted.operators]


def _threads(setting: Setting) -> list[str]:
    threads = setting.config.training.threads
    return [] if threads is None else [f"training.threads={threads}"]


def _values(cells: Sequence[Cell], known: Known, step: int) -> dict[str, dict[Any, float]]:
    """Losses after that step, by arm and block."""
    values: dict[str, dict[Any, float]] = {}
    for cell in cells:
        values.setdefault(cell.arm, {})[cell.order] = float(known[cell]["after"][str(step)])
    return values


def _told(
    where: str, cells: Sequence[Cell], known: Known, step: int, contrasts: Sequence[tuple[str, str]]
) -> list[Figure]:
    """Mean losses, and where blocks are enough the family; how many second moments fell."""
    values = _values(cells, known, step)
    figures = [
        Figure(f"{where}: loss, {arm}", sum(of.values()) / len(of), "nats", n=len(of)) for arm, of in values.items()
    ]
    for arm in values:
        fell = [known[cell]["second_moments_fell"] for cell in cells if cell.arm == arm]
        figures.append(Figure(f"{where}: second moments that fell, {arm}", sum(fell) / len(fell), "%", n=len(fell)))
    family = judge(values, contrasts, low=NEVER, high=ALWAYS)
    return figures if family.fit is None or family.gap is None else figures + _figures(where, family)


def _figures(where: str, family: Family) -> list[Figure]:
    """The gap, the power, the share that each arm closes, and each contrast as a difference of shares."""
    model, gap = family.fit, family.gap
    assert model is not None and gap is not None
    spread = "own differences" if model.own else f"residual {model.sd:.4f} nats, {model.freedom} degrees of freedom"
    shown = f"{'' if family.gate else 'not '}shown, p = {family.p_gate or math.nan:.2g}"
    low, high = gap.interval
    found = [Figure(f"{where}: gap", gap.estimate, "nats", low, high, "95 % interval", family.n, note=shown)]
    if least := family.smallest():
        found.append(Figure(f"{where}: smallest effect at 80 % power", max(least), "%", n=family.n, note=spread))
    for arm in model.values:
        if arm not in (family.low, family.high) and (closed := model.closed(arm, family.low, family.high)):
            found.append(_share(f"{where}: {arm}", closed, family.n))
    of_gap: dict[Hashable, float] = {family.low: 1.0, family.high: -1.0}
    for row in family.rows:
        if (apart := model.ratio({row.control: 1.0, row.arm: -1.0}, of_gap)) is not None:
            p, equal = ("-" if value is None else f"{value:.2g}" for value in (row.p, row.p_equal))
            note = f"p = {p}, {row.verdict}; equal: p = {equal}"
            found.append(replace(_share(f"{where}: {row.arm} - {row.control}", apart, row.n), note=note))
    return found


def _share(name: str, closed: tuple[float, tuple[float, float] | None], n: int) -> Figure:
    low, high = closed[1] or (None, None)
    return Figure(name, closed[0], "%", low, high, "95 % interval by Fieller", n)


def _apart(name: str, one: Contrast, other: Contrast) -> Figure:
    """The difference of two contrasts of two models, nats, with Welch's degrees of freedom."""
    error2 = one.error**2 + other.error**2
    freedom = error2**2 / (one.error**4 / one.freedom + other.error**4 / other.freedom)
    apart = Contrast(one.estimate - other.estimate, math.sqrt(error2), round(freedom))
    return Figure(name, apart.estimate, "nats", *apart.interval, "95 % interval", note=f"p = {apart.p:.2g}")


def forks(setting: Setting) -> list[Figure]:
    """Of each base and beta2 the gap after each length; never's and always's losses."""
    opened = dict(bases(setting))
    known = _recorded(setting, opened)
    orders, figures = range(setting.repeats or ORDERS), list[Figure]()
    for base, of in opened.items():
        for optimizer in (PLAIN, FORGETTING):
            cells = [Cell(optimizer, base, arm, order) for order in orders for arm in (NEVER, ALWAYS)]
            todo = [cell for cell in cells if cell not in known]
            for cell in setting.over(todo, f"fair: {base}, {optimizer}, forks") if todo else ():
                known.put(cell, _fork(of, cell, setting))
            for step in FORKED:
                figures += _told(f"{base}, {optimizer}, {step} steps", cells, known, step, ())
    return figures


def scratch(setting: Setting, families: _Families = FAMILIES) -> list[Figure]:
    """Of each family the gap, arms and contrasts; and how the cost of switching differs."""
    known = _recorded(setting)
    seeds, figures, costs = range(setting.repeats or SEEDS), list[Figure](), dict[str, Contrast]()
    for family, (optimizer, contrasts) in families.items():
        cells = [Cell(optimizer, SCRATCH, arm, seed) for seed in seeds for arm in arms_of(contrasts)]
        todo = sorted((cell for cell in cells if cell not in known), key=lambda cell: cell.arm not in (NEVER, ALWAYS))
        for cell in setting.over(todo, f"fair: {family}, runs") if todo else ():
            known.put(cell, _run(cell, setting))
        for step in WHOLE:
            figures += _told(f"{family}, {step} steps", cells, known, step, contrasts)
        model = fit(_values(cells, known, WHOLE[-1]))
        if model is not None and "random" in model.values:
            cost = model.between("random", "random held")
            costs |= {} if cost is None else {family: cost}
    if len(costs) == 2:
        figures.append(_apart("cost of switching: beta2 0.999 less 0.95", *costs.values()))
    return figures


def lengths(_setting: Setting) -> list[Figure]:
    """Of runs that are recorded: never and always after two lengths, and whether their gap grows; schedules of 500 and
    of 1,000 steps."""
    gaps: dict[str, dict[Any, float]] = {}
    figures = []
    curves = {arm: _curves(*where) for arm, where in RECORDED.items()}
    for step in (250, 500):
        values = {arm: {seed: of[step] for seed, of in curves[arm].items()} for arm in (NEVER, ALWAYS)}
        where = f"recorded, {step} steps"
        figures += [Figure(f"{where}: loss, {arm}", _mean(of), "nats", n=len(of)) for arm, of in values.items()]
        figures += _figures(where, judge(values, (), low=NEVER, high=ALWAYS))
        gaps[str(step)] = {seed: of - values[ALWAYS][seed] for seed, of in values[NEVER].items()}
    model = fit(gaps)
    assert model is not None
    grown = model.between("500", "250")
    assert grown is not None
    note = f"p = {grown.p:.2g}, paired"
    figures.append(
        Figure("recorded: gap after 500 steps less that after 250", grown.estimate, "nats", *grown.interval, note=note)
    )
    for arm, of_seed in curves.items():
        for step in sorted(set.intersection(*(set(of) for of in of_seed.values()))):
            losses = {seed: of[step] for seed, of in of_seed.items()}
            figures.append(Figure(f"schedules: {arm} after {step} steps", _mean(losses), "nats", n=len(losses)))
    return figures


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values)


def _curves(pack: str, pattern: str) -> dict[int, dict[int, float]]:
    """Validation losses by seed and step, of the runs of a pack of runs/reference whose names fit."""
    found = {}
    with unpacked([Path("runs/reference", pack, pattern)]) as there:
        for folder in there.paths:
            evals = load(folder).evals
            losses = zip(evals["step"], evals["val_loss"], strict=True)
            found[int(folder.name.rpartition("-s")[2])] = {int(step): float(loss) for step, loss in losses}
    return found


def _has_records(_setting: Setting) -> None:
    if not Path("runs/reference").is_dir():
        raise UserError("runs/reference: not here; lengths reads the packed records of a checkout, from its root")


def more(setting: Setting) -> list[Figure]:
    """From scratch, what has not been run yet."""
    return scratch(setting, MORE)


PARTS = {"forks": forks, "scratch": scratch, "more": more, "lengths": lengths}
CHECKS = {"lengths": _has_records}
