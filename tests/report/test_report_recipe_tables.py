"""The paper's tables 2, 4, 9, 13 and 15 with our runs in them, and the routing of experts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_reading import notes, row
from report_recorded import Recorded

from gnmr.lab.paper import published
from gnmr.lab.paper.tables import loss_at, paper_tables, table_2, table_4, table_7, table_9, table_13, table_15
from gnmr.lab.report.casts import casts, watched
from gnmr.lab.report.comparisons import Comparison
from gnmr.lab.report.routing import routing
from gnmr.lab.report.runs import Columns, Run

Write = Callable[..., Path]
SIX_EIGHT = {"controller__alpha_init": 1.5, "controller__alpha": 1.1, "controller__beta": 1.5}


def steps(losses: Any, times: Any = 0.5) -> Columns:
    values = np.asarray(losses, float)
    return {"step": np.arange(1.0, len(values) + 1), "loss": values, "step_time_s": np.full(len(values), times)}


def theirs(table: Any) -> list[list[str]]:
    return [cells for cells in table.rows if cells[0].startswith("  the paper's")]


def recipes(scale: str = "cpu") -> Recorded:
    """Table 2's four arms."""
    runs = Recorded("deepseek_recipe", scale)
    runs.add("sim_e3m2_fp8_hybrid", math.log(41), **SIX_EIGHT)
    runs.add("fp8_hybrid", math.log(42))
    runs.add("fp8_hybrid_bf16", math.log(41.5), **SIX_EIGHT | {"controller__beta": None})
    runs.add("bf16", math.log(40))
    return runs


def of(runs: Recorded) -> Comparison:
    (comparison,) = runs.comparisons()
    return comparison


def test_each_setting_has_its_own_tables() -> None:
    titles = [table.title for table in paper_tables([of(recipes())])]
    assert [title.partition("(")[2] for title in titles] == ["the paper's table 2)", "the paper's table 9)"]
    unnamed = Recorded("custom")
    unnamed.add("sim_e3m2_fp8_hybrid", 3.0)
    assert "table 2" in paper_tables([of(unnamed)])[0].title, "by its recipes"
    moe = Recorded("custom")
    moe.add("bf16", 3.0, model__name="moe")
    assert ["table 13" in table.title for table in paper_tables([of(moe)])] == [True]
    stress = Recorded()
    stress.add("bf16", 3.0)
    assert ["table 1)" in table.title for table in paper_tables([of(stress)])] == [True]


def test_table_2_has_the_perplexity_along_the_run() -> None:
    """Evaluations at 10, 50 and 100 of 100 steps are near three of the nine marks."""
    for scale in ("cpu", "deepseek_1.3b"):
        runs = recipes(scale)
        for run in runs.runs:
            run.__dict__["evals"] = {"step": np.array([10, 50, 100]), "val_ppl": np.array([90.0, 50.0, 30.0])}
        table = table_2(of(runs))
        ours = [cells for cells in table.rows if cells not in theirs(table)]
        order = ["sim_e3m2_fp8_hybrid-gnmr", "fp8_hybrid", "fp8_hybrid_bf16-gnmr", "bf16"]
        assert [cells[0] for cells in ours] == order
        assert ours[0][1:] == ["90.00 ± -", "-", "-", "-", "50.00 ± -", "-", "-", "-", "30.00 ± -"]
        assert table.columns[1:3] == ["PPL at\n20,324", "PPL at\n40,647"]
        found = theirs(table)
        assert [(cells[1], cells[-1]) for cells in found] == [
            ("28.52", "15.20"), ("29.54", "15.18"), ("29.50", "15.10"), ("29.10", "15.06"),
        ]  # fmt: skip
        assert {cells[0] for cells in found} == {"  the paper's" + (", 1.3b" if scale == "cpu" else "")}
        assert ("another model and other data" in notes(table)) == (scale == "cpu")


@pytest.mark.parametrize(
    "changed",
    [
        {"controller__alpha": 1.2},
        {"controller__beta": None},
        {"controller__trigger": 2.0},
        {"controller__init_frac": 0.1},
        {"paths__recovers": ["fprop"]},
        {"paths__pins__down_proj": ["fprop"]},
        {"stress__kind": "noise"},
        {"optim__name": "scale"},
        {"model__outlier_channels__number": 2},
        {"paths__low": "sim_e2m3"},
    ],
)
def test_the_papers_recipes_need_the_papers_settings(changed: dict[str, Any]) -> None:
    runs = Recorded("deepseek_recipe", "1.3b")
    runs.add("sim_e3m2_fp8_hybrid", 3.0, **SIX_EIGHT | changed)
    assert len(table_2(of(runs)).rows) == 1
    small = Recorded("deepseek_recipe", "recipe_cpu")
    small.add("sim_e3m2_fp8_hybrid", 3.0, **SIX_EIGHT | changed)
    outliers = "model__outlier_channels__number" in changed  # the stress that size is to others
    assert len(table_2(of(small)).rows) == 1 + outliers
    assert table_9("deepseek_recipe", runs.comparisons()).columns[-1] == "final PPL"


def test_table_4_has_the_time_of_a_step() -> None:
    runs = recipes("1.3b")
    runs.add("int8", 3.0)
    for place, run in enumerate(runs.runs):
        run.__dict__["steps"] = steps(np.ones(5), [9.0, 0.25, 0.25, 0.25, 0.5]) if place < 4 else steps([])
        run.header["machine"] = {"device": "cpu", "cpu": "Test CPU", "cores": 2, "threads": 1 + (place > 0)}
        run.header["paths"] = (
            ["llm_int8, int_mm", "bf16"] if place else ["sim_e3m2, simulated", "fp8_hybrid, scaled_mm"]
        )
    table = table_4(of(runs))
    assert table.rows[0] == ["sim_e3m2_fp8_hybrid-gnmr", "0.250 ± -", "8192 ± -"]
    assert table.rows[1:3] == [["fp8_hybrid", "0.250 ± -", "8192 ± -"], ["  the paper's", "1.266", "103532"]]
    assert [cells[1] for cells in theirs(table)] == ["1.266", "1.264", "1.294"]
    told = notes(table)
    assert "1 of 4 runs had a part of their machine's cores" in told
    assert "Simulated: sim_e3m2, which takes more" in told and "different machines" not in told
    del runs.runs[1].header["paths"]  # a run from before there were backends, of fp8_hybrid
    assert "Simulated: fp8_hybrid, sim_e3m2, which takes more" in notes(table_4(of(runs)))


def test_table_4_takes_the_summarys_times_where_the_rows_are_gone() -> None:
    """Those of an older run, which has none, make no row; rows come before the summary."""
    runs = recipes()
    told = {"step_time_median_s": 0.4, "tokens_per_s": 5120.0}
    for place, run in enumerate(runs.runs):
        run.__dict__["steps"] = steps(np.ones(3), 0.25) if place == 1 else steps([])
        run.__dict__["summary"] |= told if place < 2 else {"step_time_median_s": 0.4} if place == 2 else {}
    table = table_4(of(runs))
    assert table.rows == [
        ["sim_e3m2_fp8_hybrid-gnmr", "0.400 ± -", "5120 ± -"],
        ["fp8_hybrid", "0.250 ± -", "8192 ± -"],
        ["  the paper's, 1.3b", "1.266", "103532"],
    ]
    assert "on its own machines: another model and other data" in notes(table)  # steps have nothing in common


def test_other_settings_have_their_speed_without_the_papers() -> None:
    runs = Recorded("moe_stress", "3.7b")
    runs.add("fp8_hybrid", 3.0, paths__low="fp8_hybrid", paths__recovery=None)
    runs.runs[0].__dict__["steps"] = steps(np.ones(3), 0.25)
    (table,) = [table for table in paper_tables([of(runs)]) if "speed" in table.title]
    assert [cells[1] for cells in table.rows] == ["0.250 ± -"]
    assert "table 4" not in table.title and "paper" not in notes(table)


def test_table_9_goes_by_size() -> None:
    large, small = recipes("1.3b"), recipes("130m")
    for runs, parameters in ((large, 1.3e9), (small, 1.3e8)):
        for run in runs.runs:
            run.header["parameters"] = parameters
    small.runs += large.runs
    table = table_9("deepseek_recipe", small.comparisons())
    assert [cells[1:] for cells in table.rows] == [
        ["130m", "130.0M", "204,800", "41.00 ± -", "24.62"],
        ["1.3b", "1.3B", "204,800", "41.00 ± -", "15.20"],
    ]
    ours = table_9("deepseek_recipe", recipes().comparisons())
    assert ours.rows == [["sim_e3m2_fp8_hybrid-gnmr", "cpu", "-", "204,800", "41.00 ± -"]]
    assert "The paper's sizes are 130m, 350m, 1.3b, 3b" in notes(ours)


def run_of(losses: Any, planned: int) -> Run:
    runs = Recorded()
    runs.add("bf16", 3.0, training__steps=planned)
    runs.runs[0].__dict__["steps"] = steps(losses)
    return runs.runs[0]


def test_the_training_loss_at_a_step_is_a_mean() -> None:
    """Of 1,000 steps those within 5 of the mark count; the first step alone at 0; not finite ones never."""
    losses = np.arange(1.0, 1001.0)
    run = run_of(losses, 1000)
    assert [loss_at(run, share) for share in (0, 0.1, 1)] == [1.0, 100.0, 997.5]
    losses[94:100] = np.nan
    assert loss_at(run_of(losses, 1000), 0.1) == 103.0
    assert loss_at(run_of(losses[:500], 1000), 0.6) is None
    assert loss_at(run_of([3.0, 2.0], 2), 1) == 2.0


def test_table_13_crosses_out_what_diverged() -> None:
    """One of two seeds of the 8-bit arm ends at step 1,000 of 2,900, the 16-bit arm's only one at once."""
    runs = Recorded("moe_stress", "moe_3.7b")
    moe = {"training__steps": 2900, "model__name": "moe"}
    runs.add("fp8_hybrid", None, 3.0, **moe)
    runs.add("fp8_hybrid_bf16", 3.0, controller__alpha=0.9, controller__warmup_frac=0.05, **moe)
    runs.add("bf16", None, **moe)
    for run, length in zip(runs.runs, (1000, 2900, 2900, 0), strict=True):
        run.__dict__["steps"] = steps(np.full(length, 2.0 + run.seed))
    table = table_13(of(runs))
    low, routed, full = (row(table, name) for name in ("fp8_hybrid", "fp8_hybrid_bf16-gnmr", "bf16"))
    assert low["step 1,000"] == "2.500 ± 0.707"
    assert low["step 1,200"] == low["step 2,900"] == "3.000 ± -, 1 x"
    assert routed["step 2,900"] == "2.000 ± -"
    assert full["step 100"] == "x"
    assert [cells[-2:] for cells in theirs(table)] == [["0.158", "x"], ["0.159", "0.154"], ["0.156", "0.152"]]
    assert "x: diverged before" in notes(table)


def test_table_15_goes_by_tokens() -> None:
    for scale, whose in (("pangu_cpu", "  the paper's, 1b"), ("pangu_1b", "  the paper's")):
        runs = Recorded("pangu_4bit", scale)
        runs.add("sim_int4", 3.0)
        runs.add("sim_int4_sim_int8", 3.0, controller__alpha=0.4)
        runs.add("bf16", 3.0)
        for run in runs.runs:
            run.__dict__["steps"] = steps(np.linspace(12, 3, 100))
        table = table_15(of(runs))
        assert [cells[0] for cells in theirs(table)] == [whose] * 3
        assert table.columns[1:3] == ["at\n0", "at\n20,480"]
        assert row(table, "bf16")["at 0"] == "12.000 ± -"
    assert theirs(table)[1][-1] == "3.076"


def test_published_rows_have_a_figure_for_each_column() -> None:
    assert {len(row) for row in published.TABLE_2.values()} == {len(published.TOKENS_2)}
    assert {len(row) for row in published.TABLE_13.values()} == {len(published.STEPS_13)}
    assert {len(row) for row in published.TABLE_15.values()} == {len(published.TOKENS_15)}


def test_routing_is_that_of_the_most_uneven_layer(
    write_run: Write, comparisons: Callable[[], list[Comparison]]
) -> None:
    experts = {"model.name": "moe", "model.experts.number": 4, "model.experts.top_k": 2}
    folder = write_run(arm="bf16", settings=experts)
    told = [
        {"layers.0.mlp.max_share": 0.4, "layers.0.mlp.min_share": 0.1, "layers.0.mlp.entropy": math.log(4) / 2},
        {"layers.0.mlp.max_share": 0.3, "layers.1.mlp.max_share": 0.5, "layers.0.mlp.min_share": 0.2,
         "layers.1.mlp.min_share": 0.0, "layers.0.mlp.entropy": math.log(4), "layers.1.mlp.entropy": math.log(4) / 4},
    ]  # fmt: skip
    told[0] |= {key.replace("layers.0", "layers.1"): value for key, value in told[0].items()}
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()][:2]
    lines = [json.dumps(made | {"statistics": one}) + "\n" for made, one in zip(rows, told, strict=True)]
    (folder / "steps.jsonl").write_text("".join(lines))
    write_run(arm="int8")
    (comparison,) = comparisons()
    table = routing(comparison)
    assert table.rows == [["bf16", "0.450", "0.500", "0.050", "0.000", "0.375", "0.250"]]
    assert "Even is 0.250" in notes(table)


def test_casts_and_watched_modules_are_means_over_the_seeds() -> None:
    recorded = Recorded("deepseek_recipe")
    seen = [
        {
            "steps": 10,
            "saturation_total": {"input": [20 * seed, 0], "grad_output": [0, 5]},
            "monitored": {"norm": {"mean": 0.5 * seed, "largest_gnmr": 2.0}},
        }
        for seed in (1, 2)
    ]
    recorded.add("fp8_hybrid_bf16", 3.0, 3.1)
    recorded.add("sim_e3m2_fp8_hybrid", 3.0, 3.1)
    for run, told in zip(recorded.runs[:2], seen, strict=True):
        run.__dict__["summary"] |= told
    (comparison,) = recorded.comparisons()
    assert [row[1:] for row in casts(comparison).rows] == [["3", "0", "-", "-", "0", "0.5", "-", "-"]]
    assert [row[1:] for row in watched(comparison).rows] == [["0.7500", "2.00"]]


def test_table_7_has_the_four_scores_and_the_papers_beside_its_model() -> None:
    def scores(gsm8k: float, perplexity: float) -> dict[str, Any]:
        tasks = {
            "gsm8k": {"metrics": {"exact_match,strict-match": {"value": gsm8k}}, "items": 5},
            "wikitext2": {"metrics": {"token_perplexity": {"value": perplexity}}, "items": 1},
        }
        return {"step": 10, "path": "16bit", "tasks": tasks}

    tables = {}
    for scale in ("finetune_cpu", "finetune_13b"):
        recorded = Recorded("finetune", scale)
        recorded.add("bf16", 2.0, 2.1)
        recorded.add("llm_int8", 2.0, 2.1)
        for run, (exact, perplexity) in zip(recorded.runs, [(0.1, 5.0), (0.2, 7.0), (0.0, 6.0)], strict=False):
            run.__dict__["scores"] = scores(exact, perplexity)
        recorded.runs[3].__dict__["scores"] = {}
        (comparison,) = recorded.comparisons()
        tables[scale] = table_7(comparison)
    ours = {cells[0]: cells[1:] for cells in tables["finetune_cpu"].rows}
    assert (ours["bf16"][1], ours["bf16"][4]) == ("15.00 ± 7.07", "6.0000 ± 1.4142")
    assert (ours["llm_int8"][1], ours["llm_int8"][4]) == ("0.00 ± -", "6.0000 ± -")
    assert ours["bf16"][2] == "-" and "items: gsm8k 5, wikitext2 1" in notes(tables["finetune_cpu"])
    theirs = ["  the paper's", "", "15.09", "29.92", "64.62", "5.4503"]
    large = [cells[:6] for cells in tables["finetune_13b"].rows]
    assert large[[cells[0] for cells in large].index("bf16") + 1] == theirs
