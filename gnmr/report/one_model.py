"""All arms between two bounds in one model: each against never, behind the positive control (`gnmr.report.family`)."""

from __future__ import annotations

from gnmr.report.arms import Arm
from gnmr.report.comparisons import Comparison
from gnmr.report.family import MARGIN, Family, judge
from gnmr.report.family_notes import assumptions, positive_control, power, row_numbers
from gnmr.report.layout import Table


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


def _table(comparison: Comparison, arms: list[Arm]) -> Table:
    named = {str(id(arm)): arm for arm in arms}
    family = judged(arms)
    columns = ["arm", "n", "difference\n[95 % interval]", "p\n(Holm)", "gap closed\n[95 % interval]"]
    columns += [f"p, equal to\n{100 * MARGIN:.0f} % of the gap", "verdict"]
    table = Table(f"{comparison.name}: one model for all arms, against {arms[0].label}", columns)
    for row in family.rows:
        told = row_numbers(row)
        difference = f"{told['difference']} {told['interval']}".strip()
        closed = f"{told['closed']} {told['closed_interval']}".strip()
        cells = [difference, told["p"], closed, told["p_equal"], told["verdict"].replace(" shown", "\nshown")]
        table.rows.append([named[row.arm].label, str(row.n), *cells])
    table.notes = [positive_control(family, arms[0].label, arms[-1].label), *power(family), *assumptions(family.fit)]
    return table
