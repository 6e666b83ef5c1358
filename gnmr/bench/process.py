"""What only a fresh process shows: how long it takes to begin, and how much memory it takes at its peak."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnmr.bench.figures import Figure, median
from gnmr.bench.setting import Setting
from gnmr.bench.timing import samples
from gnmr.errors import RunFailed, UserError

GNMR = (sys.executable, "-m", "gnmr")
MEMORY_STEPS = 24
POLL_S = 0.05
_PROC = Path("/proc")


def startup(setting: Setting) -> list[Figure]:
    """Wall time of `gnmr --help`, and of `gnmr train` from the start of its process to the first row in steps.jsonl."""

    def first_row() -> float:
        with tempfile.TemporaryDirectory(prefix="gnmr-bench-") as folder:
            rows = Path(folder, "run", "steps.jsonl")
            began = time.perf_counter()
            with _train(setting, folder, "training.steps=1", "training.eval_blocks=1") as process:
                while process.poll() is None and not (rows.exists() and rows.stat().st_size):
                    time.sleep(0.002)
                return time.perf_counter() - began

    def asked_for_help() -> float:
        began = time.perf_counter()
        subprocess.run([*GNMR, "--help"], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began

    help_s = samples(asked_for_help, setting.rounds("startup: gnmr --help", 5, warm_up=1))
    begin_s = samples(first_row, setting.rounds("startup: gnmr train to its first step", 3, warm_up=1))
    return [
        median("gnmr --help", help_s, "s", 0.5),
        median("gnmr train to its first row in steps.jsonl, warm cache", begin_s, "s", 8.0),
    ]


def check_memory(_setting: Setting) -> None:
    """UserError unless memory can be measured."""
    if not (_PROC / "self" / "status").exists():
        raise UserError("bench memory: reads /proc, which only Linux has")


def memory(setting: Setting) -> list[Figure]:
    """Peak resident memory of `gnmr train` over some steps, an evaluation and a checkpoint, its helpers counted."""
    steps = min(MEMORY_STEPS, setting.config.training.steps)
    parts: dict[str, float] = {}

    def peak() -> float:
        peaks: dict[int, tuple[str, float]] = {}
        with (
            tempfile.TemporaryDirectory(prefix="gnmr-bench-") as folder,
            _train(setting, folder, f"training.steps={steps}") as process,
        ):
            while process.poll() is None:
                for pid in _family(process.pid):
                    peaks[pid] = _high_water(pid) or peaks.get(pid, ("", 0.0))
                time.sleep(POLL_S)
        parts.clear()
        for name, mib in peaks.values():
            parts[name] = parts.get(name, 0.0) + mib
        return sum(parts.values())

    mib = samples(peak, setting.rounds(f"memory: gnmr train, {steps} steps", 1))
    note = ", ".join(f"{name} {value:,.0f} MiB" for name, value in parts.items() if name)
    return [median("peak resident memory of gnmr train and its helpers", mib, "MiB", 2048.0, note)]


@contextmanager
def _train(setting: Setting, folder: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """`gnmr train` in a process of its own, W&B offline unless the words say otherwise. RunFailed if it ends badly."""
    words = ["records.wandb=offline", *setting.overrides, *overrides, f"run_dir={folder}/run"]
    command = [*GNMR, "train", *words]
    with open(Path(folder, "stderr"), "w+", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True)
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


def _family(pid: int) -> list[int]:
    """The process and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _high_water(pid: int) -> tuple[str, float] | None:
    """Name and peak resident memory in MiB of a process; None once it has ended.

    Read from /proc and not from getrusage: there a child's peak begins at that of the process that forked it.
    """
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmHWM" not in fields:
        return None
    return fields["Name"].strip(), int(fields["VmHWM"].split()[0]) / 1024
