"""The examples under Accelerate, in a Trainer and in Lightning's run as they stand, and the loss falls.

That their sets are those of a loop by hand is tested in test_same_sets.py.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["accelerate_loop", "hf_trainer", "lightning_loop"])
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "lightning_loop":
        pytest.importorskip("lightning.pytorch")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](["--steps", "12"])
    losses = [float(loss) for loss in re.findall(r"loss\W+(\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) >= 12 and losses[11] < losses[0] - 0.05
