"""Means over seeds; two arms over the seeds that both have: difference, interval, test, verdict.

The runs of one seed share the order of the data and the initialisation, so the difference within a seed is what counts
and the spread between seeds cancels. The quantity is the natural logarithm of the final validation perplexity, which
is the final validation loss; a difference d of it is shown as 100 (e^d - 1) %, lower is better. A run that diverged is
`math.inf` here, worse than any number, and is never dropped.

**One primary test**, chosen before the runs: the two-sided paired t-test. Rank tests cannot speak at the bench's three
to five seeds: the smallest two-sided p of Wilcoxon's test or the sign test on n pairs is 2 / 2^n, 0.25 and 0.06 there.

**Where a run diverged** there is no mean and no t-test. Two exact tests stand in: the sign test on the pairs, in which
divergence loses against every number and two diverged runs tie, and Fisher's test on the two numbers of diverged runs,
which ignores the pairing (too cautious, if anything, where the seeds of two arms tend to diverge together). p is twice
the smaller of the two (Bonferroni). Below five pairs no outcome could reach the level, so there is no verdict.

**Many arms**: p is adjusted by Holm's method over all comparisons of one table. Intervals are of one comparison each.
`gnmr.lab.report.family` has one model with one residual for all arms of a family.

**The effect size** d_z is the mean difference in units of its standard deviation. Its 95 % interval holds the values
under which the observed t = d_z sqrt(n) is neither in the upper nor in the lower 2.5 % of the noncentral t distribution
with n - 1 degrees of freedom and noncentrality d_z sqrt(n): exact for normal differences at any n, wide at three pairs
(Steiger and Fouladi, "Noncentrality interval estimation and the evaluation of statistical models", 1997; Cumming and
Finch, Educational and Psychological Measurement 61, 2001, 532-574).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, special, stats

LEVEL = 0.05
POWER = 0.8
"""With which the smallest effect of a table is shown."""
FEWEST, FEWEST_DIVERGED = 3, 5
"""Pairs that a verdict needs: with finite numbers alone, and where a run diverged."""

_LARGE_T = 100.0
"""Above it the interval of d_z comes from the spread of the standard deviation alone, the same to 0.2 %: at a very
large t scipy's inverse in the noncentrality stalls."""
BETTER, WORSE, NO_DIFFERENCE, TOO_FEW = "better", "worse", "no difference shown", "too few seeds"


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation over n seeds."""

    n: int
    mean: float
    sd: float | None
    """None with fewer than two seeds or a number that is not finite."""


def stat(values: Iterable[float | None]) -> Stat | None:
    """None where there is nothing to average. An inf or nan among the values is not dropped: it is the mean."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if len(known) == 0:
        return None
    spread = len(known) > 1 and np.isfinite(known).all()
    return Stat(len(known), float(known.mean()), float(known.std(ddof=1)) if spread else None)


@dataclass(frozen=True)
class Paired:
    """An arm minus another over their common seeds, in log perplexity."""

    n: int
    diverged: tuple[int, int] = (0, 0)
    """Diverged runs among the pairs, the arm's and the other's."""
    mean: float | None = None
    """None without pairs or where a run diverged; so are sd, interval, d_z and its interval."""
    sd: float | None = None
    """Sample standard deviation of the differences; None below two pairs."""
    interval: tuple[float, float] | None = None
    """95 % interval of the mean by Student's t, not adjusted for other comparisons; None below two pairs."""
    p: float | None = None
    """Two-sided, not adjusted; None where there are too few pairs for a verdict."""
    direction: int = 0
    """-1 where the arm is the better one, 1 where it is the worse, 0 where neither; by itself no verdict."""

    @property
    def d_z(self) -> float | None:
        """Cohen's effect size of paired differences: their mean in units of their standard deviation."""
        return self.mean / self.sd if self.mean is not None and self.sd else None

    @property
    def d_z_interval(self) -> tuple[float, float] | None:
        """95 % interval of `d_z` by the noncentral t distribution; None where there is no d_z."""
        if self.d_z is None:
            return None
        root, freedom, tails = math.sqrt(self.n), self.n - 1, np.array([1 - LEVEL / 2, LEVEL / 2])
        t = abs(self.d_z) * root
        if t <= _LARGE_T:
            low, high = special.nctdtrinc(freedom, tails, t) / root
        else:
            low, high = abs(self.d_z) * np.sqrt(stats.chi2.isf(tails, freedom) / freedom)
        return (float(low), float(high)) if self.d_z > 0 else (-float(high), -float(low))


def paired(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Compares two arms given as {seed: log perplexity, inf where the run diverged}."""
    seeds = sorted(mine.keys() & theirs.keys())
    pairs = np.array([(mine[seed], theirs[seed]) for seed in seeds], dtype=float).reshape(-1, 2)
    n, lost = len(pairs), ~np.isfinite(pairs)
    if lost.any():
        return _counted(pairs, int(lost[:, 0].sum()), int(lost[:, 1].sum()))
    if n == 0:
        return Paired(0)
    differences = pairs[:, 0] - pairs[:, 1]
    mean = float(differences.mean())
    direction = int(np.sign(mean))
    if n == 1:
        return Paired(n, mean=mean, direction=direction)
    sd = float(differences.std(ddof=1))
    error = sd / math.sqrt(n)
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    return Paired(n, (0, 0), mean, sd, (mean - half, mean + half), p if n >= FEWEST else None, direction)


def _counted(pairs: np.ndarray, mine: int, theirs: int) -> Paired:
    n, wins, losses = len(pairs), int((pairs[:, 0] < pairs[:, 1]).sum()), int((pairs[:, 0] > pairs[:, 1]).sum())
    sign = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    fisher = stats.fisher_exact([[mine, n - mine], [theirs, n - theirs]]).pvalue
    direction = int(np.sign(losses - wins if sign < fisher else mine - theirs))
    p = min(1.0, 2 * float(min(sign, fisher))) if n >= FEWEST_DIVERGED else None
    return Paired(n, (mine, theirs), p=p, direction=direction)


@lru_cache(maxsize=256)
def smallest_shift(freedom: int, level: float = LEVEL) -> float:
    """The difference, in standard errors, that a two-sided t-test at that level shows with `POWER`.

    By the noncentral t distribution; the other tail is left out.
    """
    critical = stats.t.ppf(1 - level / 2, freedom)
    return float(optimize.brentq(lambda x: stats.nct.sf(critical, freedom, x) - POWER, 0, 10 * critical + 10))


def smallest_effect(sd: float, freedom: int, n: int) -> float:
    """The difference of two arms' means over n seeds that a two-sided t-test at `LEVEL` shows with `POWER`.

    `sd`, `freedom`: of the residual (`gnmr.lab.report.family.fit`).
    """
    return smallest_shift(freedom) * sd * math.sqrt(2 / n)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values of one family; a None is no member of it and stays None."""
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(order):
        largest = max(largest, min(1.0, value * (len(order) - rank)))
        adjusted[place] = largest
    return adjusted


def verdict(comparison: Paired, adjusted: float | None) -> str:
    """`BETTER`, `WORSE`, `NO_DIFFERENCE` or `TOO_FEW`, from the comparison and its p-value after Holm's adjustment."""
    if adjusted is None:
        return TOO_FEW
    if adjusted >= LEVEL or comparison.direction == 0:
        return NO_DIFFERENCE
    return BETTER if comparison.direction < 0 else WORSE


def verdicts(family: Sequence[Paired]) -> list[tuple[float | None, str]]:
    """Adjusted p-value and verdict of each comparison of one table."""
    adjusted = holm([comparison.p for comparison in family])
    return [(p, verdict(comparison, p)) for comparison, p in zip(family, adjusted, strict=True)]


def gap_closed(
    low: Mapping[int, float], arm: Mapping[int, float], recovery: Mapping[int, float]
) -> tuple[float, int] | None:
    """(low - arm) / (low - recovery) of the means over the seeds that all three have, and the number of those seeds.

    None where there is no such seed, where one of these runs diverged, or where low is not the worse of the two ends.
    """
    seeds = low.keys() & arm.keys() & recovery.keys()
    means = [math.fsum(side[seed] for seed in seeds) / max(len(seeds), 1) for side in (low, arm, recovery)]
    if not seeds or not all(map(math.isfinite, means)) or means[0] <= means[2]:
        return None
    return (means[0] - means[1]) / (means[0] - means[2]), len(seeds)


def as_percent(difference: float) -> float:
    """A difference of log perplexity as percent of the other's perplexity."""
    return 100 * math.expm1(min(difference, 700.0))  # e^710 is no double
