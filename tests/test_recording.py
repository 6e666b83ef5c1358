"""`gnmr.attach(..., record="runs/mine")`: the records of a loop that is not ours."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import gnmr
from gnmr.errors import UserError
from gnmr.paths import PathLinear
from gnmr.records.ledger import check_records
from gnmr.report.runs import load


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def loop(folder: Path, steps: int = 6, finish: bool = True, seed: int = 0, **how) -> gnmr.AttachedController:
    """A few steps, each with its loss, an evaluation behind the last one."""
    model = net()
    how = {"low": "int4", "recovery": "int8", "max_o": 2, "alpha": 1.05, "beta": 1.05, "targets": ["?"]} | how
    controller = gnmr.attach(model, record=folder, seed=seed, **how)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(8, 16, generator=draw) * (5 if step % 3 == 2 else 1)
        loss = (model(x) - x).square().mean()
        loss.backward()
        controller.step()
        controller.log(loss=loss.item(), lr=0.1, tokens=8 * (step + 1))
        model.zero_grad()
    controller.log(val_loss=2.0)
    if finish:
        controller.detach()
    return controller


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "routed-s3"
    loop(folder)
    return folder


def test_it_is_a_run_to_whoever_reads_records(done):
    check_records(done)
    run = load(done).check()
    assert (run.status, run.experiment, run.arm, run.seed, run.scale) == ("done", done.parent.name, "routed", 3, "own")
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6] and run.steps["tokens"].tolist()[-1] == 48
    assert (run.steps["loss"] > 0).all() and run.evals["val_loss"].tolist() == [2.0]
    assert run.settings["controller.max_o"] == 2 and run.settings["paths.low"] == "int4"
    ratios = run.ratios()
    assert ratios.units == ["0", "1", "2", "3"] and ratios.norm_SU.shape == (6, 4) and "gnmr" in ratios.columns
    assert ratios.active_SU.sum() == run.steps["num_active"].sum() > 0
    assert run.summary["promotion_frac"] == pytest.approx(ratios.active_SU.mean())
    assert run.summary["spent_gemm_frac"] == pytest.approx(ratios.active_SU.mean()), "equal linears"


def test_the_report_and_replay_read_it(done, gnmr, tmp_path):
    outcome = gnmr("report", str(done), f"out={tmp_path / 'out'}", "--no-plots")
    assert (outcome.code, outcome.err) == (0, "") and "routed" in outcome.out
    assert gnmr("replay", str(done)).mistake.endswith(f"gnmr replay {done / 'ratios.parquet'} takes it")
    replayed = gnmr("replay", str(done / "ratios.parquet"), "alpha=1.05", "beta=1.05", "max_o=2")
    assert replayed.code == 0 and "units" in replayed.out


def test_a_loop_that_was_killed_is_read_too(tmp_path):
    loop(tmp_path / "a", finish=False)
    run = load(tmp_path / "a").check()
    assert run.status == "running" and len(run.steps["step"]) == 5, "the last one may still be logged to"


def test_what_is_there_is_never_written_over(done):
    model = net()
    with pytest.raises(UserError, match="holds the records of a run; choose another folder"):
        gnmr.attach(model, targets=["?"], max_o=2, record=str(done))
    assert not any(isinstance(module, PathLinear) for module in model.modules())
    (done.parent / "photos").mkdir()
    (done.parent / "photos" / "cat.jpg").touch()
    with pytest.raises(UserError, match="is not empty"):
        gnmr.attach(net(), targets=["?"], max_o=2, record=done.parent / "photos")


def test_a_copy_records_nothing(tmp_path):
    controller = loop(tmp_path / "a", steps=2, finish=False)
    assert deepcopy(controller)._recording is None and controller._recording is not None
    controller.detach()
    assert load(tmp_path / "a").status == "done"


def test_what_cannot_be_logged(tmp_path):
    controller = gnmr.attach(net(), targets=["?"], max_o=2, record=tmp_path / "a")
    with pytest.raises(ValueError, match="there is no step yet"):
        controller.log(loss=1.0)
    controller = loop(tmp_path / "b", steps=1, finish=False)
    with pytest.raises(ValueError, match="accuracy is not known: use one of loss, lr, tokens, val_loss"):
        controller.log(accuracy=1.0)
    with pytest.raises(ValueError, match=r"loss=tensor.* of a tensor loss.item\(\)"):
        controller.log(loss=torch.tensor(1.0))
    with pytest.raises(ValueError, match="nothing is recorded: attach"):
        gnmr.attach(net(), targets=["?"], max_o=2).log(loss=1.0)


def test_own_signals_and_recipes_have_names_in_the_config(tmp_path):
    from gnmr.paths import Recipe

    recipe = Recipe.of("mine", {"fprop": {"input": "e4m3/tensor"}})
    loop(
        tmp_path / "a",
        steps=1,
        low=recipe,
        recovery="bf16",
        alpha=1.5,
        beta=1.3,
        signal=lambda context: _signal(context),
    )
    settings = load(tmp_path / "a").settings
    assert settings["paths.low"] == "mine" and settings["controller.signal"]
    assert json.loads((tmp_path / "a" / "header.json").read_text())["recoverable"] is True


def _signal(context):
    from gnmr.controller.signals import SIGNALS

    return SIGNALS["grad_norm"](context)
