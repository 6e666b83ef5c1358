"""Statistics of arms over their replicates: one linear model for a family of arms, and exact tests for divergence.

A replicate is what arms have in common: a seed, an order of the data of a base, or a seed in one of several cells. All
quantities are losses, the logarithm of the perplexity: a difference d is shown as 100 (e^d - 1)% of the perplexity, and
lower is better. A run that diverged is `math.inf`, worse than any number, and is never dropped.

**A family** is fitted by ordinary least squares: loss = arm + replicate + a normal residual of one spread. The tests:

1. *Assumptions.* Levene's test (from medians) that the residuals of all arms have equal spread, and the RESET test that
   arm and replicate add up (the squares of the fitted losses explain no more). If one of the two is refused, each
   contrast is tested by its own differences within replicates, as the paired t-test does.
2. *Positive control.* Always on the recovery path against never. If it is not shown to be better, no arm gets a
   verdict.
3. *Every arm against its control.* The p-values are Holm-adjusted over the family.
4. *Equivalence.* Two one-sided tests that the difference is within `MARGIN` of the gap, Holm-adjusted over the family.
   The gap is estimated too: the tests are of the contrasts arm - control -+ margin (never - always).

The share of the gap that an arm recovers is a ratio of two contrasts with Fieller's interval.

**Two arms alone** are compared by the two-sided paired t-test. A verdict needs three pairs. Rank tests cannot reach the
level here: the smallest two-sided p of the sign test on n pairs is 2 / 2^n.

**If a run diverged**, the arm has no mean. The arm leaves the model, and two exact tests stand in, in the same family:
the sign test on the pairs, in which divergence loses against every number and two diverged runs tie, and Fisher's test
on the two numbers of diverged runs. p is twice the smaller of the two (Bonferroni), and a verdict needs five pairs.

Schuirmann, J. Pharmacokin. Biopharm. 15 (1987); Fieller, Supplementum JRSS 7 (1940); Ramsey, JRSS B 31 (1969).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

LEVEL = 0.05
POWER = 0.8
FEWEST, FEWEST_DIVERGED = 3, 5  # pairs that a verdict needs: with finite losses alone, and where a run diverged
MARGIN = 0.1  # share of the gap that counts as equal
BETTER, WORSE, EQUAL, NO_DIFFERENCE = "better", "worse", "equal", "no difference shown"
TOO_FEW, NO_VERDICT = "too few seeds", "no verdict"
RELATIONS = {
    BETTER: "significantly better than",
    WORSE: "significantly worse than",
    EQUAL: "equal to",
    NO_DIFFERENCE: "not significantly different from",
}
"""Verdicts as parts of a sentence."""
_DRAWS = 999
_LARGEST = 1e100  # losses above it cannot be squared, and count as diverged
Losses = Mapping[Any, float]  # losses of an arm by replicate, inf where the run diverged
Values = Mapping[str, Losses]  # losses by arm


class Stat(NamedTuple):
    """Mean and sample standard deviation over n seeds; the latter is None with fewer than two finite numbers."""

    n: int
    mean: float
    sd: float | None


def stat(values: Iterable[float | None]) -> Stat | None:
    """Return mean and spread, or None without values. An inf or nan is not dropped: it is the mean."""
    numbers = np.array([value for value in values if value is not None], dtype=float)
    if len(numbers) == 0:
        return None
    spread = len(numbers) > 1 and np.isfinite(numbers).all()
    with np.errstate(over="ignore"):  # perplexities of hundreds of nats, whose spread is infinite
        return Stat(len(numbers), float(numbers.mean()), float(numbers.std(ddof=1)) if spread else None)


class Contrast(NamedTuple):
    """An estimated weighted sum of the arms' losses, and its standard error."""

    estimate: float
    error: float
    freedom: int

    @property
    def p(self) -> float:
        """Two-sided p of no difference."""
        if not self.error:
            return float(not self.estimate)
        return float(2 * special.stdtr(self.freedom, -abs(self.estimate) / self.error))

    @property
    def above(self) -> float:
        """One-sided p against the contrast being at most 0."""
        if not self.error:
            return 0.5 - 0.5 * float(np.sign(self.estimate))
        return float(special.stdtr(self.freedom, -self.estimate / self.error))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95%, not adjusted for other contrasts; None without a degree of freedom."""
        if self.freedom < 1:
            return None
        half = float(special.stdtrit(self.freedom, 1 - LEVEL / 2)) * self.error
        return self.estimate - half, self.estimate + half


class Share(NamedTuple):
    """The share of the gap that an arm recovers, with Fieller's 95% interval; None if the gap may be 0."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Result:
    """An arm against its control."""

    arm: str
    control: str
    n: int  # replicates that both have
    difference: Contrast | None = None  # None without replicates, and where a run diverged
    direction: float = 0  # below 0 if the arm is the better one; not a verdict by itself
    diverged: tuple[int, int] = (0, 0)  # runs of the arm and of the control, in the replicates of both
    p: float | None = None  # Holm-adjusted in a family; None if there are too few replicates, or no verdicts at all
    closed: Share | None = None  # None for the bounds themselves
    p_equal: float | None = None  # of the two one-sided tests, Holm-adjusted
    verdict: str = NO_VERDICT


def paired(values: Values, arm: str, control: str) -> Result:
    """Compare two arms by their differences within replicates, not adjusted for other comparisons.

    Args:
        values: losses by arm.
        arm: the arm in question.
        control: the arm that it is compared with.
    """
    common = [replicate for replicate in values[arm] if replicate in values[control]]
    pairs = np.array([(values[arm][r], values[control][r]) for r in common], dtype=float).reshape(-1, 2)
    n, diverged = len(pairs), (~np.isfinite(pairs)).sum(axis=0).tolist()
    if any(diverged):
        from scipy import stats  # its import takes as long as the rest of a report

        # A sign test, in which a diverged run is worse than any other, and Fisher's test of the numbers that diverged.
        wins, losses = int((pairs[:, 0] < pairs[:, 1]).sum()), int((pairs[:, 0] > pairs[:, 1]).sum())
        sign = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        fisher = stats.fisher_exact([[count, n - count] for count in diverged]).pvalue
        direction = float(np.sign(losses - wins if sign < fisher else diverged[0] - diverged[1]))
        p = min(1.0, 2 * float(min(sign, fisher))) if n >= FEWEST_DIVERGED else None
        return Result(arm, control, n, direction=direction, diverged=(diverged[0], diverged[1]), p=p)
    if n == 0:
        return Result(arm, control, 0)
    differences = pairs[:, 0] - pairs[:, 1]
    # A paired t-test, on the standard error of the mean difference.
    error = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    difference = Contrast(float(differences.mean()), error, n - 1)
    return Result(arm, control, n, difference, difference.estimate, p=difference.p if n >= FEWEST else None)


class Model:
    """Arms' losses, all finite, with the fitted model."""

    def __init__(self, values: Values) -> None:
        from statsmodels.formula.api import ols
        from statsmodels.stats.diagnostic import linear_reset

        replicates = list(dict.fromkeys(replicate for losses in values.values() for replicate in losses))
        self.arms = list(values)
        self.losses_AR = np.array([[losses.get(r, math.nan) for r in replicates] for losses in values.values()])
        arm, replicate = np.nonzero(~np.isnan(self.losses_AR))  # of each run
        loss = self.losses_AR[arm, replicate]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arms without replicates in common, which `joint` does not compare
            # loss = effect of the arm + effect of the replicate + residual
            data = {"loss": loss, "arm": arm, "replicate": replicate}
            self.fit = ols("loss ~ 0 + C(arm) + C(replicate)", data).fit()
        self.freedom = int(self.fit.df_resid)
        residual = np.array(self.fit.resid)
        residual[abs(residual) < 1e-12 * abs(loss).max()] = 0.0  # rounding
        self.sd = math.sqrt(float(residual @ residual) / self.freedom) if self.freedom else math.nan
        # The two assumptions. The residuals of two arms alone are each other's negatives.
        groups = [rows for number in range(len(values)) if len(rows := np.flatnonzero(arm == number)) >= FEWEST]
        self.spread_p = self.additive_p = math.nan
        if self.sd and self.freedom > 1 and len(groups) > 2:
            self.spread_p = _spread_p(self.fit.model.exog, residual, groups)
            self.additive_p = float(linear_reset(self.fit, power=2, use_f=True).pvalue)
        self.own_differences = self.spread_p < LEVEL or self.additive_p < LEVEL

    def of(self, arm: str) -> np.ndarray:
        """Return the weights of the arms (A,) that make the arm's own mean; contrasts are sums of them."""
        return np.eye(len(self.arms))[self.arms.index(arm)]

    def joint(self, *weights_A: np.ndarray) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Estimate contrasts from their weights, (A,) each.

        Returns:
            Values (C,), covariance (C, C) and degrees of freedom; None if the arms have no replicates in common.
        """
        weights_CA = np.array(weights_A)
        common_R = ~np.isnan(self.losses_AR[weights_CA.any(axis=0)]).any(axis=0)
        number = int(common_R.sum())
        if self.own_differences:
            if number < 2:
                return None
            # Each replicate gives one value of every contrast; their mean and its covariance are estimated from them.
            values_CR = weights_CA @ np.nan_to_num(self.losses_AR[:, common_R])  # missing losses have the weight 0
            return values_CR.mean(axis=1), np.cov(values_CR).reshape(len(weights_CA), -1) / number, number - 1
        if number == 0 or self.freedom < 1:
            return None
        # Contrast c of the coefficients b: c b, with covariance c (X'X)^-1 c' s^2. The arms' coefficients come first.
        matrix = np.pad(weights_CA, ((0, 0), (0, len(self.fit.params) - len(self.arms))))
        covariance = matrix @ np.asarray(self.fit.normalized_cov_params) @ matrix.T * self.sd**2
        return matrix @ np.asarray(self.fit.params), covariance, self.freedom

    def contrast(self, weights_A: np.ndarray) -> Contrast | None:
        """Estimate one contrast; None if its arms have no replicates in common."""
        if (estimated := self.joint(weights_A)) is None:
            return None
        estimate, covariance, freedom = estimated
        return Contrast(float(estimate[0]), math.sqrt(max(float(covariance[0, 0]), 0.0)), freedom)

    def between(self, arm: str, other: str) -> Contrast | None:
        """Estimate the arm minus the other; None if the model does not hold both."""
        return self.contrast(self.of(arm) - self.of(other)) if {arm, other} <= {*self.arms} else None

    def closed(self, arm: str, low: str, high: str) -> Share | None:
        """Estimate (low - arm) / (low - high), by Fieller's theorem."""
        estimated = self.joint(self.of(low) - self.of(arm), self.of(low) - self.of(high))
        if estimated is None or not estimated[0][1]:
            return None
        (a, b), cov, freedom = estimated
        t2 = float(special.stdtrit(freedom, 1 - LEVEL / 2)) ** 2
        # |a - s b|^2 <= t^2 var(a - s b) as a quadratic in s
        square, linear, constant = b * b - t2 * cov[1, 1], -2 * (a * b - t2 * cov[0, 1]), a * a - t2 * cov[0, 0]
        # The gap may be 0, so the interval has no ends.
        if square <= 0:
            return Share(float(a / b), None)
        root = math.sqrt(max(linear * linear - 4 * square * constant, 0.0))
        return Share(float(a / b), (float((-linear - root) / (2 * square)), float((-linear + root) / (2 * square))))


def _spread_p(exog: np.ndarray, residual: np.ndarray, groups: Sequence[np.ndarray]) -> float:
    """Return the p-value of Levene's test of equal spread over the groups.

    Residuals are fewer than they look, so the p-value is the place of the statistic among those of `_DRAWS` draws from
    the model itself. With three replicates the tabulated p-value finds hardly anything.
    """
    from scipy import stats

    null = np.random.default_rng(0).standard_normal((_DRAWS, len(residual)))
    null -= null @ (exog @ np.linalg.pinv(exog)).T
    rows = np.concatenate([residual[None], null])
    levene = stats.levene(*(rows[:, group] for group in groups), center="median", axis=1).statistic
    return float((1 + np.sum(levene[1:] >= levene[0])) / (1 + _DRAWS))


def model_of(values: Values) -> Model | None:
    """Fit the arms without diverged runs; None if no degree of freedom is left for the residual."""
    finite = {arm: losses for arm, losses in values.items() if losses and max(map(abs, losses.values())) < _LARGEST}
    model = Model(finite) if len(finite) > 1 else None
    return model if model is not None and model.freedom >= 1 else None


@dataclass(frozen=True)
class Family:
    """A family of arms, tested."""

    low: str
    high: str
    values: Values
    n: int  # replicates that the two bounds have in common, also where a run diverged
    model: Model | None
    gap: Contrast | None  # never minus always; None if one of them diverged
    p_gate: float | None  # of the positive control by itself
    gate: bool  # whether the positive control is shown to be better
    results: tuple[Result, ...] = ()

    @property
    def between(self) -> list[str]:
        """The arms between the two bounds."""
        return [arm for arm in self.values if arm not in (self.low, self.high)]

    @property
    def tested(self) -> bool:
        """Return True if enough replicates have both bounds for a test."""
        return self.n >= FEWEST

    def test(self, contrasts: Iterable[tuple[str, str]]) -> tuple[Result, ...]:
        """Test contrasts, each of an arm and its control; the p-values are Holm-adjusted over all of them."""
        results = [self._test(arm, control) for arm, control in contrasts]
        return tuple(adjusted(results) if self.gate else [replace(result, p=None) for result in results])

    def _test(self, arm: str, control: str) -> Result:
        exact, model = paired(self.values, arm, control), self.model
        if model is None or (difference := model.between(arm, control)) is None:
            return exact if any(exact.diverged) else replace(exact, p=None)
        p = difference.p if exact.n >= FEWEST else None
        tested = replace(exact, difference=difference, direction=difference.estimate, p=p)
        if self.gap is None or not self.gate or arm in (self.low, self.high):
            return tested
        # Equivalence: arm - control + margin (low - high) is above 0, and arm - control - margin (low - high) below 0.
        difference_A = model.of(arm) - model.of(control)
        margin_A = MARGIN * (model.of(self.low) - model.of(self.high))
        above, below = model.contrast(difference_A + margin_A), model.contrast(difference_A - margin_A)
        p_equal = max(above.above, 1 - below.above) if above and below and exact.n >= FEWEST else None
        return replace(tested, closed=model.closed(arm, self.low, self.high), p_equal=p_equal)

    def smallest(self, result: Result) -> float | None:
        """Return the difference to the control, as a share of the gap, that this test shows with 80% power."""
        from statsmodels.stats.power import TTestPower

        if not self.gate or result.difference is None or self.gap is None or self.gap.estimate <= 0:
            return None
        n = result.difference.freedom + 1
        shift = float(TTestPower().solve_power(nobs=n, alpha=LEVEL, power=POWER)) * math.sqrt(n)  # in standard errors
        return result.difference.error * shift / self.gap.estimate

    def control_text(self) -> str:
        """Return the outcome of the positive control."""
        size = "" if self.gap is None else f", a gap of {self.gap.estimate:.3f} nats"
        shown = f"{'' if self.gate else 'not '}shown (p = {p_text(self.p_gate)})"
        return f"Positive control: {self.high} against {self.low}{size}: {shown}."

    def method_text(self) -> str:
        """Return how the contrasts are tested, with the tests of the assumptions that decided it."""
        if self.model is None:
            return "Exact tests, since runs diverged or replicates are too few for a model."
        method = "Paired t-tests"
        if not self.model.own_differences:
            method = f"Pooled residual, sd {self.model.sd:.3f} nats, {self.model.freedom} degrees of freedom"
        assumptions = f"equal spread p = {p_text(self.model.spread_p)}, additivity p = {p_text(self.model.additive_p)}"
        return f"{method} ({assumptions})."


def judge(values: Values, contrasts: Sequence[tuple[str, str]], *, low: str, high: str) -> Family:
    """Test a family.

    Args:
        values: losses by arm; all arms enter the model, whether they are tested or not.
        contrasts: arm and control of each test.
        low: the arm that is never on the recovery path.
        high: the arm that always is: the positive control.
    """
    model, exact = model_of(values), paired(values, high, low)
    gap = model.between(low, high) if model else None
    # The positive control: by the model if it has both bounds, else by the pairs alone.
    p_gate, better = exact.p, exact.direction < 0
    if gap is not None:
        p_gate, better = gap.p if exact.n >= FEWEST else None, gap.estimate > 0
    gate = p_gate is not None and p_gate < LEVEL and better
    family = Family(low, high, values, exact.n, model, gap, p_gate, gate)
    return replace(family, results=family.test(contrasts))


def adjusted(results: Sequence[Result]) -> list[Result]:
    """Return the results as one family: with Holm-adjusted p-values, and verdicts."""
    p_values = holm([result.p for result in results])
    p_values_equal = holm([result.p_equal for result in results])
    judged = []
    for result, p, p_equal in zip(results, p_values, p_values_equal, strict=True):
        verdict = NO_DIFFERENCE
        if p is None:
            verdict = TOO_FEW
        elif p < LEVEL and result.direction:
            verdict = BETTER if result.direction < 0 else WORSE
        elif p_equal is not None and p_equal < LEVEL:
            verdict = EQUAL
        judged.append(replace(result, p=p, p_equal=p_equal, verdict=verdict))
    return judged


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return the Holm-adjusted p-values of one family; None is not a member of the family and stays None.

    The function of statsmodels collects all garbage in every call, which takes longer than the rest of a report.
    """
    ascending = sorted((float(value), place) for place, value in enumerate(values) if value is not None)
    p_values: list[float | None] = [None] * len(values)
    largest = 0.0
    # Each p-value times the number of those that are not smaller, and at least as large as the one before.
    for smaller, (value, place) in enumerate(ascending):
        largest = max(largest, min(1.0, (len(ascending) - smaller) * value))
        p_values[place] = largest
    return p_values


def gap_closed(low: Losses, arm: Losses, recovery: Losses) -> float | None:
    """Return (low - arm) / (low - recovery) of the means over common seeds.

    None without such a seed, if one of these runs diverged, or if low is not the worse of the two bounds.
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
