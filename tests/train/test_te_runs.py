"""Runs through Transformer Engine, against its stub: they switch, resume, record and refuse as others do."""

from __future__ import annotations

import pickle
from io import BytesIO

import pytest
import torch
from everything import differences, everything
from test_recipes_in_runs import stopped

from gnmr.records.reader import read_json, read_jsonl

HYBRID = ["preset=8/16", "precision.backend=te"]
DELAYED = ["precision.low=fp8_delayed", "precision.recovery=bf16", "precision.backend=te", "training.accumulation=2"]


def decoded(folder):
    """Everything that a run leaves, the stub's pickled scales as tensors."""
    found = everything(folder)
    states = torch.load(BytesIO(found["state"]["plan"]["te"]), weights_only=True)
    assert len(states) == 7
    found["state"]["plan"]["te"] = {key: pickle.loads(state.numpy().tobytes()) for key, state in states.items()}
    return found


def test_a_run_switches_and_goes_on_to_the_last_bit(train, stub, tmp_path):
    whole = train(tmp_path / "whole", *DELAYED)
    assert any(row["num_active"] for row in read_jsonl(whole / "steps.jsonl"))
    assert {type(recipe).__name__ for recipe, _, _ in stub.ran} == {"DelayedScaling"}
    stopped(train, tmp_path / "parts", *DELAYED)
    assert differences(decoded(whole), decoded(train(tmp_path / "parts", *DELAYED))) == []
    last = read_jsonl(whole / "steps.jsonl")[-1]
    assert (last["saved_bytes"], last["saturation"]) == (None, {})  # said to be unknown, not to be 0
    assert read_json(whole / "header.json")["paths"] == ["fp8_delayed, te", "bf16"]


def test_the_oracle_leaves_no_trace(train, stub, tmp_path):
    plain = decoded(train(tmp_path / "plain", *DELAYED))
    seen = decoded(train(tmp_path / "oracle", *DELAYED, "records.evidence=[true_gap]"))
    assert differences(plain["state"], seen["state"]) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("controller.signal=recovery_gap", "controller.signal=recovery_gap: gap_low, gap_recovery: of Transformer Engine's casts"),
        (
            "records.evidence=[mse]",
            "records.evidence: mse: of Transformer Engine's casts nothing can be read; use back",
        ),
        (
            "faults.kind=noise",
            "stress: nothing can be broken in Transformer Engine's casts; use backend='scaled_mm' or",
        ),
        ("precision.recovers=[wgrad]", "paths: backend='te': Transformer Engine does not run the recipe bf16 in wgrad"),
        (
            "precision.low=sim_e3m2",
            "paths: backend='te': Transformer Engine does not run the recipe sim_e3m2, but fp8_hyb",
        ),
        (
            "precision.low=fp8_delayed training.activation_checkpointing=true",
            "training.activation_checkpointing=true: rec",
        ),
    ],
)
@pytest.mark.slow
def test_what_it_cannot_do_is_one_line(words, line, gnmr, stub, tiny_words, tmp_path):
    assert gnmr("train", *tiny_words, *HYBRID, *words.split(" ")).mistake.startswith(line)
    assert not (tmp_path / "runs").exists()
