"""One test for a family of arms: log perplexity = arm + block + a normal residual of one spread.

A block is what arms have in common: a seed, the order of a fork's data, a base, a cell. Least squares; blocks may be
missing. A contrast is a weighted sum of arms' effects, tested by t with the residual pooled over all arms; of two arms
alone this is the paired t-test. In order:

1. **Assumptions.** Brown and Forsythe's test of equal spread over arms and Shapiro and Wilk's of normality, both of
   the residuals, which are fewer than they look; so p is the statistic's place among `DRAWS` draws from the model
   itself (exact for any design). And Tukey's test that arm and block add up: worse arms may differ more over seeds,
   which residuals alone hide. Where spread or sum is refused each contrast is tested by its own differences within
   blocks, as the paired t-test does. Where normality is refused that is said.
2. **Positive control.** Always on the recovery path against never, one test. Where it is not shown to be better no
   arm gets a verdict.
3. **Every arm against its control**, p by Holm over the family. Holm keeps the chance of one false alarm in the whole
   family at the level; it needs no independence (Dunnett's test gains little over it).
4. **Equivalence.** Two one-sided tests that the difference is within `MARGIN` of the gap, by Holm over the family.
   The gap is estimated too: the test is that of the linear contrast, arm - control -+ margin (never - always).

The share of the gap that an arm closes is a ratio of two contrasts, its interval Fieller's. An arm of which a run
diverged leaves the model and is told from the control by exact tests (`statistics.paired`), in the same family.

Tukey, Biometrics 5 (1949), for any design: Milliken and Graybill, JASA 65 (1970).
Fieller, Supplementum JRSS 7 (1940); Schuirmann, J. Pharmacokin. Biopharm. 15 (1987); Holm, Scand. J. Stat. 6 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from scipy import stats

from gnmr.lab.report.statistics import (
    BETTER,
    FEWEST,
    LEVEL,
    NO_DIFFERENCE,
    TOO_FEW,
    WORSE,
    holm,
    paired,
    smallest_shift,
)

MARGIN = 0.1
"""Of the gap: what counts as equal."""
DRAWS = 999
EQUAL, NO_VERDICT = "equal", "no verdict"
Values = Mapping[Any, float]
"""By block: log perplexity, inf where the run diverged."""


@dataclass(frozen=True)
class Contrast:
    """An estimated weighted sum of arms' effects, and its standard error."""

    estimate: float
    error: float
    freedom: int

    @property
    def p(self) -> float:
        """Two-sided, of no difference."""
        if not self.error:
            return float(self.estimate == 0)
        return float(2 * stats.t.sf(abs(self.estimate) / self.error, self.freedom))

    @property
    def above(self) -> float:
        """One-sided p of "it is above 0"; small where it is."""
        if not self.error:
            return 0.5 - 0.5 * float(np.sign(self.estimate))
        return float(stats.t.sf(self.estimate / self.error, self.freedom))

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, of this contrast alone."""
        half = float(stats.t.ppf(1 - LEVEL / 2, self.freedom)) * self.error
        return self.estimate - half, self.estimate + half


@dataclass(frozen=True)
class Fit:
    """The model of a family of arms, fitted to finite values. `own`: contrasts by their own differences."""

    values: Mapping[Hashable, Values]
    rows: tuple[tuple[int, Hashable], ...]
    """Number of the arm and block of each value, arm by arm."""
    residual: np.ndarray
    sd: float
    freedom: int
    own: bool = False

    @cached_property
    def assumptions(self) -> tuple[float, float]:
        """p of equal spread over arms, and of normal residuals; NaN where nothing can be told."""
        if not self.sd:
            return math.nan, math.nan
        key = tuple((arm, block) for arm, block in self.rows)
        found = _statistics(self.residual[None], [arm for arm, _ in key])
        null = _null(key)
        tails = [np.sum(null[0] >= found[0]), np.sum(null[1] <= found[1])]  # W is small where it is not normal
        known = np.isfinite(null[0]).all(), len(self.residual) >= 3
        return tuple(  # type: ignore[return-value]
            float((1 + tail) / (1 + DRAWS)) if can else math.nan for tail, can in zip(tails, known, strict=True)
        )

    @cached_property
    def additive(self) -> float:
        """p of Tukey's test that arm and block add up: the squares of the fitted values explain no more."""
        design, inverse, _ = _design(self.rows)
        fitted = np.array([value for found in self.values.values() for value in found.values()]) - self.residual
        square = (fitted - fitted.mean()) ** 2
        left = square - design @ (inverse @ square)
        length, freedom = float(left @ left), self.freedom - 1
        if not self.sd or freedom < 1 or length < 1e-12 * float(square @ square):
            return math.nan
        explained = float(left @ self.residual) ** 2 / length
        rest = float(self.residual @ self.residual) - explained
        return float(stats.f.sf(explained / (rest / freedom), 1, freedom)) if rest > 0 else 0.0

    @property
    def refused(self) -> bool:
        """Whether equal spread or the sum of arm and block is refused."""
        return self.assumptions[0] < LEVEL or self.additive < LEVEL

    def blocks(self, *arms: Hashable) -> list[Any]:
        """That all of these arms have."""
        common = set.intersection(*(set(self.values[arm]) for arm in arms))
        return [block for block in self.values[arms[0]] if block in common]

    def contrast(self, weights: Mapping[Hashable, float]) -> Contrast | None:
        """None where the blocks do not tell it (arms without a block in common)."""
        found = self.joint(weights)
        if found is None:
            return None
        estimate, cov, freedom = found
        return Contrast(float(estimate[0]), math.sqrt(max(float(cov[0, 0]), 0.0)), freedom)

    def between(self, arm: Hashable, other: Hashable) -> Contrast | None:
        """The arm minus the other."""
        return self.contrast({arm: 1.0, other: -1.0})

    def joint(self, *contrasts: Mapping[Hashable, float]) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Estimates of several contrasts, their covariance and its degrees of freedom."""
        if self.own:
            blocks = self.blocks(*dict.fromkeys(arm for weights in contrasts for arm, one in weights.items() if one))
            table = np.array(
                [[sum(w * self.values[arm][b] for arm, w in weights.items()) for b in blocks] for weights in contrasts]
            )
            if len(blocks) < 2:
                return None
            return table.mean(axis=1), np.cov(table).reshape(len(table), -1) / len(blocks), len(blocks) - 1
        names, (_, inverse, told) = list(self.values), _design(self.rows)
        wanted = np.zeros((len(contrasts), len(told)))
        for row, weights in enumerate(contrasts):
            for arm, weight in weights.items():
                wanted[row, names.index(arm)] += weight
        if np.abs(wanted @ told - wanted).max() > 1e-8:
            return None
        y = np.array([value for found in self.values.values() for value in found.values()])
        over = wanted @ inverse
        return over @ y, self.sd**2 * over @ over.T, self.freedom

    def ratio(
        self, above: Mapping[Hashable, float], below: Mapping[Hashable, float]
    ) -> tuple[float, tuple[float, float] | None] | None:
        """A ratio of two contrasts and Fieller's 95 % interval, None where the one below is not shown to be off 0."""
        found = self.joint(above, below)
        if found is None or not found[0][1]:
            return None
        (a, b), cov, freedom = found
        t2 = float(stats.t.ppf(1 - LEVEL / 2, freedom)) ** 2
        # |a - s b|^2 <= t^2 var(a - s b) as a quadratic in s
        square, linear, constant = b * b - t2 * cov[1, 1], -2 * (a * b - t2 * cov[0, 1]), a * a - t2 * cov[0, 0]
        inside = linear * linear - 4 * square * constant
        if square <= 0:
            return float(a / b), None
        if not math.isfinite(inside):
            return None
        root = math.sqrt(max(inside, 0.0))
        return float(a / b), (float((-linear - root) / (2 * square)), float((-linear + root) / (2 * square)))

    def closed(self, arm: Hashable, low: Hashable, high: Hashable) -> tuple[float, tuple[float, float] | None] | None:
        """The share of the gap from `low` to `high` that the arm closes, and its interval: see `ratio`."""
        return self.ratio(_apart(low, arm), _apart(low, high))


def fit(values: Mapping[Any, Values]) -> Fit | None:
    """The model; None where no degree of freedom is left for the residual, or values are too large to be squared.

    All values are finite.
    """
    rows = tuple((arm, block) for arm, found in enumerate(values.values()) for block in found)
    if not rows:
        return None
    design, inverse, told = _design(rows)
    freedom = len(rows) - round(float(np.trace(told)))
    if freedom < 1:
        return None
    y = np.array([value for found in values.values() for value in found.values()])
    left = y - design @ (inverse @ y)
    left[abs(left) < 1e-12 * abs(y).max(initial=0.0)] = 0.0  # rounding
    with np.errstate(over="ignore", invalid="ignore"):
        sd = float(np.sqrt(left @ left / freedom))
    return Fit(values, rows, left, sd, freedom) if math.isfinite(sd) else None


def modelled(values: Mapping[Any, Values]) -> Fit | None:
    """As `fit`; contrasts by their own differences where equal spread or the sum of arm and block is refused."""
    model = fit(values)
    return replace(model, own=True) if model is not None and model.refused else model


@lru_cache(maxsize=64)
def _design(rows: tuple[tuple[int, Hashable], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrix of arms and blocks, its pseudo-inverse, and their product: what the rows tell."""
    arms, blocks = 1 + max(arm for arm, _ in rows), list(dict.fromkeys(block for _, block in rows))
    place = {block: arms + number for number, block in enumerate(blocks)}
    design = np.zeros((len(rows), arms + len(blocks)))
    for row, (arm, block) in enumerate(rows):
        design[row, arm] = design[row, place[block]] = 1
    inverse = np.linalg.pinv(design)
    return design, inverse, inverse @ design


@lru_cache(maxsize=64)
def _null(rows: tuple[tuple[int, Hashable], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Both statistics of `DRAWS` draws of residuals from the model: they depend on the design alone."""
    design, inverse, _ = _design(rows)
    draws = np.random.default_rng(0).standard_normal((DRAWS, len(rows)))
    return _statistics(draws - draws @ inverse.T @ design.T, [arm for arm, _ in rows])


def _statistics(residual_DN: np.ndarray, arms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Brown and Forsythe's F over arms, NaN where no arm has three values, and Shapiro and Wilk's W, of each row."""
    groups = [np.flatnonzero(np.array(arms) == arm) for arm in dict.fromkeys(arms)]
    groups = [group for group in groups if len(group) >= 3]
    normal = np.array([stats.shapiro(row).statistic if len(row) >= 3 else math.nan for row in residual_DN])
    if len(groups) < 2:
        return np.full(len(residual_DN), math.nan), normal
    apart = [np.abs(r - np.median(r, axis=1, keepdims=True)) for r in (residual_DN[:, group] for group in groups)]
    number, total = len(groups), sum(map(len, groups))
    mean = sum(one.sum(axis=1) for one in apart) / total
    between = sum(one.shape[1] * (one.mean(axis=1) - mean) ** 2 for one in apart) / (number - 1)
    within = sum(((one - one.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) for one in apart) / (total - number)
    between = np.where(between < 1e-20 * within, 0.0, between)  # rounding: those of two arms are each other's negatives
    return np.asarray(between / within), normal


@dataclass(frozen=True)
class Row:
    """An arm against its control."""

    arm: str
    control: str
    n: int
    """Blocks that both have."""
    difference: Contrast | None
    """In log perplexity; None for exact tests."""
    diverged: tuple[int, int]
    """Runs of the arm and of the control, in the blocks of both."""
    p: float | None
    """By Holm; None where there are too few blocks, or no verdicts at all."""
    closed: tuple[float, tuple[float, float] | None] | None
    """Share of the gap, and its interval; None of the bounds themselves."""
    p_equal: float | None
    """Of the two one-sided tests, by Holm."""
    verdict: str


@dataclass(frozen=True)
class Family:
    """A family of arms, tested."""

    low: str
    high: str
    rows: tuple[Row, ...]
    fit: Fit | None
    gap: Contrast | None
    """Never minus always, in log perplexity; None where one of them diverged."""
    p_gate: float | None
    """Of the positive control, by itself."""
    gate: bool
    """Whether the positive control is shown to be better."""

    @property
    def n(self) -> int:
        """Blocks that the two bounds have in common."""
        return len(self.fit.blocks(self.low, self.high)) if self.fit and self.gap else 0

    def smallest_of(self, row: Row, tests: int = 1) -> float | None:
        """The difference between this arm and its control, as a share of the gap, that is shown with 80 % power.

        Among several `tests` that of Holm's first step, level / tests.
        """
        if row.difference is None or self.gap is None or self.gap.estimate <= 0:
            return None
        return row.difference.error * smallest_shift(row.difference.freedom, LEVEL / tests) / self.gap.estimate

    def smallest(self, tests: int = 1) -> list[float]:
        """Of every test that has one: equal where the residual is pooled and all arms have the same blocks."""
        found = (self.smallest_of(row, tests) for row in self.rows)
        return [one for one in found if one is not None]


def judge(values: Mapping[str, Values], contrasts: Sequence[tuple[str, str]], *, low: str, high: str) -> Family:
    """Tests a family.

    Args:
        values: by arm; all arms stand in the model, whether they are tested or not.
        contrasts: arm and control of each test.
        low: never on the recovery path.
        high: always on it: the positive control.
    """
    finite = {arm: found for arm, found in values.items() if all(map(math.isfinite, found.values()))}
    model = modelled(finite)
    gap = model.between(low, high) if model and low in finite and high in finite else None
    if gap is not None:
        p_gate: float | None = gap.p if len(values[low].keys() & values[high].keys()) >= FEWEST else None
        gate = p_gate is not None and p_gate < LEVEL and gap.estimate > 0
    else:
        exact = paired(values[high], values[low])
        p_gate, gate = exact.p, exact.p is not None and exact.p < LEVEL and exact.direction < 0
    rows = [_row(model, values, arm, control, (low, high) if gap and gate else None) for arm, control in contrasts]
    adjusted, equal = holm([row.p for row in rows]), holm([row.p_equal for row in rows])
    told = [
        replace(row, p=p if gate else None, p_equal=q, verdict=_verdict(row, p, q) if gate else NO_VERDICT)
        for row, p, q in zip(rows, adjusted, equal, strict=True)
    ]
    return Family(low, high, tuple(told), model, gap, p_gate, gate)


def _row(
    model: Fit | None, values: Mapping[str, Values], arm: str, control: str, bounds: tuple[str, str] | None
) -> Row:
    """The arm's tests, not adjusted; as verdict its direction. `bounds`: None where no share of the gap is told."""
    n = len(values[arm].keys() & values[control].keys())
    if model is None or arm not in model.values or control not in model.values:
        exact = paired(values[arm], values[control])
        p = exact.p if any(exact.diverged) else None
        verdict = BETTER if exact.direction < 0 else WORSE if exact.direction > 0 else NO_DIFFERENCE
        return Row(arm, control, n, None, exact.diverged, p, None, None, verdict)
    found = model.between(arm, control)
    if found is None:
        return Row(arm, control, n, None, (0, 0), None, None, None, NO_DIFFERENCE)
    closed = p_equal = None
    if bounds is not None and arm not in bounds:
        low, high = bounds
        closed = model.closed(arm, low, high)
        above, below = (model.contrast(_sum(_apart(arm, control), _apart(low, high), s * MARGIN)) for s in (1, -1))
        if above and below and n >= FEWEST:
            p_equal = max(above.above, 1 - below.above)
    verdict = BETTER if found.estimate < 0 else WORSE if found.estimate > 0 else NO_DIFFERENCE
    return Row(arm, control, n, found, (0, 0), found.p if n >= FEWEST else None, closed, p_equal, verdict)


def _verdict(row: Row, p: float | None, p_equal: float | None) -> str:
    if p is None:
        return TOO_FEW
    if p < LEVEL:
        return row.verdict
    return EQUAL if p_equal is not None and p_equal < LEVEL else NO_DIFFERENCE


def _apart(arm: Hashable, other: Hashable) -> dict[Hashable, float]:
    """The weights of the arm minus the other; of an arm and itself none."""
    return {arm: 1.0, other: -1.0} if arm != other else {arm: 0.0}


def _sum(one: Mapping[Hashable, float], other: Mapping[Hashable, float], factor: float) -> dict[Hashable, float]:
    keys = dict.fromkeys([*one, *other])
    return {key: one.get(key, 0.0) + factor * other.get(key, 0.0) for key in keys}


def alike(cells: Mapping[Any, Mapping[str, Values]]) -> float | None:
    """p of the F-test that arms differ in the same way in all cells; None where it cannot be told.

    `cells`: of each cell its arms' values. Against a model of each cell by itself, their residuals pooled.
    """
    whole = fit(pooled(cells))
    parts = [fit(found) for found in cells.values()]
    if whole is None or any(part is None for part in parts):
        return None
    left = sum(part.residual @ part.residual for part in parts if part)
    freedom = sum(part.freedom for part in parts if part)
    more = whole.freedom - freedom
    if more < 1 or not left:
        return None
    f = (whole.residual @ whole.residual - left) / more / (left / freedom)
    return float(stats.f.sf(f, more, freedom))


def pooled(cells: Mapping[Any, Mapping[str, Values]]) -> dict[str, dict[Any, float]]:
    """The values of all cells by arm; a block is one of one cell."""
    found: dict[str, dict[Any, float]] = {}
    for cell, arms in cells.items():
        for arm, of_arm in arms.items():
            found.setdefault(arm, {}).update({(cell, block): value for block, value in of_arm.items()})
    return found
