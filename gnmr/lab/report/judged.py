"""The arms of a comparison with their tests: what the table, the sentence, the page and `gnmr demo` say alike.

Every arm is tested against the arm that never recovers. The arms between two bounds (a static low arm and its static
recovery arm) are one family with one model (`gnmr.lab.report.family`), behind the positive control; any other arm gets
a paired t-test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gnmr.lab.report.arms import Arm, Outcomes
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import Family, judge
from gnmr.lab.report.statistics import FEWEST, gap_closed, paired, verdicts


@dataclass(frozen=True)
class Bounds:
    """A static low arm, its static recovery arm, and the arms between them."""

    low: Arm
    high: Arm
    between: tuple[Arm, ...]
    family: Family
    """Every arm against `low`; the arms by their labels."""
    against_random: Family | None
    """Every arm that has a random arm with the same budget, against that arm."""

    @property
    def tested(self) -> bool:
        """Return True if enough seeds have both bounds for a test."""
        return len(outcomes(self.low).keys() & outcomes(self.high).keys()) >= FEWEST

    def closed(self, arm: Arm) -> float | None:
        """Return the share of the gap between the bounds that the arm closes; None without a gap."""
        return gap_closed(outcomes(self.low), outcomes(arm), outcomes(self.high))


@dataclass(frozen=True)
class Judged:
    """An arm against its baseline, in log perplexity."""

    arm: Arm
    baseline: Arm | None
    """None: the arm is itself a baseline, or has none."""
    n: int = 0
    """Seeds that both have."""
    difference: float | None = None
    interval: tuple[float, float] | None = None
    diverged: tuple[int, int] = (0, 0)
    """Diverged runs of the arm and of its baseline."""
    p: float | None = None
    """Holm-adjusted over the family."""
    verdict: str | None = None
    closed: float | None = None
    """Share of the gap between the bounds."""
    closed_interval: tuple[float, float] | None = None
    random: tuple[float | None, str] | None = None
    """p and verdict against the random arm with the same budget; None without one."""


def outcomes(arm: Arm) -> Outcomes:
    """Return the log perplexity by seed, inf for a diverged run; of forks that heal, before they heal."""
    if not arm.settings.get("fork.heal"):
        return arm.outcomes
    found = dict.fromkeys(arm.diverged, math.inf)
    for run in arm.done:
        at = run.evals["val_loss"][run.evals["step"] == run.settings.get("training.steps")]
        found |= {run.seed: float(at[-1])} if len(at) and math.isfinite(at[-1]) else {}
    return found


def bounds(comparison: Comparison) -> list[Bounds]:
    """Return every pair of bounds with the arms that lie between them."""
    found: dict[tuple[str, str], list[Arm]] = {}
    for arm in comparison.arms:
        low, high = comparison.low(arm), comparison.recovery(arm)
        if low is not None and high is not None and low is not high and outcomes(arm):
            members = found.setdefault((low.label, high.label), [])
            members += [arm] if arm is not low and arm is not high else []
    arms = {arm.label: arm for arm in comparison.arms}
    return [
        _bounds(comparison, arms[low], arms[high], members)
        for (low, high), members in found.items()
        if outcomes(arms[low]) and outcomes(arms[high])
    ]


def _bounds(comparison: Comparison, low: Arm, high: Arm, between: list[Arm]) -> Bounds:
    values = {arm.label: outcomes(arm) for arm in (low, *between, high)}
    names = list(values)
    family = judge(values, [(name, names[0]) for name in names[1:]], low=names[0], high=names[-1])
    randoms = [
        (arm.label, other.label) for arm in between if (other := comparison.random(arm)) and other.label in values
    ]
    against_random = judge(values, randoms, low=names[0], high=names[-1]) if randoms else None
    return Bounds(low, high, tuple(between), family, against_random)


def judged(comparison: Comparison, pairs: list[Bounds]) -> list[Judged]:
    """Return every arm with its tests, in the order of the arms. `pairs`: `bounds(comparison)`."""
    found: dict[str, Judged] = {}
    for one in pairs:
        found |= {arm.label: _in_family(one, arm) for arm in (*one.between, one.high) if arm.label not in found}
    rest = []
    for arm in comparison.arms:
        baseline = comparison.low(arm)
        if arm.label not in found and baseline is not None and baseline is not arm:
            rest.append((arm, baseline, paired(outcomes(arm), outcomes(baseline))))
    for (arm, baseline, test), (p, verdict) in zip(rest, verdicts([test for *_, test in rest]), strict=True):
        found[arm.label] = Judged(arm, baseline, test.n, test.mean, test.interval, test.diverged, p, verdict)
    randoms = _against_random(comparison, pairs)
    return [replace(found.get(arm.label, Judged(arm, None)), random=randoms.get(arm.label)) for arm in comparison.arms]


def _against_random(comparison: Comparison, pairs: list[Bounds]) -> dict[str, tuple[float | None, str]]:
    """Return p and verdict of every arm against the random arm with the same budget: of its family, else paired."""
    found: dict[str, tuple[float | None, str]] = {}
    for one in pairs:
        if one.against_random is not None and one.tested:
            found |= {row.arm: (row.p, row.verdict) for row in one.against_random.rows}
    rest = {arm.label: (arm, other) for arm in comparison.arms if (other := comparison.random(arm)) is not None}
    rest = {label: pair for label, pair in rest.items() if label not in found}
    tests = verdicts([paired(outcomes(arm), outcomes(other)) for arm, other in rest.values()])
    return found | dict(zip(rest, tests, strict=True))


def _in_family(one: Bounds, arm: Arm) -> Judged:
    (row,) = (row for row in one.family.rows if row.arm == arm.label)
    test, mean = row.difference, paired(outcomes(arm), outcomes(one.low))
    return Judged(
        arm,
        one.low,
        mean.n,
        mean.mean if test is None else test.estimate,
        mean.interval if test is None else test.interval,
        mean.diverged,
        row.p,
        row.verdict,
        None if arm is one.high else one.closed(arm),
        row.closed[1] if row.closed is not None and arm is not one.high else None,
    )
