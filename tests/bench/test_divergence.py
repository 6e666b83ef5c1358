from __future__ import annotations

import math
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from gnmr.lab.config.compose import compose
from gnmr.precision.cast import quantize
from gnmr.precision.recipes import Cast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not (BENCHMARKS / "results").is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
divergence, page = import_module("divergence"), import_module("pages.divergence")


def course(errors: list[float]) -> Any:
    made = divergence.Course([], [], 40)
    for error in errors:
        if not made.add(error, 0.5):
            break
    return made.row()


def test_diverged_is_what_rose_and_did_not_come_back() -> None:
    falls = [40.0 - i for i in range(40)]
    assert not course(falls)["diverged"]
    assert course([1.0] * 36 + [3.1] * 4)["diverged"]
    assert not course([1.0] * 36 + [2.9] * 4)["diverged"]
    assert not course([1.0] * 10 + [500.0] * 20 + [2.0] * 10)["diverged"]
    assert course([1.0] * 36 + [math.nan] + [1.0] * 3)["errors"][-1] is None


def test_a_run_ends_after_ten_steps_in_a_row_that_are_not_finite() -> None:
    lost = course([1.0] * 8 + [math.nan, math.inf] * 16)
    assert lost["diverged"] and lost["steps"] == 18 and lost["not_finite"] == 9
    back = course([1.0] * 8 + [math.inf] * 9 + [1.0] * 23)
    assert not back["diverged"] and back["steps"] == 40 and back["spent"] == 0.5


def test_the_norm_is_cast_as_its_reader_reads_and_recovers_with_it() -> None:
    setting = divergence.Setting("mxint2", 0.1)
    student = divergence.Student(32, 1)
    norm, up = student.layers[0].norm, student.layers[0].up_proj
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.0)
        norm.bias.uniform_(-0.1, 0.1)
    x = torch.randn(4, 32)
    plain = norm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller = divergence.attached(student, setting, divergence.ranked("random", 0.5), 0)
    cast = Cast.of("int2/mx")
    assert cast is not None
    gain, bias = (quantize(p.detach()[None], cast, 1)[0][0] for p in (norm.weight, norm.bias))
    wanted = torch.nn.functional.layer_norm(x, (32,), gain, bias)
    assert not torch.allclose(plain, wanted, atol=0.05)
    torch.testing.assert_close(norm(x), wanted)
    norm(x).sum().backward()
    torch.testing.assert_close(norm.bias.grad, torch.full((32,), 4.0))
    up.switch(True)
    torch.testing.assert_close(norm(x), plain)
    up.switch(False)
    norm.keeps = True
    torch.testing.assert_close(norm(x), plain)
    controller.detach()


def test_every_arm_trains_and_spends_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BATCH", 8)
    setting = divergence.Setting("mxint2", 0.05, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = {name: divergence.trained(setting, arm, 0) for name, arm in divergence.ARMS.items()}
    spent = {name: run.row()["spent"] for name, run in runs.items()}
    assert all(len(run.errors) == 2 and all(map(math.isfinite, run.errors)) for run in runs.values())
    assert spent["never"] == spent["layer norm's parameters"] == spent["SkipStep"] == 0
    assert spent["always"] == 1 and spent["fprop"] == pytest.approx(1 / 3, abs=1e-3)
    assert spent["first two blocks"] == 0.5 and spent["fprop from the half on"] == pytest.approx(1 / 6, abs=1e-3)
    for name in ("GNMR", "price", "random"):  # chosen from the second step on
        assert spent[f"{name}, 4 of 8 operators"] == 0.25
        assert spent[f"{name}, fprop of 6"] == 0.125
    first, second = ({name: run.errors[step] for name, run in runs.items()} for step in (0, 1))
    assert first["never"] == first["clip 1"] != first["fprop"] == first["always"]
    assert len({second[name] for name in ("never", "clip 1", "layer norm's parameters", "GradientStabilizer")}) == 4


@pytest.mark.parametrize("low", ["bf16", "mxint2"])
def test_the_language_model_is_composed(low: str) -> None:
    config = compose(divergence.words_of(divergence.Setting(low, 0.1, "adam", steps=7), 3))
    assert (config.precision.low, config.optim.lr, config.training.steps, config.training.seed) == (low, 0.1, 7, 3)
    assert config.precision.recovery is None
    assert low not in divergence.OWN or config.precision.recipes[low] == divergence.OWN[low]


def row(arm: str, seed: int, diverged: bool) -> dict[str, Any]:
    run = {"low": "mxint2", "rate": 0.05, "optimizer": "sgd", "steps": 120, "arm": arm, "seed": seed}
    return {
        "run": run,
        "diverged": diverged,
        "errors": [2.0, 1.0],
        "spent": 0.5,
        "not_finite": 50 if diverged else None,
    }


def test_survivors_are_told_with_exact_tests_where_the_positive_control_holds() -> None:
    lost = {"never": 10, "always": 0, "half of them": 5}
    rows = [row(arm, seed, seed < number) for arm, number in lost.items() for seed in range(10)]
    told = "\n".join(page.survivors(rows))
    assert "| always | 50% | 10 of 10 | 1.00 | 2e-05 |" in told  # 2 * 1.08e-5: of two arms the smaller p
    assert "| half of them | 50% | 5 of 10 | 1.00 | 0.03 |" in told
    assert "| never | 50% | 0 of 10 |  |  |" in told
    weak = [one | {"diverged": False} for one in rows]
    assert "nothing else is told" in "\n".join(page.survivors(weak))
    assert "half of them" not in "\n".join(page.survivors(weak))
