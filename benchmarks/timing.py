"""Tools that the benchmark scripts share: arms that take turns, intervals, and the header of a result file.

The arms of a comparison run in one process and take turns, so that a busy machine slows all of them alike. A round
gives one ratio; a result is the median over the rounds with its 95% bootstrap interval.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gnmr
from gnmr.lab.train.provenance import commit, machine, portable_command
from gnmr.records import output

Clock = Callable[[], float]


def clock_of(device: torch.device, kind: str = "wall") -> Clock:
    """Return a clock: `wall` waits for the device's queued work, `cpu` counts the CPU time of all threads."""
    if kind == "cpu":
        if device.type != "cpu":
            raise ValueError(f"--clock cpu: the benchmark runs on {device.type}; use --clock wall")
        return time.process_time

    def synchronized() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return synchronized


def alternate(
    arms: Mapping[str, Callable[[], object]], rounds: Iterable[int], clock: Clock = time.perf_counter
) -> dict[str, np.ndarray]:
    """Return the seconds of every arm in every round, (rounds,) each.

    The order rotates by one from round to round, so that no arm is always the first. Rounds with a negative number are
    warm-up rounds, which are not kept.
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in rounds:
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            began = clock()
            arms[name]()
            if number >= 0:
                seconds[name].append(clock() - began)
    return {name: np.array(values) for name, values in seconds.items()}


def spread(samples: Any) -> dict[str, Any]:
    """Return the median of the samples, its 95% bootstrap interval and their number."""
    x = np.asarray(samples, dtype=float)
    draws = np.random.default_rng(0).choice(x, (2000, len(x)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"median": float(np.median(x)), "low": float(low), "high": float(high), "n": len(x)}


def header() -> dict[str, Any]:
    """Return the origin of this process's numbers: command, date, commit, versions, machine and load."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "command": portable_command(shlex.join(["python", script, *sys.argv[1:]])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "gnmr": gnmr.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine(device) | {"load_average": list(os.getloadavg())},
    }


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows with their header to `out` and print them."""
    for row in rows:
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    output.write_json(out, header() | {"rows": rows}, str(out))
