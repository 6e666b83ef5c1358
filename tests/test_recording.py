"""`gnmr.attach(..., record="runs/mine")`: the records of a loop that is not ours."""

from __future__ import annotations

import gc
import io
import json
import math
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import gnmr
from gnmr.control import TwoStage
from gnmr.control.signals import SIGNALS
from gnmr.conversion import PathLinear
from gnmr.errors import UserError
from gnmr.formats import Recipe
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.recorded_run import load
from gnmr.lab.report.units import thresholds


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def loop(
    folder: Path, steps: int = 6, finish: bool = True, seed: int = 0, calibrate: int = 0, late: int = 0, **how
) -> gnmr.Router:
    """A few steps, each with its loss, an evaluation behind the last one; the calibration begins `late` steps late."""
    model = net()
    how = {"low": "int4", "recovery": "int8", "max_o": 2, "alpha": 1.05, "beta": 1.05, "targets": ["?"]} | how
    controller = gnmr.attach(model, record=folder, seed=seed, **how)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if calibrate and step == late:
            controller.calibrate(fraction=0.3, steps=calibrate)
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
    run = load(done).check()
    assert (run.status, run.experiment, run.arm, run.seed, run.scale) == ("done", done.parent.name, "routed", 3, "own")
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6] and run.steps["tokens"].tolist()[-1] == 48
    assert (run.steps["loss"] > 0).all() and run.evals["val_loss"].tolist() == [2.0]
    assert run.settings["controller.max_o"] == 2 and run.settings["precision.low"] == "int4"
    matrices = run.units()
    assert matrices.units == ["0", "1", "2", "3"] and matrices.norm_SU.shape == (6, 4) and "gnmr" in matrices.columns
    assert matrices.active_SU.sum() == run.steps["num_active"].sum() > 0
    assert run.summary["promotion_frac"] == pytest.approx(matrices.active_SU.mean())
    assert run.summary["spent_gemm_frac"] == pytest.approx(matrices.active_SU.mean()), "equal linears"


def test_the_report_and_replay_read_it(done, gnmr, tmp_path):
    outcome = gnmr("report", str(done), f"out={tmp_path / 'out'}", "--all")
    assert (outcome.code, outcome.err) == (0, "") and "routed" in outcome.out
    assert "Training loops of your own, 6 steps; their records do not say on which data." in outcome.out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<dd>1,088 parameters</dd>" in page and "<dd>6 steps</dd>" in page
    own = gnmr("replay", str(done))  # under the loop's own settings: the sets are the loop's
    (told,) = (line.split()[-2:] for line in own.out.splitlines() if line.startswith("unit-steps spent"))
    assert own.code == 0 and told[0] == told[1] != "0.00%"
    replayed = gnmr("replay", str(done), "alpha=1.05", "beta=1.05", "max_o=2")
    assert replayed.code == 0 and "units" in replayed.out


def test_thresholds_of_two_stages_are_in_the_records(tmp_path):
    folder = tmp_path / "study" / "mine-s0"
    loop(folder, alpha=TwoStage(9.0, 1.05, 4), beta=TwoStage(8.0, 1.5, 2))
    run = load(folder).check()
    (arm,) = compare([run])[0].arms
    assert thresholds(arm, run) == {"gnmr": [(1, 9.0), (5, 1.05)], "delta_gnmr": [(1, 8.0), (3, 1.5)]}


def test_a_loop_that_was_killed_is_read_too(tmp_path):
    loop(tmp_path / "a", finish=False)
    run = load(tmp_path / "a").check()
    assert run.status == "running" and len(run.steps["step"]) == 5, "the last one may still be logged to"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_there_is_never_written_over(done):
    before = contents(done)
    with pytest.raises(UserError, match="holds the records of a run; choose another folder, or load"):
        loop(done)
    assert contents(done) == before, "a finished run is only made longer from a checkpoint on"
    model = net()
    with pytest.raises(UserError, match="holds the records of a run with other units; choose another folder"):
        gnmr.attach(model, max_o=2, targets=["[012]"], record=str(done))
    assert not any(isinstance(module, PathLinear) for module in model.modules())
    (done.parent / "photos").mkdir()
    (done.parent / "photos" / "cat.jpg").touch()
    with pytest.raises(UserError, match="is not empty"):
        gnmr.attach(net(), targets=["?"], max_o=2, record=done.parent / "photos")


def going_on(folder: Path, steps: range, state: dict | None = None, save_after: int = 0) -> dict:
    """Steps of a loop, which is done after eight; the model's and the controller's state after `save_after`."""
    model, saved = net(), {}
    if state:
        model.load_state_dict(state["model"])
    controller = gnmr.attach(model, targets=["?"], max_o=2, alpha=1.05, beta=1.05, record=folder)
    if state:
        controller.load_state_dict(state["controller"])
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (5 if step % 3 == 2 else 1)
        loss = (model(x) - x).square().mean()
        loss.backward()
        controller.step()
        controller.log(loss=loss.item(), tokens=8 * step)
        if step % 4 == 0:
            controller.log(val_loss=2.0 + step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        if step == save_after:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "controller": controller.state_dict()}, file)
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    if steps[-1] == 8:
        controller.detach()
    return saved


def test_a_loss_that_is_not_logged_is_null(tmp_path):
    model = net()
    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=2, targets=["?"], record=tmp_path / "a")
    for loss in (None, math.nan, 1.5):
        model(torch.randn(8, 16)).square().mean().backward()
        controller.step()
        model.zero_grad()
        if loss is not None:
            controller.log(loss=loss)
    controller.detach()
    rows = [json.loads(line) for line in (tmp_path / "a" / "steps.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [None, "nan", 1.5]


@pytest.mark.parametrize("end", [6, 8])
def test_records_go_on_behind_a_checkpoint(end, tmp_path):
    """Of a loop that was killed after step 6, and of one that was done after step 8."""
    going_on(tmp_path / "whole", range(1, 9))
    saved = going_on(tmp_path / "cut", range(1, end + 1), save_after=4)
    assert (tmp_path / "cut" / "DONE").exists() == (end == 8)
    going_on(tmp_path / "cut", range(5, 9), saved)
    whole, cut = (load(tmp_path / name).check() for name in ("whole", "cut"))
    assert cut.status == "done" and cut.steps["step"].tolist() == [*range(1, 9)]
    for name in ("loss", "tokens", "num_active", "grad_norm_pre_clip"):
        assert cut.steps[name].tolist() == whole.steps[name].tolist(), name
    assert cut.evals["val_loss"].tolist() == whole.evals["val_loss"].tolist() == [6.0, 10.0]
    assert (cut.units().norm_SU == whole.units().norm_SU).all() and cut.events == whole.events
    resumed = json.loads((tmp_path / "cut" / "header.json").read_text())["resumed"]
    assert [one["after_step"] for one in resumed] == [4]


def test_a_loop_is_refused_while_another_process_records_there(tmp_path):
    """Resumed from a checkpoint of the loop that lives, or begun at the same time."""
    folder = tmp_path / "a"
    saved = going_on(folder, range(1, 5), save_after=4)
    gc.collect()  # the controller, with its lock
    held = (
        "import sys; from gnmr.records.lock import *; lock = lock_folder(Path(sys.argv[1])); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", held, folder], **pipes) as other:
        other.stdout.readline()
        before = contents(folder)
        with pytest.raises(UserError, match="is being written by another process"):
            going_on(folder, range(5, 9), saved)
        assert contents(folder) == before
        other.kill()
    going_on(folder, range(5, 9), saved)
    assert load(folder).check().steps["step"].tolist() == [*range(1, 9)]


@pytest.mark.parametrize("observe", ["parameters", "input_grad"])
def test_a_gradient_that_several_units_have_in_common_counts_once(observe, tmp_path):
    found = {}
    for unit in ("operator", "gemm"):
        model = net()
        paths = {"low": "sim_e2m1", "recovery": "bf16", "targets": ["?"], "unit": unit}
        controller = gnmr.attach(model, **paths, signal="always_low", observe=observe, record=tmp_path / unit)
        model(torch.ones(8, 16)).square().mean().backward()
        norm = controller.step().metrics()["gnmr/grad_norm"]
        if observe == "parameters":
            norms = [parameter.grad.norm() for parameter in model.parameters()]
            assert norm == pytest.approx(torch.stack(norms).norm().item())
        controller.detach()
        found[unit] = norm, [*load(tmp_path / unit).steps["grad_norm_pre_clip"]]
    assert found["gemm"] == (norm, [norm]) and found["operator"] == found["gemm"]


def test_a_step_back_within_the_loop(tmp_path):
    """To the checkpoint before a spike: rows after it are dropped."""
    model = net()
    controller = gnmr.attach(model, targets=["?"], max_o=2, record=tmp_path / "a")
    for step in range(1, 5):
        model(torch.ones(2, 16)).sum().backward()
        controller.step()
        if step == 2:
            saved = deepcopy(controller.state_dict())
    controller.load_state_dict(saved)
    model(torch.ones(2, 16)).sum().backward()
    controller.step()
    controller.detach()
    assert load(tmp_path / "a").check().steps["step"].tolist() == [1, 2, 3]


def test_records_that_a_loop_cannot_go_on_with(tmp_path):
    saved = going_on(tmp_path / "a", range(1, 7), save_after=4)
    before = (tmp_path / "a" / "steps.jsonl").read_bytes()
    with pytest.raises(UserError, match="holds the records of a run; choose another folder, or load"):
        going_on(tmp_path / "a", range(1, 2))
    with pytest.raises(UserError, match="has no records of the 4 steps before this checkpoint"):
        going_on(tmp_path / "b", range(5, 6), saved)
    bare = saved | {"controller": {name: one for name, one in saved["controller"].items() if name != "record"}}
    with pytest.raises(UserError, match="the checkpoint was not saved while recording"):
        going_on(tmp_path / "a", range(5, 6), bare)
    assert (tmp_path / "a" / "steps.jsonl").read_bytes() == before


def test_a_copy_records_nothing(tmp_path):
    controller = loop(tmp_path / "a", steps=2, finish=False)
    assert deepcopy(controller).recording is None and controller.recording is not None
    controller.detach()
    assert load(tmp_path / "a").status == "done"


def test_what_cannot_be_logged(tmp_path):
    controller = gnmr.attach(net(), targets=["?"], max_o=2, record=tmp_path / "a")
    with pytest.raises(ValueError, match=r"call it after step\(\)"):
        controller.log(loss=1.0)
    controller = loop(tmp_path / "b", steps=1, finish=False)
    with pytest.raises(ValueError, match="accuracy is not known: use one of loss, lr, tokens, val_loss"):
        controller.log(accuracy=1.0)
    with pytest.raises(ValueError, match=r"loss=tensor.* of a tensor loss.item\(\)"):
        controller.log(loss=torch.tensor(1.0))
    with pytest.raises(ValueError, match="nothing is recorded: attach"):
        gnmr.attach(net(), targets=["?"], max_o=2).log(loss=1.0)


def test_own_signals_and_recipes_have_names_in_the_config(tmp_path):
    recipe = Recipe.of("mine", {"fprop": {"input": "e4m3/tensor"}})
    signal = lambda context: SIGNALS["grad_norm"](context)
    loop(tmp_path / "a", steps=1, low=recipe, recovery="bf16", alpha=1.5, beta=1.3, signal=signal)
    settings = load(tmp_path / "a").settings
    assert settings["precision.low"] == "mine" and settings["controller.signal"]
    assert json.loads((tmp_path / "a" / "header.json").read_text())["recoverable"] is True


def test_runs_of_one_name_that_differ_in_what_they_exclude_are_two_arms(tmp_path):
    for seed, exclude in enumerate(([], ["3"], ["3"])):
        loop(tmp_path / f"mine-s{seed}", steps=1, seed=seed, exclude=exclude)
    (comparison,) = compare(load(tmp_path / f"mine-s{seed}") for seed in range(3))
    assert sorted(arm.seeds for arm in comparison.arms) == [[0], [1, 2]]
    assert len({arm.label for arm in comparison.arms}) == 2


def test_a_trigger_that_the_loop_found_is_in_its_records(tmp_path):
    """Of a loop that goes on from a checkpoint too; the report holds risks against it."""
    folder, model = tmp_path / "study" / "mine-s0", net()
    header = folder / "header.json"

    def steps(controller, numbers):
        for step in numbers:
            (model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean() * step).backward()
            controller.step()
            controller.log(loss=1.0)
            model.zero_grad()

    controller = gnmr.attach(model, targets=["?"], max_o=2, record=folder)
    controller.calibrate(fraction=0.2, steps=6)
    steps(controller, range(1, 6))
    state = deepcopy(controller.state_dict())
    assert "calibrated" not in json.loads(header.read_text()) and controller.calibrated is None
    steps(controller, range(6, 9))
    found = controller.calibrated
    assert json.loads(header.read_text())["calibrated"] == {"after_step": 6, "trigger": found}
    controller.detach()
    run = load(folder).check()
    assert run.trigger == (found, 7) and thresholds(compare([run])[0].arms[0], run)["gnmr"] == [(7, 1.5 * found)]

    header_before = json.loads(header.read_text())
    again = gnmr.attach(model, targets=["?"], max_o=2, record=folder)
    again.load_state_dict(state)
    assert "calibrated" not in json.loads(header.read_text()), "it was found behind the step that it goes on from"
    steps(again, range(6, 18))
    told = json.loads(header.read_text())
    assert told["calibrated"] == {"after_step": 6, "trigger": found}, "as if it had not been cut short"
    assert told["resumed"] and told["units"] == header_before["units"]
