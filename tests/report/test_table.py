"""The table's numbers against means, spreads and tests worked out here; which arms are compared with which."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from recorded import Recorded, notes, row
from scipy import stats

from gnmr.lab.report.headline import headline
from gnmr.lab.report.layout import measure
from gnmr.lab.report.recorded_run import load
from gnmr.lab.report.statistics import RELATIONS, Stat
from gnmr.lab.report.table import arm_table

Write = Callable[..., Path]
DIFFERENCE = "diff. [95% CI]"


@pytest.fixture
def runs() -> Recorded:
    return Recorded()


def test_means_spreads_and_paired_differences(write_run: Write, comparisons: Callable) -> None:
    high, low = {0: 40.0, 1: 44.0, 2: 41.0}, {0: 42.0, 1: 45.0, 2: 44.0}
    for seed in high:
        write_run(arm="bf16", seed=seed, val_ppl=high[seed])
        write_run(arm="int4", seed=seed, val_ppl=low[seed])
    table = arm_table(comparisons()[0])
    losses = [math.log(value) for value in low.values()]
    told = row(table, "int4")
    assert told["seeds"] == "3 of 3"
    assert told["val loss"] == f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
    differences = [math.log(high[seed] / low[seed]) for seed in high]
    ends = stats.ttest_1samp(differences, 0).confidence_interval()
    mean, first, last = (100 * math.expm1(value) for value in (statistics.mean(differences), *ends))
    assert row(table, "bf16")[DIFFERENCE] == f"{mean:+.1f}% [{first:+.1f}, {last:+.1f}]"
    assert row(table, "int4")[DIFFERENCE] == "-"


def test_all_arms_between_two_bounds_stand_in_one_model(runs: Recorded) -> None:
    """Differences of means are -0.02 and -0.1."""
    losses = {"int4": [3.0, 3.1, 3.2], "int4_int8": [2.99, 3.08, 3.17], "int8": [2.9, 2.99, 3.11]}
    for arm, of_arm in losses.items():
        runs.add(arm, *of_arm)
    (comparison,) = runs.comparisons()
    table, (family,) = arm_table(comparison), comparison.families
    told = row(table, "int4_int8-gnmr")
    assert family.model is not None and family.model.freedom == 4
    assert told["verdict (p)"].endswith(f" ({family.results[0].p:.3f})")
    assert told[DIFFERENCE].startswith("-2.0%") and told["gap recovered"].startswith("20% [")
    assert row(table, "int8")["verdict (p)"].startswith("better (") and row(table, "int8")["gap recovered"] == "-"
    assert "int8 against int4" in notes(table)


def test_diverged_runs_stand_in_the_table(runs: Recorded) -> None:
    runs.add("int4", None, 3.0, None, None, None, None)
    runs.add("int4_int8", 2.9, 2.9, 2.9, 2.9, 2.9, 2.9)
    runs.add("int8", None)
    runs.runs[-1].reason = "disk full after step 7"
    told = row(arm_table(runs.comparisons()[0]), "int4_int8-gnmr")
    assert (told[DIFFERENCE], told["verdict (p)"]) == ("diverged 0 : 5", "better (0.030)")


def test_arms_are_tested_against_random_at_their_budget(runs: Recorded) -> None:
    """Of three random arms the one with the nearest promotion; no test where that is over 10% of the larger away."""
    runs.add("int4", 3.0, 3.1, 3.2)
    runs.add("int4_int8", 2.9, 2.99, 3.11, promoted=0.010)
    for max_o, share in ((1, 0.0095), (2, 0.012), (3, 0.05)):
        settings = {"controller__signal": "random", "controller__max_o": max_o}
        runs.add("int4_int8", 3.0, 3.1, 3.2, promoted=share, **settings)
    runs.add("int4_int8", 2.9, 2.9, 2.9, promoted=0.2, controller__routing="ranked")
    (comparison,) = runs.comparisons()
    table = arm_table(comparison)
    assert row(table, "int4_int8-gnmr")["vs random (p)"] == f"better ({1 - math.sqrt(300 / 302):.3f})"
    assert row(table, "int4_int8-gnmr-ranked")["vs random (p)"] == "-", "another budget"


@pytest.mark.parametrize("lost", ["gnmr", "random"])
def test_an_arm_that_diverged_throughout_meets_its_random_arm(runs: Recorded, lost: str) -> None:
    """Five of five against none, as in the statistics: Fisher 2 / C(10, 5), twice."""
    finite, none = [2.9] * 5, [None] * 5
    runs.add("int4", *[3.0] * 5)
    runs.add("int4_int8", *(none if lost == "gnmr" else finite))
    runs.add("int4_int8", *(none if lost == "random" else finite), controller__signal="random")
    told = row(arm_table(runs.comparisons()[0]), "int4_int8-gnmr")
    assert told["vs random (p)"] == f"{'worse' if lost == 'gnmr' else 'better'} ({4 / 252:.3f})"


@pytest.mark.parametrize(
    "noise", [pytest.param(0.003, marks=pytest.mark.slow), 0.03, pytest.param(0.3, marks=pytest.mark.slow)]
)
def test_sentence_and_table_say_the_same(runs: Recorded, noise: float) -> None:
    draw = np.random.default_rng(7)
    back = {"low": 0.0, "high": 0.5, "gnmr": 0.1, "random": 0.1, "price": 0.3}
    losses = {name: (3.0 - gain + noise * draw.standard_normal(3)).tolist() for name, gain in back.items()}
    runs.add("int4", *losses["low"])
    runs.add("int8", *losses["high"])
    runs.add("int4_int8", *losses["gnmr"], summary={"spent_gemm_frac": 0.09})
    random = {"controller__signal": "random", "controller__budget": 0.1, "controller__cost": "gemm"}
    runs.add("int4_int8", *losses["random"], promoted=0.03, summary={"spent_gemm_frac": 0.1}, **random)
    price = random | {"controller__signal": "price"}
    spent = {"spent_gemm_frac": 0.08, "spent_extra_time": 0.24}
    runs.add("int4_int8", *losses["price"], promoted=0.01, summary=spent, **price)
    (comparison,) = runs.comparisons()
    told, sentence = row(arm_table(comparison), "int4_int8-price"), headline(comparison).sentence
    assert (told["GEMM FLOPs spent"], told["extra time"]) == ("8.0%", "24.0%")
    if told["verdict (p)"] == "no verdict":
        assert sentence.endswith("the arms between them are not judged.")
    else:
        verdict, _, p = told["vs random (p)"].rpartition(" ")
        assert f"recovered {told['gap recovered'].partition(' ')[0]} with 8.0% of the GEMM FLOPs" in sentence
        own = told["verdict (p)"].rpartition(" ")[2].strip("()")
        assert f"(p = {own})" in sentence and RELATIONS[verdict].rpartition(" ")[2] in sentence
        assert sentence.endswith(f" random with the same budget (p = {p.strip('()')}).")


@pytest.mark.parametrize("share, meets", [(0.0091, True), (0.0111, True), (0.0089, False), (0.0112, False)])
def test_a_budget_is_the_same_within_a_tenth_of_the_larger(runs: Recorded, share: float, meets: bool) -> None:
    runs.add("int4_int8", 3.0, promoted=0.01)
    runs.add("int4_int8", 3.0, promoted=share, controller__signal="random")
    (comparison,) = runs.comparisons()
    gnmr = next(arm for arm in comparison.arms if arm.signal != "random")
    assert (comparison.random(gnmr) is not None) == meets


def test_optimizer_arms_are_compared_with_the_plain_low_path(runs: Recorded) -> None:
    clip = {"optim__transform__name": "agc"}
    runs.add("int4", 3.0)
    runs.add("bf16", 2.8)
    runs.add("int4", 2.9, **clip)
    runs.add("int4_int8", 2.95, **clip)
    (comparison,) = runs.comparisons()
    baselines = {arm.label: one.label for arm in comparison.arms if (one := comparison.low(arm)) is not None}
    assert baselines == dict.fromkeys(["int4", "int4-agc", "int4_int8-gnmr-agc", "bf16"], "int4")


def test_the_signal_that_always_recovers_is_the_static_recovery_path(runs: Recorded) -> None:
    """Its first step is on the low path, which is much of a short run."""
    runs.add("int4", 3.0)
    runs.add("int4_int8", 2.95)
    runs.add("int4_int8", 2.9, None, promoted=0.995, controller__signal="always_high")
    runs.runs[-1].__dict__["summary"]["promotion_frac"] = 0.9
    (comparison,) = runs.comparisons()
    assert {arm.label: arm.always for arm in comparison.arms}["int4_int8-always_high"] == "int8"
    runs.runs.pop()
    table = arm_table(runs.comparisons()[0])
    assert row(table, "int4_int8-gnmr")["gap recovered"] == "50%"
    assert row(table, "int4_int8-always_high")["gap recovered"] == "-"


def test_an_arm_with_pins_is_not_the_static_low_path(runs: Recorded) -> None:
    runs.add("int4", 3.0)
    runs.add("int8", 2.9)
    pins = ["fprop", "dgrad", "wgrad"]
    runs.add("int4", 2.95, precision__name="int4_pins", precision__pins__down_proj=pins)
    (comparison,) = runs.comparisons()
    low, pinned = (
        next(arm for arm in comparison.arms if arm.settings["precision.name"] == name) for name in ("int4", "int4_pins")
    )
    assert (low.always, pinned.always) == ("int4", None)
    assert comparison.low(pinned) is low and comparison.low(low) is low


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exclude", ["o_proj"]),
        ("targets", ["down_proj"]),
        ("backend", "scaled_mm"),
        ("weights", "instead"),
    ],
)
def test_an_arm_has_a_baseline_with_the_same_operators_and_casts(runs: Recorded, key: str, value: object) -> None:
    other = {f"precision__{key}": value}
    runs.add("int4", 3.0)
    runs.add("int4_int8", 2.9, **other)
    (alone,) = (arm for arm in runs.comparisons()[0].arms if arm.routed)
    assert runs.comparisons()[0].low(alone) is None
    runs.add("int4", 2.95, **other)
    runs.add("bf16", 2.8)
    (comparison,) = runs.comparisons()
    (routed,) = (arm for arm in comparison.arms if arm.routed)
    low = comparison.low(routed)
    assert len(comparison.arms) == 4 and low is not None and low.settings[f"precision.{key}"] == value


def test_compressed_arms_have_a_baseline_of_the_same_compression(runs: Recorded) -> None:
    greedy = {"compression__name": "greedylore", "compression__rank": 2, "precision__low": "bf16"}
    runs.add("bf16", 3.0, controller__signal="always_low", compression__refresh_every=200, **greedy)
    runs.add("bf16", 2.9, controller__signal="price", compression__refresh_every=50, **greedy)
    (comparison,) = runs.comparisons()
    (routed,) = (arm for arm in comparison.arms if arm.signal == "price")
    assert comparison.low(routed) is None


def test_failed_and_unfinished_cells_are_named_and_not_averaged(write_run: Write, comparisons: Callable) -> None:
    write_run(arm="int4", seed=0, val_ppl=40.0)
    write_run(arm="int4", seed=1, val_ppl=42.0)
    write_run(arm="int4", seed=2, val_ppl=900.0, steps=2, planned=3, status="failed", reason="loss was nan at step 1")
    write_run(arm="int8", seed=0, val_ppl=41.0, steps=2, planned=3, status="running")
    write_run(arm="int8", seed=1, val_ppl=41.0, steps=2, planned=3, status="interrupted", reason="Ctrl-C")
    table = arm_table(comparisons()[0])
    assert row(table, "int4")["val loss"] == measure(Stat(2, math.log(40 * 42) / 2, math.log(42 / 40) / 2**0.5), 4)
    assert row(table, "int8")["val loss"] == "-" and row(table, "int8")["seeds"] == "0 of 3"
    told = notes(table)
    assert "int4: 2 done, 1 failed: seed 2, step 2 of 3" in told and "loss was nan at step 1" in told
    assert "1 interrupted: seed 1, step 2 of 3, validation perplexity 41.00 after step 2, Ctrl-C" in told
    assert "1 unfinished: seed 0, step 2 of 3" in told


def test_a_seed_run_twice_counts_once(write_run: Write, comparisons: Callable, tmp_path: Path) -> None:
    write_run(arm="bf16", val_ppl=40.0).rename(tmp_path / "elsewhere")
    write_run(arm="bf16", val_ppl=50.0, steps=1, planned=3, status="running")
    (comparison,) = comparisons()
    assert comparison.arms[0].final("val_ppl") == Stat(1, pytest.approx(40.0), None)
    assert "repeats a seed" in notes(arm_table(comparison))


def test_forks_that_heal_show_the_losses_that_are_tested(runs: Recorded) -> None:
    runs.add("bf16", 3.0, 3.1, 3.2, training__steps=30, fork__heal=30)  # losses after step 60
    runs.add("int4", 3.5, 3.6, 3.7, training__steps=30, fork__heal=30)
    for run in runs.runs:
        run.evals["val_loss"][0] = run.evals["val_loss"][1] + (1.0 if run.arm.startswith("int4") else 0.0)  # step 30
    (comparison,) = runs.comparisons()
    table = arm_table(comparison)
    assert row(table, "bf16")["val loss"] == "3.1000 ± 0.1000"
    assert row(table, "int4")["val loss"] == "4.6000 ± 0.1000"  # 1.5 nats above: +348.2%
    assert "by 348.2%" in headline(comparison).sentence
    assert "Losses of forks that heal are those before they heal." in notes(table)


def test_one_base_and_one_setting_are_one_arm_wherever_they_were_written(runs: Recorded) -> None:
    """The path of a base does not count, nor does a key that an older version did not have."""
    for path in ("int4", "int4_int8", "int8"):
        runs.add(path, 3.0, 3.1, 3.2, base="base", optim__clip_norm=None)
    for run in runs.runs:
        run.header["base"] = {"sha256": "0123456789"}
        if run.seed == 2:
            del run.settings["optim.clip_norm"]
    (comparison,) = runs.comparisons()
    assert [arm.seeds for arm in comparison.arms] == [[0, 1, 2]] * 3
    assert headline(comparison).sentence


def test_a_base_counts_by_its_name_and_checksum(write_run: Write) -> None:
    header = {"base": {"step": 4, "sha256": "0123456789"}}
    folders = [write_run(settings={"base": f"{place}/base"}, header=header) for place in ("runs", "/there/runs")]
    assert [load(folder).settings["base"] for folder in folders] == ["base", "base"]
    assert [load(folder).base for folder in folders] == ["base 01234567"] * 2
    for folder in folders:
        (folder / "header.json").unlink()
    assert [load(folder).base for folder in folders] == ["runs/base", "/there/runs/base"], "may be two bases"


def test_runs_of_another_version_are_one_arm_wherever_they_were_kept(write_run: Write, comparisons: Callable) -> None:
    """Their config has a key that this version does not know, so it is not checked."""
    for seed in range(3):
        file = write_run(seed=seed) / "config.yaml"
        tree = yaml.safe_load(file.read_text())
        tree["controller"]["gone"], tree["runs_dir"] = 1, f"/runs{seed}"
        file.write_text(yaml.safe_dump(tree))
    (comparison,) = comparisons()
    assert [arm.seeds for arm in comparison.arms] == [[0, 1, 2]]


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
    assert len(found) == 2 and any(f"they differ in {says}." in notes(arm_table(one)) for one in found)


def test_arms_of_one_name_are_told_apart_and_paired_with_their_own_reference(
    write_run: Write, comparisons: Callable
) -> None:
    for rate, full, low in ((0.001, 40.0, 42.0), (0.005, 50.0, 51.0)):
        write_run(arm="bf16", val_ppl=full, settings={"optim.lr": rate})
        write_run(arm="int4", val_ppl=low, settings={"optim.lr": rate})
    table = arm_table(comparisons()[0])
    assert row(table, "bf16 lr=0.001")[DIFFERENCE] == f"{100 * (40 / 42 - 1):+.1f}%"
    assert row(table, "bf16 lr=0.005")[DIFFERENCE] == f"{100 * (50 / 51 - 1):+.1f}%"
    assert "The arms differ in more than their precision and controller: optim.lr." in notes(table)


def test_compressed_gradients_lie_between_never_recovering_and_dense(runs: Recorded) -> None:
    """In one format throughout, what is sent makes the low path."""
    greedy = {"compression__name": "greedylore", "compression__rank": 2, "precision__low": "bf16"}
    runs.add("bf16", 2.8)
    runs.add("bf16", 3.0, controller__signal="always_low", **greedy)
    runs.add("bf16", 2.9, controller__signal="price", summary={"numbers_sent_frac": 0.2}, **greedy)
    (comparison,) = runs.comparisons()
    table = arm_table(comparison)
    (routed,) = (arm for arm in comparison.arms if arm.signal == "price")
    assert comparison.low(routed).signal == "always_low"
    assert row(table, routed.label)["sent"] == "20.0%" and row(table, routed.label)["gap recovered"] == "50%"
