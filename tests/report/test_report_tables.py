"""The figures in the tables against means, spreads and differences worked out here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gnmr.lab.report.regimes import regime_cells
from report_reading import notes, row
from report_recorded import Recorded
from scipy import stats

from gnmr import precision as paths
from gnmr.lab.records.find import find_runs
from gnmr.lab.report.arms import bits, paired_difference
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import count, duration, measure, percent, size
from gnmr.lab.report.one_model import one_model
from gnmr.lab.report.runs import load
from gnmr.lab.report.statistics import Stat, stat
from gnmr.lab.report.tables import (
    against_baseline,
    against_random,
    comparison_tables,
    control,
    lost,
    quality,
    run_table,
)
from gnmr.lab.report.tradeoff import signal_curves, tradeoff

Write = Callable[..., Path]


def test_means_spreads_and_paired_differences(write_run: Write, comparisons: Callable) -> None:
    full = {0: 40.0, 1: 44.0, 2: 41.0}
    low = {0: 42.0, 1: 45.0, 2: 44.0}
    for seed in full:
        write_run(arm="bf16", seed=seed, val_ppl=full[seed])
        write_run(arm="int4", seed=seed, val_ppl=low[seed])
    (comparison,) = comparisons()
    table = quality(comparison)
    assert [cells[0] for cells in table.rows] == ["int4", "bf16"]
    differences = [math.log(low[seed] / full[seed]) for seed in full]
    told = row(table, "int4")
    assert told["seeds done"] == "3 of 3"
    assert told["val perplexity"] == f"{131 / 3:.2f} ± {statistics.stdev(low.values()):.2f}" == "43.67 ± 1.53"
    mean, spread = (100 * math.expm1(number(differences)) for number in (statistics.mean, statistics.stdev))
    assert told["vs 16-bit"] == f"{mean:+.2f} ± {spread:.2f} %" == "+4.84 ± 2.44 %"
    assert row(table, "bf16")["vs 16-bit"] == "reference"


def test_one_seed_has_no_spread(write_run: Write, comparisons: Callable) -> None:
    write_run(arm="bf16", val_ppl=40.0)
    write_run(arm="int4", val_ppl=42.0)
    told = row(quality(comparisons()[0]), "int4")
    assert told["val perplexity"] == "42.00 ± -"
    assert told["vs 16-bit"] == "+5.00 ± - %"


def test_differences_are_paired_by_seed_where_seeds_are_missing(write_run: Write, comparisons: Callable) -> None:
    """bf16 has seeds 0 and 1, int4 has 1 and 2: only seed 1 counts, whatever the means say."""
    write_run(arm="bf16", seed=0, val_ppl=10.0)
    write_run(arm="bf16", seed=1, val_ppl=40.0)
    write_run(arm="int4", seed=1, val_ppl=42.0)
    write_run(arm="int4", seed=2, val_ppl=90.0)
    (comparison,) = comparisons()
    int4, bf16 = comparison.arms
    assert paired_difference(int4, bf16) == Stat(1, pytest.approx(5.0), None)
    table = quality(comparison)
    assert "Compared only where both have the seed: int4 on seed 1." in notes(table)
    assert "int4: 2 done, missing: seed 0." in notes(table)
    assert "bf16: 2 done, missing: seed 2." in notes(table)
    assert row(table, "int4")["seeds done"] == "2 of 3"


@pytest.fixture
def runs() -> Recorded:
    return Recorded()


def test_arms_are_tested_against_the_static_low_path(runs: Recorded) -> None:
    """int4_int8 minus int4 is -0.01, -0.02, -0.03 (p = 1 - sqrt(12 / 14), see the statistics), int8 minus int4 -0.1,
    -0.11, -0.09: t = -10 sqrt 3, p = 1 - sqrt(300 / 302). Two tests: Holm doubles the smaller p."""
    runs.add("int4", 3.0, 3.1, 3.2)
    runs.add("int4_int8", 2.99, 3.08, 3.17)
    runs.add("int8", 2.9, 2.99, 3.11)
    (table,) = against_baseline(runs.comparisons()[0])
    assert table.title == "stress, scale cpu: against int4"
    assert row(table, "int4_int8-gnmr") == {
        "arm": "int4_int8-gnmr",
        "n": "3",
        "difference [95 % interval]": "-1.98 [-4.39, +0.49] %",
        "d_z [95 % interval]": "-2.00 [-4.11, +0.14]",
        "p (Holm)": f"{1 - math.sqrt(12 / 14):.3f}",
        "verdict": "no difference\nshown",
        "gap closed": "20 %",
    }
    assert row(table, "int8")["p (Holm)"] == f"{2 * (1 - math.sqrt(300 / 302)):.3f}" == "0.007"
    assert (row(table, "int8")["verdict"], row(table, "int8")["gap closed"]) == ("better", "-")
    assert "p by Holm over the 2 tests of this table" in notes(table)
    assert "The gap itself" not in notes(table)


def test_all_arms_between_two_bounds_stand_in_one_model(runs: Recorded) -> None:
    """Differences of means are -0.02 and -0.1; of the residuals, by double centring, the sd has four degrees."""
    values = np.array([[3.0, 3.1, 3.2], [2.99, 3.08, 3.17], [2.9, 2.99, 3.11]])
    for arm, losses in zip(("int4", "int4_int8", "int8"), values.tolist(), strict=True):
        runs.add(arm, *losses)
    left = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    sd = math.sqrt((left**2).sum() / 4)
    (table,) = one_model(runs.comparisons()[0])
    p = 2 * stats.t.sf(0.02 / (sd * math.sqrt(2 / 3)), 4)
    told = row(table, "int4_int8-gnmr")
    assert (told["n"], told["p (Holm)"], told["difference [95 % interval]"][:6]) == ("3", f"{p:.3f}", "-2.0 %")
    assert told["gap closed [95 % interval]"].startswith("20 % (")
    assert "int8 against int4, a gap of 0.100 nats (+10.5 %): shown" in notes(table)
    assert f"n = 3; residual sd {sd:.3f} nats, {1000 * sd:.0f} % of the gap, 4 degrees of freedom." in notes(table)
    runs.runs = [run for run in runs.runs if "gnmr" not in run.arm]
    assert one_model(runs.comparisons()[0]) == [], "two arms have the paired test"


def test_a_gap_that_is_not_shown_is_said(runs: Recorded) -> None:
    runs.add("int4", 3.0, 3.1)
    runs.add("int4_int8", 2.99, 3.08)
    runs.add("int8", 2.9, 2.99)
    (table,) = against_baseline(runs.comparisons()[0])
    assert [cells[-2] for cells in table.rows] == ["too few seeds"] * 2
    assert "The gap itself is not shown by the test" in notes(table)


def test_a_gap_is_tested_in_one_family_over_the_experiment(runs: Recorded) -> None:
    """p = 0.016 (see the statistics), four times that over four rates: a gap by itself, none among four."""
    for rate in (1e-3, 2e-3, 3e-3, 4e-3):
        runs.add("int4", 3.35, 3.35, 3.35, optim__lr=rate)
        runs.add("int8", 2.8, 2.9, 3.0, optim__lr=rate)
        runs.add("int4_int8", 3.0, 3.0, 3.0, optim__lr=rate)
    shown = "The gap itself is not shown by the test (p = 0.064 by Holm over the experiment's pairs of static arms)"
    (comparison,) = runs.comparisons()
    assert [shown in notes(table) for table in against_baseline(comparison)] == [True] * 4
    assert [cell["low"] for cell in regime_cells([comparison])] == ["unclear"] * 4, "the map says the same"
    runs.runs = runs.runs[:9]
    assert "The gap itself" not in notes(against_baseline(runs.comparisons()[0])[0])


def test_diverged_runs_stand_in_the_tables(runs: Recorded) -> None:
    runs.add("int4", None, 3.0, None, None, None, None)
    runs.add("int4_int8", 2.9, 2.9, 2.9, 2.9, 2.9, 2.9)
    runs.add("int8", None)
    runs.runs[-1].reason = "disk full after step 7"
    (comparison,) = runs.comparisons()
    table = quality(comparison)
    assert [row(table, name)["diverged"] for name in ("int4", "int4_int8-gnmr", "int8")] == ["5", "-", "-"]
    told = row(against_baseline(comparison)[0], "int4_int8-gnmr")
    assert (told["n"], told["difference [95 % interval]"]) == ("6", "diverged 0 : 5")
    assert told["p (Holm)"] == f"{4 * 6 / math.comb(12, 5):.3f}" == "0.030", "Fisher: 2 C(6, 5) / C(12, 5), doubled"
    assert told["verdict"] == "better"
    assert row(against_baseline(comparison)[0], "int8")["n"] == "0", "a full disk is no divergence"


def test_arms_are_tested_against_random_at_their_budget(runs: Recorded) -> None:
    """Of three random arms the one with the nearest promotion; no test where that is over 10 % of the larger away."""
    random = {"controller__signal": "random"}
    runs.add("int4", 3.0, 3.1, 3.2)
    runs.add("int4_int8", 2.9, 2.99, 3.11, promoted=0.010)
    for max_o, share in ((1, 0.0095), (2, 0.012), (3, 0.05)):
        settings = random | {"controller__max_o": max_o}
        runs.add("int4_int8", 3.0, 3.1, 3.2, promoted=share, **settings)
    runs.add("int8", 2.9, 3.0, 3.1)
    ranked = {"controller__routing": "ranked"}
    runs.add("int4_int8", 2.9, 2.9, 2.9, promoted=0.2, **ranked)
    runs.add("int4_int8", 2.9, 2.9, 2.9, controller__hold=20)
    (comparison,) = runs.comparisons()
    table = against_random(comparison)
    shares = {cells[0]: cells[1:3] for cells in table.rows}
    gnmr, far = "int4_int8-gnmr", "int4_int8-gnmr-ranked"
    assert shares == {gnmr: ["1.0 %", "0.950 %"], far: ["20.0 %", "5.0 %"]}
    assert "nearest promotion: int4_int8-random max_o=1, int4_int8-random max_o=3." in notes(table)
    assert row(table, gnmr)["p (Holm)"] == f"{1 - math.sqrt(300 / 302):.3f}", "the other row is not of the family"
    assert (row(table, gnmr)["verdict"], row(table, far)["verdict"]) == ("better", "-")
    assert row(table, far)["difference [95 % interval]"].startswith("-18.13 ")
    assert f"No test, since no random arm has their budget to within 10 % of the larger share: {far}." in notes(table)
    assert "Without a random arm that differs in the controller alone: int4_int8-gnmr hold=20." in notes(table)
    assert comparison.random(next(arm for arm in comparison.arms if arm.label == far)) is None


@pytest.mark.parametrize("noise", [0.003, 0.03, 0.3])
def test_an_arm_has_one_verdict_against_another(runs: Recorded, noise: float) -> None:
    """Of a sweep from scratch: sentence and tables say the same, whatever the paired tests would."""
    draw = np.random.default_rng(7)
    losses = {name: (3.0 - back + noise * draw.standard_normal(3)).tolist() for name, back in BACK.items()}
    runs.add("int4", *losses["low"])
    runs.add("int8", *losses["high"])
    runs.add("int4_int8", *losses["gnmr"], summary={"spent_gemm_frac": 0.09})
    random = {"controller__signal": "random", "controller__budget": 0.1, "controller__cost": "gemm"}
    runs.add("int4_int8", *losses["random"], promoted=0.03, summary={"spent_gemm_frac": 0.1}, **random)
    price = random | {"controller__signal": "price"}
    runs.add("int4_int8", *losses["price"], promoted=0.01, summary={"spent_gemm_frac": 0.08}, **price)
    (comparison,) = runs.comparisons()
    made = comparison_tables(comparison)
    with_verdict = [table.title.partition(": ")[2] for table in made if "verdict" in table.columns]
    assert with_verdict == ["one model for all arms, against int4", "against random at the same budget"]
    against = {table.title.partition(": ")[2]: table for table in made}["against random at the same budget"]
    verdict = row(against, "int4_int8-price")["verdict"].replace("\n", " ")
    assert row(against, "int4_int8-gnmr")["verdict"] == "-", "another budget, and three times the promotion"
    assert (row(against, "int4_int8-price")["spent"], row(against, "int4_int8-price")["random spent"]) == (
        "8.0 %",
        "10.0 %",
    )
    sentence = headline(comparison).sentence
    if verdict == "no verdict":
        assert "nothing is said of arms between them" in sentence
    else:
        p = row(against, "int4_int8-price")["p (Holm)"]
        assert "at 8.0 % of the GEMMs' arithmetic" in sentence
        assert sentence.endswith(f"against random under the same budget: {verdict} (p = {p}).")


BACK = {"low": 0.0, "high": 0.5, "gnmr": 0.1, "random": 0.1, "price": 0.3}
"""By arm: how much of the gap it closes, in nats."""


@pytest.mark.parametrize("share, meets", [(0.0091, True), (0.0111, True), (0.0089, False), (0.0112, False)])
def test_a_budget_is_the_same_within_a_tenth_of_the_larger(runs: Recorded, share: float, meets: bool) -> None:
    runs.add("int4_int8", 3.0, promoted=0.01)
    runs.add("int4_int8", 3.0, promoted=share, controller__signal="random")
    (comparison,) = runs.comparisons()
    gnmr = next(arm for arm in comparison.arms if arm.signal != "random")
    assert (comparison.random(gnmr) is not None) == meets


@pytest.mark.parametrize("lost", ["gnmr", "random"])
def test_an_arm_that_diverged_throughout_meets_its_random_arm(runs: Recorded, lost: str) -> None:
    """Five of five against none, as in the statistics: Fisher 2 / C(10, 5), twice."""
    finite, none = [2.9] * 5, [None] * 5
    runs.add("int4", *[3.0] * 5)
    runs.add("int4_int8", *(none if lost == "gnmr" else finite))
    runs.add("int4_int8", *(none if lost == "random" else finite), controller__signal="random")
    (comparison,) = runs.comparisons()
    table = against_random(comparison)
    told = row(table, "int4_int8-gnmr")
    expected = ("diverged 5 : 0", "worse") if lost == "gnmr" else ("diverged 0 : 5", "better")
    assert (told["difference [95 % interval]"], told["verdict"]) == expected
    assert (told["spent"], told["random spent"], told["p (Holm)"]) == ("1.0 %", "1.0 %", f"{4 / 252:.3f}")
    assert [cells[:2] for cells in tradeoff(comparison).rows[:2]] == [["gnmr_delta", "1.0 %"], ["random", "1.0 %"]]


def test_promotion_is_over_seeds_that_ended(runs: Recorded) -> None:
    """A full disk is no end; a share that is not known is left out."""
    runs.add("int4_int8", 3.0, None, None, None)
    for run, share in zip(runs.runs, (0.01, 0.03, None, 0.9), strict=True):
        run.__dict__["summary"]["promotion_frac"] = share
    runs.runs[3].reason = "disk full after step 7"
    (arm,) = runs.comparisons()[0].arms
    assert arm.promoted == pytest.approx(0.02)


def test_a_recovery_arm_that_lost_a_seed_at_once_is_still_static(runs: Recorded) -> None:
    """Its first step is on the low path, which is much of a short run."""
    runs.add("int4_int8", 3.0, None, promoted=0.998, controller__signal="always_high")
    runs.runs[1].__dict__["summary"]["promotion_frac"] = 0.9
    assert [arm.always for arm in runs.comparisons()[0].arms] == ["int8"]


def test_arms_without_a_static_low_arm_are_named(runs: Recorded) -> None:
    runs.add("int4", 3.0)
    runs.add("int4_int8", 2.9)
    runs.add("int4_int8", 2.9, controller__signal="gap")
    runs.add("int8_bf16", 2.9)
    assert "a seed that ended: int8_bf16-gnmr." in notes(tradeoff(runs.comparisons()[0]))


def test_optimizer_arms_are_held_against_the_plain_low_path(runs: Recorded) -> None:
    clip = {"optim__transform__name": "zclip"}
    runs.add("int4", 3.0)
    runs.add("bf16", 2.8)
    runs.add("int4", 2.9, **clip)
    runs.add("int4_int8", 2.95, **clip)
    (comparison,) = runs.comparisons()
    (table,) = against_baseline(comparison)
    assert table.title == "stress, scale cpu: against int4"
    assert [cells[0] for cells in table.rows] == ["int4-zclip", "int4_int8-gnmr-zclip", "bf16"]
    assert row(quality(comparison), "int4-zclip")["vs 16-bit"] == "+10.52 ± - %"


def test_quality_against_promotion(runs: Recorded) -> None:
    runs.add("int4", 3.0, 3.0)
    runs.add("int8", 2.8, 2.8)
    for trigger, share, loss in ((1.0, 0.1, 2.85), (2.0, 0.01, 2.95)):
        settings = {"controller__trigger": trigger}
        runs.add("int4_int8", loss, loss, promoted=share, **settings)
    gap = {"controller__signal": "gap", "controller__routing": "ranked"}
    runs.add("int4_int8", 2.9, None, promoted=0.05, **gap)
    (comparison,) = runs.comparisons()
    assert [(cells[0], cells[1], *cells[3:]) for cells in tradeoff(comparison).rows] == [
        ("gap ranked", "5.0 %", "2", "diverged 1 : 0"),
        ("gnmr_delta", "1.0 %", "2", "-4.88 [-4.88, -4.88] %"),
        ("gnmr_delta", "10.0 %", "2", "-13.93 [-13.93, -13.93] %"),
        ("static int4", "0.0 %", "2", "reference"),
        ("static int8", "100.0 %", "2", "-18.13 [-18.13, -18.13] %"),
    ]


def test_what_faults_cost(runs: Recorded) -> None:
    """Each arm against itself without them, seed by seed; a window of outlier channels against none at all."""
    runs.add("int4", 3.0, 3.1, 3.2)
    runs.add("int4", 3.1, 3.2, 3.3, stress__kind="noise", stress__magnitude=2.0, stress__rate=0.5)
    runs.add("int4_int8", 2.9, 3.0, 3.1)
    runs.add("int4_int8", 2.95, 3.05, None, stress__kind="nan", stress__rate=0.5)
    runs.add("int8", 2.9, 2.9, 2.9, stress__kind="nan", stress__rate=0.5)
    window = {"model__outlier_channels__number": 2, "model__outlier_channels__window": [5, 9]}
    runs.add("int4", 3.2, 3.3, 3.4, model__outlier_channels__gain=32.0, **window)
    (comparison,) = runs.comparisons()
    shown = {tuple(cells[1:4]) for cells in lost(comparison).rows}
    assert shown == {
        ("noise 2", "3", "+10.52 [+10.52, +10.52] %"),
        ("nan", "3", "diverged 1 : 0"),
        ("outliers 32", "3", "+22.14 [+22.14, +22.14] %"),
    }
    assert "Without such an arm beside them: int8." in notes(lost(comparison))
    runs.add("int4", 2.0, 2.0, 2.0, **window | {"model__outlier_channels__window": []})
    assert {tuple(cells[1:4]) for cells in lost(runs.comparisons()[0]).rows} == shown, (
        "those of a whole run are no twin"
    )


def test_a_curve_is_one_signals_budgets(runs: Recorded) -> None:
    """Random's share is its budget; how long a set is held makes another curve."""
    runs.add("int4", 3.0, 3.0)
    for share in (0.01, 0.05):
        signal = {"controller__signal": "random", "controller__options__share": share}
        runs.add("int4_int8", 2.9, 2.9, promoted=share, controller__max_o=28, **signal)
    for hold in (1, 20):
        runs.add("int4_int8", 2.9, 2.9, promoted=0.01 * hold, controller__hold=hold)
    curves = signal_curves(runs.comparisons()[0])
    assert {name: [point.promoted for point in points] for name, points in curves.items()} == {
        "gnmr_delta hold=1": [0.01],
        "gnmr_delta hold=20": [0.2],
        "random": [0.01, 0.05],
    }


def test_the_signal_that_always_recovers_is_the_static_recovery_path(runs: Recorded) -> None:
    runs.add("int4", 3.0)
    runs.add("int4_int8", 2.95)
    high = {"controller__signal": "always_high"}
    runs.add("int4_int8", 2.9, promoted=0.995, **high)
    (comparison,) = runs.comparisons()
    (table,) = against_baseline(comparison)
    assert row(table, "int4_int8-gnmr")["gap closed"] == "50 %"
    assert row(table, "int4_int8-always_high")["gap closed"] == "-"


def test_each_low_path_has_its_own_run_that_always_recovers(runs: Recorded) -> None:
    """Several arms that are the recovery path throughout: equal runs, of which each low path's own is its bound."""
    for low in ("int3", "int4"):
        runs.add(low, 3.0, 3.0)
        runs.add(f"{low}_int8", 2.95, 2.95, paths__low=low, paths__recovery="int8")
        high = {"paths__low": low, "paths__recovery": "int8", "controller__signal": "always_high"}
        runs.add(f"{low}_int8", 2.9, *([2.9] * (low == "int3")), promoted=0.995, **high)  # int3's has more seeds
    (comparison,) = runs.comparisons()
    bounds = {
        arm.settings["precision.low"]: comparison.recovery(arm) for arm in comparison.arms if arm.signal == "gnmr_delta"
    }
    assert {low: bound.settings["precision.low"] for low, bound in bounds.items()} == {"int3": "int3", "int4": "int4"}


def test_an_arm_with_pins_is_not_the_static_low_path(runs: Recorded) -> None:
    runs.add("int4", 3.0)
    runs.add("int8", 2.9)
    runs.add("int4", 2.95, paths__name="int4_pins", paths__pins__down_proj=["fprop", "dgrad", "wgrad"])
    (comparison,) = runs.comparisons()
    low, pinned = (
        next(arm for arm in comparison.arms if arm.pinned == yes and arm.low_bits == 4) for yes in (False, True)
    )
    assert (low.always, pinned.always) == ("int4", None)
    assert comparison.low(pinned) is low and comparison.low(low) is low


def test_failed_and_unfinished_cells_are_named_and_not_averaged(write_run: Write, comparisons: Callable) -> None:
    write_run(arm="int4", seed=0, val_ppl=40.0)
    write_run(arm="int4", seed=1, val_ppl=42.0)
    write_run(arm="int4", seed=2, val_ppl=900.0, steps=2, planned=3, status="failed", reason="loss was nan at step 1")
    write_run(arm="int8", seed=0, val_ppl=41.0, steps=2, planned=3, status="running")
    write_run(arm="int8", seed=1, val_ppl=41.0, steps=2, planned=3, status="interrupted", reason="Ctrl-C")
    (comparison,) = comparisons()
    table = quality(comparison)
    assert row(table, "int4")["val perplexity"] == "41.00 ± 1.41"
    assert row(table, "int8")["val perplexity"] == "-"
    assert "int4: 2 done, 1 failed: loss was nan at step 1 (seed 2, step 2 of 3" in notes(table)
    assert "1 interrupted: seed 1, step 2 of 3, validation perplexity 41.00 after step 2, Ctrl-C" in notes(table)
    assert "1 unfinished (running or killed): seed 0, step 2 of 3" in notes(table)
    assert "No 16-bit arm of the same model and optimizer to compare with." in notes(table)
    assert "vs 16-bit" not in table.columns and "vs 16-bit" not in notes(table)


def test_a_seed_run_twice_counts_once(write_run: Write, comparisons: Callable, tmp_path: Path) -> None:
    first = write_run(arm="bf16", val_ppl=40.0)
    first.rename(tmp_path / "elsewhere")
    write_run(arm="bf16", val_ppl=50.0, steps=1, planned=3, status="running")
    (comparison,) = comparisons()
    assert comparison.arms[0].stat("final_val_ppl") == Stat(1, pytest.approx(40.0), None)
    assert "repeats a seed" in notes(quality(comparison))


def test_a_run_of_another_commit_stands_beside_the_arm_whose_seed_it_repeats(
    write_run: Write, comparisons: Callable, tmp_path: Path
) -> None:
    write_run(arm="int4", seed=0, val_ppl=44.0, header={"commit": "9876543210abcdef"}).rename(tmp_path / "mine")
    for seed in (0, 1):
        write_run(arm="int4", seed=seed, val_ppl=40.0)
    (comparison,) = comparisons()
    assert [(arm.label.split()[1:], arm.seeds) for arm in comparison.arms] == [
        ([], [0, 1]),
        (["at", "9876543210"], [0]),
    ]
    assert row(quality(comparison), "int4 at 9876543210")["val perplexity"].startswith("44.00")
    assert "repeats a seed" not in notes(quality(comparison))


@pytest.mark.parametrize(
    "other, says",
    [
        ({"header": {"data": {"fingerprint": "0ther"}}}, "data (feedbeef here, 0ther there)"),
        ({"settings": {"training.seq_len": 128, "training.batch_size": 16}}, "seq_len (256 here, 128 there)"),
        ({"settings": {"training.batch_size": 4}}, "tokens per step (2,048 here, 1,024 there)"),
        ({"steps": 2}, "steps (3 here, 2 there)"),
    ],
)
def test_what_cannot_be_compared_is_said_and_kept_apart(
    write_run: Write, comparisons: Callable, other: dict, says: str
) -> None:
    write_run(arm="bf16", val_ppl=40.0)
    write_run(arm="bf16", seed=1, val_ppl=80.0, **other)
    found = comparisons()
    assert sorted(row(quality(comparison), "bf16")["val perplexity"] for comparison in found) == [
        "40.00 ± -",
        "80.00 ± -",
    ]
    line = f"Not comparable with the other runs of this experiment and scale: they differ in {says}."
    assert any(line in notes(quality(comparison)) for comparison in found)


def test_arms_of_one_name_are_told_apart_and_paired_with_their_own_reference(
    write_run: Write, comparisons: Callable
) -> None:
    for rate, full, low in ((0.001, 40.0, 42.0), (0.005, 50.0, 51.0)):
        write_run(arm="bf16", val_ppl=full, settings={"optim.lr": rate})
        write_run(arm="int4", val_ppl=low, settings={"optim.lr": rate})
    table = quality(comparisons()[0])
    assert row(table, "int4 lr=0.001")["vs 16-bit"] == "+5.00 ± - %"
    assert row(table, "int4 lr=0.005")["vs 16-bit"] == "+2.00 ± - %"
    assert "Mind: the arms differ in more than their paths and controller: optim.lr." in notes(table)


def test_control_and_cost(write_run: Write, comparisons: Callable) -> None:
    shares = {"promotion_frac": 0.004, "hit_max_o_frac": 0.25, "wall_time_s": 120.0}
    over = {"over_frac": {"gnmr": 0.0007, "delta_gnmr": 0.05}}
    spent = {"spent_gemm_frac": 0.143, "spent_extra_bytes": 2048.0}
    for seed in (0, 1):
        write_run(arm="bf16", seed=seed)
        write_run(arm="int4_int8", seed=seed, summary=shares | over | {"saved_bytes_mean": 1000 + 200 * seed} | spent)
    table = control(comparisons()[0])
    routed, full = row(table, "int4_int8-gnmr"), row(table, "bf16")
    assert (routed["promoted"], routed["hit max_o"]) == ("0.400 %", "25.0 %")
    assert routed["over threshold"] == "gnmr 0.070 %\ndelta_gnmr 5.0 %"
    assert (routed["saved"], routed["of 16-bit"], routed["wall time"]) == ("1.07 KiB", "27.5 %", "2.0 min")
    assert (full["promoted"], full["hit max_o"], full["saved"]) == ("-", "-", "3.91 KiB")
    assert (routed["GEMMs spent"], routed["predicted (Eq. 5)"]) == ("14.3 %", "2.00 KiB")
    assert (full["GEMMs spent"], full["predicted (Eq. 5)"]) == ("-", "-")  # of a version that did not record it


def test_compressed_gradients_lie_between_never_recovering_and_dense(write_run: Write, comparisons: Callable) -> None:
    """In one format throughout: what is sent makes the low path."""
    compressed = {"compression.name": "greedylore", "compression.rank": 4, "compression.dense_steps": 0}
    gap = compressed | {"controller.signal": "gap", "compression.workers": 2}
    for seed in (0, 1, 2):
        write_run(arm="bf16", seed=seed, val_ppl=40.0 + seed)
        write_run(
            arm="bf16",
            seed=seed,
            val_ppl=50.0 + seed,
            settings=compressed | {"controller.signal": "always_low", "compression.workers": 2},
            summary={"numbers_sent_frac": 0.2, "promotion_frac": 0.0},
        )
        sent = {"numbers_sent_frac": 0.3, "promotion_frac": 0.1}
        write_run(arm="bf16", seed=seed, val_ppl=45.0 + seed, settings=gap, summary=sent)
    comparison = comparisons()[0]
    table = control(comparison)
    assert (
        row(table, "bf16-greedylore-r4-gap")["numbers sent"] == "30.0 %" and row(table, "bf16")["numbers sent"] == "-"
    )
    arms = {arm.name: arm for arm in comparison.arms}
    routed, never, dense = (arms[f"bf16{name}"] for name in ("-greedylore-r4-gap", "-greedylore-r4-always_low", ""))
    assert (comparison.low(routed), comparison.recovery(routed), comparison.reference(never)) == (never, dense, dense)
    assert never.always == "rank 4 by greedylore" and routed.always is None
    assert headline(comparison).sentence.startswith("Compression cost +")
    assert "numbers\nsent" in table.columns and "numbers\nsent" not in control(compare(dense.runs)[0]).columns


def test_shares_over_threshold_of_other_signals_and_of_old_records(write_run: Write, comparisons: Callable) -> None:
    """A signal has its own columns, or none; records from before there was a choice have two fixed fields."""
    gsnr = {"controller.signal": "gsnr"}
    write_run(settings=gsnr, summary={"over_frac": {"gsnr": 0.02}})
    old = write_run(summary={"gnmr_over_frac": 0.01, "delta_gnmr_over_frac": 0.03})
    blind = write_run(arm="bf16")
    for folder in (old, blind):
        rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        (folder / "steps.jsonl").write_text("".join(json.dumps(row | {"over": None}) + "\n" for row in rows))
    table = control(comparisons()[0])
    assert row(table, "int4_int8-gsnr")["over threshold"] == "gsnr 2.0 %"
    assert row(table, "int4_int8-gnmr")["over threshold"] == "gnmr 1.0 %\ndelta_gnmr 3.0 %"
    assert row(table, "bf16")["over threshold"] == "-"


def test_promotions_are_counted_by_cause(write_run: Write, comparisons: Callable) -> None:
    causes = ["gnmr", "delta_gnmr", "gnmr"]
    events = [{"step": 1, "unit": "u", "event": "promote", "cause": cause, "risk": 2.0} for cause in causes]
    write_run(events=[*events, {"step": 2, "unit": "u", "event": "release", "cause": "lock", "risk": 0.5}])
    write_run(seed=1, events=events)
    told = notes(control(comparisons()[0]))
    assert "int4_int8-gnmr: 6 promotions in 2 seeds (gnmr 4, delta_gnmr 2)." in told


def test_promotions_are_those_of_the_runs_whose_events_were_kept(write_run: Write, comparisons: Callable) -> None:
    event = {"step": 1, "unit": "u", "event": "promote", "cause": "gnmr", "risk": 2.0}
    folders = [write_run(seed=seed, events=[event] * 2) for seed in range(3)]
    (folders[1] / "events.jsonl").unlink()
    assert "int4_int8-gnmr: 4 promotions in 2 of 3 seeds (gnmr 4)." in notes(control(comparisons()[0]))


def test_statistics() -> None:
    assert stat([]) is None
    assert stat([None, 2.0]) == Stat(1, 2.0, None)
    assert stat([1.0, 3.0]) == Stat(2, 2.0, pytest.approx(2**0.5))
    assert stat([1.0, float("inf")]) == Stat(2, float("inf"), None)


def test_bits() -> None:
    assert [bits(name) for name in ("int2", "int4", "e2m1", "e3m2", "e4m3", "bf16", None)] == [2, 4, 4, 6, 8, 16, None]
    assert {name: bits(name) for name in paths.RECIPES} == {name: one.bits for name, one in paths.RECIPES.items()}


def test_numbers_as_text() -> None:
    assert measure(None, 2) == "-"
    assert measure(Stat(2, 1.234, 0.5), 1, sign=True, unit=" %") == "+1.2 ± 0.5 %"
    assert [percent(share) for share in (None, 0.0, 0.00019, 0.5)] == ["-", "0.0 %", "0.019 %", "50.0 %"]
    assert [size(number) for number in (None, 1000, 11 * 2**20, 3 * 2**30)] == ["-", "1000 B", "11.0 MiB", "3.00 GiB"]
    assert [duration(seconds) for seconds in (5, 90, 7200)] == ["5.0 s", "1.5 min", "2.0 h"]
    assert [count(number) for number in (2048, 1.2e6, 13.1e9)] == ["2,048", "1.2M", "13.1B"]


def test_the_steps_of_a_run_without_rows_are_its_summarys(write_run: Write, tmp_path: Path) -> None:
    folder = write_run(arm="bf16", steps=3)
    (folder / "steps.jsonl").unlink()
    (run,) = map(load, find_runs([tmp_path]))
    assert run_table([run], tmp_path).rows[0][1:3] == ["done", "3 of 3"]


def test_the_largest_comparison_of_an_experiment_stands_first() -> None:
    trial, whole = Recorded(), Recorded()
    trial.add("int4_int8", 3.0, training__steps=2)
    whole.add("int4_int8", 3.0, 3.1)
    whole.add("int8_bf16", 2.9, 3.0)
    found = compare([*trial.runs, *whole.runs])
    assert [len(one.runs) for one in found] == [4, 1]
