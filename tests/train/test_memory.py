"""What cannot fit is refused by arithmetic; what may fit never is."""

from __future__ import annotations

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab import models
from gnmr.lab.config import ModelConfig
from gnmr.lab.config.model import ExpertsConfig
from gnmr.lab.train import memory
from gnmr.lab.train.memory import parameters, refuse_run

CPU = torch.device("cpu")
MOE = ["model.name=moe", "model.experts.number=3"]
TOO_LARGE = {
    "training.batch_size=9999999999999": "training.batch_size=9999999999999, training.seq_len=16: ",
    "training.seq_len=9999999999": "training.seq_len=9999999999",
    "training.accumulation=9999999999999": "training.accumulation=9999999999999: ",
    "model.hidden_size=100000000": "model.hidden_size=100000000, ",
    "model.intermediate_size=99999999999999": "model.intermediate_size=99999999999999, ",
    "model.num_layers=40000 model.hidden_size=1000000": "model.hidden_size=1000000, ",
}


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(num_layers=3),
        ModelConfig(tied_head=True),
        ModelConfig(num_kv_heads=2),
        ModelConfig(name="gpt", num_layers=3),
        ModelConfig(name="moe", experts=ExpertsConfig(number=3)),
    ],
)
def test_parameters_are_counted(model):
    with torch.device("meta"):
        built = models.build(model, 300, 17)
    assert parameters(model, 300, 17) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("words", TOO_LARGE)
def test_refused_before_anything_is_built(words, train, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", None)
    with pytest.raises(UserError, match="cannot fit into memory: the run needs at least") as caught:
        train(tmp_path / "run", *words.split())
    assert TOO_LARGE[words].removesuffix(": ").split("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_to_the_byte(tiny, monkeypatch):
    config = tiny()
    total = sum(size for size, *_ in memory.needs_of(config, 300))
    monkeypatch.setattr(memory, "machine_memory", lambda: total)
    refuse_run(config, CPU, 300)
    monkeypatch.setattr(memory, "machine_memory", lambda: total - 1)
    with pytest.raises(UserError, match="cannot fit into memory"):
        refuse_run(config, CPU, 300)
