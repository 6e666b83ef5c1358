"""A line an arm."""

from __future__ import annotations

from report_reading import row

from gnmr.lab.report.brief import brief


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
