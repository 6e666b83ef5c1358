"""The regime map: its cells and their verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_recorded import Recorded

from gnmr.report.plots import draw
from gnmr.report.regimes import flat, regime_map, regime_tables
from gnmr.report.tables import tables

NOISE = (-0.002, 0.0, 0.002)
"""Between the seeds of all arms but int8, so that two arms differ by a constant or by this."""


class Map(Recorded):
    """Runs of a regime map with three seeds and such noise."""

    def arm(self, paths: str, loss: float, seeds: int = 3, **settings: Any) -> None:
        noise = [NOISE[seed % 3] if paths != "int8" else 0.0 for seed in range(seeds)]
        self.add(paths, *(loss + 0.1 * seed + noise[seed] for seed in range(seeds)), **settings)

    def routed(self, loss: float, random: float) -> None:
        self.arm("int4_int8", loss)
        self.arm("int4_int8", random, controller__signal__name="random")


@pytest.fixture
def runs() -> Map:
    return Map("regime_map")


@pytest.mark.parametrize(
    "low, gnmr, random, of_low, of_gnmr, of_random",
    [
        (3.10, 3.005, 3.05, "hurt", "closes the gap", "part of the gap"),
        (3.10, 3.04, 3.08, "hurt", "part of the gap", "part of the gap"),
        (3.10, 3.05, 3.05, "hurt", "no better than random", "part of the gap"),
        (3.10, 3.10, 3.05, "hurt", "not at all", "part of the gap"),
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
    (cell,) = regime_map(runs.comparisons())
    assert (cell["cell"], cell["low"], cell["seeds"]) == ({}, of_low, 3)
    assert {name: arm["verdict"] for name, arm in cell["arms"].items()} == {"gnmr": of_gnmr, "random": of_random}
    assert cell["arms"]["gnmr"]["difference"] == pytest.approx(100 * math.expm1(gnmr - low))
    json.dumps(cell)


def test_a_closed_gap_that_random_closes_too_is_told(runs: Map) -> None:
    runs.arm("int4", 3.1)
    runs.arm("int8", 3.0)
    runs.routed(3.0, 3.0)
    (cell,) = regime_map(runs.comparisons())
    assert (cell["arms"]["gnmr"]["verdict"], cell["arms"]["gnmr"]["vs_random"]) == (
        "closes the gap",
        "no difference shown",
    )
    (table,) = regime_tables(runs.comparisons())
    assert table.rows[0][3] == "closes the gap\nno better than random\n100 % @ 1.0 %"


def test_cells_are_what_varies_besides_arms(runs: Map) -> None:
    """Two rates, of which one has no routed arms; gain and width go together, so one of them names the cell."""
    wide = {"model__hidden_size": 512, "model__intermediate_size": 1024}
    for settings in ({"optim__lr": 1e-3}, {"optim__lr": 2e-3}, {"optim__lr": 1e-3, **wide}):
        runs.arm("int4", 3.1, **settings)
        runs.arm("int8", 3.0, **settings)
        runs.arm("bf16", 2.9, **settings)
    runs.arm("int4_int8", 3.05, optim__lr=1e-3)
    found = regime_map(runs.comparisons())
    assert [(tuple(cell["cell"].values()), cell["low"], list(cell["arms"])) for cell in found] == [
        ((256, 1e-3), "hurt", ["gnmr"]),
        ((256, 2e-3), "hurt", []),
        ((512, 1e-3), "hurt", []),
    ]
    assert list(found[0]["cell"]) == ["model.hidden_size", "optim.lr"]
    assert found[0]["arms"]["gnmr"]["verdict"] == "no random arm"
    assert [cell["arm"] for cell in flat(found)] == ["gnmr"]
    assert flat(found)[0]["optim.lr"] == 1e-3
    (table,) = regime_tables(runs.comparisons())
    assert [cells[0] for cells in table.rows] == [
        "hidden_size=256 lr=0.001",
        "hidden_size=256 lr=0.002",
        "hidden_size=512 lr=0.001",
    ]


def test_pairs_of_formats_are_cells(runs: Map) -> None:
    runs.arm("int4", 3.1)
    runs.arm("int8", 3.0)
    runs.arm("bf16", 2.999)
    runs.arm("int4_int8", 3.05)
    runs.arm("int8_bf16", 2.9995)
    assert [(tuple(cell["cell"].values()), cell["low"]) for cell in regime_map(runs.comparisons())] == [
        (("int4", "int8"), "hurt"),
        (("int8", "bf16"), "fine"),
    ]


def test_diverged_low_path(runs: Map) -> None:
    runs.add("int4", *[None] * 5)
    runs.arm("int8", 3.0, seeds=5)
    runs.arm("int4_int8", 3.001, seeds=5)
    (cell,) = regime_map(runs.comparisons())
    arm = cell["arms"]["gnmr"]
    assert (cell["low"], cell["low_difference"]) == ("failed", None)
    assert (arm["verdict"], arm["gap_closed"], arm["difference"]) == ("closes the gap", None, None)
    assert arm["p"] == pytest.approx(4 / 252)


def test_three_seeds_are_too_few_where_runs_diverged(runs: Map) -> None:
    runs.add("int4", *[None] * 3)
    runs.arm("int8", 3.0)
    runs.arm("int4_int8", 3.0)
    (cell,) = regime_map(runs.comparisons())
    assert (cell["low"], cell["arms"]["gnmr"]["verdict"]) == ("failed", "too few seeds")


def test_two_seeds_are_too_few(runs: Map) -> None:
    for arm, loss in (("int4", 3.1), ("int8", 3.0), ("int4_int8", 3.0)):
        runs.arm(arm, loss, seeds=2)
    (cell,) = regime_map(runs.comparisons())
    assert (cell["low"], cell["arms"]["gnmr"]["verdict"]) == ("too few seeds", "too few seeds")


def test_static_recovery_may_be_without_the_faults(runs: Map) -> None:
    runs.arm("int8", 3.0)
    for kind in ("none", "noise"):
        rate = {"none": 0.0, "noise": 0.5}[kind]
        runs.arm("int4", 3.1 if kind == "noise" else 3.0, stress__kind=kind, stress__rate=rate)
        runs.arm("int4_int8", 3.0, stress__kind=kind, stress__rate=rate)
    found = [(cell["cell"], cell["low"]) for cell in regime_map(runs.comparisons())]
    assert found == [({"stress.kind": "noise"}, "hurt"), ({"stress.kind": "none"}, "fine")]


def test_the_map_stands_for_all_tables_and_plots_of_its_experiment(runs: Map, tmp_path: Path) -> None:
    runs.arm("int4", 3.1)
    runs.arm("int8", 3.0)
    assert [table.title for table in tables(runs.comparisons())] == ["Regime map"]
    assert draw(runs.comparisons(), tmp_path) == []
