"""Verdicts on planted causes in trained models, by the beds of benchmarks/blame.py, which has more of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """benchmarks/blame.py, with its inputs in the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        module = importlib.import_module("blame")
        folder = tmp_path_factory.mktemp("blame")
        module.make_inputs(folder)
        patch.chdir(folder)
        patch.setenv("GNMR_CACHE", "cache")
        yield module
        sys.modules.pop("blame"), sys.modules.pop("golden")


@pytest.mark.parametrize("name", ["dense", "recipe", "moe", "moe_recipe", "finetune"])
def test_planted_causes(name, bench):
    """Of what spikes each has its own verdict within four step times, which names the broken operator, of two at least
    the one that makes the spike; of 15 faults of the forward pass (60 in the arms that are no fine-tuning) not one
    costs a step."""
    made = bench.bed(bench.ARMS[name])
    found = [row for row in bench.planted(made) if row[3] is not None]
    assert {cause for _, cause, *_ in found} == {"data", "precision", "not_reproducible"}
    assert [(what, verdict.cause) for what, cause, _, verdict, _ in found if verdict.cause != cause] == []
    assert all(verdict.passes <= 4 + 1e-9 for *_, verdict, _ in found)
    assert not any(lost for *_, lost in found)
    precision = [(set(units), set(verdict.units)) for _, cause, units, verdict, _ in found if cause == "precision"]
    assert all(named == planted if len(planted) == 1 else named and named <= planted for planted, named in precision)
    broken = list(bench.not_finite(made))
    assert len(broken) == 15 and not any(lost for _, lost, _ in broken) and any(told for *_, told in broken)
    assert {verdict.cause for verdict, _ in bench.ordinary(made, 2)} <= {"data"}
