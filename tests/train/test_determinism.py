"""What decides the order of the data, and what does not; equal bits of a seed: test_kill_and_resume.py."""

from __future__ import annotations

import pytest
from everything import same_bits

from gnmr.lab.train.step import TrainStep


@pytest.fixture
def batches(monkeypatch) -> list:
    """The micro-batches of every step taken in this test, in order."""
    seen = []
    plain = TrainStep.__call__

    def call(self, micro_batches, lr):
        seen.extend(block for batch in micro_batches for block in batch.clone())
        return plain(self, micro_batches, lr)

    monkeypatch.setattr(TrainStep, "__call__", call)
    return seen


@pytest.mark.slow
def test_the_order_does_not_depend_on_paths_or_controller(train, tmp_path, batches):
    arms = {
        "gnmr": [],
        "static": ["precision.low=int2", "precision.recovery=null"],
        "off": ["precision.low=bf16", "precision.recovery=null"],
        "other": ["controller.max_o=7", "controller.alpha=9", "precision.rounding=stochastic", "optim.lr=1e-4"],
        "gpt": ["model.name=gpt", "model.num_layers=2"],
        "accumulated": ["training.batch_size=1", "training.accumulation=2"],
    }
    seen = {}
    for name, words in arms.items():
        batches.clear()
        train(tmp_path / name, "training.checkpoint_every=100", *words)
        seen[name] = list(batches)
    for name in arms:
        assert len(seen[name]) == 16
        assert all(same_bits(a, b) for a, b in zip(seen["gnmr"], seen[name], strict=True)), name
