"""What cannot fit is refused by arithmetic; what may fit never is."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from gnmr.errors import UserError
from gnmr.lab import models
from gnmr.lab.cli.subject import memory_bound
from gnmr.lab.config import ModelConfig
from gnmr.lab.config.model import ExpertsConfig
from gnmr.lab.train import memory
from gnmr.lab.train.memory import parameters, refuse_checkpoint, refuse_run

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


def test_weights_of_a_checkpoint_count(tiny, tmp_path):
    save_file({"up.weight": torch.zeros(30, 40, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    model = ModelConfig(name="pretrained", checkpoint=str(tmp_path))
    config = SimpleNamespace(training=tiny("training.dtype=float32").training, model=model, optim=tiny().optim)
    assert memory.needs_of(config, 300)[0] == (4 * 30 * 40, "weights", f"model.checkpoint={tmp_path}")


@pytest.mark.parametrize(("gradients", "floats", "size"), [(True, True, 8), (True, False, 4), (False, False, 2)])
def test_a_checkpoint_that_cannot_be_diagnosed_is_refused_before_it_is_loaded(gradients, floats, size, monkeypatch):
    """One million parameters in BF16."""
    tensors = {"embed.weight": ((1000, 500), 2), "up.weight": ((1000, 500), 2)}
    given = {"where": "here", "gradients": gradients, "floats": floats, "tokens": 0}
    monkeypatch.setattr(memory, "machine_memory", lambda: size * 1_000_000)
    refuse_checkpoint(tensors, CPU, **given)
    with pytest.warns(UserWarning, match=r"^here: may not fit into memory: about 0\..* GB .* 10,000 tokens a batch"):
        refuse_checkpoint(tensors, CPU, **given | {"tokens": 10_000})
    monkeypatch.setattr(memory, "machine_memory", lambda: size * 1_000_000 - 1)
    with pytest.raises(UserError, match=r"^here: cannot fit into memory: its 0.001 billion parameters") as caught:
        refuse_checkpoint(tensors, CPU, **given)
    assert ("dtype=own" in str(caught.value)) == floats and ("with gradients" in str(caught.value)) == gradients


def test_memory_that_runs_out_on_a_cpu_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert memory.out_of_memory(caught.value) and memory.out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not memory.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(UserError, match=r"^use less$"), memory_bound("use less"):
        torch.empty(1 << 55)


def test_a_limit_of_addresses_is_the_memory_of_the_process():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, -1))\n"
    code += "from gnmr.lab.train.memory import machine_memory; print(machine_memory())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(ended.stdout) < 1 << 36
