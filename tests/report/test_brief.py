"""A line an arm, and a run beside arms that were recorded elsewhere."""

from __future__ import annotations

from report_reading import row

from gnmr.lab.report.brief import beside, brief
from gnmr.lab.report.runs import load


def test_a_line_an_arm_with_what_it_spent(write_run):
    spent = {"promotion_frac": 0.25, "spent_gemm_frac": 0.125}
    folders = [write_run(arm="int4_int8", seed=seed, val_ppl=20.0 + seed, summary=spent) for seed in (0, 1)]
    folders += [write_run(arm="int4", seed=0, val_ppl=22.0), write_run(arm="int4", seed=1, status="failed", reason="x")]
    (table,) = brief(folders)
    told = row(table, "int4_int8-gnmr")
    assert (told["runs"], told["perplexity"], told["promoted"], told["spent"]) == (
        "2",
        "20.50 ± 0.71",
        "25.0 %",
        "12.5 %",
    )
    assert row(table, "int4")["runs"] == "1 of 2" and row(table, "int4")["perplexity"] == "22.00 ± -"


def test_a_run_stands_beside_arms_of_its_experiment_and_length_alone(write_run, tmp_path):
    own = load(write_run(arm="int4_int8", seed=0, val_ppl=20.0))
    others = {"int8": {}, "bf16": {}, "int4": {"scale": "60m"}, "int8_bf16": {"steps": 9}}
    known = [load(write_run(arm=arm, seed=7, header={"commit": "fedcba987654"}, **how)) for arm, how in others.items()]
    table = beside(own, known)
    assert [cells[0] for cells in table.rows] == ["this run: int4_int8-gnmr", "int8", "bf16"]
    assert table.notes == [
        f"The reference arms are of another commit (fedcba9876; here {own.commit}): near, and no test.",
    ]
    foreign = [load(write_run(arm="int8", seed=8, header={"data": {"fingerprint": "other"}}))]
    assert "They read other data" in beside(own, foreign).notes[1]
    assert beside(own, known[2:]) is None
