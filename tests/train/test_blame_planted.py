"""Verdicts on planted causes in trained models, by the beds of planted.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import planted
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Text and a tiny checkpoint in the working folder, as benchmarks/golden.py makes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
        folder = tmp_path_factory.mktemp("planted")
        importlib.import_module("golden").make_inputs(folder)
        patch.chdir(folder)
        patch.setenv("GNMR_CACHE", "cache")
        yield
        sys.modules.pop("golden")


@pytest.mark.parametrize("name", ["saved", "recipe", "moe", "finetune"])
def test_planted_causes(name, inputs):
    """Of what spikes each has its own verdict within four step times, which names the broken operators that make the
    spike and no others; of six faults of the forward pass not one costs a step."""
    made = planted.bed(planted.ARMS[name], learn=60)
    found = [row for row in planted.planted(made, singles=4, pairs=1) if row.result.verdict is not None]
    assert {row.cause for row in found} == {"data", "precision", "not_reproducible"}
    for row in found:
        verdict = row.result.verdict
        assert verdict.cause == row.cause and verdict.passes <= 4 + 1e-9 and not row.result.skipped, row
    precision = [row for row in found if row.cause == "precision"]
    wrong = [(row.what, row.result.verdict.units) for row in precision if not row.right]
    assert any(len(row.units) > 1 for row in precision) and len(wrong) <= len(precision) // 10, wrong
    broken = list(planted.not_finite(made, units=2))
    assert len(broken) == (0 if name == "saved" else 6) and not any(lost for _, lost, _ in broken)
    assert name == "saved" or any(told for *_, told in broken)
