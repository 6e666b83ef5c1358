"""What cannot fit is refused by arithmetic; what may fit never is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.cli.subject import memory_bound
from gnmr.lab.train import memory
from gnmr.lab.train.memory import refuse_checkpoint

CPU = torch.device("cpu")


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
