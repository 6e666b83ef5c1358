"""The paper's tables with our runs in them: which rows there are, and where the paper's figures stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_reading import notes
from report_recorded import Recorded

from gnmr.lab.paper.tables import table_1, table_3, table_5, table_6, table_10, table_11

Write = Callable[..., Path]
TABLE_5: dict[str, Any] = {"controller__beta": None, "optim__lr": 2.5e-3}
STAGES = {"controller__alpha_init": 1.5, "controller__alpha": 1.1}
ADAPT: dict[str, Any] = {
    "controller__signal": "static_k",
    "controller__options__k_frac": 0.25,
    "controller__options__calibration_frac": 0.05,
    "controller__warmup_frac": 0.05,
    "controller__warmup_path": "16bit",
    "paths__unit": "block",
    "training__steps": 10_000,
}
"""Blocks, ranked over 500 steps in 16 bits; the rate of 350m is `Recorded`'s."""


def test_the_papers_figures_stand_beside_its_own_scales_only(write_run: Write, comparisons: Callable) -> None:
    for scale in ("cpu", "60m"):
        for arm in ("int4", "int4_int8", "bf16"):
            write_run(arm=arm, scale=scale, val_ppl=35.0, settings={"optim.lr": 2.5e-3})
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
        "second stage of dGNMR": {"controller.beta_init": 2.0},
        "warm-up": {"controller.warmup_frac": 0.1},
        "cap": {"controller.max_o": 28},
        "lock": {"controller.t_lock": 3},
        "outlier channels": {"model.outlier_channels.number": 2},
        "forward": {"precision.site": "forward"},
        "stochastic": {"precision.rounding": "stochastic"},
        "some operators": {"precision.targets": ["down_proj"]},
        "blocks": {"precision.unit": "block"},
        "optimizer": {"optim.name": "scale"},
        "clipping": {"optim.clip_norm": 1.0},
        "rate": {"optim.lr": 0.1},
        "history": {"controller.options.history": "ema"},
    }
    write_run(arm="int4_int8", scale="60m", experiment="own", settings={"optim.lr": 2.5e-3})
    for place, settings in enumerate(cases.values()):
        given = {"optim.lr": 2.5e-3} | settings
        write_run(arm="int4_int8", scale="60m", experiment=f"case{place:02}", settings=given)
    *others, own = comparisons()
    assert [cells[-1] for cells in table_1("own", [own]).rows] == ["30.59"]
    for name, comparison in zip(cases, others, strict=True):
        assert [cells[-1] for cells in table_1("case", [comparison]).rows] == ["-"], name


def test_failed_arms_are_crosses_in_table_1(write_run: Write, comparisons: Callable) -> None:
    write_run(arm="int4", scale="1.3b", status="failed", reason="diverged", settings={"optim.lr": 6e-4})
    assert table_1("stress", comparisons()).rows == [["int4", "x", "x"]]


def test_table_3_has_the_papers_shares_at_its_thresholds(write_run: Write, comparisons: Callable) -> None:
    thresholds = {"controller.alpha": 2.0, "controller.beta": 1.5, "optim.lr": 1e-3}  # the rate of 350m
    shares = {"over_frac": {"gnmr": 0.002, "delta_gnmr": 0.001}}
    write_run(arm="int4_int8", scale="350m", settings=thresholds, summary=shares)
    write_run(arm="int4_int8", scale="130m", settings=thresholds, summary=shares)
    write_run(arm="int4_int8", scale="60m", settings=thresholds | {"controller.trigger": 4.0}, summary=shares)
    found = comparisons()
    assert [cells[1:] for cells in table_3("stress", found).rows] == [
        ["60m", "8.0", "6.0", "0.200 %", "-", "0.100 %", "-"],  # shares of what exceeds trigger times threshold
        ["130m", "2.0", "1.5", "0.200 %", "-", "0.100 %", "-"],
        ["350m", "2.0", "1.5", "0.200 %", "0.141 %", "0.100 %", "0.067 %"],
    ]
    without = table_3("stress", found[:1])
    assert len(without.columns) == 6
    assert "The paper has no shares for these scales and thresholds" in notes(without)


def test_table_5_has_the_stages_along_the_run() -> None:
    """Perplexity at the evaluations nearest to 1.3, 2.1 and 2.6 of 2.6 B tokens: steps 50, 80 and 100 of 100."""
    along = {"step": np.array([20, 50, 80, 100]), "val_ppl": np.array([90.0, 50.0, 40.0, 30.0])}
    tables = {}
    for scale in ("cpu", "130m"):
        runs = Recorded(scale=scale)
        runs.add("int4_int8", 3.0, **TABLE_5)
        runs.add("int4_int8", 3.0, **TABLE_5 | STAGES)
        runs.add("int4_int8", 3.0, **TABLE_5, controller__max_o=2)
        for run in runs.runs:
            run.__dict__["evals"] = along
        tables[scale] = table_5(runs.comparisons()[0])
    assert [cells[1:] for cells in tables["cpu"].rows] == [
        ["1.5", "1.1", "50.00 ± -", "40.00 ± -", "30.00 ± -"],
        ["1.5", "1.5", "50.00 ± -", "40.00 ± -", "30.00 ± -"],
    ]
    assert tables["cpu"].columns[3:] == ["PPL at\n102,400", "PPL at\n165,415", "PPL at\n204,800"]
    assert "none of its rows fits these arms" in notes(tables["cpu"])
    assert [cells[-3:] for cells in tables["130m"].rows if cells[0] == "  the paper's"] == [
        ["26.49", "23.92", "23.54"],
        ["26.56", "23.98", "23.60"],
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"paths__low": "int2"},
        {"paths__recovery": "bf16"},
        {"controller__beta": 2.0},
        {"controller__t_lock": 2},
        {"controller__init_frac": 0.1},
        {"controller__warmup_frac": 0.1},
        {"optim__name": "scale"},
        {"optim__lr": 1e-3},
        {"model__outlier_channels__number": 2},
    ],
)
def test_tables_5_and_6_need_the_papers_settings(changed: dict[str, Any]) -> None:
    runs = Recorded(scale="130m")
    for max_o in (4, 2):
        for alpha in (1.1, 1.5):
            given = TABLE_5 | STAGES | {"controller__alpha": alpha, "controller__max_o": max_o} | changed
            runs.add("int4_int8", 3.0, **given)
    for table in (table_5(runs.comparisons()[0]), table_6(runs.comparisons()[0])):
        assert len(table.rows) == 4 and "none of its rows fits these arms" in notes(table)


def test_table_5_needs_its_cap() -> None:
    runs = Recorded(scale="130m")
    for alpha in (1.1, 1.5):
        runs.add("int4_int8", 3.0, **TABLE_5 | STAGES | {"controller__alpha": alpha, "controller__max_o": 2})
    assert len(table_5(runs.comparisons()[0]).rows) == 2


def test_table_6_has_the_caps() -> None:
    runs = Recorded(scale="130m")
    for max_o in (8, 2):
        runs.add("int4_int8", 3.0, **TABLE_5 | STAGES, controller__max_o=max_o)
    runs.add("int4", 3.0)
    (comparison,) = runs.comparisons()
    table = table_6(comparison)
    assert [cells[1] for cells in table.rows] == ["2", "", "8", ""]
    assert [cells[2:] for cells in table.rows[1::2]] == [["26.56", "23.97", "23.59"], ["26.56", "24.01", "23.63"]]
    assert table_5(comparison).rows == []


def test_table_10_has_the_static_baseline_between_its_neighbours() -> None:
    runs = Recorded(scale="350m")
    for arm in ("int4", "int4_int8", "bf16"):
        runs.add(arm, math.log(35), training__steps=10_000)
    assert table_10("stress", runs.comparisons()).rows == [], "no static baseline, no table"
    for signal in ("static_k", "gsnr"):
        runs.add("int4_int8", math.log(60), **ADAPT | {"controller__signal": signal})
    assert notes(table_10("stress", runs.comparisons())).startswith("The paper's figures"), "no other baseline is there"
    before = {key: value for key, value in ADAPT.items() if key != "controller__warmup_path"}  # as in old records
    runs.add("int4_int8", math.log(50), **before | {"paths__unit": "operator"})
    table = table_10("stress", runs.comparisons())
    assert table.rows == [
        ["int4", "35.00 ± -", "-"],
        ["int4_int8-gnmr", "35.00 ± -", "-"],
        ["int4_int8-static_k unit=operator", "50.00 ± -", "-"],
        ["int4_int8-static_k warmup_path=16bit unit=block", "60.00 ± -", "88.97"],
    ]
    assert "Another one, chosen of other units or on another path: int4_int8-static_k unit=operator" in notes(table)


@pytest.mark.parametrize(
    "changed",
    [
        {"controller__warmup_frac": 0.0},
        {"controller__warmup_path": "recovery"},
        {"paths__unit": "operator"},
        {"controller__options__calibration_frac": 0.1},
        {"controller__options__calibration_steps": 400},
        {"controller__options__k_frac": None, "controller__max_o": 2},
        {"controller__options__k": 3},
        {"controller__options__share": 0.1},
        {"paths__low": "e2m3"},
        {"optim__name": "scale"},
    ],
)
def test_table_10_needs_the_papers_baseline(changed: dict[str, Any]) -> None:
    runs = Recorded(scale="350m")
    runs.add("int4_int8", math.log(60), **ADAPT | changed)
    assert [cells[-1] for cells in table_10("stress", runs.comparisons()).rows] == ["-"]


@pytest.mark.parametrize(
    "changed", [{"controller__alpha": 1.4}, {"controller__max_o": 8}, {"optim__lr": 2.5e-3}, {"controller__t_lock": 2}]
)
def test_table_11_needs_the_papers_settings(changed: dict[str, Any]) -> None:
    runs = Recorded(scale="130m")
    rate = {"optim__lr": 3e-3}
    runs.add("int4_int8", 3.0, **rate | changed)
    runs.add("int4_int8", 3.0, **rate | changed, controller__signal="random")
    assert len(table_11(runs.comparisons()[0]).rows) == 2


def test_table_11_has_the_signals_on_one_actuator() -> None:
    runs = Recorded(scale="130m")
    cost = {"hit_max_o_frac": 0.0125, "steps": 4, "wall_time_s": 2.0}
    rate = {"optim__lr": 3e-3}  # E.5
    gsnr = {"controller__signal": "gsnr", "controller__routing": "ranked"}
    runs.add("int4_int8", math.log(24), promoted=0.004, summary=cost | {"peak_memory_bytes": 3_732_400_000}, **rate)
    runs.add("int4_int8", math.log(25), promoted=0.004, summary=cost, **gsnr, **rate)
    runs.add("int4_int8", math.log(26), controller__signal="random", controller__max_o=3, **rate)
    assert table_11(runs.comparisons()[0]).rows == [
        ["int4_int8-gnmr", "24.000 ± -", "0.0040", "0.0125", "0.5000", "3732"],
        ["  the paper's", "23.685", "0.0040", "0.0043", "0.9972", "3732"],
        ["int4_int8-gsnr-ranked", "25.000 ± -", "0.0040", "0.0125", "0.5000", "-"],
        ["  the paper's", "23.729", "-", "-", "1.2775", "4009"],
    ]


def test_what_is_not_the_papers_setting_has_none_of_its_figures() -> None:
    runs = Recorded(scale="60m")
    runs.add("int4", 3.0, optim__transform__name="zclip")
    runs.add("int8", 3.0, stress__kind="noise")
    runs.add("int4_int8", 3.0, controller__trigger=2.0)
    assert [cells[-1] for cells in table_1("stress", runs.comparisons()).rows] == ["-"] * 3
