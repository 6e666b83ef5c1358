"""`gnmr train` under torchrun: a process that dies is started again, and the run is the same."""

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
from everything import SHARDED, differences, everything

from gnmr.records.reader import read_json, read_jsonl

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


def test_a_process_that_is_done_does_not_wait_for_gloo(words: list[str], tmp_path: Path) -> None:
    """At the interpreter's end gloo's threads may call std::terminate, rarely; so it must not come to that."""
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, sys\n"
        "atexit.register(print, 'the interpreter ends')\n"
        "from gnmr.lab.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for wrong, code in (([], 0), (["training.steps=-1"], 1)):
        command = [*torchrun, str(script), *words, "training.steps=2", "parallel=fsdp", *wrong]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert ended.returncode == code, ended.stderr
        assert ("the interpreter ends" in ended.stdout) is bool(wrong)
    assert (tmp_path / "run" / "DONE").exists()


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
    assert differences(alone["state"]["model"], there["state"]["model"], **SHARDED) == []
    assert [row["num_active"] for row in alone["steps"]] == [row["num_active"] for row in steps]
