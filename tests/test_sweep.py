"""Sweeps: a line a cell, done cells are skipped, failed ones run again, cells side by side."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins

from gnmr.lab.cli import train
from gnmr.lab.config import read
from gnmr.lab.train import loop as loop_module
from gnmr.lab.train import run as run_module
from gnmr.lab.train.step import TrainStep
from gnmr.records.find import finished, last_step
from gnmr.records.reader import read_json

SEEDS = "training.seed=0,1"
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def cells(tmp_path: Path) -> dict[int, Path]:
    """Run folders by seed."""
    return dict(sorted((int(p.name.rsplit("-s", 1)[1]), p) for p in tmp_path.glob("runs/*/*-s*")))


def done(tmp_path: Path) -> list[int]:
    """Seeds of the cells that are done."""
    return [seed for seed, folder in cells(tmp_path).items() if (folder / "DONE").exists()]


@pytest.mark.parametrize(("sent", "told"), [(None, "GEMM FLOPs spent 3.0%"), (0.271, "sent 27.1%")])
def test_a_line_tells_what_recovery_costs(tmp_path, sent, told):
    summary = {"final_val_ppl": 36.19, "spent_gemm_frac": 0.03, "numbers_sent_frac": sent, "wall_time_s": 45.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert finished(tmp_path) == f"{tmp_path.name}  ppl 36.19  {told}  0:00:45"
    (tmp_path / "summary.json").write_text("[]")
    assert finished(tmp_path) == tmp_path.name


def test_the_last_step_is_that_of_the_last_whole_row(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert last_step(tmp_path) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("composed_once")
def test_cells_that_are_done_are_skipped(gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words[:2], "-m", *tiny_words[2:], SEEDS, "records.live=auto"]
    first = gnmr("train", *words)
    assert (first.code, first.err) == (0, "")
    told = [line for line in first.out.splitlines() if line.startswith("#")]
    for number, (line, folder) in enumerate(zip(told, cells(tmp_path).values(), strict=True)):
        assert re.fullmatch(rf"#{number} {folder.name}  ppl \d+\.\d\d  GEMM FLOPs spent \d+\.\d%  0:00:\d\d", line), (
            line
        )
        assert "step 2/2  loss" in (folder / "log.txt").read_text()
        assert read_json(folder / "header.json")["command"].split().count(f"training.seed={number}") == 1
    assert "down_proj" not in first.out, "details are in each cell's folder"
    before = {p: p.stat().st_mtime_ns for folder in cells(tmp_path).values() for p in folder.rglob("*")}
    again = gnmr("train", *words)
    skipped = [f"{folder} is done: skipped" for folder in cells(tmp_path).values()]
    folder = cells(tmp_path)[0].parent
    told = [f"2 cells done in {folder}", f"next: gnmr report {folder}"]
    assert (again.code, [line for line in again.out.splitlines() if "first: source" not in line]) == (0, skipped + told)
    assert before == {p: p.stat().st_mtime_ns for folder in cells(tmp_path).values() for p in folder.rglob("*")}
    assert [p.name for p in tmp_path.iterdir()] == ["runs"], "Hydra leaves nothing beside the runs"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], JOBLIB], ids=["one by one", "joblib"])
def test_a_short_sweep_is_a_trial_and_says_what_comes_next(launcher, gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for word in tiny_words if not word.startswith(("debug=", "runs_dir=", "records.live="))]
    small = ["model.num_heads=2", "training.batch_size=2", "training.eval_sequences=2"]
    ended = gnmr("train", "-m", *words, *small, "training.steps=2", SEEDS, *launcher)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == "next: gnmr report runs/smoke/custom"
    assert {path.parent.name for path in (tmp_path / "runs").rglob("DONE")} == {
        path.name for path in (tmp_path / "runs" / "smoke" / "custom").iterdir()
    }


def test_a_folder_that_cannot_be_made_is_told_with_its_key(gnmr, tmp_path):
    (tmp_path / "file").touch()
    line = f"{tmp_path / 'file'}: cannot be written (File exists); choose another runs_dir"
    assert gnmr("train", "-m", SEEDS, f"runs_dir={tmp_path / 'file'}").mistake == line


@pytest.mark.slow
def test_a_failed_cell_does_not_stop_the_others_and_runs_again(gnmr, tiny_words, tmp_path, monkeypatch):
    plain = run_module.assemble

    def assemble(config, *args):
        parts = plain(config, *args)
        if config.training.seed == 0:
            parts.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
        return parts

    words = [*tiny_words, SEEDS, "-m"]
    monkeypatch.setattr(loop_module, "MAX_NONFINITE_STREAK", 1)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "assemble", assemble)
        ended = gnmr("train", *words)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("gnmr: run FAILED: 1 steps in a row")
    assert "#0 failed: 1 steps in a row" in ended.out and done(tmp_path) == [1]
    again = gnmr("train", *words)
    assert again.code == 0 and again.out.count("is done: skipped") == 1 and done(tmp_path) == [0, 1]


class ElsewhereLauncher(BasicLauncher):
    """Runs cells as a cluster does: what they leave in their process never reaches the sweep's."""

    def launch(self, *arguments: Any, **named: Any) -> Any:
        returned = super().launch(*arguments, **named)
        train._failures.clear()
        train._swept.clear()
        return returned


def test_a_failure_on_another_machine_fails_the_sweep(gnmr, tiny_words, monkeypatch):
    name = "hydra_plugins.elsewhere.ElsewhereLauncher"
    monkeypatch.setitem(Plugins.instance().class_name_to_class, name, ElsewhereLauncher)
    ended = gnmr("train", *tiny_words, "controller.alpha=-1,-2", f"hydra.launcher._target_={name}", "-m")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("gnmr: #0 failed: controller.alpha=-1")
    assert "#1 failed: controller.alpha=-2" in ended.out, "the first one did not stop it"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], JOBLIB], ids=["one by one", "joblib"])
def test_a_mistake_in_one_cell_leaves_the_others(launcher, gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, "controller.alpha=-1,1.5", SEEDS, *launcher, "-m")
    assert ended.code == 2
    assert ended.err.splitlines() == ["gnmr: controller.alpha=-1.0: must be a positive number or null"]
    assert done(tmp_path) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["unknown=1", "sweep=nosuch", "--config-dir=nowhere", "training.seed=range(1,"])
def test_a_mistake_in_all_cells_writes_nothing(word, gnmr, tiny_words, tmp_path):
    assert gnmr("train", *tiny_words, word, "-m").mistake
    assert not (tmp_path / "runs").exists()


LONG = ["training.steps=300", "training.checkpoint_every=1000", "training.eval_every=1000", "-m"]


@contextmanager
def sweeping(tmp_path: Path, *words: str, cells_at_work: int) -> Iterator[subprocess.Popen[str]]:
    """A sweep, once so many of its cells have taken 30 steps."""
    sweep = subprocess.Popen(
        [sys.executable, "-m", "gnmr", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while sum(last_step(folder) > 30 for folder in cells(tmp_path).values()) < cells_at_work:
        assert sweep.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    try:
        yield sweep
    finally:
        with suppress(ProcessLookupError):
            os.killpg(sweep.pid, signal.SIGKILL)


def until_saved(folder: Path) -> int:
    """The step of the checkpoint of a cell that was stopped, which is that of its last row."""
    until = time.monotonic() + 60
    while not (folder / "summary.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    summary = read_json(folder / "summary.json")
    assert summary["status"] == "interrupted" and 0 < summary["steps"] < 300
    assert (folder / "checkpoints" / f"step-{summary['steps']:08d}").is_dir()
    assert last_step(folder) == summary["steps"]
    return summary["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [([], signal.SIGTERM), (JOBLIB, signal.SIGINT), (JOBLIB, signal.SIGTERM), (JOBLIB, signal.SIGKILL)],
)
def test_a_sweep_that_is_stopped_goes_on_where_it_was(launcher, number, gnmr, tiny_words, tmp_path):
    """Ctrl-C reaches all its processes, the other signals the first one alone."""
    words = [*tiny_words, *LONG, SEEDS, *launcher]
    with sweeping(tmp_path, *words, cells_at_work=2 if launcher else 1) as sweep:
        (os.killpg if number == signal.SIGINT else os.kill)(sweep.pid, number)
        out, _ = sweep.communicate(timeout=60)
        assert sweep.returncode == (128 + number if number != signal.SIGKILL else -number), out
        assert "Traceback" not in out
        stopped = {seed: until_saved(folder) for seed, folder in cells(tmp_path).items()}
    assert list(stopped) == ([0, 1] if launcher else [0])
    again = gnmr("train", *tiny_words, *LONG, SEEDS)
    assert again.code == 0 and done(tmp_path) == [0, 1]
    for seed, step in stopped.items():
        assert read_json(cells(tmp_path)[seed] / "header.json")["resumed"][0]["after_step"] == step


def test_a_signal_in_the_last_step_of_a_cell_ends_the_sweep(gnmr, tiny_words, tmp_path, monkeypatch):
    plain = TrainStep.__call__

    def call(self, *args):
        if self.router.t == 1:
            signal.raise_signal(signal.SIGINT)
        return plain(self, *args)

    monkeypatch.setattr(TrainStep, "__call__", call)
    assert gnmr("train", *tiny_words, SEEDS, "-m").code == 130 and done(tmp_path) == [0]


@pytest.mark.slow
def test_a_cell_whose_worker_is_killed_is_named_and_stops_no_other(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, *LONG, "training.seed=0,1,2", *JOBLIB]
    with sweeping(tmp_path, *words, cells_at_work=2) as sweep:
        workers = subprocess.run(["pgrep", "-P", str(sweep.pid), "-f", "popen_loky"], capture_output=True, text=True)
        os.kill(min(map(int, workers.stdout.split())), signal.SIGKILL)
        out, _ = sweep.communicate(timeout=120)
    line = r"#0 .*seed=0 failed: its process was killed by SIGKILL \(out of memory\?\); the same command continues it"
    assert sweep.returncode == 1 and re.search(line, out) and "Traceback" not in out
    assert done(tmp_path) == [1, 2]


@pytest.mark.slow
def test_arms_may_have_names_that_yaml_reads_as_numbers(gnmr, tiny_words, tmp_path):
    (tmp_path / "sweep").mkdir()
    arms = "arms: {5: controller.max_o=5, 0.05: controller.max_o=2, on: controller.max_o=1}"
    params = 'hydra: {sweeper: {params: {arm: "${names:arms}"}}}'
    (tmp_path / "sweep" / "mine.yaml").write_text(f"# @package _global_\n{arms}\n{params}\n")
    ended = gnmr("train", *tiny_words, "-m", f"--config-dir={tmp_path}", "sweep=mine")
    assert (ended.code, ended.err) == (0, "")
    chosen = [read(folder / "config.yaml").controller.max_o for folder in tmp_path.glob("runs/*/*-s0")]
    assert sorted(chosen) == [1, 2, 5]
