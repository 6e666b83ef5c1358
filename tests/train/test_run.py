"""A run from config to DONE: its folder, and what it refuses before it touches one."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time

import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.config import config_hash
from gnmr.lab.train import loop
from gnmr.lab.train import run as run_module
from gnmr.lab.train.folder import locked, run_folder
from gnmr.lab.train.run import run
from gnmr.lab.views.recorder import Recorder
from gnmr.records.reader import read_json, read_jsonl, read_units


@pytest.fixture(scope="module")
def done(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("done") / "run")


@pytest.fixture
def copied(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


def test_the_folder_is_named_by_experiment_arm_hash_and_seed(tiny, tmp_path):
    config, other = (tiny(f"runs_dir={tmp_path}", f"training.seed={seed}") for seed in (0, 7))
    folder = run_folder(config)
    assert folder == tmp_path / "tiny" / f"int4_int8-gnmr-{config_hash(config)}-s0"
    assert run_folder(other).name == folder.name[:-1] + "7"
    assert run_folder(tiny(f"runs_dir={tmp_path}", "optim.lr=0.5")).name != folder.name
    assert run_folder(tiny(f"runs_dir={tmp_path}", "training.checkpoint_every=1")) == folder
    static = run_folder(tiny("precision.name=int2", "precision.low=int2", "precision.recovery=null"))
    assert static.name.startswith("int2-") and "gnmr" not in static.name


def test_what_a_done_run_holds(done, tiny):
    header = read_json(done / "header.json")
    assert header["torch"] == torch.__version__ and header["machine"]["threads"] == 1
    assert header["units"] == [f"layers.0.self_attn.{p}_proj" for p in "qkvo"] + [
        f"layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    evals = read_jsonl(done / "eval.jsonl")
    assert [row["step"] for row in evals] == [4, 8]
    assert all(row["val_ppl"] == pytest.approx(math.exp(row["val_loss"])) for row in evals)
    summary, rows = read_json(done / "summary.json"), read_jsonl(done / "steps.jsonl")
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("done", 8, 256)
    assert summary["final_val_loss"] == evals[-1]["val_loss"]
    assert summary["promotion_frac"] == sum(row["num_active"] for row in rows) / (8 * 7)
    assert read_units(done).num_rows == 8 * 7


def test_a_done_run_is_left_alone(copied, train):
    before = {p: p.stat().st_mtime_ns for p in copied.rglob("*")}
    said: list[str] = []
    train(copied, say=said.append)
    assert said == [f"{copied} is done: skipped"]
    assert before == {p: p.stat().st_mtime_ns for p in copied.rglob("*")}


def test_a_run_whose_own_signal_changed_is_not_taken_for_this_one(train, tmp_path, monkeypatch):
    code = "from gnmr.control.signals import GnmrSignal\n\n\nclass Mine(GnmrSignal):\n    pass\n"
    (tmp_path / "signal_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    words = "controller.signal=signal_of_mine:Mine", "training.steps=2"
    folder, said = train(tmp_path / "run", *words), list[str]()
    train(folder, *words, say=said.append)
    assert said == [f"{folder} is done: skipped"]
    (tmp_path / "signal_of_mine.py").write_text(code + "\n\nTWICE = True\n")
    with pytest.raises(UserError, match=r"^controller\.signal=signal_of_mine:Mine: its file changed since the run"):
        train(folder, *words)


@pytest.mark.parametrize("word", ["optim.lr=0.5", "training.seed=1", "precision.low=int2"])
def test_a_folder_of_another_config_is_refused(word, copied, train):
    before = {p: p.stat().st_mtime_ns for p in copied.rglob("*")}
    with pytest.raises(UserError, match=word.partition("=")[0]):
        train(copied, word)
    assert before == {p: p.stat().st_mtime_ns for p in copied.rglob("*")}


def test_a_folder_of_something_else_is_refused(train, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.jpg").write_text("miaow")
    with pytest.raises(UserError, match="is not a run folder"):
        train(folder)
    assert [p.name for p in folder.iterdir()] == ["cat.jpg"]
    with pytest.raises(UserError, match="is not a run folder"):
        train(folder / "cat.jpg")
    with pytest.raises(UserError, match="cannot be written"):
        train(folder / "cat.jpg" / "run")


@pytest.mark.parametrize("content", ["a: [", "training: {stps: 3}", "- 1", ""])
def test_a_config_that_cannot_be_read_is_told_in_one_line(content, copied, train):
    (copied / "config.yaml").write_text(content)
    (copied / "DONE").unlink()
    with pytest.raises(UserError) as caught:
        train(copied)
    assert "\n" not in str(caught.value) and "choose another run_dir" in str(caught.value)


def test_a_run_is_not_done_before_its_last_step(copied, train):
    rows = (copied / "steps.jsonl").read_text().splitlines(keepends=True)
    (copied / "steps.jsonl").write_text("".join(rows[:-2]))
    (copied / "DONE").write_text("")  # somebody put it there
    last = len(rows) - 2
    with pytest.raises(UserError, match=f"DONE: the rows end after step {last} of {last + 2}; remove DONE"):
        train(copied)


@pytest.mark.parametrize(
    "words, says",
    [
        (["scores.tasks=[hellaswag]"], None),
        (["scores.tasks=[wikitext2,hellaswag]"], "scores.tasks=[wikitext2]: the run is done without these scores; exp"),
        (
            ["scores.tasks=[hellaswag]", "scores.limit=10"],
            "scores.limit=10: the scores of the run were taken",
        ),
        (
            ["scores.tasks=[hellaswag]", "scores.path=low"],
            "scores.path=low: the scores of the run were taken",
        ),
        ([], None),
    ],
)
def test_other_scores_asked_of_a_done_run_are_told(words, says, copied, train, tiny):
    last = tiny().total_steps
    rows = [
        {"step": step, "path": "16bit", "tasks": {name: {}}} for step, name in ((1, "wikitext2"), (last, "hellaswag"))
    ]
    (copied / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    train(copied, *words, say=said.append)
    assert said[0] == f"{copied} is done: skipped"
    assert len(said) == 1 if says is None else said[1].startswith(says) and "lm_eval" in said[1]


def test_one_process_at_a_time(train, tmp_path, monkeypatch):
    """A child holds the folder, so nothing is loaded; the lock goes with the child, however it ends."""
    folder = tmp_path / "run"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(folder):
            os.write(write, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(read, 1)
        with monkeypatch.context() as patch, pytest.raises(UserError, match="is being written by another process"):
            patch.setattr(run_module, "assemble", lambda *_: pytest.fail("the data and the model were loaded"))
            train(folder, "training.steps=1")
        assert [p.name for p in folder.iterdir()] == [".lock"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert (train(folder, "training.steps=1") / "DONE").exists()


def test_a_defect_leaves_a_marked_folder_and_its_traceback(train, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "validated", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run")
    assert read_json(tmp_path / "run" / "summary.json")["status"] == "failed"
    assert (tmp_path / "run" / "FAILED").read_text() == "a defect; see the traceback\n"


@pytest.mark.parametrize(
    ("number", "where", "name", "step"),
    [(signal.SIGTERM, run_module, "export", 8), (signal.SIGINT, Recorder, "start", 0)],
)
def test_a_stop_outside_the_step_loop_is_no_failure(number, where, name, step, train, tmp_path, monkeypatch):
    folder, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        patch.setattr(where, name, lambda *_: signal.raise_signal(number))
        train(folder)
    assert stopped.type is KeyboardInterrupt or stopped.value.code == 143
    summary = read_json(folder / "summary.json")
    assert summary["status"] == "interrupted"
    assert summary["reason"] == f"stopped outside the step loop, after step {step}"
    assert not (folder / "FAILED").exists() and not (folder / "DONE").exists()
    assert signal.getsignal(signal.SIGTERM) is before
    said: list[str] = []
    assert (train(folder, say=said.append) / "DONE").exists()
    assert said == ([f"continuing after step {step} of {folder}"] if step else [])


def test_the_last_scores_are_made_once(tiny, tmp_path):
    """The run ended between its scores and DONE."""
    made: list[int] = []

    class Scorer:
        def check(self, _parts):
            pass

        def score(self, _parts, step, _say):
            made.append(step)
            return {"step": step, "path": "16bit", "tasks": {}}

    for _ in range(2):
        words = [f"run_dir={tmp_path / 'run'}", "scores.tasks=[hellaswag]", "training.steps=2"]
        folder = run(tiny(*words), lambda _: None, scorer=Scorer())
        (folder / "DONE").unlink()
    assert made == [2] and len(read_jsonl(folder / "scores.jsonl")) == 1


BEFORE_THE_DATA = [
    (["precision.low=fp8_hybrid", "precision.recovery=bf16", "precision.backend=int_mm"], "backend='int_mm'"),
    (["controller.signal=recovery_gap", "precision.recovery=null"], "needs both paths"),
    (["controller.signal=nothing"], "controller: "),
    (["faults.kind=noise", "faults.windows=[[2,1]]", "faults.targets=[nothing]"], "faults: "),
    (["records.monitor=[nothing]"], "records.monitor: "),
]
"""What the model cannot have is told before its data is looked for."""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["precision.targets=[q_proj,nothing]"], "nothing"),
        (["training.seq_len=100000"], "a sequence needs 100001"),
        (["model.outlier_channels={number: 99, gain: 2}"], "the narrowest activation has 32 channels"),
        *(([*words, "data.path=/nowhere"], line) for words, line in BEFORE_THE_DATA),
    ],
)
def test_what_a_run_cannot_have_ends_before_the_folder_is_made(words, line, tiny, tmp_path):
    with pytest.raises(UserError, match=line):
        run(tiny(f"run_dir={tmp_path / 'run'}", *words), lambda _: None)
    assert not (tmp_path / "run").exists()
