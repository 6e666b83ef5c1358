from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_rows import eval_row, step_row

from gnmr.records.reader import read_units
from gnmr.records.schema import SUMMARY_FIELDS
from gnmr.records.summary import SpikeScore, summarize
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
        "final_val_bits_per_byte": 1.25,
        "spike_score": None,
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
        "mfu": 0.375,
    }


def test_spike_score_by_hand() -> None:
    # The losses alternate between 2 and 4, so their mean is 3 and their standard deviation 1.
    losses = [2.0 if i % 2 else 4.0 for i in range(60)]
    score = SpikeScore()
    for loss in losses:
        score.add(loss)
    assert score.share() == 0.0
    score.add(math.nan)
    score.add(9.9)
    assert score.share() == 0.0, "6.9 standard deviations; NaN is left out"
    score = SpikeScore()
    for loss in [*losses, 10.0]:
        score.add(loss)
    assert score.share() == 1 / 11, "the first 50 losses are compared with too few"


def test_spike_score_reads_a_window_of_a_thousand(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    losses = [*draw.normal(1000.0, 5.0, 1500), *draw.normal(3.0, 0.1, 2500)]
    losses[3000] = losses[3500] = 9.0
    score, spikes = SpikeScore(), 0
    for i, loss in enumerate(losses):
        score.add(loss)
        before = np.array(losses[max(0, i - 1000) : i])
        spikes += i >= 50 and abs(loss - before.mean()) >= 7 * before.std()
    assert spikes >= 3 and score.share() == spikes / (len(losses) - 50)


def test_a_huge_loss_leaves_no_trace_in_the_spike_score() -> None:
    losses = [*np.random.default_rng(0).normal(3.0, 0.001, 2500)]
    losses[100] = 1e9
    score = SpikeScore()
    for loss in losses:
        score.add(loss)
    assert score.share() == 1 / 2450


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
