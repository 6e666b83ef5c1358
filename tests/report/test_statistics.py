"""Tests of two arms and of families of arms, against closed forms, scipy, and drawn families."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from gnmr.lab.report.statistics import (
    Family,
    Result,
    adjusted,
    gap_closed,
    holm,
    judge,
    model_of,
    paired,
)

INF = math.inf
SEEDS = np.array([0.3, -0.2, 0.5, 0.0, -0.4])
ARMS = {"never": 4.0, "a": 3.95, "b": 3.7, "c": 3.9, "always": 3.0}


def drawn(
    means: dict[str, float], sd: float, seed: int, replicates: int = 5, wide: dict[str, float] | None = None
) -> dict[str, dict[int, float]]:
    """Losses: mean + replicate + normal noise, of an arm in `wide` times that factor."""
    draw = np.random.default_rng(seed)
    return {
        arm: {r: mean + SEEDS[r] + draw.normal(0, sd * (wide or {}).get(arm, 1)) for r in range(replicates)}
        for arm, mean in means.items()
    }


def judged(values: dict[str, dict[int, float]], control: str = "never", arms: list[str] | None = None) -> Family:
    named = [arm for arm in values if arm != control] if arms is None else arms
    return judge(values, [(arm, control) for arm in named], low="never", high="always")


def against(mine: dict[int, float], theirs: dict[int, float]) -> Result:
    return paired({"a": mine, "b": theirs}, "a", "b")


def verdicts(*family: Result) -> list[tuple[float | None, str]]:
    return [(one.p, one.verdict) for one in adjusted(family)]


def test_paired_differences_by_hand() -> None:
    """0.01, 0.02, 0.03: mean 0.02, sd 0.01, t = 2 sqrt 3; with two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    found = against({0: 3.01, 1: 4.02, 2: 5.03, 7: 1.0}, {2: 5.0, 1: 4.0, 0: 3.0, 8: 1.0})
    error = 0.01 / math.sqrt(3)
    assert (found.n, found.diverged, found.difference) == (3, (0, 0), pytest.approx((0.02, error, 2)))
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14)) and found.difference is not None
    half = 4.302653 * error  # the 97.5% point of Student's t with two degrees of freedom
    assert found.difference.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-7)
    assert verdicts(found) == [(found.p, "no difference shown")]
    same = against({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert same.difference == (0.0, 0.0, 2) and verdicts(same) == [(1.0, "no difference shown")]


def test_fewer_than_three_pairs_never_give_a_verdict() -> None:
    nothing, one = against({0: 1.0}, {1: 1.0}), against({0: 1.0}, {0: 2.0})
    two = against({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.001})
    assert (nothing.n, nothing.difference, nothing.p) == (0, None, None)
    assert one.difference is not None and (one.difference.estimate, one.difference.interval, one.p) == (-1, None, None)
    assert two.difference is not None and two.difference.interval is not None
    assert [told for _, told in verdicts(nothing, one, two)] == ["too few seeds"] * 3


def test_divergence_is_counted_and_not_dropped() -> None:
    """Five of five against none: Fisher 2 / C(10, 5), the sign test 2 / 2^5; twice the smaller."""
    finite = dict.fromkeys(range(5), 3.0)
    lost = dict.fromkeys(range(5), INF)
    found = against(finite, lost)
    assert (found.n, found.diverged, found.difference) == (5, (0, 5), None)
    assert found.p == pytest.approx(4 / 252)
    assert verdicts(found, against(lost, finite)) == [
        (pytest.approx(8 / 252), "better"),
        (pytest.approx(8 / 252), "worse"),
    ]
    assert verdicts(against(lost, lost)) == [(1.0, "no difference shown")]
    assert against(dict.fromkeys(range(4), INF), finite).p is None, "five pairs are needed"
    other = dict.fromkeys(range(10), 3.0)
    found = against({seed: INF if seed == 4 else 3.1 for seed in range(10)}, other)
    assert verdicts(found) == [(pytest.approx(4 / 2**10), "worse")], "in all ten pairs: the sign test, twice"


def test_holm() -> None:
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_gap_closed() -> None:
    """Means over seeds 0 and 1: low 1.1, arm 1.0, recovery 0.85."""
    low, arm, recovery = {0: 1.0, 1: 1.2, 2: 9.0}, {0: 0.95, 1: 1.05}, {0: 0.8, 1: 0.9, 2: 1.0}
    assert gap_closed(low, arm, recovery) == pytest.approx(0.4)
    assert gap_closed(recovery, arm, low) is None, "low is the better end"
    assert gap_closed({0: INF}, {0: 1.0}, {0: 0.9}) is None
    assert gap_closed({0: 1.0}, {1: 1.0}, {0: 0.9}) is None


def test_a_balanced_family_by_closed_form() -> None:
    """Differences of means; the residual that double centering leaves; Student's t with (A - 1)(R - 1) degrees."""
    values = drawn(ARMS, 0.1, 106)
    table = np.array([list(found.values()) for found in values.values()])
    left = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    sd = math.sqrt((left**2).sum() / 16)
    found = judged(values)
    assert found.model is not None and (found.model.sd, found.model.freedom) == (pytest.approx(sd), 16)
    p = {}
    for row in found.results:
        difference = table[list(values).index(row.arm)].mean() - table[0].mean()
        assert row.difference is not None and row.difference.estimate == pytest.approx(difference)
        p[row.arm] = 2 * stats.t.sf(abs(difference) / (sd * math.sqrt(2 / 5)), 16)
    assert [row.p for row in found.results] == pytest.approx(holm(list(p.values())))
    assert {row.arm: row.verdict for row in found.results}["b"] == "better" and found.gate
    one = found.smallest(found.results[0])
    assert one is not None and found.gap is not None
    shift = one * found.gap.estimate / (sd * math.sqrt(2 / 5))
    assert stats.nct.sf(stats.t.ppf(0.975, 16), 16, shift) == pytest.approx(0.8, abs=1e-4)


def test_missing_replicates_by_the_normal_equations() -> None:
    values = drawn(ARMS, 0.1, 2)
    del values["a"][0], values["b"][3], values["b"][4]
    arms, rows = list(values), [(arm, r) for arm, found in values.items() for r in found]
    design = np.array([[1.0, *(arm == one for one in arms[1:]), *(r == one for one in range(1, 5))] for arm, r in rows])
    y = np.array([values[arm][r] for arm, r in rows])
    normal = np.linalg.inv(design.T @ design)
    effects = normal @ design.T @ y
    left = y - design @ effects
    freedom = len(y) - design.shape[1]
    sd = math.sqrt(left @ left / freedom)
    model = model_of(values)
    assert model is not None and (model.sd, model.freedom) == (pytest.approx(sd), freedom)
    for place, arm in enumerate(arms[1:], 1):
        one = model.between(arm, "never")
        assert one is not None
        assert (one.estimate, one.error) == pytest.approx((effects[place], sd * math.sqrt(normal[place, place])))


@pytest.mark.parametrize("wide", [None, {"a": 30.0, "c": 30.0}])
def test_paired_t_tests_of_two_arms_and_of_unequal_spread(wide: dict[str, float] | None) -> None:
    """Two arms alone give the paired t-test, and so does a family whose equal spread is refused."""
    means = ARMS if wide else {"never": 4.0, "always": 3.9}
    values = drawn(means, 0.02 if wide else 0.1, 9, wide=wide)
    model = model_of(values)
    assert model is not None and model.own_differences == bool(wide)
    for arm in [arm for arm in means if arm != "never"]:
        found = model.between(arm, "never")
        theirs = stats.ttest_rel(list(values[arm].values()), list(values["never"].values()))
        assert found is not None and found.p == pytest.approx(theirs.pvalue)
        assert found.interval == pytest.approx(tuple(theirs.confidence_interval()))


def test_worse_arms_that_differ_more_over_replicates_are_refused() -> None:
    """Tukey's one degree of freedom by its closed form; and losses that are a product of arm and replicate."""
    values = drawn(ARMS, 0.1, 12)
    table = np.array([list(found.values()) for found in values.values()])
    arm, replicate = table.mean(axis=1) - table.mean(), table.mean(axis=0) - table.mean()
    left = table - table.mean() - arm[:, None] - replicate
    one = (arm @ table @ replicate) ** 2 / (arm @ arm * (replicate @ replicate))
    f = one / (((left**2).sum() - one) / 15)
    model = model_of(values)
    assert model is not None and model.additive_p == pytest.approx(stats.f.sf(f, 1, 15))
    factor = {"never": 3.0, "a": 2.9, "b": 2.0, "c": 2.6, "always": 0.2}
    scaled = {name: {r: of[r] + (factor[name] - 1) * SEEDS[r] for r in of} for name, of in values.items()}
    model = model_of(scaled)
    assert model is not None and model.additive_p < 0.01 and model.own_differences


def test_the_share_of_the_gap_and_fiellers_interval_by_root_finding() -> None:
    model = model_of(drawn(ARMS, 0.1, 4))
    assert model is not None
    found = model.closed("b", "never", "always")
    assert found is not None and found.interval is not None
    critical = stats.t.ppf(0.975, model.freedom)

    def beyond(share: float) -> float:
        one = model.contrast((1 - share) * model.of("never") - model.of("b") + share * model.of("always"))
        assert one is not None
        return abs(one.estimate) / one.error - critical

    value = found.value
    ends = optimize.brentq(beyond, value - 2, value), optimize.brentq(beyond, value, value + 2)
    assert found.interval == pytest.approx(ends)


def test_no_verdict_if_the_positive_control_fails() -> None:
    found = judged(drawn({**ARMS, "always": 3.99, "b": 3.0}, 0.1, 5))
    assert not found.gate and {row.verdict for row in found.results} == {"no verdict"}
    assert all(row.p is None and row.p_equal is None and row.closed is None for row in found.results)
    assert found.smallest(found.results[0]) is None
    worse = judged(drawn({**ARMS, "always": 6.0}, 0.1, 5))
    assert not worse.gate and worse.p_gate is not None and worse.p_gate < 1e-6, "always is shown to be the worse one"
    few = judged(drawn(ARMS, 0.01, 8, replicates=2))
    assert not few.gate and few.p_gate is None


def test_equal_to_a_tenth_of_the_gap_is_a_verdict() -> None:
    """The test is that of the linear contrast arm - control -+ 0.1 (never - always)."""
    means = {"never": 4.0, "random": 3.7, "a": 3.71, "always": 3.0}
    values = drawn(means, 0.02, 6)
    found = judged(values, "random", arms=["a"])
    (row,) = found.results
    assert row.verdict == "equal" and row.p is not None and row.p > 0.05 and found.model is not None
    mean = {arm: np.mean(list(of.values())) for arm, of in values.items()}
    tails = []
    for side in (1, -1):
        at = mean["a"] - mean["random"] + side * 0.1 * (mean["never"] - mean["always"])
        error = found.model.sd * math.sqrt((1 + 1 + 0.01 + 0.01) / 5)
        tails.append(stats.t.sf(side * at / error, found.model.freedom))
    assert row.p_equal == pytest.approx(max(tails))
    assert judged(drawn(means, 0.2, 6), "random").results[1].verdict != "equal", "too much noise"


def test_a_diverged_arm_leaves_the_model_and_is_worse_than_any_number() -> None:
    values = drawn(ARMS, 0.1, 7)
    values["a"] = dict.fromkeys(range(5), INF)
    found = judged(values)
    rows = {row.arm: row for row in found.results}
    assert rows["a"].diverged == (5, 0) and rows["a"].difference is None and rows["b"].difference is not None
    assert rows["a"].verdict == "worse" and found.model is not None and "a" not in found.model.arms
    lost = judged(drawn(ARMS, 0.1, 7) | {"never": dict.fromkeys(range(5), INF)})
    assert lost.gate and lost.gap is None and lost.p_gate == pytest.approx(2 / math.comb(10, 5) * 2)
    assert [row.p for row in lost.results] == pytest.approx([4 * lost.p_gate] * 4), "Fisher's, twice, by Holm over four"


def test_what_no_model_can_tell() -> None:
    one = {0: 1.0, 1: 2.0, 2: 5.0}
    assert model_of({"a": one}) is None and model_of({"a": {0: 1.0}, "b": {0: 2.0}}) is None and model_of({}) is None
    same = model_of({"a": one, "b": {seed: value + 7 for seed, value in one.items()}})
    assert same is not None and (same.sd, same.freedom) == (0, 2)
    apart = model_of({"a": one, "b": {0: 1.5, 1: 2.1}, "c": {7: 1.0, 8: 2.0}, "d": {7: 1.1, 8: 2.3}})
    assert apart is not None and apart.between("a", "c") is None and apart.between("a", "b") is not None


@pytest.mark.slow
def test_false_alarms_over_drawn_families() -> None:
    """Five arms that equal the control: about 5% of the families have a false alarm, and 5% refuse an assumption."""
    means = {"never": 4.0, **dict.fromkeys("abcde", 4.0), "always": 3.0}
    alarms, covered, refused = 0, 0, np.zeros(2)
    for seed in range(400):
        found = judged(drawn(means, 0.06, seed), arms=[*"abcde"])
        alarms += any(row.verdict in ("better", "worse") for row in found.results)
        first = found.results[0].difference
        assert first is not None and found.model is not None
        covered += first.interval[0] <= 0 <= first.interval[1]
        refused += np.array([found.model.spread_p, found.model.additive_p]) < 0.05
    assert alarms < 0.08 * 400 and covered > 0.92 * 400 and (refused < 0.08 * 400).all(), (alarms, covered, refused)
