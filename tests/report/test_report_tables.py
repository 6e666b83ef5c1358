"""The figures in the tables against means, spreads and differences worked out here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from gnmr.report.arms import Comparison, Stat, bits, compare, paired_difference, stat
from gnmr.report.layout import Table, count, duration, measure, percent, size
from gnmr.report.runs import find_runs, load
from gnmr.report.tables import control, quality, table_1, table_3

Write = Callable[..., Path]


@pytest.fixture
def comparisons(tmp_path: Path) -> Callable[[], list[Comparison]]:
    """All that has been written so far."""
    return lambda: compare(load(folder) for folder in find_runs([tmp_path]))


def row(table: Table, name: str) -> dict[str, str]:
    cells = next(row for row in table.rows if row[0] == name)
    return dict(zip([column.replace("\n", " ") for column in table.columns], cells, strict=True))


def notes(table: Table) -> str:
    return "\n".join(table.notes)


def test_means_spreads_and_paired_differences(write_run: Write, comparisons: Callable) -> None:
    full = {0: 40.0, 1: 44.0, 2: 41.0}
    low = {0: 42.0, 1: 45.0, 2: 44.0}
    for seed in full:
        write_run(arm="bf16", seed=seed, val_ppl=full[seed])
        write_run(arm="int4", seed=seed, val_ppl=low[seed])
    (comparison,) = comparisons()
    table = quality(comparison)
    assert [cells[0] for cells in table.rows] == ["int4", "bf16"]
    differences = [100 * (low[seed] / full[seed] - 1) for seed in full]
    told = row(table, "int4")
    assert told["seeds done"] == "3 of 3"
    assert told["val perplexity"] == f"{131 / 3:.2f} ± {statistics.stdev(low.values()):.2f}" == "43.67 ± 1.53"
    assert told["vs 16-bit"] == f"{statistics.mean(differences):+.2f} ± {statistics.stdev(differences):.2f} %"
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
    assert "No 16-bit arm of the same model and optimizer to compare with: int4, int8." in notes(table)


def test_a_seed_run_twice_counts_once(write_run: Write, comparisons: Callable, tmp_path: Path) -> None:
    first = write_run(arm="bf16", val_ppl=40.0)
    first.rename(tmp_path / "elsewhere")
    write_run(arm="bf16", val_ppl=50.0, steps=1, planned=3, status="running")
    (comparison,) = comparisons()
    assert comparison.arms[0].stat("final_val_ppl") == Stat(1, pytest.approx(40.0), None)
    assert "repeats a seed" in notes(quality(comparison))


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
    shares = {"promotion_frac": 0.004, "hit_max_o_frac": 0.25, "gnmr_over_frac": 0.0007, "wall_time_s": 120.0}
    for seed in (0, 1):
        write_run(arm="bf16", seed=seed)
        write_run(arm="int4_int8", seed=seed, summary=shares | {"saved_bytes_mean": 1000 + 200 * seed})
    table = control(comparisons()[0])
    routed, full = row(table, "int4_int8-gnmr"), row(table, "bf16")
    assert (routed["promoted"], routed["hit max_o"], routed["GNMR > α"]) == ("0.400 %", "25.0 %", "0.070 %")
    assert (routed["saved"], routed["of 16-bit"], routed["wall time"]) == ("1.07 KiB", "27.5 %", "2.0 min")
    assert (full["promoted"], full["hit max_o"], full["saved"]) == ("-", "-", "3.91 KiB")


def test_promotions_are_counted_by_cause(write_run: Write, comparisons: Callable) -> None:
    causes = ["gnmr", "delta_gnmr", "gnmr"]
    events = [{"step": 1, "unit": "u", "event": "promote", "cause": cause, "risk": 2.0} for cause in causes]
    write_run(events=[*events, {"step": 2, "unit": "u", "event": "release", "cause": "lock", "risk": 0.5}])
    write_run(seed=1, events=events)
    told = notes(control(comparisons()[0]))
    assert "int4_int8-gnmr: 6 promotions in 2 seeds (gnmr 4, delta_gnmr 2)." in told


def test_the_papers_figures_stand_beside_its_own_scales_only(write_run: Write, comparisons: Callable) -> None:
    for scale in ("cpu", "60m"):
        for arm in ("int4", "int4_int8", "bf16"):
            write_run(arm=arm, scale=scale, val_ppl=35.0)
    found = comparisons()
    table = table_1("stress", found)
    assert [column.replace("\n", " ") for column in table.columns] == [
        "arm", "cpu 6,144 tokens", "60m 6,144 tokens", "paper, 60m 1.1B",
    ]  # fmt: skip
    theirs = {cells[0]: cells[-1] for cells in table.rows}
    assert theirs == {"int4": "67.22", "int4_int8-gnmr": "30.59", "bf16": "30.79"}
    assert "it has no figures for scale cpu, so none stand beside ours" in notes(table)
    only_cpu = table_1("stress", found[:1])
    assert len(only_cpu.columns) == 2
    assert "paper" not in only_cpu.columns[1]
    assert "it has no figures for scale cpu" in notes(only_cpu)


def test_the_papers_perplexity_needs_the_papers_arm(write_run: Write, comparisons: Callable) -> None:
    cases = {
        "alpha": {"controller.alpha": 9.0},
        "two stages": {"controller.alpha_init": 2.0},
        "forward": {"paths.site": "forward"},
    }
    for place, settings in enumerate(cases.values()):
        write_run(arm="int4_int8", scale="60m", experiment=f"case{place}", settings=settings)
    for comparison in comparisons():
        assert [cells[-1] for cells in table_1("case", [comparison]).rows] == ["-"]


def test_failed_arms_are_crosses_in_table_1(write_run: Write, comparisons: Callable) -> None:
    write_run(arm="int4", scale="1.3b", status="failed", reason="diverged")
    assert table_1("stress", comparisons()).rows == [["int4", "x", "x"]]


def test_table_3_has_the_papers_shares_at_its_thresholds(write_run: Write, comparisons: Callable) -> None:
    thresholds = {"controller.alpha": 2.0, "controller.beta": 1.5}
    shares = {"gnmr_over_frac": 0.002, "delta_gnmr_over_frac": 0.001}
    write_run(arm="int4_int8", scale="350m", settings=thresholds, summary=shares)
    write_run(arm="int4_int8", scale="130m", settings=thresholds, summary=shares)
    found = comparisons()
    assert [cells[1:] for cells in table_3("stress", found).rows] == [
        ["130m", "2.0", "1.5", "0.200 %", "-", "0.100 %", "-"],
        ["350m", "2.0", "1.5", "0.200 %", "0.141 %", "0.100 %", "0.067 %"],
    ]
    without = table_3("stress", found[:1])
    assert len(without.columns) == 6
    assert "The paper has no shares for these scales and thresholds" in notes(without)


def test_statistics() -> None:
    assert stat([]) is None
    assert stat([None, 2.0]) == Stat(1, 2.0, None)
    assert stat([1.0, 3.0]) == Stat(2, 2.0, pytest.approx(2**0.5))
    assert stat([1.0, float("inf")]) == Stat(2, float("inf"), None)


def test_bits() -> None:
    assert [bits(name) for name in ("int2", "int4", "e2m1", "e3m2", "e4m3", "bf16", None)] == [2, 4, 4, 6, 8, 16, None]


def test_numbers_as_text() -> None:
    assert measure(None, 2) == "-"
    assert measure(Stat(2, 1.234, 0.5), 1, sign=True, unit=" %") == "+1.2 ± 0.5 %"
    assert [percent(share) for share in (None, 0.0, 0.00019, 0.5)] == ["-", "0.0 %", "0.019 %", "50.0 %"]
    assert [size(number) for number in (None, 1000, 11 * 2**20, 3 * 2**30)] == ["-", "1000 B", "11.0 MiB", "3.00 GiB"]
    assert [duration(seconds) for seconds in (5, 90, 7200)] == ["5.0 s", "1.5 min", "2.0 h"]
    assert [count(number) for number in (2048, 1.2e6, 13.1e9)] == ["2,048", "1.2M", "13.1B"]
