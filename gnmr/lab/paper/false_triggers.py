"""How often luck triggers (the paper's section 7).

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.paper.theory_tables import TableFigure, in_table
from gnmr.lab.replay.trace import read_norms

HISTORIES = (1, 2, 5, 10, 30, 100, 300, 1000)
ALPHAS = (1.1, 1.3, 1.5, 2.0, 3.0)
C = 1 / 8
HISTORIES_DRAWN = 2000
"""Simulated histories in a round."""
DETREND_STEPS = 101
KEPT_STEPS = 1000
"""Most recorded steps that are resampled; of a longer run every n-th."""

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


def _rates(law: Law, hits: np.ndarray, number: int) -> list[TableFigure]:
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
            cells.append(in_table(figure, table=f"{law.name} ({what}, %)", row=row, column=column, sharper=sharper))
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


def _recorded(norm_TU: np.ndarray) -> Iterable[TableFigure]:
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
            table = "recorded norms as they came (share of unit-steps, %)"
            yield in_table(figure, table=table, row=row, column=f"alpha {alpha}")
