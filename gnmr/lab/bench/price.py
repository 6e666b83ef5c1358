"""Prices held against the truth: by how much the loss rises when one operator's fprop is on the low path, and what
training gains when one GEMM of it is not.

    truth       the loss of a trained base with a single operator on the low path, on other tokens than the prices';
                and the share of all rises that a score finds in 10 % of the GEMMs
    sampling    prices of few tokens against those of all
    cadence     prices of one step in so many against those of the steps to come
    shares      of all prices, those in the GEMMs that a budget of `gnmr bench spend` buys
    atlas       forks of the base with a single GEMM of an operator on the recovery path, against forks with none

`run=` names the bases, one or several with commas between (runs of ours, `shipped` without). Beside the price stand
what others rank by: gradient norm, update norm, gap estimate, mean squared error, underflow, and ModelOpt's score, the
sum over tokens and outputs of (grad_output * output error)^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.control.signals.base import Context
from gnmr.control.signals.price import Price
from gnmr.doctor.knapsack import Choice, Item, arithmetic, by_score
from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.rows import Rows
from gnmr.lab.bench.scenes import LASTING, Scene
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.train.build import Parts, training_blocks, validation
from gnmr.lab.train.fork import Forks
from gnmr.lab.train.step import loss_of
from gnmr.lab.train.steps import Steps
from gnmr.names import GEMMS
from gnmr.precision.conversion import operator_shapes
from gnmr.precision.linear import PathLinear

LOW: dict[str, dict[str, str]] = {
    "sim_e2m1": {},
    "sim_int4": {},
    "nvfp4": {},
    "mxfp4": {},
    "sim_e3m2": {},
    "fp8_hybrid": {},
    "llm_int8": {},
    "int4": {"site": "forward"},
    "int2": {"site": "forward"},
}
"""Low path: what else of `paths` it needs. Recovery is bf16."""
MEASURED, HELD_OUT = 16, 96
"""Validation blocks of which prices are measured, and on which the loss is."""
STRIDES = (4, 16, 64)
CADENCES = (1, 5, 10, 20, 40)
CADENCE_STEPS, COMING = 160, 20
"""Steps of the fork, and those whose mean price a cadence is held against."""
SHARE = 0.1
"""Of the GEMMs' arithmetic: what a score is asked to choose."""
SCORES = ("price", "price, by elements", "gradient norm", "update norm", "gap", "MSE", "underflow", "ModelOpt's score")


def bases(setting: Setting) -> Iterator[tuple[str, Forks]]:
    """Name and forks of each base."""
    runs = (setting.config.run_dir or "shipped").split(",")
    names = [Path(run).name for run in runs]
    if len(set(names)) < len(names):
        raise UserError(f"run={','.join(runs)}: folders of one name; rows go by the name alone")
    for run, name in zip(runs, names, strict=True):
        yield name, Forks(run, setting.say)


def forked(forks: Forks, low: str, *words: str) -> Config:
    """The config of forks of that low path, static otherwise."""
    more = [f"precision.{key}={value}" for key, value in LOW.get(low, {}).items()]
    return forks.config(
        f"precision.low={low}", "precision.recovery=bf16", "controller.signal=always_low", *more, *words
    )


@dataclass(frozen=True)
class Ranked:
    """What pins of a base are chosen by."""

    operators: list[str]
    scores: Mapping[str, np.ndarray]
    """By name; empty where no arm asks."""
    costs: Mapping[Item, float]


def ranked(forks: Forks, scene: Scene) -> Ranked:
    """Of the base's operators under a scene's low path."""
    parts = forks.parts(forked(forks, scene.low, *scene.words))
    costs = arithmetic(operator_shapes(parts.model, parts.config.precision))
    scores = scored(parts)[0] if scene.pins else {}
    return Ranked([operator.operator_name for operator in parts.converted.operators], scores, costs)


@dataclass(frozen=True)
class Truth:
    """Of one low path at one base; (operators,) each."""

    operators: list[str]
    scores: dict[str, np.ndarray]
    rises: np.ndarray
    """nats by which the loss is higher with that operator alone on the low path."""
    errors: np.ndarray
    """Standard errors of these, over the batches."""
    together: float
    """nats by which it is higher with all of them there."""
    sampled: dict[int, np.ndarray]
    """By stride: prices of one token in so many."""


def measured(parts: Parts, setting: Setting, what: str, *, strides: Sequence[int] = ()) -> Truth:
    """Prices and scores of `MEASURED` blocks, the truth of `HELD_OUT` others. Every operator is in recovery."""
    config, plan, model = parts.config, parts.converted, parts.model
    size = config.training.batch_size
    blocks = _blocks(parts, MEASURED + HELD_OUT)
    scores, sampled = scored(parts, strides)

    def losses() -> np.ndarray:
        with torch.no_grad():
            return np.array([float(loss_of(model, batch)) for batch in blocks[MEASURED:].split(size)])

    high = losses()
    rises = []
    for operator in setting.over(plan.operators, what):
        operator.switch(False)
        rises.append(losses() - high)
        operator.switch(True)
    for operator in plan.operators:
        operator.switch(False)
    each = np.array(rises)
    return Truth(
        [operator.operator_name for operator in plan.operators],
        scores,
        each.mean(axis=1),
        each.std(axis=1, ddof=1) / each.shape[1] ** 0.5,
        float((losses() - high).mean()),
        sampled,
    )


def scored(parts: Parts, strides: Sequence[int] = ()) -> tuple[dict[str, np.ndarray], dict[int, np.ndarray]]:
    """Scores of `MEASURED` blocks by name, and prices by stride; (operators,) each. Every operator is in recovery."""
    parts.model.eval()
    for operator in parts.converted.operators:
        operator.switch(True)
    return _scores(parts, _blocks(parts, MEASURED).split(parts.config.training.batch_size), strides)


def _blocks(parts: Parts, count: int) -> Tensor:
    """(count, T + 1) validation blocks."""
    blocks = validation(parts.config, parts.corpus, count)
    assert isinstance(blocks, Tensor), "a base reads plain text"
    return blocks


def _scores(
    parts: Parts, batches: Sequence[Tensor], strides: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[int, np.ndarray]]:
    """By name, and prices by stride; (operators,) each."""
    plan, model = parts.converted, parts.model

    def backward() -> None:
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()

    sampled = {}
    for stride in strides:
        meter = plan.price(["price_fprop"], stride)
        backward()
        sampled[stride] = meter.by_operator()["fprop"].numpy().copy()
        model.zero_grad(set_to_none=True)
    meter = plan.price(["price_fprop", "price_dgrad", "price_wgrad"], tokens=1)
    probe = plan.probe(["gap_low", "mse", "underflow"])
    with _modelopt(plan.operators) as modelopt:
        backward()
    own, seen = meter.by_operator(), probe.read()
    norms = [float(operator.weight.grad.norm()) for operator in plan.operators if operator.weight.grad is not None]
    plan.unprice()
    plan.unprobe()
    model.zero_grad(set_to_none=True)
    return {
        "price": own["fprop"].numpy().copy(),
        "price, by elements": own["fprop_elements"].numpy().copy(),
        "dgrad's error": own["dgrad"].numpy().copy(),
        "wgrad's error": own["wgrad"].numpy() * np.array(norms) ** 2,
        "gradient norm": np.array(norms),
        "update norm": np.array([_update_norm(parts.optimizer, operator.weight) for operator in plan.operators]),
        "gap": seen["gap_low"].numpy(),
        "MSE": seen["mse"].numpy(),
        "underflow": seen["underflow"].numpy(),
        "ModelOpt's score": np.array([modelopt[operator.index] for operator in plan.operators]),
    }, sampled


@contextmanager
def _modelopt(operators: Sequence[PathLinear]) -> Iterator[dict[int, float]]:
    """By index: the sum of (grad_output * output error)^2 over all passes inside, of the low path's outputs."""
    found = dict.fromkeys((operator.index for operator in operators), 0.0)

    def add(operator: PathLinear, error: Tensor, grad: Tensor) -> None:
        found[operator.index] += float((grad.double() * error).square().sum())

    def watch(operator: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(operator, PathLinear)
        (x,) = inputs
        if not output.requires_grad:
            return
        with torch.no_grad():
            operator.shared.forget()
            operator.switch(False)
            low = operator.forward(x.detach().clone())
            operator.switch(True)
            operator.shared.forget()
            error = low.double() - F.linear(x, operator.weight, operator.bias).double()
        output.register_hook(partial(add, operator, error))

    handles = [operator.register_forward_hook(watch) for operator in operators]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _update_norm(optimizer: torch.optim.Optimizer, weight: Tensor) -> float:
    """Of Adam's last update, over the rate."""
    state = optimizer.state[weight]
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    step = float(state["step"])
    first, second = state["exp_avg"].double() / (1 - beta1**step), state["exp_avg_sq"].double() / (1 - beta2**step)
    return float((first / (second.sqrt() + 1e-8)).norm())


def truth(setting: Setting) -> list[Figure]:
    """Spearman of every score with the true rise, Pearson and slope of the price, sums against all at once."""
    figures = []
    for base, forks in bases(setting):
        for low in LOW:
            parts = forks.parts(forked(forks, low))
            found = measured(parts, setting, f"price: {base}, {low}")
            figures += _of_truth(
                f"{base}, {low}", found, arithmetic(operator_shapes(parts.model, parts.config.precision))
            )
    return figures


def _of_truth(where: str, found: Truth, costs: Mapping[Item, float]) -> list[Figure]:
    above, scores = int((found.rises > 2 * found.errors).sum()), {name: found.scores[name] for name in SCORES}
    price = scores["price"]
    total = found.rises.sum()
    note = (
        f"{above} of {len(price)} operators rise by more than two standard errors ({found.errors.mean():.0e} nats); "
        f"rises add up to {total:.4f} nats, all at once {found.together:.4f}, prices {price.sum():.4f}"
    )
    figures = [
        Figure(
            f"{where}: Spearman, {name}", spearman(score, found.rises), "", n=len(price), note=note * (name == "price")
        )
        for name, score in scores.items()
    ]
    for name, score in {**scores, "the truth itself": found.rises}.items():
        kept = _chosen(found.operators, score, costs)
        figures.append(
            Figure(f"{where}: rises in {SHARE:.0%} of the GEMMs, {name}", found.rises[kept].sum() / total, "%")
        )
    return [
        *figures,
        Figure(f"{where}: Pearson, price", float(pearsonr(price, found.rises)[0]), "", n=len(price)),
        Figure(f"{where}: prices over rises", float(price.sum() / total), "x", n=len(price)),
        Figure(f"{where}: rises over all at once", float(total / found.together), "x", n=len(price)),
    ]


def _chosen(operators: Sequence[str], score: np.ndarray, costs: Mapping[Item, float]) -> list[int]:
    """Indices of the operators whose `fprop` fills `SHARE` of all arithmetic, by score per cost."""
    pins = per_cost(operators, score, costs, SHARE, GEMMS[:1]).pins
    return [i for i, name in enumerate(operators) if name in pins]


def per_cost(
    operators: Sequence[str], score: np.ndarray, costs: Mapping[Item, float], budget: float, gemms: Sequence[str]
) -> Choice:
    """Pins that fill the budget with these GEMMs of the operators of the highest score per cost."""
    rates = {name: float(value) / costs[name, "fprop"] for name, value in zip(operators, score, strict=True)}
    return by_score(rates, {}, costs, budget, gemms=gemms)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b)[0]) if np.ptp(a) and np.ptp(b) else 0.0


def sampling(setting: Setting) -> list[Figure]:
    """Of one batch: Spearman and mean relative distance of sampled prices to those of all tokens."""
    figures = []
    for base, forks in bases(setting):
        for low in ("sim_e2m1", "nvfp4"):
            parts = forks.parts(forked(forks, low))
            for operator in parts.converted.operators:
                operator.switch(True)
            parts.model.eval()
            blocks = _blocks(parts, MEASURED)
            batches = blocks.split(parts.config.training.batch_size)
            all_tokens = [_scores(parts, [batch], STRIDES) for batch in batches]
            for stride in STRIDES:
                pairs = [(sampled[stride], scores["price"]) for scores, sampled in all_tokens]
                rank = float(np.mean([spearman(a, b) for a, b in pairs]))
                distance = float(np.mean([np.median(np.abs(np.log(a / b))) for a, b in pairs]))
                where = f"{base}, {low}: one token in {stride}"
                figures.append(Figure(f"{where}, Spearman with all tokens'", rank, "", n=len(pairs)))
                figures.append(Figure(f"{where}, median |log ratio|", distance, "", n=len(pairs)))
    return figures


def cadence(setting: Setting) -> list[Figure]:
    """In a fork on the low path: the price that the signal holds where it measures one step in so many, against the
    mean price of each of the next `COMING` steps. Spearman over operators, mean over the stretches."""
    figures = []
    for base, forks in bases(setting):
        for low in ("sim_e2m1", "nvfp4"):
            logs_TU = _logs(forks, low, setting)
            ends = range(2 * COMING, len(logs_TU) - COMING + 1, COMING)
            coming = {end: logs_TU[end : end + COMING].mean(axis=0) for end in ends}
            for every in CADENCES:
                ranks = [spearman(_held(logs_TU[:end], every), coming[end]) for end in ends]
                where = f"{base}, {low}: one step in {every}, Spearman with the steps to come"
                figures.append(Figure(where, float(np.mean(ranks)), "", n=len(ranks)))
    return figures


def _logs(forks: Forks, low: str, setting: Setting) -> np.ndarray:
    """(steps, operators): log prices of fprop, of one token in `precision.price_tokens`, measured in each step."""
    config = forked(forks, low, f"training.steps={CADENCE_STEPS}", "records.evidence=[price_fprop]")
    parts = forks.parts(config)
    steps = Steps(parts, training_blocks(config, parts.corpus, None, parts.branch))
    over = setting.over(range(1, CADENCE_STEPS + 1), f"cadence: {forks.base.name}, {low}, steps")
    return np.log([steps(step).decision.evidence["price_fprop"] for step in over])


def _held(logs_TU: np.ndarray, every: int) -> np.ndarray:
    """(operators,): what the signal `price` holds behind these steps, its logarithm, under its own defaults."""
    count = logs_TU.shape[1]
    signal = Price(Context(tuple(map(str, range(count))), (1.0,) * count, torch.device("cpu")), every=every)
    seen = {"norm": torch.ones(count, dtype=torch.float64), "observed": torch.ones(count, dtype=torch.bool)}
    for step, logs in enumerate(logs_TU, start=1):
        _, (price,) = signal.observe(seen | {"price": torch.from_numpy(logs).exp()}, step)
    return price.log().numpy()


def shares(setting: Setting) -> list[Figure]:
    """Of all prices, the share in the operators that pins by price choose, for lasting scenes of several budgets.

    An operator counts with its price (that of fprop), whichever of its GEMMs the scene recovers.
    """
    scenes = {name: scene for name, scene in LASTING.items() if len(scene.budgets) > 1}
    figures = []
    for base, forks in bases(setting):
        for name in setting.over([*scenes], f"shares: {base}"):
            scene, found = scenes[name], ranked(forks, scenes[name])
            prices = dict(zip(found.operators, found.scores["price"], strict=True))
            for budget in scene.budgets:
                choice = per_cost(found.operators, found.scores["price"], found.costs, budget, scene.recovers)
                share = sum(prices[operator] for operator in choice.pins) / sum(prices.values())
                where = f"{base}, {name}: prices in {budget:.1%} of the GEMMs"
                note = f"spends {choice.share:.1%}: {', '.join(choice.pins)}"
                figures.append(Figure(where, float(share), "%", n=len(prices), note=note))
    return figures


ATLAS_LOW, ATLAS_ORDERS = "sim_e2m1", 3
_ATLAS = Path("bench", "price-atlas.jsonl")
SCORE_OF = {"fprop": "price", "dgrad": "dgrad's error", "wgrad": "wgrad's error"}
"""The score of the base that is each GEMM's own."""


@dataclass(frozen=True)
class Pinned:
    """A fork of a base: which GEMM of which operator is in 16 bits, none where both are empty."""

    base: str
    operator: str
    gemm: str
    order: int


def atlas(setting: Setting) -> list[Figure]:
    """What training gains of one GEMM in 16 bits: loss of a fork without less that with, after its low stretch.

    `repeats` orders. Each fork is a row in `runs_dir/bench/price-atlas.jsonl`; a second call goes on behind the first.
    """
    file, opened = Path(setting.config.runs_dir) / _ATLAS, dict(bases(setting))
    known, orders = Rows(file, Pinned, opened), range(setting.repeats or ATLAS_ORDERS)
    found = {}
    for base, forks in opened.items():
        parts = forks.parts(forked(forks, ATLAS_LOW))
        found[base] = [operator.operator_name for operator in parts.converted.operators], scored(parts)[0]
    for base, order in ((base, order) for order in orders for base in opened):
        names, forks = found[base][0], opened[base]
        cells = [Pinned(base, "", "", order), *(Pinned(base, name, gemm, order) for gemm in GEMMS for name in names)]
        for cell in setting.over([cell for cell in cells if cell not in known], f"atlas: {base}, order {order}"):
            pins = {cell.operator: [cell.gemm]} if cell.gemm else {}
            known.put(cell, {"loss": _fork_loss(forks, forked(forks, ATLAS_LOW, f"fork.order={order}"), pins)})
    losses = {cell: float(row["loss"]) for cell, row in known.items()}
    return [figure for base, (names, scores) in found.items() for figure in _gains(base, names, scores, losses, orders)]


def _gains(
    base: str,
    names: Sequence[str],
    scores: Mapping[str, np.ndarray],
    losses: Mapping[Pinned, float],
    orders: Sequence[int],
) -> Iterator[Figure]:
    """Of each GEMM the rank correlation of scores with mean gains, and of the gains of two orders with each other.

    By the latter a score that knew the true gains would have the square root of the mean's reliability (Spearman and
    Brown).
    """
    for gemm in GEMMS:
        gains = np.array(
            [[losses[Pinned(base, "", "", k)] - losses[Pinned(base, name, gemm, k)] for k in orders] for name in names]
        )
        mean, where = gains.mean(axis=1), f"{base}, {ATLAS_LOW}, {gemm}"
        clear, n = 0, len(orders)
        if n > 1:
            # Pooled: a few orders give an operator no spread of its own.
            error = np.sqrt(gains.var(axis=1, ddof=1).mean() / n)
            clear = int((mean > 2 * error).sum())
            pairs = [spearman(gains[:, i], gains[:, j]) for i in range(n) for j in range(i)]
            one = max(float(np.mean(pairs)), 0.0)
            yield Figure(f"{where}: Spearman, two orders", float(np.mean(pairs)), "", n=n)
            yield Figure(f"{where}: most that a score can have", math.sqrt(n * one / (1 + (n - 1) * one)), "", n=n)
        note = f"gains add up to {mean.sum():.4f} nats; {clear} of {len(names)} above two standard errors"
        for score in dict.fromkeys((SCORE_OF[gemm], "price", "gradient norm", "update norm", "gap", "MSE")):
            rank = spearman(scores[score], mean)
            yield Figure(f"{where}: Spearman, {score}", rank, "", n=n, note=note * (score == SCORE_OF[gemm]))


def _fork_loss(forks: Forks, config: Config, pins: dict[str, list[str]]) -> float:
    """Validation loss on the 16-bit path after the low stretch, nats."""
    config = replace(config, precision=replace(config.precision, pins=pins), fork=replace(config.fork, heal=0))
    return forks(config, phases=("low",)).validation["low"].high


PARTS: dict[str, Callable[[Setting], list[Figure]]] = {
    "truth": truth,
    "sampling": sampling,
    "cadence": cadence,
    "shares": shares,
    "atlas": atlas,
}
