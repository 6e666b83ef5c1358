"""How long a fresh process takes to begin."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from gnmr.lab.bench import process
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import samples


def startup(setting: Setting) -> list[Figure]:
    """Wall time of `gnmr --help`, and of `gnmr train` from the start of its process to its first line and to the first
    row in steps.jsonl."""
    line_s: list[float] = []

    def first_row() -> float:
        with tempfile.TemporaryDirectory(prefix="gnmr-bench-") as folder:
            began = time.perf_counter()
            with process.train(setting, folder, "training.steps=1", "training.eval_sequences=1") as run:
                line_s.append(_until(run, Path(folder, "stdout"), began))
                return _until(run, Path(folder, "run", "steps.jsonl"), began)

    def asked_for_help() -> float:
        began = time.perf_counter()
        subprocess.run([*process.GNMR, "--help"], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began

    help_s = samples(asked_for_help, setting.rounds("startup: gnmr --help", 5, warm_up=1))
    begin_s = samples(first_row, setting.rounds("startup: gnmr train to its first step", 3, warm_up=1))
    first_s = np.array(line_s[-len(begin_s) :])
    return [
        median("gnmr --help", help_s, "s", target=0.5),
        median("gnmr train to its first line", first_s, "s", target=1.0),
        median("gnmr train to its first row in steps.jsonl, warm cache", begin_s, "s", target=8.0),
    ]


def _until(run: subprocess.Popen[str], file: Path, began: float) -> float:
    """Seconds since `began`, when something stands in the file or the process has ended."""
    while run.poll() is None and not (file.exists() and file.stat().st_size):
        time.sleep(0.002)
    return time.perf_counter() - began


PARTS = {"startup": startup}
