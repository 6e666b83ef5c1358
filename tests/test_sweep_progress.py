"""What a sweep measures beforehand; workers that stop with their parent."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from gnmr.lab import sweep
from gnmr.lab.sweep.progress import last_step
from gnmr.lab.sweep.workers import Workers
from gnmr.lab.train import build
from gnmr.records.reader import read_json

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sweep")]  # one pool of workers


def test_a_measured_step_leaves_nothing_behind(tiny, tmp_path):
    cost = sweep.cell_cost(tiny(f"run_dir={tmp_path / 'run'}"))
    assert 0 < cost.step < 60 and 0 < cost.beside < 60
    assert not list(tmp_path.iterdir())


SIDE_BY_SIDE = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def folders(tmp_path: Path) -> dict[int, Path]:
    """Run folders by seed."""
    return {int(p.name.rsplit("-s", 1)[1]): p for p in sorted(tmp_path.glob("runs/*/*-s*"))}


def done(tmp_path: Path) -> list[int]:
    """Seeds of the cells that are."""
    return [seed for seed, folder in folders(tmp_path).items() if (folder / "DONE").exists()]


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files. Somebody else has taken the name that the stop file once had."""
    folder = tmp_path / "scratch"
    (folder / f"gnmr-stop-{os.getuid()}-{os.getpid()}").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_stop_file_is_out_of_reach(scratch):
    taken = set(scratch.iterdir())
    with Workers(1):
        (own,) = set(scratch.iterdir()) - taken
        assert stat.S_IMODE(own.stat().st_mode) == 0o700 and not list(own.iterdir())
        assert re.fullmatch(r"gnmr-stop-\w{8}", own.name)
    assert set(scratch.iterdir()) == taken


def test_cells_side_by_side(gnmr, tiny_words, tmp_path, scratch, monkeypatch):
    """In processes of their own, which share the cores; skipping and exit codes as with the basic launcher.

    Data is made once before, not by each worker; a cell that is asked for twice is one, and one that chooses its
    threads itself keeps them.
    """
    from joblib import cpu_count

    made = []
    monkeypatch.setattr(build, "prepare", lambda data, tokens, say: made.append(tokens))
    first = gnmr("train", *tiny_words, *SIDE_BY_SIDE, "training.seed=0,1,0", "training.threads=null,3")
    assert first.code == 0 and "sweep: 4 of 4 cells done, 0 failed, in" in first.out, first.err
    assert len(made) == 1
    found = {}
    for folder in tmp_path.glob("runs/*/*-s*"):
        training = yaml.safe_load((folder / "config.yaml").read_text())["training"]
        header, threads = read_json(folder / "header.json"), training["threads"]
        assert header["machine"]["threads"] == threads and (folder / "DONE").exists()
        assert f"training.threads={threads}" in header["command"]
        found[training["seed"], threads] = folder
    assert set(found) == set(itertools.product([0, 1], [max(1, cpu_count() // 2), 3]))
    losses = [read_json(found[seed, 3] / "summary.json")["final_val_loss"] for seed in (0, 1)]
    assert losses[0] != losses[1]

    (found[1, 3] / "DONE").unlink()
    before = (found[0, 3] / "DONE").stat().st_mtime_ns
    # One cell that is done, one that is not, one whose config makes no sense.
    second = gnmr("train", *tiny_words, *SIDE_BY_SIDE, "training.seed=0,1,-1", "training.threads=3")
    assert second.mistake.startswith("training.seed=-1: must lie")
    assert "2 of 3 cells done (1 before), 1 failed, in 0:0" in second.out
    assert "\n  #2: training.seed=-1: must lie" in second.out
    assert (found[1, 3] / "DONE").exists() and len(list(tmp_path.glob("runs/*/*-s*"))) == 4
    assert (found[0, 3] / "DONE").stat().st_mtime_ns == before


LONG = ["training.steps=300", "training.checkpoint_every=1000", "training.eval_every=1000"]
"""A cell that takes seconds and saves no checkpoint before its end unless it is told to stop."""


def wait_for_steps(tmp_path: Path, alive: Callable[[], bool]) -> None:
    """Until both first cells are in training."""
    until = time.monotonic() + 120
    while sum(last_step(folder) > 0 for folder in folders(tmp_path).values()) < 2 and time.monotonic() < until:
        assert alive()
        time.sleep(0.01)
    assert sorted(folders(tmp_path)) == [0, 1]


def assert_stopped_with_checkpoints(tmp_path: Path) -> None:
    """Both first cells, the third was never begun; nobody holds them."""
    assert sorted(folders(tmp_path)) == [0, 1]
    for folder in folders(tmp_path).values():
        summary = read_json(folder / "summary.json")
        assert summary["status"] == "interrupted" and 0 < summary["steps"] < 300, summary
        assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{summary['steps']:08d}"]
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_workers_stop_when_their_parent_is_killed(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, *LONG]
    command = [sys.executable, "-m", "gnmr", "train", *words, "training.seed=0,1,2", *SIDE_BY_SIDE]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for_steps(tmp_path, lambda: parent.poll() is None)
    finally:
        parent.kill()
    out, _ = parent.communicate(timeout=60)  # ends when the last worker has closed its end of the pipe
    assert "sweep: 3 cells, 0 done already, 900 of 900 steps to do, 2 cells side by side: about 0:0" in out
    assert_stopped_with_checkpoints(tmp_path)
    before = last_step(folders(tmp_path)[0])
    again = gnmr("train", *words, "training.seed=0", "-m")
    assert again.code == 0 and f"continuing after step {before} of {folders(tmp_path)[0]}" in again.out
    assert "sweep: 1 of 1 cell done, 0 failed, in" in again.out


def test_a_signal_stops_a_sweep_with_checkpoints(gnmr, tiny_words, tmp_path, scratch):
    """As any of those that test_stopping.py has."""

    def interrupt() -> None:
        wait_for_steps(tmp_path, lambda: True)
        os.kill(os.getpid(), signal.SIGUSR1)

    handler = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=interrupt)
    thread.start()
    ended = gnmr("train", *tiny_words, *LONG, "training.seed=0,1,2", *SIDE_BY_SIDE)
    thread.join()
    assert ended.code == 138, ended.err
    lines = [line for line in ended.out.splitlines() if line.startswith("sweep: ")]
    assert "sweep: stopping, each cell that runs saves a checkpoint first" in lines
    assert lines[-1].startswith("sweep: 0 of 3 cells done, 0 failed, 3 not finished (the same command continues), in ")
    for folder in folders(tmp_path).values():
        assert f"  {folder}: not finished: stopped after step {last_step(folder)}\n" in ended.out
    assert_stopped_with_checkpoints(tmp_path)
    assert signal.getsignal(signal.SIGUSR1) is handler and len(list(scratch.iterdir())) == 1


def worker_of(folder: Path) -> int:
    """Process that writes this run."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == folder / "steps.jsonl":
                return int(link.parts[2])
    raise AssertionError(f"nobody writes {folder}")


def test_a_killed_worker_takes_no_other_along(gnmr, tiny_words, tmp_path):
    """Its cell is not finished, its sibling and the cells that are left end well, and the same command continues."""
    words = [*tiny_words, "training.steps=60", "training.eval_every=1000", "training.seed=0,1,2"]

    def kill() -> None:
        wait_for_steps(tmp_path, lambda: True)
        os.kill(worker_of(folders(tmp_path)[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    ended = gnmr("train", *words, *SIDE_BY_SIDE)
    thread.join()
    assert ended.code == 1 and done(tmp_path) == [1, 2], ended.out
    assert ended.err == "gnmr: sweep: 1 of 3 not finished; the same command continues\n"
    why = "not finished: its worker process was ended by SIGKILL\n"
    assert f"#0 {why}" in ended.out and f"  {folders(tmp_path)[0]}: {why}" in ended.out
    assert "sweep: 2 of 3 cells done, 0 failed, 1 not finished (the same command continues), in" in ended.out
    again = gnmr("train", *words, "-m")
    assert again.code == 0 and done(tmp_path) == [0, 1, 2]
