from __future__ import annotations

from pathlib import Path

import pytest
from made_rows import eval_row, step_row

from gnmr.records.reader import read_units
from gnmr.records.schema import SUMMARY_FIELDS
from gnmr.records.summary import summarize
from gnmr.records.writer import RunWriter


def test_summary_by_hand(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, None)
    active, gnmr_over, delta_over, saved = (0, 1, 2, 3), (0, 2, 4, 1), (1, 1, 0, 0), (100, 200, 300, 500)
    for i in range(4):
        writer.step(
            step_row(
                i + 1,
                num_active=active[i],
                over={"gnmr": gnmr_over[i], "delta_gnmr": delta_over[i]},
                saved_bytes=saved[i],
                saturation={"input": [i, 0], "weight": [0, 1]} if i else {},
                nonfinite_total=i // 2,
                step_time_s=(0.25, 4.0, 0.5, 0.25)[i],
            )
        )
    writer.eval(eval_row(2))
    writer.eval(eval_row(4))
    writer.close()
    assert summarize(tmp_path, num_recoverable=5, max_o=2, status="interrupted", reason="Ctrl-C") == {
        "status": "interrupted",
        "reason": "Ctrl-C",
        "steps": 4,
        "tokens": 8192,
        "final_val_loss": 2.25,
        "final_val_ppl": 8.25,
        "promotion_frac": 6 / 20,
        "hit_max_o_frac": 2 / 4,
        "numbers_sent_total": None,
        "numbers_sent_frac": None,
        "peak_memory_bytes": None,
        "over_frac": {"gnmr": 7 / 20, "delta_gnmr": 2 / 20},
        "saved_bytes_mean": 275.0,
        "spent_gemm_frac": 0.25,
        "spent_extra_bytes": 512.0,
        "spent_extra_time": 0.5,
        "saturation_total": {"input": [6, 0], "weight": [0, 3]},
        "nonfinite_total": 1,
        "wall_time_s": 5.0,
        "step_time_median_s": 0.375,
        "tokens_per_s": 2048 / 0.375,
    }


def test_nothing_trained_gives_null_shares(tmp_path: Path) -> None:
    RunWriter(tmp_path, None).close()
    summary = summarize(tmp_path, 28, 4, "failed", "at once")
    assert list(summary) == list(SUMMARY_FIELDS)
    assert summary["steps"] == summary["tokens"] == summary["nonfinite_total"] == 0
    counted = {"status", "reason", "steps", "tokens", "nonfinite_total", "wall_time_s"}
    mappings = {"over_frac", "saturation_total"}
    assert all(summary[key] == {} for key in mappings)
    assert all(summary[key] is None for key in summary.keys() - counted - mappings)


@pytest.mark.parametrize("units", [0, 28])
def test_a_run_without_units_has_no_share_of_unit_steps(tmp_path: Path, units: int) -> None:
    writer = RunWriter(tmp_path, None)
    writer.step(step_row(1, num_active=0, over={}))
    summary = writer.finish("done", None, units, 4)
    assert summary["promotion_frac"] == (None if units == 0 else 0.0)
    assert not list(tmp_path.glob("units.*")) and read_units(tmp_path).num_rows == 0
