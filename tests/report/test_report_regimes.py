"""The regime map: its cells and their verdicts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from report_recorded import Recorded

from gnmr.lab.report.html.sections import VERDICT_COLOURS
from gnmr.lab.report.regimes import (
    AS_RANDOM,
    CLOSES,
    NO_GAP,
    NO_RANDOM,
    NOT_AT_ALL,
    PART,
    RANDOM_HELPS,
    regime_cells,
    regime_maps,
    regime_tables,
    summary,
)
from gnmr.lab.report.tables import tables

NOISE = (-0.002, 0.0, 0.002)
"""Between the seeds of all arms but int8, so that two arms differ by a constant or by this."""


class Map(Recorded):
    """Runs of a regime map with three seeds and such noise."""

    def arm(self, paths: str, loss: float, seeds: int = 3, **settings: Any) -> None:
        noise = [NOISE[seed % 3] if paths != "int8" else 0.0 for seed in range(seeds)]
        self.add(paths, *(loss + 0.1 * seed + noise[seed] for seed in range(seeds)), **settings)

    def routed(self, loss: float, random: float) -> None:
        self.arm("int4_int8", loss)
        self.arm("int4_int8", random, controller__signal="random")


@pytest.fixture
def runs() -> Map:
    return Map()


@pytest.mark.parametrize(
    "low, gnmr, random, of_low, of_gnmr, of_random",
    [
        (3.10, 3.005, 3.05, "hurt", "closes the gap", "better than static low"),
        (3.10, 3.04, 3.08, "hurt", "part of the gap", "better than static low"),
        (3.10, 3.05, 3.05, "hurt", "no better than random", "better than static low"),
        (3.10, 3.10, 3.05, "hurt", "not at all", "better than static low"),
        (3.10, 3.12, 3.10, "hurt", "not at all", "not at all"),
        (3.001, 3.0, 3.0, "fine", "no gap", "no gap"),
    ],
)
def test_verdicts(
    runs: Map,
    low: float,
    gnmr: float,
    random: float,
    of_low: str,
    of_gnmr: str,
    of_random: str,
) -> None:
    runs.arm("int4", low)
    runs.arm("int8", 3.0)
    runs.routed(gnmr, random)
    (cell,) = regime_cells(runs.comparisons())
    assert (cell["cell"], cell["low"], cell["seeds"]) == ({}, of_low, 3)
    assert {name: arm["verdict"] for name, arm in cell["arms"].items()} == {"gnmr": of_gnmr, "random": of_random}
    assert cell["arms"]["gnmr"]["difference"] == pytest.approx(100 * math.expm1(gnmr - low))
    json.dumps(cell)


def test_a_closed_gap_that_random_closes_too_is_told(runs: Map) -> None:
    runs.arm("int4", 3.1)
    runs.arm("int8", 3.0)
    runs.routed(3.0, 3.0)
    (cell,) = regime_cells(runs.comparisons())
    assert (cell["arms"]["gnmr"]["verdict"], cell["arms"]["gnmr"]["vs_random"]) == (
        "closes the gap",
        "no difference shown",
    )
    assert regime_tables(runs.comparisons()) == [], "one cell is no map"
    runs.arm("int4", 3.1, optim__lr=2e-3)
    runs.arm("int8", 3.0, optim__lr=2e-3)
    runs.arm("int4_int8", 3.0, optim__lr=2e-3)
    runs.arm("int4_int8", 3.0, controller__signal="random", optim__lr=2e-3)
    (table,) = regime_tables(runs.comparisons())
    assert table.columns[3:] == ["gnmr", "random"]
    assert table.rows[0][3] == "closes the gap\nno better than random\n100 % @ 1.0 %"


def test_cells_are_what_varies_besides_arms(runs: Map) -> None:
    """Two rates, of which one has no routed arms; gain and width go together, so one of them names the cell."""
    wide = {"model__hidden_size": 512, "model__intermediate_size": 1024}
    for settings in ({"optim__lr": 1e-3}, {"optim__lr": 2e-3}, {"optim__lr": 1e-3, **wide}):
        runs.arm("int4", 3.1, **settings)
        runs.arm("int8", 3.0, **settings)
        runs.arm("bf16", 2.9, **settings)
    for settings in ({"optim__lr": 1e-3}, {"optim__lr": 1e-3, **wide}):
        runs.arm("int4_int8", 3.05, **settings)
    found = regime_cells(runs.comparisons())
    assert [(tuple(cell["cell"].values()), cell["low"], list(cell["arms"])) for cell in found] == [
        ((256, 1e-3), "hurt", ["gnmr"]),
        ((256, 2e-3), "hurt", []),
        ((512, 1e-3), "hurt", ["gnmr"]),
    ]
    assert list(found[0]["cell"]) == ["model.hidden_size", "optim.lr"]
    assert found[0]["arms"]["gnmr"]["verdict"] == "no random arm"
    (table,) = regime_tables(runs.comparisons())
    assert [cells[0] for cells in table.rows] == [
        "hidden_size=256 lr=0.001",
        "hidden_size=256 lr=0.002",
        "hidden_size=512 lr=0.001",
    ]


def test_fine_is_shown_and_not_just_not_refuted(runs: Map) -> None:
    """Seeds that differ by tens of per cent tell nothing, wherever their mean lies."""
    runs.add("int4", 3.4, 2.6, 2.9)
    runs.add("int8", 3.0, 3.0, 3.0)
    (cell,) = regime_cells(runs.comparisons())
    assert (cell["low"], cell["seeds"]) == ("unclear", 3) and cell["low_difference"] < 0


def test_pairs_of_formats_are_cells(runs: Map) -> None:
    runs.arm("int4", 3.1)
    runs.arm("int8", 3.0)
    runs.arm("bf16", 2.999)
    runs.arm("int4_int8", 3.05)
    runs.arm("int8_bf16", 2.9995)
    assert [(tuple(cell["cell"].values()), cell["low"]) for cell in regime_cells(runs.comparisons())] == [
        (("int4", "int8"), "hurt"),
        (("int8", "bf16"), "fine"),
    ]


def test_diverged_low_path(runs: Map) -> None:
    runs.add("int4", *[None] * 5)
    runs.arm("int8", 3.0, seeds=5)
    runs.arm("int4_int8", 3.001, seeds=5)
    (cell,) = regime_cells(runs.comparisons())
    arm = cell["arms"]["gnmr"]
    assert (cell["low"], cell["low_difference"]) == ("failed", None)
    assert (arm["verdict"], arm["gap_closed"], arm["difference"]) == ("closes the gap", None, None)
    assert arm["p"] == pytest.approx(4 / 252)


def test_three_seeds_are_too_few_where_runs_diverged(runs: Map) -> None:
    runs.add("int4", *[None] * 3)
    runs.arm("int8", 3.0)
    runs.arm("int4_int8", 3.0)
    (cell,) = regime_cells(runs.comparisons())
    assert (cell["low"], cell["arms"]["gnmr"]["verdict"]) == ("failed", "too few seeds")


def test_each_verdict_of_an_arm_is_explained(runs: Map) -> None:
    for rate in (1e-3, 2e-3):
        bounds(runs, optim__lr=rate)
    (table,) = regime_tables(runs.comparisons())
    for verdict in (CLOSES, PART, AS_RANDOM, NO_RANDOM, RANDOM_HELPS, NOT_AT_ALL, NO_GAP):
        assert f"{verdict}: " in table.notes[-1]
        assert verdict in VERDICT_COLOURS


def test_two_seeds_are_too_few(runs: Map) -> None:
    for arm, loss in (("int4", 3.1), ("int8", 3.0), ("int4_int8", 3.0)):
        runs.arm(arm, loss, seeds=2)
    (cell,) = regime_cells(runs.comparisons())
    assert (cell["low"], cell["arms"]["gnmr"]["verdict"]) == ("too few seeds", "too few seeds")


def test_static_recovery_may_be_without_the_faults(runs: Map) -> None:
    runs.arm("int8", 3.0)
    for kind in ("none", "noise"):
        rate = {"none": 0.0, "noise": 0.5}[kind]
        runs.arm("int4", 3.1 if kind == "noise" else 3.0, stress__kind=kind, stress__rate=rate)
        runs.arm("int4_int8", 3.0, stress__kind=kind, stress__rate=rate)
    found = [(cell["cell"], cell["low"]) for cell in regime_cells(runs.comparisons())]
    assert found == [({"faults.kind": "noise"}, "hurt"), ({"faults.kind": "none"}, "fine")]


def bounds(runs: Map, low: float = 3.1, high: float = 3.0, **settings: Any) -> None:
    runs.arm("int4", low, **settings)
    runs.arm("int8", high, **settings)


def test_the_map_is_shown_beside_the_other_tables(runs: Map) -> None:
    """Where two cells have both static arms, whatever the experiment is called; a third has no static recovery."""
    bounds(runs)
    assert regime_maps(runs.comparisons()) == {}
    runs.arm("int4", 3.1, optim__lr=2e-3)
    assert regime_maps(runs.comparisons()) == {}
    bounds(runs, optim__lr=3e-3)
    other = Map("another")
    bounds(other)
    titles = [table.title for table in tables([*runs.comparisons(), *other.comparisons()])]
    assert [title for title in titles if "map" in title] == ["Regime map: stress"] and len(titles) > 1
    ((experiment, cells),) = regime_maps(runs.comparisons()).items()
    assert (experiment, [cell["low"] for cell in cells]) == ("stress", ["hurt", "no recovery arm", "hurt"])
    assert summary(cells) == "In 2 of 2 cells the static low path is hurt."


def test_columns_are_arms_that_stand_in_two_cells(runs: Map) -> None:
    for rate in (1e-3, 2e-3):
        bounds(runs, optim__lr=rate)
        runs.arm("int4_int8", 3.05, optim__lr=rate)
    runs.arm("int4_int8", 3.0, optim__lr=2e-3, controller__signal="gap")
    assert [list(cell["arms"]) for cell in regime_cells(runs.comparisons())] == [["gnmr"], ["gnmr"]]
    (table,) = regime_tables(runs.comparisons())
    assert table.columns == ["cell", "seeds", "static low", "gnmr"]


def test_cells_of_other_batches_and_data_are_in_one_map(runs: Map) -> None:
    """Each is judged within its own tokens a step; what tells them apart is named, though a rate goes with it."""
    bounds(runs)
    runs.arm("int4_int8", 3.0)
    more = {"training__batch_size": 32, "training__steps": 25}
    bounds(runs, 2.1, 2.0, **more)
    runs.arm("int4_int8", 2.1, **more)
    cells = regime_cells(runs.comparisons())
    assert [cell["cell"] for cell in cells] == [
        {"training.batch_size": 8, "training.steps": 100},
        {"training.batch_size": 32, "training.steps": 25},
    ]
    assert [cell["arms"]["gnmr"]["verdict"] for cell in cells] == ["closes the gap", "not at all"]
    for run in runs.runs[9:]:
        run.header["data"] = {"fingerprint": "0ther"}
    assert [cell["cell"]["data"] for cell in regime_cells(runs.comparisons())] == ["feedbeef", "0ther"]


def test_a_scale_stands_for_what_it_sets(runs: Map) -> None:
    for scale, wide in (("cpu", 128), ("60m", 512)):
        for site in ("saved", "forward"):
            bounds(runs, scale_name=scale, model__hidden_size=wide, training__steps=wide, paths__site=site)
    cells = regime_cells(runs.comparisons())
    assert [list(cell["cell"].values()) for cell in cells] == [
        ["60m", "forward"],
        ["60m", "saved"],
        ["cpu", "forward"],
        ["cpu", "saved"],
    ]


def test_what_an_optimizer_does_to_the_gradient_makes_an_arm_and_no_cell(runs: Map) -> None:
    for rate in (1e-3, 2e-3):
        for transform in (None, "zclip"):
            settings = {"optim__lr": rate, "optim__transform__name": transform}
            runs.arm("int4", 3.1, **settings)
            runs.arm("int4_int8", 3.05, **settings)
        runs.arm("int8", 3.0, optim__lr=rate)
    cells = regime_cells(runs.comparisons())
    assert [(cell["cell"], list(cell["arms"])) for cell in cells] == [
        ({"optim.lr": 1e-3}, ["gnmr", "gnmr-zclip"]),
        ({"optim.lr": 2e-3}, ["gnmr", "gnmr-zclip"]),
    ]


def test_what_is_only_recorded_makes_neither(runs: Map) -> None:
    for rate in (1e-3, 2e-3):
        for evidence in ([], ["gap_low"]):
            settings = {"optim__lr": rate, "records__evidence": evidence, "training__threads": len(evidence)}
            bounds(runs, **settings)
            runs.arm("int4_int8", 3.05, **settings)
    cells = regime_cells(runs.comparisons())
    assert [(cell["cell"], list(cell["arms"])) for cell in cells] == [
        ({"optim.lr": 1e-3}, ["gnmr"]),
        ({"optim.lr": 2e-3}, ["gnmr"]),
    ]


def test_arms_that_differ_in_hold_are_two(runs: Map) -> None:
    """Told in every cell, though no cell has both; and each is held against the random arm that holds as long."""
    for rate, holds in ((1e-3, (1, 20)), (2e-3, (20,)), (3e-3, (1,))):
        bounds(runs, optim__lr=rate)
        for hold in holds:
            runs.arm("int4_int8", 3.03, optim__lr=rate, controller__hold=hold)
        runs.arm("int4_int8", 3.06, optim__lr=rate, controller__hold=20, controller__signal="random")
    cells = regime_cells(runs.comparisons())
    assert [list(cell["arms"]) for cell in cells] == [
        ["gnmr hold=1", "gnmr hold=20", "random"],
        ["gnmr hold=20", "random"],
        ["gnmr hold=1", "random"],
    ]
    told = {name: arm["vs_random"] for name, arm in cells[0]["arms"].items()}
    assert told == {"gnmr hold=1": None, "gnmr hold=20": "better", "random": None}
    (comparison,) = runs.comparisons()
    assert "int4_int8-gnmr lr=0.001 hold=20" in {arm.label for arm in comparison.arms}


def test_an_arm_of_many_settings_is_called_by_those_that_most_do_not_have(runs: Map) -> None:
    """Six keys differ over these, and each leaves the first by one: no name needs the hash of a config."""
    usual = {"optim__lr": 1e-3, "controller__hold": 1, "controller__max_o": 2, "model__num_layers": 2}
    usual |= {"model__hidden_size": 32, "training__batch_size": 2}
    others = [{"optim__lr": 2e-3}, {"controller__hold": 20}, {"controller__max_o": 1}, {"model__num_layers": 3}]
    for other in ({}, *others, {"model__hidden_size": 64}):
        runs.arm("int4_int8", 3.03, **(usual | other))
    (comparison,) = runs.comparisons()
    labels = {arm.label.removeprefix("int4_int8-gnmr").strip() for arm in comparison.arms}
    assert labels == {"", "lr=0.002", "hold=20", "max_o=1", "num_layers=3", "hidden_size=64"}


def test_records_without_hold_hold_for_a_step(runs: Map) -> None:
    bounds(runs)
    runs.arm("int4_int8", 3.03)
    runs.arm("int4_int8", 3.06, controller__signal="random", controller__hold=1)
    runs.arm("int4_int8", 3.0, controller__signal="random", controller__hold=20)
    (cell,) = regime_cells(runs.comparisons())
    assert cell["arms"]["gnmr"]["vs_random"] == "better"


def test_a_budget_is_told_where_a_cell_has_several(runs: Map) -> None:
    """A trigger that was found for each cell makes one arm of them; two budgets in one cell are two arms."""
    for rate, trigger in ((1e-3, 2.0), (2e-3, 2.5)):
        bounds(runs, optim__lr=rate)
        runs.arm("int4_int8", 3.03, optim__lr=rate, controller__trigger=trigger)
        for share in (0.01, 0.05):
            signal = {"controller__signal": "random", "controller__options__share": share}
            runs.arm("int4_int8", 3.06, optim__lr=rate, promoted=share, **signal)
    assert [list(cell["arms"]) for cell in regime_cells(runs.comparisons())] == [
        ["gnmr", "random share=0.01", "random share=0.05"]
    ] * 2


def test_a_sentence_to_quote(runs: Map) -> None:
    for rate, low, gnmr, random in (
        (1e-3, 3.10, 3.005, 3.05),
        (2e-3, 3.10, 3.04, 3.04),
        (3e-3, 3.10, 3.10, 3.05),
        (4e-3, 3.00, 3.00, 3.00),
    ):
        bounds(runs, low, optim__lr=rate)
        runs.arm("int4_int8", gnmr, optim__lr=rate)
        runs.arm("int4_int8", random, optim__lr=rate, controller__signal="random")
    told = summary(regime_cells(runs.comparisons()))
    assert told == (
        "In 3 of 4 cells the static low path is hurt, in 1 fine. Where it is hurt or failed: gnmr closes at least 90 % "
        "of the gap in 1 of 3 and is better than random at its budget in 1 of 3; random closes at least 90 % of the "
        "gap in none of 3."
    )
    (table,) = regime_tables(runs.comparisons())
    assert table.notes[0] == told
