"""Differences, tests and verdicts against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gnmr.lab.report.statistics import Paired, as_percent, gap_closed, holm, paired, smallest_effect, verdict, verdicts

INF = math.inf


def test_paired_differences_by_hand() -> None:
    """0.01, 0.02, 0.03: mean 0.02, sd 0.01, t = 2 sqrt 3; with two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    found = paired({0: 3.01, 1: 4.02, 2: 5.03, 7: 1.0}, {2: 5.0, 1: 4.0, 0: 3.0, 8: 1.0})
    assert (found.n, found.diverged, found.direction) == (3, (0, 0), 1)
    assert found.mean == pytest.approx(0.02)
    assert found.sd == pytest.approx(0.01)
    assert found.d_z == pytest.approx(2.0)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    half = 4.302653 * 0.01 / math.sqrt(3)  # the 97.5 % point of Student's t with two degrees of freedom
    assert found.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-7)
    assert verdict(found, found.p) == "no difference shown"


@pytest.mark.parametrize("differences", [(0.01, 0.02, 0.03), (-0.3, -0.1, -0.2, -0.25, 0.05), (0.1, 0.3)])
def test_the_interval_of_d_z_is_that_of_the_noncentral_t(differences: tuple[float, ...]) -> None:
    """At its ends the observed t is the 97.5 % and the 2.5 % point: the distribution function by its definition, the
    mean of Phi(t s - noncentrality) over the spread s of the standard deviation."""
    found = paired(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    n, d_z, ends = found.n, found.d_z, found.d_z_interval
    assert d_z is not None and ends is not None and ends[0] < d_z < ends[1]
    spread = np.sqrt(stats.chi2.ppf((np.arange(200_000) + 0.5) / 200_000, n - 1) / (n - 1))
    shares = [float(stats.norm.cdf(math.sqrt(n) * (d_z * spread - end)).mean()) for end in ends]
    assert shares == pytest.approx([0.975, 0.025], abs=1e-4)
    mirrored = paired(dict.fromkeys(range(n), 0.0), dict(enumerate(differences)))
    assert mirrored.d_z_interval == pytest.approx((-ends[1], -ends[0]))


def test_a_very_large_d_z_has_an_interval_too() -> None:
    """Differences that are equal but for rounding; below and above the limit the two ways agree."""
    for scale in (57.0, 58.5, 1e12):
        found = paired({0: scale - 1, 1: scale, 2: scale + 1}, {0: 0.0, 1: 0.0, 2: 0.0})
        assert found.d_z_interval == pytest.approx((0.1591 * scale, 1.9207 * scale), rel=0.003)


def test_fewer_than_three_pairs_never_give_a_verdict() -> None:
    nothing, one = paired({0: 1.0}, {1: 1.0}), paired({0: 1.0}, {0: 2.0})
    two = paired({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.001})
    assert (nothing.n, nothing.mean, nothing.p) == (0, None, None)
    assert (one.mean, one.sd, one.interval, one.p, one.d_z, one.d_z_interval) == (-1.0, None, None, None, None, None)
    assert two.interval is not None
    assert [told for _, told in verdicts([nothing, one, two])] == ["too few seeds"] * 3


def test_equal_arms_do_not_differ() -> None:
    found = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (found.mean, found.sd, found.p, found.d_z) == (0.0, 0.0, 1.0, None)
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


def test_order_counts_where_a_run_diverged() -> None:
    """Worse in all ten pairs, in one by divergence: the sign test's 2 / 2^10, twice."""
    other = dict.fromkeys(range(10), 3.0)
    found = paired({seed: INF if seed == 4 else 3.1 for seed in range(10)}, other)
    assert found.p == pytest.approx(4 / 2**10)
    assert verdict(found, found.p) == "worse"


def test_where_a_run_diverged_five_pairs_are_needed() -> None:
    assert paired(dict.fromkeys(range(4), INF), dict.fromkeys(range(4), 3.0)).p is None


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
    assert gap_closed(low, arm, recovery) == (pytest.approx(0.4), 2)
    assert gap_closed(recovery, arm, low) is None, "low is the better end"
    assert gap_closed({0: INF}, {0: 1.0}, {0: 0.9}) is None
    assert gap_closed({0: 1.0}, {1: 1.0}, {0: 0.9}) is None


def test_as_percent() -> None:
    assert as_percent(math.log(1.05)) == pytest.approx(5.0)
    assert math.isfinite(as_percent(1e6))


def test_the_smallest_effect_is_shown_in_80_of_100_tables() -> None:
    """Drawn: two arms of two and the noise of eight, by the t-test that the tables would take."""
    draw, n, freedom = np.random.default_rng(0), 4, 21
    effect = smallest_effect(0.3, freedom, n)
    means = draw.normal(effect, 0.3 * math.sqrt(2 / n), 40_000)
    sds = 0.3 * np.sqrt(draw.chisquare(freedom, 40_000) / freedom)
    shown = means / (sds * math.sqrt(2 / n)) > stats.t.ppf(0.975, freedom)
    assert shown.mean() == pytest.approx(0.8, abs=0.01)
    assert smallest_effect(0.3, 10**6, 2) == pytest.approx(0.3 * (1.959964 + 0.841621), rel=1e-4)
