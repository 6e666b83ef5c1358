"""Differences, tests and verdicts against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from gnmr.lab.report.statistics import (
    Paired,
    gap_closed,
    holm,
    paired,
    smallest_shift,
    verdicts,
)

INF = math.inf


def test_paired_differences_by_hand() -> None:
    """0.01, 0.02, 0.03: mean 0.02, sd 0.01, t = 2 sqrt 3; with two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    found = paired({0: 3.01, 1: 4.02, 2: 5.03, 7: 1.0}, {2: 5.0, 1: 4.0, 0: 3.0, 8: 1.0})
    assert (found.n, found.diverged, found.direction) == (3, (0, 0), 1)
    assert found.mean == pytest.approx(0.02)
    assert found.sd == pytest.approx(0.01)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    half = 4.302653 * 0.01 / math.sqrt(3)  # the 97.5% point of Student's t with two degrees of freedom
    assert found.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-7)
    assert verdicts([found]) == [(found.p, "no difference shown")]


def test_fewer_than_three_pairs_never_give_a_verdict() -> None:
    nothing, one = paired({0: 1.0}, {1: 1.0}), paired({0: 1.0}, {0: 2.0})
    two = paired({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.001})
    assert (nothing.n, nothing.mean, nothing.p) == (0, None, None)
    assert (one.mean, one.sd, one.interval, one.p) == (-1.0, None, None, None)
    assert two.interval is not None
    assert [told for _, told in verdicts([nothing, one, two])] == ["too few seeds"] * 3


def test_equal_arms_do_not_differ() -> None:
    found = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (found.mean, found.sd, found.p) == (0.0, 0.0, 1.0)
    assert verdicts([found]) == [(1.0, "no difference shown")]


def test_divergence_is_counted_and_not_dropped() -> None:
    """Five of five against none: Fisher 2 / C(10, 5), the sign test 2 / 2^5; twice the smaller."""
    finite = dict.fromkeys(range(5), 3.0)
    lost = dict.fromkeys(range(5), INF)
    found = paired(finite, lost)
    assert (found.n, found.diverged, found.mean, found.interval) == (5, (0, 5), None, None)
    assert found.p == pytest.approx(4 / 252)
    assert verdicts([found, paired(lost, finite)]) == [
        (pytest.approx(8 / 252), "better"),
        (pytest.approx(8 / 252), "worse"),
    ]
    assert verdicts([paired(lost, lost)]) == [(1.0, "no difference shown")]
    assert paired(dict.fromkeys(range(4), INF), finite).p is None, "five pairs are needed"


def test_order_counts_where_a_run_diverged() -> None:
    """Worse in all ten pairs, in one by divergence: the sign test's 2 / 2^10, twice."""
    other = dict.fromkeys(range(10), 3.0)
    found = paired({seed: INF if seed == 4 else 3.1 for seed in range(10)}, other)
    assert found.p == pytest.approx(4 / 2**10)
    assert verdicts([found])[0][1] == "worse"


def test_holm() -> None:
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_verdict_needs_the_adjusted_p() -> None:
    """p = 1 - t / sqrt(2 + t^2) with t = -4.5 sqrt 3 is 0.0163; four such comparisons leave no verdict, one does."""
    strong = paired({0: 2.8, 1: 2.9, 2: 3.0}, {0: 3.35, 1: 3.35, 2: 3.35})
    assert strong.p == pytest.approx(1 - math.sqrt(60.75 / 62.75))
    assert verdicts([strong])[0][1] == "better"
    assert [told for _, told in verdicts([strong] * 4)] == ["no difference shown"] * 4
    assert verdicts([strong, Paired(2)])[0][1] == "better", "too few seeds are no member of the family"


def test_gap_closed() -> None:
    """Means over seeds 0 and 1: low 1.1, arm 1.0, recovery 0.85."""
    low, arm, recovery = {0: 1.0, 1: 1.2, 2: 9.0}, {0: 0.95, 1: 1.05}, {0: 0.8, 1: 0.9, 2: 1.0}
    assert gap_closed(low, arm, recovery) == pytest.approx(0.4)
    assert gap_closed(recovery, arm, low) is None, "low is the better end"
    assert gap_closed({0: INF}, {0: 1.0}, {0: 0.9}) is None
    assert gap_closed({0: 1.0}, {1: 1.0}, {0: 0.9}) is None


def test_the_smallest_shift_is_shown_in_80_of_100_tests() -> None:
    """By the noncentral t distribution; for many degrees of freedom by the normal one."""
    critical = stats.t.ppf(0.975, 16)
    assert stats.nct.sf(critical, 16, smallest_shift(16)) == pytest.approx(0.8, abs=1e-4)
    assert smallest_shift(10**4) == pytest.approx(1.959964 + 0.841621, rel=1e-3)
