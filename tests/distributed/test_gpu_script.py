"""benchmarks/gpu_parallel.py as far as a CPU can play it: every check but NCCL and the hardware's FP8."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.distributed.world import ALONE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
gpu_parallel = import_module("gpu_parallel")

pytestmark = [
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs a machine without GPUs")
def test_without_gpus_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_parallel.main([str(tmp_path / "out.json")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gpu_parallel: needs 2 GPUs or more, here are ") and told.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_its_checks_pass_on_two_processes(
    pair: Callable[..., list[Any]], tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*tiny_words, "experiment=act_quant_stress", "controller.alpha=1.05", "controller.beta=1.02"]
    words += ["controller.warmup_frac=0", "training.steps=20", f"data.cache_dir={tmp_path}"]
    fp8 = [*words, "paths.low=fp8_hybrid", "paths.recovery=bf16", "paths.backend=simulated"]
    alone = {what: gpu_parallel.traced(asked, 2, "none", ALONE, 4) for what, asked in (("runs", words), ("fp8", fp8))}
    assert any(alone["runs"]["sets"])
    out = tmp_path / "out.json"
    plan = {"words": words, "fp8": fp8, "cuda": False, "steps": 4, "rounds": 1, "out": str(out), "head": {}}
    found, other = pair("gpu_checks", plan=plan | {"alone": alone})
    names = ["gloo", "runs, ddp", "runs, fsdp", "fp8, ddp", "fp8, fsdp", "speed, ddp", "speed, fsdp"]
    assert list(found) == list(other) == names
    for name in names[:5]:
        assert found[name]["passed"], found[name]
    for name in names[1:5]:
        one = found[name]
        assert (one["losses_apart"], one["steps_with_other_sets"], one["same_weights"]) == (0, 0, True), one
    written = json.loads(out.read_text())
    assert written["finished"] and written["checks"] == found and written["processes"] == 2
    alone["runs"]["losses"][-1] *= 1.1
    assert not gpu_parallel.against(alone["runs"], alone["runs"] | {"losses": [1.0] * 4})["passed"]


def test_its_words_compose(tmp_path: Path) -> None:
    """The real size, with the hardware's FP8 too."""
    for words, kind in ((gpu_parallel.WORDS, "hsdp"), ([*gpu_parallel.WORDS, *gpu_parallel.FP8], "fsdp")):
        config = gpu_parallel._config([*words, f"data.path={tmp_path}"], 8, kind)
        assert (config.parallel, config.training.accumulation, config.model.hidden_size) == (kind, 8, 768)
    assert gpu_parallel.kinds(8) == ["ddp", "fsdp", "hsdp"] and gpu_parallel.kinds(2) == ["ddp", "fsdp"]
