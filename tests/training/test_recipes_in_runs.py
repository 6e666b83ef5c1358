"""Runs under recipes: every one trains, evaluates in 16 bits, and goes on exactly where it was stopped."""

from __future__ import annotations

import pytest
from everything import differences, everything

from gnmr.paths import RECIPES
from gnmr.records.reader import read_jsonl
from gnmr.training.step import TrainStep, evaluate

WIDE = ["model.hidden_size=128", "model.intermediate_size=256"]
DELAYED = ["paths.low=fp8_delayed", "paths.recovery=bf16", "training.accumulation=2"]


@pytest.mark.parametrize("low", RECIPES)
@pytest.mark.parametrize("recovery", ["null", "fp8_hybrid"])
@pytest.mark.filterwarnings("ignore:the recovery path")
def test_a_llama_trains_two_steps(low, recovery, assembled, step_of, blocks_of):
    parts = assembled(*WIDE, f"paths.low={low}", f"paths.recovery={recovery}", "paths.recovers=[fprop,wgrad]")
    step, blocks = step_of(parts), blocks_of(parts, 2)
    plain = evaluate(parts.model, parts.plan, blocks, 2)
    first, second = step([blocks], 1e-3), step([blocks], 1e-3)
    assert not first.skipped and not second.skipped and second.loss < first.loss
    assert abs(first.loss - plain) < 0.05 and (first.loss == pytest.approx(plain, abs=1e-6)) == (low == "bf16")
    assert first.saved_bytes == first.saved_bytes_predicted > 0


def test_a_run_switches_between_recipes(train, tmp_path):
    words = ["paths.low=sim_e2m1", "paths.recovery=fp8_hybrid"]
    routed = train(tmp_path / "all", *words)
    assert any(row["num_active"] for row in read_jsonl(routed / "steps.jsonl"))
    wgrad = train(tmp_path / "wgrad", *words, "paths.recovers=[wgrad]")
    losses = [[row["loss"] for row in read_jsonl(folder / "steps.jsonl")] for folder in (routed, wgrad)]
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


def test_the_oracle_leaves_no_trace_in_delayed_scales(train, tmp_path):
    """It runs both paths on every batch before the step."""
    plain = everything(train(tmp_path / "plain", *DELAYED))
    seen = everything(train(tmp_path / "oracle", *DELAYED, "records.evidence=[true_gap]"))
    assert plain["state"]["plan"]["largest"].count_nonzero() > 0
    assert differences(plain["state"], seen["state"]) == []


def test_delayed_scales_go_on_to_the_last_bit(train, tmp_path, uninterrupted, monkeypatch):
    plain = TrainStep.__call__

    def call(self, *args):
        if self.controller.t == 4:
            raise KeyboardInterrupt
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", call)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", *DELAYED)
    assert differences(uninterrupted(*DELAYED), everything(train(tmp_path / "run", *DELAYED))) == []
