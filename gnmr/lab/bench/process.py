"""`gnmr train` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnmr.errors import RunFailed
from gnmr.lab.bench.setting import Setting

GNMR = (sys.executable, "-m", "gnmr")


@contextmanager
def train(setting: Setting, folder: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """`gnmr train` in a process of its own, W&B offline unless the words say otherwise; what it prints goes to
    folder/stdout and folder/stderr. RunFailed if it ends badly."""
    words = ["records.wandb=offline", *setting.overrides, *overrides, f"run_dir={folder}/run"]
    command = [*GNMR, "train", *words]
    with Path(folder, "stdout").open("w") as stdout, Path(folder, "stderr").open("w+", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            stderr.seek(0)
            lines = stderr.read().strip().splitlines() or ["no message"]
            raise RunFailed(f"gnmr train ended with exit code {process.returncode}: {lines[-1]}")
