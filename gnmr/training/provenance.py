"""Where a number comes from: commit and machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gnmr


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, CPU threads in use, and the device's name."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


@cache
def commit() -> str | None:
    """Commit of the checkout that the package is imported from, with -dirty if it is changed; None if installed."""
    root = Path(gnmr.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
