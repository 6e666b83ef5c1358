"""What a sweep says before, during and after; workers that stop with their parent."""

from __future__ import annotations

import fcntl
import itertools
import json
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

from gnmr import sweep
from gnmr.errors import UserError
from gnmr.records.reader import read_json
from gnmr.sweep import progress
from gnmr.sweep.progress import Cell, Progress, last_step, makespan
from gnmr.sweep.workers import Workers
from gnmr.training import build

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sweep")]  # one pool of workers


def write(folder: Path, steps: int = 0, **files: str) -> None:
    """A run folder with that many rows; DONE="", FAILED="why", summary='{...}'."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps({"step": i + 1, "loss": 1.0}) + "\n" for i in range(steps)))
    for name, text in files.items():
        (folder / (name if name.isupper() else f"{name}.json")).write_text(text)


@pytest.fixture
def cell(tiny, tmp_path) -> Callable[..., Cell]:
    """A cell of eight steps after `write`: cell("a", "training.seed=1", steps=4, FAILED="why")."""

    def make(name: str, *words: str, steps: int = 0, **files: str) -> Cell:
        write(tmp_path / name, steps, **files)
        return Cell(list(words), tiny(f"run_dir={tmp_path / name}", *words), 0)

    return make


def refuse(_: object) -> float:
    raise AssertionError("nothing is to be measured")


def test_jobs_take_the_pieces_in_order():
    assert makespan([4, 3, 2, 1], 1) == 10
    assert makespan([4, 3, 2, 1], 2) == 5  # 4 + 1 | 3 + 2
    assert makespan([1, 1, 8], 2) == 9  # the long one comes last: 1 + 8 | 1
    assert makespan([3], 4) == 3 and makespan([], 2) == 0


def test_the_last_whole_row_counts(tmp_path, monkeypatch):
    assert last_step(tmp_path) == 0
    write(tmp_path)
    assert last_step(tmp_path) == 0
    write(tmp_path, 300)
    assert last_step(tmp_path) == 300
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 301, "lo')  # killed, or being written
    monkeypatch.setattr(progress, "_TAIL_BYTES", 64)  # begins within a row
    assert last_step(tmp_path) == 300


def test_beforehand_by_the_recorded_steps_of_the_same_arm(cell, tiny, tmp_path):
    def summary(step_s: float) -> str:
        return json.dumps({"steps": 8, "wall_time_s": 8 * step_s})

    slow, fast, other = "paths.low=int2", "paths.low=int4", "paths.low=int3"
    for name, step_s in (("slow", 2.0), ("fast", 0.5)):
        write(tmp_path / name, 8, DONE="", summary=summary(step_s))
    # A run folder's own name is not part of the arm, so the folders may have any.
    cells = [
        Cell([], tiny(f"run_dir={tmp_path / 'slow'}", slow), 0),
        Cell([], tiny(f"run_dir={tmp_path / 'fast'}", fast), 1),
        cell("slow-1", slow, "training.seed=1"),  # 8 * 2 s
        cell("fast-1", fast, "training.seed=1", steps=4),  # killed: 4 * 0.5 s
        cell("other", other),  # 8 * 1.25 s, the mean of the arms
    ]
    line = "sweep: 5 cells, 2 done already, 20 of 40 steps to do"
    time_of_a_step = "(1.25 s a step, recorded)"
    assert Progress(cells, 1).opening(refuse) == f"{line}: about 0:00:28 {time_of_a_step}"
    assert Progress(cells, 2).opening(refuse) == f"{line}, 2 cells side by side: about 0:00:16 {time_of_a_step}"


def test_beforehand_by_measuring_where_nothing_is_recorded(cell):
    cells = [cell(f"seed-{i}", "training.steps=20", f"training.seed={i}") for i in range(2)]
    asked = []
    line = Progress(cells, 1).opening(lambda config: asked.append(config) or 3.0)
    assert line == "sweep: 2 cells, 0 done already, 40 of 40 steps to do: about 0:02:00 (3 s a step, measured)"
    assert asked == [cells[0].config]

    def cannot(_: object) -> float:
        raise UserError("no such corpus")

    assert Progress(cells, 1).opening(cannot) == "sweep: 2 cells, 0 done already, 40 of 40 steps to do"
    few = [cell("few")]
    assert Progress(few, 1).opening(refuse) == "sweep: 1 cell, 0 done already, 8 of 8 steps to do"
    done = [cell("done", steps=8, DONE="", summary='{"steps": 8, "wall_time_s": 8.0}')]
    assert Progress(done, 1).opening(refuse) == "sweep: 1 cell, 1 done already, 0 of 8 steps to do"


def test_a_measured_step_leaves_nothing_behind(tiny, tmp_path):
    assert 0 < sweep.step_seconds(tiny(f"run_dir={tmp_path / 'run'}")) < 60
    assert not list(tmp_path.iterdir())


def test_time_left_comes_from_the_steps_of_all_cells(cell, tmp_path):
    cells = [cell("a"), cell("b", steps=2), cell("c")]
    progress = Progress(cells, 2)
    assert progress.line() == "sweep: 0 of 3 cells done, 0 failed, 2 running, 2 of 24 steps (8%)"
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 1)  # continues: rows after its checkpoint are dropped
    progress.look(progress.began + 5)
    write(tmp_path / "b", 3)
    progress.look(progress.began + 12)
    # 4 + 2 steps in 2 * 12 s of work: 4 s each. Left 4 and 5, then 8 where 4 were: 12 steps in a row.
    assert progress.line() == ("sweep: 0 of 3 cells done, 0 failed, 2 running, 7 of 24 steps (29%), about 0:00:48 left")
    write(tmp_path / "a", 8, DONE="")
    write(tmp_path / "b", 3, FAILED="disk full\n")
    progress.look(progress.began + 24)
    # 10 steps in 2 * 24 s; what b will not do is not left.
    assert progress.line() == (
        "sweep: 1 of 3 cells done, 1 failed, 1 running, 11 of 19 steps (58%), about 0:00:38 left"
    )
    closing = progress.closing()
    assert re.fullmatch(
        r"sweep: 1 of 3 cells done, 1 failed, 1 not finished \(the same command continues\), in 0:00:\d\d", closing[0]
    )
    assert closing[1:] == [f"  {tmp_path / 'b'}: disk full"]


def test_an_earlier_failure_does_not_count(cell, tmp_path):
    again = cell("again", steps=3, FAILED="an earlier one")
    again.look()
    assert not again.ended
    os.utime(tmp_path / "again" / "FAILED", (1, 1))  # written anew, as the clock of this machine may have it
    again.look()
    assert again.failure == "an earlier one"


def test_a_line_whenever_a_cell_ends_and_at_times(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    said = []
    monkeypatch.setattr(progress, "say", said.append)

    def wait_for(text: str) -> None:
        until = time.monotonic() + 60
        while not any(text in line for line in said) and time.monotonic() < until:
            time.sleep(0.01)
        assert any(text in line for line in said), said

    with Progress([cell("a"), cell("b")], 1):
        time.sleep(0.1)
        assert said == []
        write(tmp_path / "a", 8, DONE="")
        wait_for("sweep: 1 of 2 cells done, 0 failed, 1 running, 8 of 16 steps (50%), about 0:0")
        assert len(said) == 1
        monkeypatch.setattr(progress, "_SAY_S", 0.05)
        write(tmp_path / "b", 6)
        wait_for("14 of 16 steps")
    said.clear()
    time.sleep(0.1)
    assert said == []


# ---- workers ----


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
