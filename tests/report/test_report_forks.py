"""Tables of forks: the gap by order, its noise, and what the table could have shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from gnmr.lab.report.family_notes import p_text
from report_reading import row
from scipy import stats

from gnmr.lab.report.family import fit
from gnmr.lab.report.forks import fork_tables
from gnmr.lab.report.statistics import smallest_effect
from gnmr.lab.report.tables import comparison_tables

NEVER = {0: 3.0, 1: 3.2, 2: 2.9}
ARM = {0: 2.94, 1: 3.16, 2: 2.84}
ALWAYS = {0: 2.9, 1: 3.1, 2: 2.8}


def forks(write_run: Callable[..., Path], base: str = "a", heal: int = 0, shift: float = 0.0) -> None:
    """Three arms over three orders, `shift` nats more than the numbers above."""
    settings = {"base": base, "fork.heal": heal, "training.steps": 2}
    for arm, losses in (("int4", NEVER), ("int4_int8", ARM), ("int8", ALWAYS)):
        for order, loss in losses.items():
            own = settings | {"fork.order": order}
            found = {0: 4.0, 2: loss + shift} | ({2 + heal: loss / 2} if heal else {})
            header = {"base": {"step": 600, "sha256": f"{base}bcdef0123456789"}}
            write_run(arm=arm, seed=order, steps=2 + heal, settings=own, header=header, val_loss=found)


def test_the_gap_closed_by_order(write_run, comparisons) -> None:
    forks(write_run)
    (comparison,) = comparisons()
    (table,) = fork_tables(comparison)
    assert [cells[0] for cells in table.rows] == ["int4", "int4_int8-gnmr", "int8"]
    assert [cells[4] for cells in table.rows] == ["0, 0, 0", "60, 40, 60", "100, 100, 100"]
    told = row(table, "int4_int8-gnmr")
    assert (told["orders"], told["gap closed"], told["loss 16 bits"]) == ("3", "53 %", "2.9800")
    assert table.title.endswith("base a abcdef01: gap closed after the arm's steps")


def test_the_noise_and_the_smallest_effect(write_run, comparisons) -> None:
    forks(write_run)
    (table,) = fork_tables(comparisons()[0])
    model = fit({"never": NEVER, "arm": ARM, "always": ALWAYS})
    assert model is not None
    sd, freedom = model.sd, model.freedom
    least = smallest_effect(sd, freedom, 3)
    assert freedom == 4 and "0.1000 nats" in table.notes[0]
    assert f"sd {sd:.2g} nats, {1000 * sd:.1f} % of the gap, 4 degrees" in table.notes[1]
    assert f"{least:.2g} nats, {1000 * least:.1f} % of the gap" in table.notes[1]


def test_arms_are_tested_against_never_behind_the_positive_control(write_run, comparisons) -> None:
    """ARM - NEVER is -0.0533; its standard error the residual sd times sqrt(2 / 3)."""
    forks(write_run)
    (table,) = fork_tables(comparisons()[0])
    model = fit({"never": NEVER, "arm": ARM, "always": ALWAYS})
    assert model is not None
    p = [2 * stats.t.sf(gap / (model.sd * math.sqrt(2 / 3)), 4) for gap in (0.16 / 3, 0.1)]
    assert row(table, "int4_int8-gnmr")["p (Holm)"] == p_text(p[0]) and 2 * p[1] < p[0]
    assert row(table, "int4_int8-gnmr")["verdict"] == row(table, "int8")["verdict"] == "better"
    assert f"int8 against int4, a gap of 0.100 nats (+10.5 %): shown (p = {p_text(p[1])})" in table.notes[2]
    assert "Tukey" in table.notes[3]


def test_a_fork_that_diverged_is_no_number_and_is_told(write_run, comparisons) -> None:
    forks(write_run)
    settings = {"base": "a", "fork.heal": 0, "training.steps": 2, "fork.order": 1, "controller.alpha": 9.0}
    header = {"base": {"step": 600, "sha256": "abcdef0123456789"}}
    why = "step 2 had a non-finite loss"
    write_run(arm="int4_int8", seed=1, steps=2, settings=settings, header=header, status="failed", reason=why)
    (table,) = fork_tables(comparisons()[0])
    told = row(table, "int4_int8-gnmr alpha=9.0")
    assert (told["orders"], told["loss 16 bits"], told["verdict"]) == ("0", "-", "too few seeds")
    assert row(table, "int8")["verdict"] == "better", "the others stand in the model as before"


def test_healing_is_a_table_of_its_own(write_run, comparisons) -> None:
    forks(write_run, heal=1)
    low, healed = fork_tables(comparisons()[0])
    assert row(low, "int8")["loss 16 bits"] == "2.9333" and row(healed, "int8")["loss 16 bits"] == "1.4667"
    assert "after healing" in healed.title


@pytest.mark.slow
def test_bases_are_compared_within_themselves(write_run, comparisons) -> None:
    forks(write_run)
    forks(write_run, base="b", shift=0.5)
    one, other = comparisons()
    assert [row(fork_tables(found)[0], "int4_int8-gnmr")["gap closed"] for found in (one, other)] == ["53 %", "53 %"]
    assert set(one.apart()) == {"base"} and "abcdef01" in one.name and "bbcdef01" in other.name
    assert all("base" not in arm.label for arm in one.arms)


def test_without_bounds_or_a_second_order_nothing_is_claimed(write_run, comparisons) -> None:
    settings = {"base": "a", "training.steps": 2}
    for arm, loss in (("int4", 3.0), ("int8", 2.9)):
        write_run(arm=arm, steps=2, settings=settings, val_loss={2: loss})
    (table,) = fork_tables(comparisons()[0])
    assert table.notes[-1] == "No noise can be told: that takes two arms over two orders and a gap."


@pytest.mark.parametrize("base", [None, "a"])
def test_only_forks_have_such_a_table(base, write_run, comparisons) -> None:
    settings = {"base": base} if base else {}
    for arm in ("int4", "int8"):
        write_run(arm=arm, settings=settings)
    titles = [table.title for table in comparison_tables(comparisons()[0])]
    assert any("gap closed after" in title for title in titles) == (base is not None)
