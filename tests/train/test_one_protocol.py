"""`gnmr train` and a loop of one's own with `gnmr.attach`: the same model, data and optimizer, the same decisions."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import gnmr
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import train_step
from gnmr.lab.train.loss import loss_of

STEPS, ACCUMULATION = 8, 2
LR = 0.02
SAME = [
    f"training.steps={STEPS}",
    "training.accumulation=2",
    "controller.max_o=2",
    "controller.alpha=1.05",
    "controller.beta=1.02",
]
RANKED = ["controller.routing=ranked"]
HERE = {"max_o": 2, "steps": STEPS}
PAPERS = {"alpha": 1.05, "beta": 1.02}
DELAYED = {"low": "fp8_delayed", "recovery": "bf16"}


def batches(parts, blocks_of) -> list[list[Batch]]:
    return [blocks.split(2) for blocks in blocks_of(parts, STEPS * 2 * ACCUMULATION).split(2 * ACCUMULATION)]


@pytest.mark.parametrize(
    "words, options",
    [
        ([], PAPERS),
        (["controller.signal=recovery_gap", *RANKED], {"signal": "recovery_gap", "routing": "ranked"}),
        (["controller.signal=random", "training.seed=3"], {"signal": "random", "seed": 3}),
        (["controller.signal=gsnr", *RANKED], {"signal": "gsnr", "routing": "ranked"}),
        (
            ["controller.warmup_frac=0.5", "controller.warmup_path=16bit"],
            PAPERS | {"warmup_steps": 4, "warmup_path": "16bit"},
        ),
        ([*RANKED, "controller.t_lock=2"], PAPERS | {"routing": "ranked", "t_lock": 2}),
        (["controller.observe=input_grad", "controller.hold=2"], PAPERS | {"observe": "input_grad", "hold": 2}),
        (
            ["precision.low=fp8_delayed", "precision.recovery=bf16", "precision.unit=block"],
            PAPERS | DELAYED | {"unit": "block"},
        ),
    ],
    ids=["gnmr_delta", "recovery_gap", "random", "gsnr", "warmup", "ranked", "input_grad", "delayed_scales"],
)
def test_the_same_decisions(words, options, assembled, blocks_of):
    parts = assembled(*SAME, *words)
    step = train_step(parts)
    runs = [step(batch, LR) for batch in batches(parts, blocks_of)]
    expected = [result.decision for result in runs]
    assert any(decision.events for decision in expected)

    parts = assembled(*SAME, *words)
    parts.router.detach()
    controller = gnmr.attach(parts.model, **(HERE | options))
    for group in parts.optimizer.param_groups:
        group["lr"] = LR
    for batch, result in zip(batches(parts, blocks_of), runs, strict=True):
        losses = [loss_of(parts.model, block) for block in batch]
        for loss in losses:
            (loss / ACCUMULATION).backward()
            controller.micro_step()
        assert float(sum(loss.detach() for loss in losses) / ACCUMULATION) == pytest.approx(result.loss, rel=1e-5)
        found = controller.step()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        for name in (field.name for field in fields(found)):
            mine, theirs = getattr(found, name), getattr(result.decision, name)
            if name in ("columns", "evidence"):
                assert mine.keys() == theirs.keys()
                assert all(np.array_equal(mine[key], theirs[key], equal_nan=True) for key in mine), name
            else:
                assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, name
