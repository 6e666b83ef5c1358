"""How much memory a run takes at its peak."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from gnmr.errors import UserError
from gnmr.lab.bench import process
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import samples

MEMORY_STEPS = 24
POLL_S = 0.05
_PROC = Path("/proc")


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
            process.train(setting, folder, f"training.steps={steps}") as run,
        ):
            while run.poll() is None:
                for pid in _family(run.pid):
                    peaks[pid] = _high_water(pid) or peaks.get(pid, ("", 0.0))
                time.sleep(POLL_S)
        parts.clear()
        for name, mib in peaks.values():
            parts[name] = parts.get(name, 0.0) + mib
        return sum(parts.values())

    mib = samples(peak, setting.rounds(f"memory: gnmr train, {steps} steps", 1))
    note = ", ".join(f"{name} {value:,.0f} MiB" for name, value in parts.items() if name)
    return [median("peak resident memory of gnmr train and its helpers", mib, "MiB", target=2048.0, note=note)]


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


PARTS = {"memory": memory}
CHECKS = {"memory": check_memory}
