"""Sweeps whose cells are jobs of submitit's: its local executor in the place of Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm (hydra-submitit-launcher)")
pytestmark = pytest.mark.slow


@pytest.fixture
def words(tiny_words: list[str], tmp_path: Path) -> list[str]:
    folder = f"hydra.launcher.submitit_folder={tmp_path / 'jobs'}/%j"
    return ["train", "-m", "hydra/launcher=submitit_local", folder, "experiment=act_quant_stress", *tiny_words]


def test_cells_are_jobs_and_one_that_fails_fails_alone(words: list[str], tmp_path: Path) -> None:
    """The second cell's rate is refused."""
    more = ["optim.lr=0.001,1e30"]
    command = [sys.executable, "-m", "gnmr", *words, *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == "gnmr: optim.lr=1e+30: must be a number from 1e-30 to 1000\n"
    assert "1 of 2 cells done, 1 failed" in ended.stdout
    assert len([*(tmp_path / "runs").rglob("DONE")]) == 1
    assert len({path.name.split("_")[0] for path in (tmp_path / "jobs").rglob("*_submitted.pkl")}) == 2


def test_a_job_that_is_killed_ends_the_sweep_in_one_line(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gnmr", *words, "training.steps=100000", "training.seed=0"]
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (found := [*(tmp_path / "runs").rglob("steps.jsonl")]) and time.monotonic() < until:
        time.sleep(0.1)
    assert found and sweep.poll() is None
    for job in job_processes(tmp_path / "jobs"):
        os.kill(job, signal.SIGKILL)
    _, told = sweep.communicate(timeout=120)
    ours = [line for line in told.splitlines() if line.startswith("gnmr:")]
    assert sweep.returncode == 1 and len(ours) == 1 and ours[0].startswith("gnmr: run FAILED: sweep: a job ended ("), (
        told
    )
    assert "Traceback" not in told


def job_processes(folder: Path) -> list[int]:
    """Process ids of submitit's jobs that were given this folder."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes()
        except OSError:
            continue
        if b"submitit.core._submit" in words and bytes(folder) in words:
            found.append(int(line.parent.name))
    return found


def test_a_cell_is_one_task(gnmr: Callable[..., Any], words: list[str]) -> None:
    told = gnmr(*words, "hydra.launcher.tasks_per_node=2").mistake
    assert told.startswith("hydra.launcher.tasks_per_node=2: a cell is one task on one node")
