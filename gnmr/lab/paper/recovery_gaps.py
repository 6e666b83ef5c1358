"""What recovering a unit gains in one step (the paper's section 7).

Theorem 1 and corollary 1. Routing changes one term of a step's bound, the squared error of the gradient. With g the
16-bit gradient and A the set of units on the recovery path

    error(A) = sum_b ||g_b(A) - g_b||^2         gap_b = ||g_low,b - g_b||^2 - ||g_high,b - g_b||^2
    error(none) - error(A) = sum of gap_b over b in A

so the best set of at most max_o units is the max_o largest positive gaps. It holds exactly where a unit's error depends
on its own path alone: with `site=saved`, whose forward pass and input gradients are exact. With `site=forward`, and
under recipes, which cast in the forward pass too, units disturb each other, and the deviation is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.data.batch import Batch
from gnmr.lab.paper.theory_tables import in_table
from gnmr.lab.train.build import assemble, train_step, training_blocks
from gnmr.lab.train.loss import loss_of, objective_of
from gnmr.precision import ConvertedModel, Recipe

SITES = ("saved", "forward")
RECIPES = "recipes"
"""Takes the place of the sites where the paths are recipes, which know none."""
STRIDE = 20
"""Training steps between two measured ones."""
MOST_PARAMETERS = 100_000_000
RANDOM_SETS = 1000
ESTIMATE, NORM, ORACLE = "gap estimate", "gradient norm", "oracle signal"
"""gap_low - gap_recovery of the probe; on the low path; ||g_low - g_high||^2."""


@dataclass(frozen=True)
class Gaps:
    """U units on one batch, on which every path was run."""

    names: list[str]
    gap_U: np.ndarray
    """Float64, gap_b as above."""
    scores: dict[str, np.ndarray]
    """What else could rank the units, (U,) float64 each."""
    none: float
    """error(A) of the empty set."""
    square: float
    """Squared norm of the 16-bit gradient of all units."""
    error: Callable[[Collection[int]], float]
    """error(A), measured in another forward and backward pass; A as indices of units."""

    def best(self, score_U: np.ndarray, max_o: int) -> list[int]:
        """The max_o units with the largest positive scores, the largest first."""
        return [int(unit) for unit in np.argsort(-score_U, kind="stable")[:max_o] if score_U[unit] > 0]


def measure(model: nn.Module, plan: ConvertedModel, backward: Callable[[], None]) -> Gaps:
    """Runs `backward` (forward and backward pass of one batch) in 16 bits, on the low and on the recovery path.

    Paths, probe, the generator of stochastic rounding and what casts remember are afterwards as they were; gradients
    are cleared. A parameter without gradient (of an expert that no token reached) has gradient 0.
    """

    def gradients(recovering: Collection[int]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with plan.no_side_effects():
            for index, group in enumerate(plan.units):
                group.switch(index in recovering)
            backward()
        grads = [
            [
                torch.zeros_like(p) if p.grad is None else p.grad
                for operator in group.operators
                for p in operator.parameters()
                if p.requires_grad
            ]
            for group in plan.units
        ]
        model.zero_grad(set_to_none=True)
        return [torch.cat([grad.flatten().double() for grad in own]) for own in grads]

    def squares(ones: list[Tensor], others: list[Tensor]) -> np.ndarray:
        return np.array([float((a - b).square().sum()) for a, b in zip(ones, others, strict=True)])

    everything = range(len(plan.units))
    earlier = plan.shared.probe
    plan.unprobe()
    with plan.high_precision():
        exact = gradients(())
    high = gradients(everything)
    probe = plan.probe(("gap_low", "gap_recovery"))
    low = gradients(())
    measured = {name: values.cpu().numpy() for name, values in probe.read().items()}
    plan.shared.probe = earlier

    nothing = [torch.zeros_like(grad) for grad in exact]
    return Gaps(
        [group.name for group in plan.units],
        squares(low, exact) - squares(high, exact),
        {
            ESTIMATE: measured["gap_low"] - measured["gap_recovery"],
            ORACLE: squares(low, high),
            NORM: np.sqrt(squares(low, nothing)),
        },
        float(squares(low, exact).sum()),
        float(squares(exact, nothing).sum()),
        lambda recovering: float(squares(gradients(recovering), exact).sum()),
    )


@dataclass(frozen=True)
class Comparison:
    """What one batch says of theorem 1."""

    deviations: list[float]
    """|measured gain - sum of the gaps| over the sum of the gaps' sizes, for each set that was measured."""
    rankings: dict[tuple[str, str], float]
    """(who ranks the units, column) -> number."""
    shares: dict[str, float]


def compare(gaps: Gaps, max_o: int, rng: np.random.Generator) -> Comparison:
    """Measures the sets that each score chooses and random ones. UserError where the paths do not differ."""
    gap, number = gaps.gap_U, len(gaps.gap_U)
    oracle = gaps.best(gap, max_o)
    if not oracle:
        raise UserError("bench theory: no unit has a gap above 0, so its two paths are equally good; use other paths.*")
    gains: dict[frozenset[int], float] = {}

    def gain(units: Collection[int]) -> float:
        chosen = frozenset(units)
        if chosen not in gains:
            gains[chosen] = gaps.none - gaps.error(chosen)
        return gains[chosen]

    most = gain(oracle)
    rankings = {}
    for name, score in gaps.scores.items():
        chosen = gaps.best(score, max_o)
        rankings[name, "rank correlation"] = float(stats.spearmanr(score, gap).statistic)
        rankings[name, f"of the best {max_o}, %"] = len(set(chosen) & set(oracle)) / len(oracle)
        rankings[name, "gain of its set, %"] = gain(chosen) / most
    draws = rng.random((RANDOM_SETS, number)).argsort(axis=1)[:, : len(oracle)]
    rankings["random", f"of the best {max_o}, %"] = float(np.isin(draws, oracle).mean())
    measured = [gain(draw) / most for draw in draws[:3]]
    rankings["random", "gain of its set, %"] = float(np.mean(measured))
    gain(rng.permutation(number)[: max(number // 2, 1)])
    added = float(gap[draws].sum(axis=1).max() / gap[oracle].sum())  # the same set in another order is not above 1
    return Comparison(
        [
            abs(value - gap[list(units)].sum()) / np.abs(gap[list(units)]).sum()
            for units, value in gains.items()
            if units
        ],
        rankings,
        {
            "best measured random set over oracle set": max(measured),
            f"best of {RANDOM_SETS:,} sets over it, gaps added": round(added, 9),
            "estimated over true gap, all units": float(gaps.scores[ESTIMATE].sum() / gap.sum()),
            "units with a gap above 0": float((gap > 0).mean()),
            "error of low path over squared gradient": gaps.none / gaps.square,
            "error removed by the oracle set": most / gaps.none,
        },
    )


def recovery(setting: Setting) -> list[Figure]:
    """Both sites at the same weights, in some steps of a run; recipes as they are. See `compare`."""
    parts = assemble(setting.config, Path(), setting.say)
    number = sum(p.numel() for p in parts.model.parameters())
    if number > MOST_PARAMETERS:
        raise UserError(f"bench theory: {number:,} parameters; it is for models of up to {MOST_PARAMETERS:,}")
    training, shared, max_o = parts.config.training, parts.converted.shared, parts.config.controller.cap
    blocks, take_step = training_blocks(parts.config, parts.corpus, None), train_step(parts)
    site, rng = shared.quantize_forward, np.random.default_rng(0)

    def batch() -> list[Tensor | Batch]:
        return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]

    sites = (RECIPES,) if isinstance(parts.converted.low, Recipe) else SITES
    found: dict[str, list[Comparison]] = {name: [] for name in sites}
    for step in setting.rounds(f"theory: steps on which all paths run, {STRIDE} apart", 2):
        for _ in range(STRIDE if step else 0):
            take_step(batch(), parts.config.optim.lr)
        micro_batches = batch()

        def backward(micro_batches: list[Tensor | Batch] = micro_batches) -> None:
            for block in micro_batches:
                (objective_of(parts.model, loss_of(parts.model, block)) / len(micro_batches)).backward()

        for name in sites:
            shared.quantize_forward = name == "forward"
            gaps = measure(parts.model, parts.converted, backward)
            found[name].append(compare(gaps, max_o, rng))
            if name == sites[0]:
                last = gaps
        shared.quantize_forward = site
    nearest = parts.config.precision.rounding == "nearest"  # else a switch moves the draws of the operators behind it
    figures = [_figures(name, several, name == "saved" and nearest) for name, several in found.items()]
    return [*chain.from_iterable(figures), *_units(sites[0], last, max_o)]


def _named(site: str) -> str:
    """As tables call it."""
    return f"site={site}" if site in SITES else site


def _figures(site: str, several: list[Comparison], exact: bool) -> list[Figure]:
    """Of one site over the measured steps; `exact`: the identity holds there."""
    deviations = np.array([value for one in several for value in one.deviations])
    figures = [
        Figure(
            f"{site}: deviation from theorem 1, largest",
            float(deviations.max()),
            "%",
            float(deviations.min()),
            float(deviations.max()),
            "smallest and largest",
            len(deviations),
            1e-3 if exact else None,
            f"measured gain against the sum of the gaps; median {np.median(deviations):.2g}",
        )
    ]
    for name in several[0].shares:
        values = np.array([one.shares[name] for one in several])
        target = 1.0 if exact and name.startswith("best") else None
        figures.append(median(f"{site}: {name}", values, "x" if "estimated" in name else "%", target=target))
    table = f"{_named(site)}: who finds the oracle set, the largest gaps (median of {len(several)} steps)"
    for row, column in several[0].rankings:
        values = np.array([one.rankings[row, column] for one in several])
        figures.append(
            in_table(median(column, values, "%" if "%" in column else ""), table=table, row=row, column=column)
        )
    return figures


def _units(site: str, gaps: Gaps, max_o: int) -> list[Figure]:
    """The units with the largest gaps in one step; those of the oracle set first."""
    columns = {"gap": gaps.gap_U} | gaps.scores
    table = f"{_named(site)}: the largest recovery gaps of the last step (oracle set: the first {max_o})"
    return [
        in_table(
            Figure(f"{column} of {gaps.names[unit]}", float(values[unit]), ""),
            table=table,
            row=gaps.names[unit],
            column=column,
        )
        for unit in np.argsort(-gaps.gap_U, kind="stable")[: max_o + 4]
        for column, values in columns.items()
    ]
