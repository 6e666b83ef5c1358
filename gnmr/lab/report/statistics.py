"""Statistics of arms over their replicates: means, paired t-tests, Holm's adjustment, power.

The runs of one replicate share the order of the data and the initialization, so their difference cancels what
replicates have in common. All quantities are losses, the logarithm of the perplexity: a difference d is shown as
100 (e^d - 1)% of the perplexity, and lower is better. A run that diverged is `math.inf`, worse than any number, and is
never dropped.

**The test of two arms** is the two-sided paired t-test. A verdict needs three pairs. Rank tests cannot reach the level
here: the smallest two-sided p of the sign test on n pairs is 2 / 2^n.

**Where a run diverged** there is no mean. Two exact tests stand in: the sign test on the pairs, in which divergence
loses against every number and two diverged runs tie, and Fisher's test on the two numbers of diverged runs. p is twice
the smaller of the two (Bonferroni), and a verdict needs five pairs.

`gnmr.lab.report.family` tests many arms with one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.05
POWER = 0.8
FEWEST, FEWEST_DIVERGED = 3, 5
"""Pairs that a verdict needs: with finite losses alone, and where a run diverged."""
BETTER, WORSE, NO_DIFFERENCE, TOO_FEW = "better", "worse", "no difference shown", "too few seeds"


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation over n seeds."""

    n: int
    mean: float
    sd: float | None
    """None with fewer than two seeds or a number that is not finite."""


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and spread, or None without values. An inf or nan is not dropped: it is the mean."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if len(known) == 0:
        return None
    spread = len(known) > 1 and np.isfinite(known).all()
    return Stat(len(known), float(known.mean()), float(known.std(ddof=1)) if spread else None)


@dataclass(frozen=True)
class Paired:
    """An arm minus another over their common replicates."""

    n: int
    diverged: tuple[int, int] = (0, 0)
    """Diverged runs among the pairs, the arm's and the other's."""
    mean: float | None = None
    """None without pairs or where a run diverged; sd and interval are None then too, and below two pairs."""
    sd: float | None = None
    interval: tuple[float, float] | None = None
    """95% interval of the mean, not adjusted for other comparisons."""
    p: float | None = None
    """Two-sided, not adjusted; None if there are too few pairs for a verdict."""
    direction: int = 0
    """-1 if the arm is the better one, 1 if it is the worse one; not a verdict by itself."""


def paired(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> Paired:
    """Compare two arms, given as {replicate: loss}."""
    pairs = np.array([(mine[one], theirs[one]) for one in mine if one in theirs], dtype=float).reshape(-1, 2)
    n, lost = len(pairs), ~np.isfinite(pairs)
    if lost.any():
        return _counted(pairs, int(lost[:, 0].sum()), int(lost[:, 1].sum()))
    if n == 0:
        return Paired(0)
    differences = pairs[:, 0] - pairs[:, 1]
    mean, direction = float(differences.mean()), int(np.sign(differences.mean()))
    if n == 1:
        return Paired(n, mean=mean, direction=direction)
    sd = float(differences.std(ddof=1))
    if not sd:
        return Paired(n, (0, 0), mean, sd, (mean, mean), float(mean == 0) if n >= FEWEST else None, direction)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - LEVEL)
    p = float(test.pvalue) if n >= FEWEST else None
    return Paired(n, (0, 0), mean, sd, (float(low), float(high)), p, direction)


def _counted(pairs: np.ndarray, mine: int, theirs: int) -> Paired:
    n, wins, losses = len(pairs), int((pairs[:, 0] < pairs[:, 1]).sum()), int((pairs[:, 0] > pairs[:, 1]).sum())
    sign = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    fisher = stats.fisher_exact([[mine, n - mine], [theirs, n - theirs]]).pvalue
    direction = int(np.sign(losses - wins if sign < fisher else mine - theirs))
    p = min(1.0, 2 * float(min(sign, fisher))) if n >= FEWEST_DIVERGED else None
    return Paired(n, (mine, theirs), p=p, direction=direction)


@lru_cache(maxsize=256)
def smallest_shift(freedom: int) -> float:
    """Return the difference, in standard errors, that a two-sided t-test at `LEVEL` shows with `POWER`."""
    from statsmodels.stats.power import TTestPower

    found = TTestPower().solve_power(nobs=freedom + 1, alpha=LEVEL, power=POWER)
    return float(found) * math.sqrt(freedom + 1)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Adjust the p-values of one family by Holm's method; a None is no member of it and stays None."""
    from statsmodels.stats.multitest import multipletests

    known = [value for value in values if value is not None]
    adjusted = iter(multipletests(known, method="holm")[1] if known else ())
    return [None if value is None else float(next(adjusted)) for value in values]


def verdicts(family: Sequence[Paired]) -> list[tuple[float | None, str]]:
    """Return adjusted p-value and verdict of each comparison of one table."""
    adjusted = holm([comparison.p for comparison in family])
    return [(p, verdict(one.direction, p)) for one, p in zip(family, adjusted, strict=True)]


def verdict(direction: float, adjusted: float | None) -> str:
    """Return `BETTER`, `WORSE`, `NO_DIFFERENCE` or `TOO_FEW` for the sign of a difference and its adjusted p."""
    if adjusted is None:
        return TOO_FEW
    if adjusted >= LEVEL or direction == 0:
        return NO_DIFFERENCE
    return BETTER if direction < 0 else WORSE


def gap_closed(low: Mapping[int, float], arm: Mapping[int, float], recovery: Mapping[int, float]) -> float | None:
    """Return (low - arm) / (low - recovery) of the means over common seeds.

    None if there is no such seed, if one of these runs diverged, or if low is not the worse of the two bounds.
    """
    seeds = low.keys() & arm.keys() & recovery.keys()
    means = [math.fsum(side[seed] for seed in seeds) / max(len(seeds), 1) for side in (low, arm, recovery)]
    if not seeds or not all(map(math.isfinite, means)) or means[0] <= means[2]:
        return None
    return (means[0] - means[1]) / (means[0] - means[2])


def p_text(value: float | None) -> str:
    """Return three decimals, or one significant digit below 0.001."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.001 else f"{value:.3f}"
