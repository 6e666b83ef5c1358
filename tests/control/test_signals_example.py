"""examples/own_signal.py runs as it stands, in a loop and by name."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from gnmr.control import Context, build_signal

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_by_name() -> None:
    context = Context(("a", "b", "c"), torch.device("cpu"))
    signal = build_signal("own_signal:MedianRatio", {"threshold": 2.0}, context)
    norm = torch.tensor([6.0, 2.0, math.nan], dtype=torch.float64)
    risk, (ratio,) = signal.observe({"norm": norm, "observed": torch.tensor([True, True, True])}, 1)
    assert ratio[:2].tolist() == pytest.approx([3, 1]) and risk.tolist() == pytest.approx([1.5, 0.5, math.inf])


def test_in_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("own_signal").main(["--steps", "12"])
    recovering = re.findall(r"next in recovery \[(.*)\]", capsys.readouterr().out)
    assert len(recovering) == 12
    assert "'4'" not in recovering[8] and "'4'" in recovering[9], "the layer that went wrong in step 10"
