"""`import gnmr; gnmr.attach(...)` works with torch and numpy alone installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("pyarrow", "hydra", "omegaconf", "rich", "yaml", "pandas")
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch
import gnmr

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
controller = gnmr.attach(model, low="int4", recovery="int8", targets="?", max_o=1)
for _ in range(3):
    model(torch.randn(4, 16)).square().mean().backward()
    controller.step()
    model.zero_grad()
unit = gnmr.Unit("all", model.parameters(), lambda recovering: None)
print(controller.t, type(gnmr.Controller([unit], gnmr.ControlSpec(max_o=1))).__name__)
"""


@pytest.mark.slow
def test_attach_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["3", "Controller"]), done.stderr
