"""What cannot fit is refused by arithmetic; what may fit never is."""

from __future__ import annotations

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab import models
from gnmr.lab.config import ModelConfig
from gnmr.lab.config.model import ExpertsConfig
from gnmr.lab.train import memory_bound
from gnmr.lab.train.memory_bound import linears, parameters, refuse_run
from gnmr.lab.train.memory_plan import plan_run

CPU = torch.device("cpu")
MOE = ["model.name=moe", "model.experts.number=3"]
TOO_LARGE = {
    "training.batch_size=9999999999999": "training.batch_size=9999999999999, training.seq_len=16: ",
    "training.seq_len=9999999999": "training.seq_len=9999999999",
    "training.accumulation=9999999999999": "training.accumulation=9999999999999: ",
    "model.hidden_size=100000000": "model.hidden_size=100000000, ",
    "model.intermediate_size=99999999999999": "model.intermediate_size=99999999999999, ",
    "model.num_layers=1000000000": "model.num_layers=1000000000: ",
    "model.name=moe model.experts.number=1000000000": "model.experts.number=1000000000",
    "faults.kind=noise faults.rate=1000 training.steps=1000000000000": "faults.rate=1000.0, training.steps=",
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
def test_parameters_and_linears_are_counted(model):
    with torch.device("meta"):
        built = models.build(model, 300, 17)
    assert parameters(model, 300, 17) == models.parameter_count(built)
    found = [name for name, module in built.named_modules() if isinstance(module, torch.nn.Linear)]
    assert linears(model) == len([name for name in found if name != "lm_head"])


@pytest.mark.parametrize("words", TOO_LARGE)
def test_refused_by_run_and_plan_before_anything_is_built(words, train, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", None)
    keys = TOO_LARGE[words].removesuffix(": ")
    for attempt in (lambda: train(tmp_path / "run", *words.split()), lambda: plan_run(tiny(*words.split()))):
        with pytest.raises(UserError, match="cannot fit into memory: the run needs at least") as caught:
            attempt()
        # A plan may name what it cannot build, a run what is largest.
        assert keys.split(", ")[0].split("=")[0] in str(caught.value) or "model.experts" in keys
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["optim.name=scale"], MOE, ["model.name=gpt", "training.dtype=float32"]])
def test_it_is_less_than_a_step_really_takes(more, tiny):
    """Less than the plan, which knows what is kept for backward; so what fits by the plan is not refused."""
    config = tiny(*more, "model.hidden_size=64", "model.num_layers=3", "training.batch_size=8", "training.seq_len=64")
    need = sum(part.size for part in memory_bound.on_device(config, config.data.vocab_size))
    assert 0.1 < need / plan_run(config).total < 1


def test_to_the_byte(tiny, monkeypatch):
    config = tiny()
    need = [*memory_bound.on_device(config, 300), *memory_bound.to_build(config), *memory_bound.to_tokenize(config)]
    total = sum(part.size for part in need)
    monkeypatch.setattr(memory_bound, "machine_memory", lambda: total)
    refuse_run(config, CPU, 300)
    monkeypatch.setattr(memory_bound, "machine_memory", lambda: total - 1)
    with pytest.raises(UserError, match="cannot fit into memory"):
        refuse_run(config, CPU, 300)


def test_a_vocabulary_that_the_text_will_not_reach_does_not_count(train, tmp_path, monkeypatch):
    """Before its text is read: a run may get a smaller one than it asks for."""
    enough = 4 * 10**8
    monkeypatch.setattr(memory_bound, "machine_memory", lambda: enough)
    words = ["data.vocab_size=1000000", "model.hidden_size=256"]
    asked = 3 * 2 * parameters(ModelConfig(hidden_size=256, intermediate_size=48, num_layers=1, num_heads=2), 10**6, 16)
    assert asked > enough
    assert (train(tmp_path / "run", *words, "training.steps=1") / "DONE").exists()
