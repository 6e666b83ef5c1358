"""A warm-up in 16 bits, and the static baseline of appendix E.4 that needs one (the arm adapt of table 10)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everything import losses

from gnmr.control import Controller
from gnmr.lab.train.build import Parts
from gnmr.lab.train.step import TrainStep
from gnmr.records.reader import read_json, read_jsonl

WARM = ["controller.warmup_frac=0.4", "controller.warmup_path=16bit"]
"""Three steps of eight."""
STATIC = ["controller.signal=static_k", "controller.routing=ranked", "controller.max_o=2147483647"]
STATIC += ["controller.options.calibration_frac=0.4", "controller.options.k_frac=0.25"]
BLOCKS = ["model.num_layers=4", "precision.unit=block", *WARM, *STATIC]
SIXTEEN = ["precision.low=bf16", "precision.recovery=null"]
LOW = ["controller.signal=always_low"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision.low=sim_e2m1", "precision.recovery=fp8_hybrid"],
        ["training.dtype=bfloat16", "training.activation_checkpointing=true", "precision.site=forward"],
        ["precision.site=forward", "faults.kind=noise", "faults.windows=[[1,8]]"],  # of which 16 bits know nothing
    ],
    ids=["saved", "recipes", "checkpointing", "faults"],
)
@pytest.mark.slow
def test_it_is_the_16_bit_run_until_it_ends_and_the_low_path_from_there(words, train, tmp_path) -> None:
    warm = train(tmp_path / "warm", *LOW, *WARM, *words)
    undisturbed = [word for word in words if "faults" not in word and "site" not in word]
    sixteen = train(tmp_path / "sixteen", *undisturbed, *SIXTEEN)
    on_recovery = train(tmp_path / "recovery", *LOW, WARM[0], *words)
    assert losses(warm)[:3] == losses(sixteen)[:3], "to the last bit"
    assert losses(warm)[1:3] != losses(on_recovery)[1:3]
    assert losses(warm)[4:] != losses(sixteen)[4:]
    ours, theirs = (read_jsonl(folder / "steps.jsonl") for folder in (warm, sixteen))
    assert [row["num_active"] for row in ours] == [len(read_json(warm / "header.json")["units"])] * 3 + [0] * 5
    if "recipes" not in str(words) and "checkpointing" not in str(words):
        assert [row["saved_bytes"] for row in ours[:3]] == [row["saved_bytes"] for row in theirs[:3]]
    assert [row["saved_bytes_predicted"] for row in ours] == [row["saved_bytes"] for row in ours]


def paths_of(parts: Parts) -> dict[str, set[str]]:
    """By unit the names of its operators' paths in force."""
    return {group.name: {operator.path.name for operator in group.operators} for group in parts.converted.units}


NORMS = np.array(
    # GNMR of step t is norm / mean of the norms before; 1 in step 1
    [
        [1.0, 4.0, 1.0, 2.0],
        [2.0, 4.0, 1.0, 2.0],  # 2, 1, 1, 1
        [1.5, 8.0, 4.0, 2.0],  # 1, 2, 4, 1: means over the three 1.333, 1.333, 2, 1
        [90.0, 90.0, 0.1, 90.0],  # after the choice nothing counts
        [0.1, 0.1, 0.1, 900.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ]
)


def test_the_quarter_of_the_blocks_with_the_highest_mean_gnmr_stays_for_good(assembled) -> None:
    parts = assembled(*BLOCKS)
    controller: Controller = parts.router.controller
    assert controller.names == [f"layers.{i}" for i in range(4)] and controller.spec.warmup_steps == 3
    for step, norms in enumerate(NORMS, start=1):
        parts.converted.begin_step(step)
        in_force = paths_of(parts)
        if step <= 3:
            assert set(map(frozenset, in_force.values())) == {frozenset({"bf16"})}
        else:
            assert in_force == {"layers.2": {"int8"}} | {f"layers.{i}": {"int4"} for i in (0, 1, 3)}
        evidence = {"norm": torch.tensor(norms, dtype=torch.float64), "observed": torch.ones(4, dtype=torch.bool)}
        decision = controller.apply(controller.observe(evidence).to_host())
        assert set(decision.by_risk(decision.active)) == (set(controller.names) if step < 3 else {"layers.2"})
        if step == 3:
            assert decision.columns["mean_gnmr"] == pytest.approx([4 / 3, 4 / 3, 2, 1])
            released = {event.unit for event in decision.events if event.event == "release"}
            assert released == {"layers.0", "layers.1", "layers.3"}
        else:
            assert not decision.events or step == 1  # whose events put all of them there


def test_evaluation_and_rehearsals_are_what_they_were(assembled, blocks_of) -> None:
    parts = assembled(*WARM, "precision.site=forward")
    step = TrainStep(parts.model, parts.router, parts.optimizer)
    step([blocks_of(parts, 2)], 0.0)
    assert paths_of(parts)["layers.0.mlp.up_proj"] == {"bf16"}
    with parts.converted.no_side_effects():
        assert paths_of(parts)["layers.0.mlp.up_proj"] == {"int8"}
    assert paths_of(parts)["layers.0.mlp.up_proj"] == {"bf16"}
