"""Test a family of arms with one linear model: loss = arm + replicate + a normal residual of one spread.

A replicate is what arms have in common: a seed, an order of the data of a base, or a seed in one of several cells. The
model is fitted by ordinary least squares. The tests, in order:

1. **Assumptions.** Levene's test (from medians) that the residuals of all arms have equal spread, and the RESET test
   that arm and replicate add up (the squares of the fitted losses explain no more). If one of the two is refused, each
   contrast is tested by its own differences within replicates, as the paired t-test does.
2. **Positive control.** Always on the recovery path against never. If it is not shown to be better, no arm gets a
   verdict.
3. **Every arm against its control.** The p-values are Holm-adjusted over the family.
4. **Equivalence.** Two one-sided tests that the difference is within `MARGIN` of the gap, Holm-adjusted over the
   family. The gap is estimated too: the tests are of the contrasts arm - control -+ margin (never - always).

The share of the gap that an arm closes is a ratio of two contrasts with Fieller's interval. An arm of which a run
diverged leaves the model and is compared with its control by exact tests (`statistics.paired`), in the same family.

Schuirmann, J. Pharmacokin. Biopharm. 15 (1987); Fieller, Supplementum JRSS 7 (1940); Ramsey, JRSS B 31 (1969).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from gnmr.lab.report.layout import interval_text, relative, whole_percent
from gnmr.lab.report.statistics import (
    FEWEST,
    LEVEL,
    NO_DIFFERENCE,
    holm,
    p_text,
    paired,
    smallest_shift,
    verdict,
)

MARGIN = 0.1
"""Share of the gap that counts as equal."""
_DRAWS = 999
_LARGEST = 1e100
"""Losses above it cannot be squared, and count as diverged."""
EQUAL, NO_VERDICT = "equal", "no verdict"
Values = Mapping[Any, float]
"""Losses by replicate, inf where the run diverged."""
Weights = Mapping[str, float]
"""A contrast: factors by arm."""


@dataclass(frozen=True)
class Contrast:
    """An estimated weighted sum of the arms' losses, and its standard error."""

    estimate: float
    error: float
    freedom: int

    @property
    def p(self) -> float:
        """Two-sided p of no difference."""
        return float(2 * stats.t.sf(abs(self.estimate) / self.error, self.freedom) if self.error else not self.estimate)

    @property
    def above(self) -> float:
        """One-sided p against the contrast being at most 0."""
        if not self.error:
            return 0.5 - 0.5 * float(np.sign(self.estimate))
        return float(stats.t.sf(self.estimate / self.error, self.freedom))

    @property
    def interval(self) -> tuple[float, float]:
        """95%, not adjusted for other contrasts."""
        half = float(stats.t.ppf(1 - LEVEL / 2, self.freedom)) * self.error
        return self.estimate - half, self.estimate + half


class Share(NamedTuple):
    """The share of the gap that an arm closes, with Fieller's 95% interval."""

    value: float
    interval: tuple[float, float] | None
    """None if the gap itself is not shown to differ from 0."""


class Model:
    """Arms' losses, all finite, with the fitted model."""

    def __init__(self, values: Mapping[str, Values]) -> None:
        from statsmodels.formula.api import ols
        from statsmodels.stats.diagnostic import linear_reset

        self.values = values
        replicates = list(dict.fromkeys(one for of_arm in values.values() for one in of_arm))
        number = {one: place for place, one in enumerate(replicates)}
        rows = [(loss, arm, number[one]) for arm, of_arm in enumerate(values.values()) for one, loss in of_arm.items()]
        loss, arms, blocks = (np.array(column) for column in zip(*rows, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arms without replicates in common, which `joint` does not compare
            self.fit = ols("loss ~ 0 + C(arm) + C(replicate)", {"loss": loss, "arm": arms, "replicate": blocks}).fit()
        self.freedom = int(self.fit.df_resid)
        residual = np.array(self.fit.resid)
        residual[abs(residual) < 1e-12 * abs(loss).max()] = 0.0  # rounding
        self.sd = math.sqrt(float(residual @ residual) / self.freedom) if self.freedom else math.nan
        groups = [np.flatnonzero(arms == arm) for arm in range(len(values))]
        groups = [group for group in groups if len(group) >= FEWEST]
        self.spread_p = self.additive_p = math.nan
        if self.sd and self.freedom > 1 and len(groups) > 2:  # the residuals of two arms are each other's negatives
            self.spread_p = _spread_p(self.fit.model.exog, residual, groups)
            self.additive_p = float(linear_reset(self.fit, power=2, use_f=True).pvalue)
        self.own_differences = self.spread_p < LEVEL or self.additive_p < LEVEL

    def replicates(self, *arms: str) -> list[Any]:
        """Return the replicates that all of these arms have."""
        return [one for one in self.values[arms[0]] if all(one in self.values[arm] for arm in arms)]

    def joint(self, *contrasts: Weights) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Estimate contrasts: return their values, covariance and degrees of freedom; None without replicates."""
        arms = list(dict.fromkeys(arm for weights in contrasts for arm in weights))
        common = self.replicates(*arms)
        if self.own_differences:
            if len(common) < 2:
                return None
            table = np.array(
                [[sum(w * self.values[a][c] for a, w in one.items()) for c in common] for one in contrasts]
            )
            return table.mean(axis=1), np.cov(table).reshape(len(table), -1) / len(common), len(common) - 1
        if not common or self.freedom < 1:
            return None
        names, wanted = list(self.values), np.zeros((len(contrasts), len(self.fit.params)))
        for row, weights in enumerate(contrasts):
            for arm, weight in weights.items():
                wanted[row, names.index(arm)] += weight
        covariance = wanted @ np.asarray(self.fit.normalized_cov_params) @ wanted.T * self.sd**2
        return wanted @ np.asarray(self.fit.params), covariance, self.freedom

    def contrast(self, weights: Weights) -> Contrast | None:
        """Estimate one contrast; None if its arms have no replicates in common."""
        if (found := self.joint(weights)) is None:
            return None
        estimate, covariance, freedom = found
        return Contrast(float(estimate[0]), math.sqrt(max(float(covariance[0, 0]), 0.0)), freedom)

    def between(self, arm: str, other: str) -> Contrast | None:
        """Estimate the arm minus the other."""
        return self.contrast({arm: 1.0, other: -1.0})

    def closed(self, arm: str, low: str, high: str) -> Share | None:
        """Estimate (low - arm) / (low - high)."""
        found = self.joint(_difference(low, arm), _difference(low, high))
        if found is None or not found[0][1]:
            return None
        (a, b), cov, freedom = found
        t2 = float(stats.t.ppf(1 - LEVEL / 2, freedom)) ** 2
        # |a - s b|^2 <= t^2 var(a - s b) as a quadratic in s
        square, linear, constant = b * b - t2 * cov[1, 1], -2 * (a * b - t2 * cov[0, 1]), a * a - t2 * cov[0, 0]
        if square <= 0:
            return Share(float(a / b), None)
        root = math.sqrt(max(linear * linear - 4 * square * constant, 0.0))
        return Share(float(a / b), (float((-linear - root) / (2 * square)), float((-linear + root) / (2 * square))))


def _spread_p(exog: np.ndarray, residual: np.ndarray, groups: Sequence[np.ndarray]) -> float:
    """Return the p-value of Levene's test of equal spread over the groups.

    Residuals are fewer than they look, so the p-value is the place of the statistic among those of `_DRAWS` draws from
    the model itself. With three replicates the tabulated p-value finds hardly anything.
    """
    null = np.random.default_rng(0).standard_normal((_DRAWS, len(residual)))
    null -= null @ (exog @ np.linalg.pinv(exog)).T
    rows = np.concatenate([residual[None], null])
    found = stats.levene(*(rows[:, group] for group in groups), center="median", axis=1).statistic
    return float((1 + np.sum(found[1:] >= found[0])) / (1 + _DRAWS))


def model_of(values: Mapping[str, Values]) -> Model | None:
    """Fit the arms without diverged runs; None if no degree of freedom is left for the residual."""
    finite = {arm: of for arm, of in values.items() if of and max(map(abs, of.values())) < _LARGEST}
    model = Model(finite) if len(finite) > 1 else None
    return model if model is not None and model.freedom >= 1 else None


@dataclass(frozen=True)
class Row:
    """An arm against its control."""

    arm: str
    control: str
    n: int
    """Replicates that both have."""
    difference: Contrast | None = None
    """None for exact tests."""
    direction: float = 0
    """Below 0 if the arm is the better one."""
    diverged: tuple[int, int] = (0, 0)
    """Runs of the arm and of the control, in the replicates of both."""
    p: float | None = None
    """Holm-adjusted; None if there are too few replicates, or no verdicts at all."""
    closed: Share | None = None
    """None for the bounds themselves."""
    p_equal: float | None = None
    """Of the two one-sided tests, Holm-adjusted."""
    verdict: str = NO_VERDICT

    def texts(self) -> dict[str, str]:
        """Return the row's numbers as text; - where there is none."""
        difference = f"diverged {self.diverged[0]} : {self.diverged[1]}" if any(self.diverged) else "-"
        interval = ""
        if self.difference is not None:
            difference = relative(self.difference.estimate)
            interval = f"({interval_text(self.difference.interval, relative)})"
        return {
            "n": str(self.n),
            "difference": difference,
            "interval": interval,
            "p": p_text(self.p),
            "p_equal": p_text(self.p_equal),
            "verdict": self.verdict,
            **closed_texts(self.closed),
        }


def closed_texts(closed: Share | None) -> dict[str, str]:
    """Return the share and its interval as text."""
    if closed is None:
        return {"closed": "-", "closed_interval": ""}
    interval = "" if closed.interval is None else f"({interval_text(closed.interval, whole_percent)})"
    return {"closed": whole_percent(closed.value), "closed_interval": interval}


@dataclass(frozen=True)
class Family:
    """A family of arms, tested."""

    low: str
    high: str
    rows: tuple[Row, ...]
    model: Model | None
    gap: Contrast | None
    """Never minus always; None if one of them diverged."""
    p_gate: float | None
    """Of the positive control by itself."""
    gate: bool
    """Whether the positive control is shown to be better."""

    @property
    def n(self) -> int:
        """Replicates that the two bounds have in common."""
        return len(self.model.replicates(self.low, self.high)) if self.model and self.gap else 0

    def smallest(self, row: Row) -> float | None:
        """Return the difference to the control, as a share of the gap, that this test shows with 80% power."""
        if not self.gate or row.difference is None or self.gap is None or self.gap.estimate <= 0:
            return None
        return row.difference.error * smallest_shift(row.difference.freedom) / self.gap.estimate

    def control_text(self) -> str:
        """Return the outcome of the positive control."""
        size = "" if self.gap is None else f", a gap of {self.gap.estimate:.3f} nats"
        shown = f"{'' if self.gate else 'not '}shown (p = {p_text(self.p_gate)})"
        return f"Positive control: {self.high} against {self.low}{size}: {shown}."

    def method_text(self) -> str:
        """Return how the contrasts are tested."""
        if self.model is None:
            return "exact tests, since runs diverged or replicates are too few for a model"
        if self.model.own_differences:
            return "paired t-tests"
        return f"pooled residual, sd {self.model.sd:.3f} nats, {self.model.freedom} degrees of freedom"

    def assumptions_text(self) -> str:
        """Return how the contrasts are tested, and the tests of the model's assumptions that decided it."""
        method = self.method_text()
        if self.model is None:
            return f"{method.capitalize()}."
        tests = f"equal spread p = {p_text(self.model.spread_p)}, additivity p = {p_text(self.model.additive_p)}"
        return f"{method.capitalize()} ({tests})."


def judge(values: Mapping[str, Values], contrasts: Sequence[tuple[str, str]], *, low: str, high: str) -> Family:
    """Test a family.

    Args:
        values: losses by arm; all arms enter the model, whether they are tested or not.
        contrasts: arm and control of each test.
        low: the arm that is never on the recovery path.
        high: the arm that always is: the positive control.
    """
    model = model_of(values)
    gap = model.between(low, high) if model and {low, high} <= model.values.keys() else None
    if model and gap is not None:
        p_gate = gap.p if len(model.replicates(low, high)) >= FEWEST else None
        better = gap.estimate > 0
    else:
        exact = paired(values[high], values[low])
        p_gate, better = exact.p, exact.direction < 0
    gate = p_gate is not None and p_gate < LEVEL and better
    rows = [_row(model, values, arm, control, (low, high) if gap and gate else None) for arm, control in contrasts]
    if not gate:
        rows = [replace(row, p=None) for row in rows]
        return Family(low, high, tuple(rows), model, gap, p_gate, gate)
    adjusted, equal = holm([row.p for row in rows]), holm([row.p_equal for row in rows])
    for place, (row, p, q) in enumerate(zip(rows, adjusted, equal, strict=True)):
        outcome = verdict(row.direction, p)
        if outcome == NO_DIFFERENCE and q is not None and q < LEVEL:
            outcome = EQUAL
        rows[place] = replace(row, p=p, p_equal=q, verdict=outcome)
    return Family(low, high, tuple(rows), model, gap, p_gate, gate)


def _row(
    model: Model | None, values: Mapping[str, Values], arm: str, control: str, bounds: tuple[str, str] | None
) -> Row:
    """Test one contrast, not adjusted. `bounds`: None if there is no gap to share."""
    n = len(values[arm].keys() & values[control].keys())
    if model is None or not {arm, control} <= model.values.keys():
        exact = paired(values[arm], values[control])
        p = exact.p if any(exact.diverged) else None
        return Row(arm, control, n, direction=exact.direction, diverged=exact.diverged, p=p)
    if (found := model.between(arm, control)) is None:
        return Row(arm, control, n)
    closed = p_equal = None
    if bounds is not None and arm not in bounds:
        low, high = bounds
        closed = model.closed(arm, low, high)
        margin = {low: MARGIN, high: -MARGIN}
        above, below = (model.contrast(_sum(_difference(arm, control), margin, sign)) for sign in (1, -1))
        if above and below and n >= FEWEST:
            p_equal = max(above.above, 1 - below.above)
    p = found.p if n >= FEWEST else None
    return Row(arm, control, n, found, found.estimate, p=p, closed=closed, p_equal=p_equal)


def _difference(arm: str, other: str) -> dict[str, float]:
    """Return the weights of the arm minus the other; of an arm and itself those of 0."""
    return {arm: 1.0, other: -1.0} if arm != other else {arm: 0.0}


def _sum(one: Weights, other: Weights, factor: float) -> dict[str, float]:
    return {key: one.get(key, 0.0) + factor * other.get(key, 0.0) for key in dict.fromkeys([*one, *other])}
