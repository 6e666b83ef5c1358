"""`gnmr train` started by torchrun, or with processes of its own: what a shell sees, and processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gnmr.records.reader import read_json, read_jsonl

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from everything import differences, everything

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("pair"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed"),
]


@pytest.fixture
def words(tiny_words: list[str], tmp_path: Path) -> list[str]:
    steps = ["training.steps=30", "training.checkpoint_every=5", "training.eval_every=30", "training.accumulation=2"]
    return ["train", *tiny_words, *steps, f"run_dir={tmp_path / 'run'}"]


def rank_1_of(parent: int) -> int:
    """The process that is rank 1 of those that this one started, one after the other."""
    children = [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    told = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    ranks = sorted(child for child, words in told.items() if b"spawn_main" in words or b"train" in words)
    assert len(ranks) == 2, told
    return ranks[1]


def waited_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert path.exists(), process.communicate(timeout=60)


def test_a_rank_that_dies_is_restarted_by_torchrun_and_the_run_is_the_same(
    words: list[str], tmp_path: Path, gnmr: Callable[..., object]
) -> None:
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = subprocess.Popen([*torchrun, "-m", "gnmr", *words, "parallel=fsdp"], stderr=subprocess.PIPE, text=True)
    waited_for(folder / "checkpoints" / "step-00000010", process)
    os.kill(rank_1_of(process.pid), signal.SIGKILL)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert [line for line in told.splitlines() if line.startswith("gnmr: run FAILED: another process ended")], told
    assert len(read_json(folder / "header.json")["resumed"]) == 1
    steps = read_jsonl(folder / "steps.jsonl")
    assert [row["step"] for row in steps] == list(range(1, 31))
    there = everything(folder)
    assert gnmr(*words[:-1], f"run_dir={tmp_path / 'alone'}").code == 0
    alone = everything(tmp_path / "alone")
    assert differences(alone["state"]["model"], there["state"]["model"]) == []
    assert [row["num_active"] for row in alone["steps"]] == [row["num_active"] for row in steps]


def test_a_run_starts_its_own_processes_and_one_that_dies_ends_it_in_one_line(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "gnmr", *words, "parallel=ddp", "training.processes=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    waited_for(folder / "checkpoints" / "step-00000005", process)
    os.kill(rank_1_of(process.pid), signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    ours = [line for line in told.splitlines() if line.startswith("gnmr:")]
    assert ours == ["gnmr: run FAILED: process 1 of 2 ended (SIGKILL); the same command continues the run"], told
    assert "another process ended" in (folder / "FAILED").read_text()
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    assert (folder / "DONE").exists() and read_json(folder / "header.json")["world"]["processes"] == 2


def test_a_full_disk_ends_all_processes_in_one_line(tiny_words: list[str], small_disk: Callable[[str], Path]) -> None:
    """Run, temporary files and standard output are on the one disk."""
    disk = small_disk("450k")
    words = [*tiny_words, "training.steps=12", "training.checkpoint_every=10", "training.accumulation=2"]
    words += [f"run_dir={disk / 'run'}", "parallel=ddp", "training.processes=2"]
    command = [sys.executable, "-m", "gnmr", "train", *words]
    (disk / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(disk / "tmp")}
    with (disk / "out").open("w") as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=240, env=env)
    line = f"disk full while writing the checkpoint of step 10 in {disk / 'run' / 'checkpoints'}\n"
    assert (ended.returncode, ended.stderr) == (1, f"gnmr: run FAILED: {line}")
    assert (disk / "run" / "FAILED").read_text() == line
    assert list((disk / "run" / "checkpoints").iterdir()) == []


def test_a_process_that_fails_by_itself_ends_those_that_wait_for_it() -> None:
    script = Path(__file__).with_name("in_launch.py")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "disk full\n", "")
