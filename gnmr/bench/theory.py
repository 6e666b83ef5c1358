"""The paper's theory (its section 7) as numbers: what recovering a unit gains, and how often luck triggers.

Theorem 1 and corollary 1. Routing changes one term of a step's bound, the squared error of the gradient. With g the
16-bit gradient and A the set of units on the recovery path

    error(A) = sum_b ||g_b(A) - g_b||^2         gap_b = ||g_low,b - g_b||^2 - ||g_high,b - g_b||^2
    error(none) - error(A) = sum of gap_b over b in A

so the best set of at most max_o units is the max_o largest positive gaps. It holds exactly where a unit's error depends
on its own path alone: with `site=saved`, whose forward pass and input gradients are exact. With `site=forward` units
disturb each other, and the deviation is a finding.

Theorem 2. Let the norms of a unit, over their mean, be independent draws of X with

    log E exp(l (X - 1)) <= l^2 k^2 / 2   for |l| <= 1/k                     (sub-exponential with parameter k)

Chernoff's bound with l = min(s/k^2, 1/k) gives P(mean of h draws >= 1 + s) <= exp(-h/2 min(s^2/k^2, s/k)), and the same
below the mean. GNMR = X / (mean of h others) reaches alpha = 1 + e only where X >= 1 + e/2 or the mean is at most
(1 + e/2)/(1 + e) = 1 - e/(2 alpha), and the halves cost a factor of 4 at the most. So the theorem's

    P(GNMR >= alpha) <= exp(-c min(e^2/k^2, e/k)) + 2 exp(-c h min((e/alpha)^2/k^2, (e/alpha)/k))

holds with c = 1/8 for this k. The paper leaves c open; nothing here is fitted. The same assumption gives a bound
without any constant, Chernoff's on X - alpha * mean at the best l (`chernoff`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor, nn

from gnmr.bench.figures import Figure, median, show
from gnmr.bench.setting import Setting
from gnmr.data import TrainBlocks
from gnmr.errors import UserError
from gnmr.paths import Plan
from gnmr.replay import read_norms
from gnmr.training import run
from gnmr.training.step import loss_of

SITES = ("saved", "forward")
STRIDE = 20
"""Training steps between two measured ones."""
MOST_PARAMETERS = 100_000_000
RANDOM_SETS = 1000
ESTIMATE, NORM, ORACLE = "gap estimate", "gradient norm", "oracle signal"
"""gap_low - gap_recovery of the probe; on the low path; ||g_low - g_high||^2."""

HISTORIES = (1, 2, 5, 10, 30, 100, 300, 1000)
ALPHAS = (1.1, 1.3, 1.5, 2.0, 3.0)
C = 1 / 8
HISTORIES_DRAWN = 2000
"""Simulated histories in a round."""
DETREND_STEPS = 101
KEPT_STEPS = 1000
"""Most recorded steps that are resampled; of a longer run every n-th."""


@dataclass(frozen=True, kw_only=True)
class Cell(Figure):
    """A figure that is shown as one cell of a table."""

    table: str
    row: str
    column: str
    sharper: float | None = None
    """A bound beside `target`."""

    def text(self) -> str:
        """Where it is a share, in percent without the sign: value/sharper/target, as far as they are there."""
        if self.unit != "%":
            return f"{self.value:.3g}"
        numbers = [100 * number for number in (self.value, self.sharper, self.target) if number is not None]
        return "/".join("<.01" if 0 < n < 0.01 else f"{n:.2g}" if abs(n) < 10 else f"{n:.0f}" for n in numbers)


def check_theory(setting: Setting) -> None:
    """UserError unless both paths exist and the run whose norms are asked for can be read."""
    if setting.config.paths.recovery is None:
        raise UserError(f"bench theory: runs both paths, and paths={setting.config.paths.name} has no recovery path")
    if setting.config.run_dir is not None:
        recorded_norms(Path(setting.config.run_dir).expanduser())


def theory(setting: Setting) -> list[Figure]:
    """Theorem 1's identity and corollary 1's set where all paths are run; theorem 2's false triggers, simulated."""
    return recovery(setting) + false_triggers(setting)


def show_theory(title: str, figures: Sequence[Figure], console: Console) -> None:
    """As `figures.show`; cells as the tables that they make up."""
    cells = [figure for figure in figures if isinstance(figure, Cell)]
    show(title, [figure for figure in figures if not isinstance(figure, Cell)], console)
    for name in dict.fromkeys(cell.table for cell in cells):
        own = {(cell.row, cell.column): cell for cell in cells if cell.table == name}
        columns = list(dict.fromkeys(column for _, column in own))
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for row in dict.fromkeys(row for row, _ in own):
            table.add_row(row, *(own[row, column].text() if (row, column) in own else "" for column in columns))
        console.print(table)


# Theorem 1 and corollary 1


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


def measure(model: nn.Module, plan: Plan, backward: Callable[[], None]) -> Gaps:
    """Runs `backward` (forward and backward pass of one batch) in 16 bits, on the low and on the recovery path.

    Paths, probe and the generator of stochastic rounding are afterwards as they were; gradients are cleared.
    """

    def gradients(recovering: Collection[int]) -> list[Tensor]:
        in_force, generator = [operator.recovering for operator in plan.operators], plan.state_dict()
        for index, operator in enumerate(plan.operators):
            operator.switch(index in recovering)
        model.zero_grad(set_to_none=True)
        backward()
        grads = [[p.grad for p in operator.parameters() if p.grad is not None] for operator in plan.operators]
        model.zero_grad(set_to_none=True)
        plan.shared.forget()
        plan.load_state_dict(generator)
        for operator, was in zip(plan.operators, in_force, strict=True):
            operator.switch(was)
        return [torch.cat([grad.flatten().double() for grad in own]) for own in grads]

    def squares(ones: list[Tensor], others: list[Tensor]) -> np.ndarray:
        return np.array([float((a - b).square().sum()) for a, b in zip(ones, others, strict=True)])

    everything = range(len(plan.operators))
    earlier = plan.shared.probe
    plan.unprobe()
    with plan.exact():
        exact = gradients(())
    high = gradients(everything)
    probe = plan.probe(("gap_low", "gap_recovery"))
    low = gradients(())
    measured = {name: values.cpu().numpy() for name, values in probe.read().items()}
    plan.shared.probe = earlier

    nothing = [torch.zeros_like(grad) for grad in exact]
    return Gaps(
        [operator.unit_name for operator in plan.operators],
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
    """Both sites at the same weights, in some steps of a run; see `compare`."""
    parts = run.assemble(setting.config, Path(), setting.say)
    number = sum(p.numel() for p in parts.model.parameters())
    if number > MOST_PARAMETERS:
        raise UserError(f"bench theory: {number:,} parameters; it is for models of up to {MOST_PARAMETERS:,}")
    training, shared, max_o = parts.config.training, parts.plan.shared, parts.config.controller.max_o
    blocks, take_step = TrainBlocks(parts.corpus.train, training.seq_len, training.seed, None), run.train_step(parts)
    site, rng = shared.quantize_forward, np.random.default_rng(0)

    def batch() -> list[Tensor]:
        return [blocks.next(training.batch_size).to(parts.device) for _ in range(training.accumulation)]

    found: dict[str, list[Comparison]] = {name: [] for name in SITES}
    for step in setting.rounds(f"theory: steps on which all paths run, {STRIDE} apart", 2):
        for _ in range(STRIDE if step else 0):
            take_step(batch(), parts.config.optim.lr)
        micro_batches = batch()

        def backward(micro_batches: list[Tensor] = micro_batches) -> None:
            for block in micro_batches:
                (loss_of(parts.model, block) / len(micro_batches)).backward()

        for name in SITES:
            shared.quantize_forward = name == "forward"
            gaps = measure(parts.model, parts.plan, backward)
            found[name].append(compare(gaps, max_o, rng))
            if name == "saved":
                last = gaps
        shared.quantize_forward = site
    nearest = parts.config.paths.rounding == "nearest"  # else a switch moves the draws of the operators behind it
    figures = [_figures(name, several, name == "saved" and nearest) for name, several in found.items()]
    return [*chain.from_iterable(figures), *_units(last, max_o)]


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
        figures.append(median(f"{site}: {name}", values, "x" if "estimated" in name else "%", target))
    table = f"site={site}: who finds the oracle set, the largest gaps (median of {len(several)} steps)"
    for row, column in several[0].rankings:
        values = np.array([one.rankings[row, column] for one in several])
        figures.append(_cell(median(column, values, "%" if "%" in column else ""), table, row, column))
    return figures


def _units(gaps: Gaps, max_o: int) -> list[Figure]:
    """The units with the largest gaps in one step; those of the oracle set first."""
    columns = {"gap": gaps.gap_U} | gaps.scores
    table = f"site=saved: the largest recovery gaps of the last step (oracle set: the first {max_o})"
    return [
        _cell(Figure(f"{column} of {gaps.names[unit]}", float(values[unit]), ""), table, gaps.names[unit], column)
        for unit in np.argsort(-gaps.gap_U, kind="stable")[: max_o + 4]
        for column, values in columns.items()
    ]


def _cell(figure: Figure, table: str, row: str, column: str, sharper: float | None = None) -> Cell:
    return Cell(**asdict(figure), table=table, row=row, column=column, sharper=sharper)


# Theorem 2


LogMgf = Callable[[np.ndarray], np.ndarray]
"""l (any shape) -> log E exp(l (X - 1)), inf where it does not exist."""


@dataclass(frozen=True)
class Law:
    """A distribution of a unit's norm over its mean; its mean is 1."""

    name: str
    draw: Callable[[np.random.Generator, int, int], np.ndarray]
    """(generator, rows, columns) -> independent X, (rows, columns) float64; a row is the history of one unit."""
    log_mgf: LogMgf | None
    """None: infinite for every l > 0, so theorem 2 says nothing."""


def gamma(name: str, shape: float) -> Law:
    """Gamma with mean 1 and coefficient of variation shape^-1/2; shape 1 is the exponential distribution."""

    def log_mgf(slope: np.ndarray) -> np.ndarray:
        inside = slope < shape
        return np.where(inside, -slope - shape * np.log1p(-np.where(inside, slope, 0.0) / shape), np.inf)

    return Law(name, lambda rng, *size: rng.standard_gamma(shape, size) / shape, log_mgf)


def lognormal(name: str, variation: float) -> Law:
    """Lognormal with mean 1: a tail heavier than any exponential, to which theorem 2 does not apply."""
    sigma = np.sqrt(np.log1p(variation**2))
    return Law(name, lambda rng, *size: rng.lognormal(-(sigma**2) / 2, sigma, size), None)


LAWS = (
    gamma("exponential", 1.0),
    gamma("gamma, coefficient of variation 0.3", 0.3**-2),
    gamma("gamma, coefficient of variation 0.1", 0.1**-2),
    lognormal("lognormal, coefficient of variation 0.3", 0.3),
)


def resampled(name: str, x_SU: np.ndarray) -> Law:
    """Independent draws from each unit's own column (mean 1). A history is one unit's; the bounds hold for them all."""

    def draw(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
        steps, units = rng.integers(len(x_SU), size=(rows, columns)), rng.integers(x_SU.shape[1], size=(rows, 1))
        return x_SU[steps, units]

    def log_mgf(slope: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            means = [np.exp(each * (x_SU - 1)).mean(axis=0).max() for each in slope.ravel()]
        return np.log(means).reshape(slope.shape)

    return Law(name, draw, log_mgf)


def sub_exponential(law: Law) -> float:
    """The smallest k of the definition above, rounded up to a grid of 2 %; inf where there is none."""
    if law.log_mgf is None:
        return float("inf")
    slopes = np.geomspace(0.02, 200, 465)
    needed = np.maximum(law.log_mgf(slopes), law.log_mgf(-slopes)) * 2 / slopes**2  # k^2, at the least
    enough = np.maximum.accumulate(needed) * slopes**2 <= 1
    return float(1 / slopes[enough][-1]) if enough.any() else float("inf")


def bound(k: float, history: int, alpha: float) -> float:
    """Theorem 2's bound with c = 1/8, at most 1."""
    if not np.isfinite(k):
        return 1.0

    def least(x: float) -> float:
        return min((x / k) ** 2, x / k)

    e = alpha - 1
    return min(1.0, float(np.exp(-C * least(e)) + 2 * np.exp(-C * history * least(e / alpha))))


def chernoff(law: Law, history: int, alpha: float) -> float:
    """min over l of E exp(l X) E exp(-l alpha/h X)^h, from P(X - alpha * mean >= 0); at most 1."""
    if law.log_mgf is None:
        return 1.0
    slopes = np.geomspace(0.02, 2000, 80)
    exponent = law.log_mgf(slopes) + history * law.log_mgf(-slopes * alpha / history) - slopes * (alpha - 1)
    return min(1.0, float(np.exp(exponent.min())))


def simulate(law: Law, rng: np.random.Generator, number: int) -> np.ndarray:
    """(histories, alphas): how many of `number` simulated GNMR reach alpha after that many independent norms."""
    x = law.draw(rng, number, max(HISTORIES) + 1)
    lengths = np.array(HISTORIES)
    means = x[:, :-1].cumsum(axis=1)[:, lengths - 1] / lengths
    return (x[:, -1:, None] >= np.array(ALPHAS) * means[:, :, None]).sum(axis=0)


def false_triggers(setting: Setting) -> list[Figure]:
    """Theorem 2's rate by simulation beside its bound, and in recorded norms where `run_dir` gives a run."""
    laws, figures = list(LAWS), list[Figure]()
    if setting.config.run_dir is not None:
        norm_TU = recorded_norms(Path(setting.config.run_dir).expanduser())
        x_SU, dependence = detrended(norm_TU)
        laws.append(resampled("recorded norms, detrended, resampled", x_SU))
        figures += [*_recorded(norm_TU), dependence]
    generators = [np.random.default_rng(seed) for seed in range(len(laws))]
    hits = np.zeros((len(laws), len(HISTORIES), len(ALPHAS)), dtype=int)
    rounds = 0
    for _ in setting.rounds(f"theory: {HISTORIES_DRAWN:,} simulated histories of {len(laws)} kinds", 20):
        rounds += 1
        for law, rng, own in zip(laws, generators, hits, strict=True):
            own += simulate(law, rng, HISTORIES_DRAWN)
    cells = [c for law, own in zip(laws, hits, strict=True) for c in _rates(law, own, rounds * HISTORIES_DRAWN)]
    bounded = [cell for cell in cells if cell.target is not None and cell.sharper is not None]
    worst = max(cell.value / cell.target for cell in bounded if cell.target)
    sharpest = max(cell.value / cell.sharper for cell in bounded if cell.sharper)
    silent = sum(cell.target == 1.0 for cell in bounded) / len(bounded)
    return [
        Figure("theorem 2: simulated rate over bound, largest", worst, "x", n=len(bounded), target=1.0),
        Figure("Chernoff: simulated rate over bound, largest", sharpest, "x", n=len(bounded), target=1.0),
        Figure(
            "theorem 2: cells whose bound is 1", silent, "%", n=len(bounded), note=f"c = {C}; such a bound says nothing"
        ),
        *cells,
        *figures,
    ]


def _rates(law: Law, hits: np.ndarray, number: int) -> list[Cell]:
    k = sub_exponential(law)
    known = np.isfinite(k)
    what = f"k = {k:.3g}; simulated/Chernoff/theorem 2" if known else "no finite k; simulated"
    cells = []
    for history, own in zip(HISTORIES, hits, strict=True):
        for alpha, count in zip(ALPHAS, own, strict=True):
            interval = stats.binomtest(int(count), number).proportion_ci()
            figure = Figure(
                f"{law.name}: P(GNMR >= {alpha}) after {history}",
                float(count / number),
                "%",
                float(interval.low),
                float(interval.high),
                "95 % interval (Clopper-Pearson)",
                number,
                bound(k, history, alpha) if known else None,
            )
            sharper = chernoff(law, history, alpha) if known else None
            row, column = f"after {history}", f"alpha {alpha}"
            cells.append(_cell(figure, f"{law.name} ({what}, %)", row, column, sharper))
    return cells


def recorded_norms(folder: Path) -> np.ndarray:
    """(T, U) float64 of a run folder, NaN where a unit was not observed or its norm is not finite."""
    norms = read_norms(folder)
    values = np.where(norms.observed & np.isfinite(norms.norm), norms.norm, np.nan)
    values = values[~np.isnan(values).all(axis=1)]  # with records.ratios_every the steps between
    if len(values) < 10:
        raise UserError(f"{folder}: {len(values)} recorded steps, 10 are the least that theorem 2 is set beside")
    return values


def detrended(norm_TU: np.ndarray) -> tuple[np.ndarray, Figure]:
    """Norms over their centred running mean, mean 1, (S, U); and how dependent on the step before they still are.

    Steps in which a unit is missing are left out, and units without a positive norm.
    """
    whole = norm_TU[:, np.nanmax(norm_TU, axis=0, initial=0.0) > 0]
    whole = whole[np.isfinite(whole).all(axis=1)]
    if len(whole) < 10:
        raise UserError(f"{len(whole)} recorded steps hold a norm of every unit, 10 are the least")
    half = min(DETREND_STEPS, len(whole)) // 2
    total = np.concatenate([np.zeros((1, whole.shape[1])), whole.cumsum(axis=0)])
    step = np.arange(len(whole))
    first, last = np.maximum(step - half, 0), np.minimum(step + half + 1, len(whole))
    x = whole * (last - first)[:, None] / (total[last] - total[first])
    x /= x.mean(axis=0)
    before, after = (part - part.mean(axis=0) for part in (x[:-1], x[1:]))
    correlation = (before * after).sum(axis=0) / np.sqrt((before**2).sum(axis=0) * (after**2).sum(axis=0))
    note = "of a unit with its next step, detrended; theorem 2 assumes 0"
    return x[:: -(-len(x) // KEPT_STEPS)], median("recorded norms: autocorrelation", correlation, "", note=note)


def _recorded(norm_TU: np.ndarray) -> Iterable[Cell]:
    """GNMR as the controller saw it: trend and dependence included. Histories from one length up to the next."""
    known = np.isfinite(norm_TU)
    values = np.where(known, norm_TU, 0.0)
    history = known.cumsum(axis=0) - known
    mean = (values.cumsum(axis=0) - values) / np.maximum(history, 1)
    ratio = np.where(mean > 0, values / np.where(mean > 0, mean, 1.0), 1.0)
    for first, following in zip(HISTORIES, [*HISTORIES[1:], np.inf], strict=True):
        inside = ratio[known & (history >= first) & (history < following)]
        if len(inside) == 0:
            return
        for alpha in ALPHAS:
            rate = float((inside >= alpha).mean())
            figure = Figure(f"recorded norms: share of GNMR >= {alpha} after {first}", rate, "%", n=len(inside))
            row = f"after {first}" + ("" if following == first + 1 else f" to {following - 1:.0f}")
            yield _cell(figure, "recorded norms as they came (share of unit-steps, %)", row, f"alpha {alpha}")
