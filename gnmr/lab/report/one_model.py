"""All arms between two bounds in one model: each against never and against random, behind the positive control.

This is the primary test of every report (`gnmr.lab.report.family`); the sentence, the tables and `gnmr demo` show it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnmr.lab.report.arms import Arm
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.family import MARGIN, Family, judge
from gnmr.lab.report.layout import Table
from gnmr.lab.report.statistics import FEWEST, Paired, paired, verdicts


def one_model(comparison: Comparison) -> list[Table]:
    """A table for each pair of bounds with an arm between them; of two arms alone the paired test says the same, and
    forks have tables of their own."""
    if comparison.kind.base is not None:
        return []
    return [_table(comparison, arms) for arms in families(comparison) if len(arms) > 2]


def families(comparison: Comparison) -> list[list[Arm]]:
    """For each pair of bounds the arms of one model: static low, those that lie between, static recovery."""
    found: dict[tuple[int, int], list[Arm]] = {}
    for arm in comparison.arms:
        low, high = comparison.low(arm), comparison.recovery(arm)
        if low is not None and high is not None and low is not high and arm.outcomes:
            members = found.setdefault((id(low), id(high)), [low])
            members += [arm] if arm is not low and arm is not high else []
    arms = {id(arm): arm for arm in comparison.arms}
    return [[*members, arms[high]] for (_, high), members in found.items()]


def judged(arms: list[Arm]) -> Family:
    """The tests of one of the `families`, its arms by their id as text, each against the first."""
    low, *others = (str(id(arm)) for arm in arms)
    values = {str(id(arm)): arm.outcomes for arm in arms}
    return judge(values, [(key, low) for key in others], low=low, high=others[-1])


@dataclass(frozen=True)
class AgainstRandom:
    """A routed arm's test against the arm that picks its units at random under the same budget."""

    other: Arm
    found: Paired
    """Of the model where `modelled`, else of the pairs of runs; p is not adjusted."""
    p: float | None
    """By Holm."""
    verdict: str
    modelled: bool


def against_random(comparison: Comparison) -> dict[str, AgainstRandom]:
    """By label, in the order of the arms: the arms with a `Comparison.random` one.

    One family for each pair of bounds; arms without bounds, or with too few pairs of them, are told by paired tests.
    """
    tests: dict[str, AgainstRandom] = {}
    randoms = {id(arm): other for arm in comparison.arms if (other := comparison.random(arm)) is not None}
    for arms in families(comparison):
        low, high = arms[0], arms[-1]
        pairs = [(arm, randoms[id(arm)]) for arm in arms if id(arm) in randoms and randoms[id(arm)] in arms]
        if not pairs or len(low.outcomes.keys() & high.outcomes.keys()) < FEWEST:
            continue
        values = {str(id(arm)): arm.outcomes for arm in arms}
        contrasts = [(str(id(arm)), str(id(other))) for arm, other in pairs]
        family = judge(values, contrasts, low=str(id(low)), high=str(id(high)))
        for (arm, other), row in zip(pairs, family.rows, strict=True):
            told = row.difference
            found = Paired(row.n, row.diverged)
            if told is not None:
                found = Paired(row.n, mean=told.estimate, interval=told.interval)
            tests[arm.label] = AgainstRandom(other, found, row.p, row.verdict, True)
    rest = [arm for arm in comparison.arms if id(arm) in randoms and arm.label not in tests]
    alone = [paired(arm.outcomes, randoms[id(arm)].outcomes) for arm in rest]
    for arm, one, (p, verdict) in zip(rest, alone, verdicts(alone), strict=True):
        tests[arm.label] = AgainstRandom(randoms[id(arm)], one, p, verdict, False)
    return {arm.label: tests[arm.label] for arm in comparison.arms if arm.label in tests}


def _table(comparison: Comparison, arms: list[Arm]) -> Table:
    named = {str(id(arm)): arm for arm in arms}
    family = judged(arms)
    columns = ["arm", "n", "difference\n[95 % interval]", "p\n(Holm)", "gap closed\n[95 % interval]"]
    columns += [f"p, equal to\n{100 * MARGIN:.0f} % of the gap", "verdict"]
    table = Table(f"{comparison.name}: one model for all arms, against {arms[0].label}", columns)
    for row in family.rows:
        told = row.texts()
        difference = f"{told['difference']} {told['interval']}".strip()
        closed = f"{told['closed']} {told['closed_interval']}".strip()
        cells = [difference, told["p"], closed, told["p_equal"], told["verdict"].replace(" shown", "\nshown")]
        table.rows.append([named[row.arm].label, str(row.n), *cells])
    table.notes = [
        f"Positive control: {arms[-1].label} against {arms[0].label}. {family.control_text()}",
        family.assumptions_text(),
    ]
    return table
