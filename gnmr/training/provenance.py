"""Where a number comes from: commit, machine, command and config, and nothing personal that repeating it does not need.

Host and user are left out. A path below the working folder is written relative to it, one below the home folder with
~; of any other path a command keeps the last part.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gnmr
from gnmr import half
from gnmr.config import Config, DataConfig, to_dict
from gnmr.records.machine import cpu_name

_ABSOLUTE = re.compile(r"(?<![^=,\[({'\"])/[^,\])}'\"]*")
"""A path from the root, where a word or a value in it begins."""


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, CPU threads in use, the device's name, and how its CPU multiplies 16-bit tensors."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "products": half.told(),
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


def place(path: str) -> str:
    """A path as seen from the working folder or the home folder where it lies below one of them; else as it is."""
    for folder, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if folder != folder.parent and Path(path).is_relative_to(folder):
            below = str(Path(path).relative_to(folder))
            return below if not start else "~" if below == "." else start + below
    return path


def told_command(command: str) -> str:
    """The command without what its absolute paths tell of the machine."""

    def shorter(found: re.Match[str]) -> str:
        path = place(found[0])
        return path if path != found[0] else Path(path).name or path

    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark that is not closed
        words = command.split()
    return shlex.join(_ABSOLUTE.sub(shorter, word) for word in words)


def told_config(config: Config) -> dict[str, Any]:
    """The config as a tree for config.yaml, without where this run was kept.

    `data.path` and `model.checkpoint` stay as they were given: they are part of what the run is (its hash), and a run
    goes on only where they are the same. `data.cache_dir` is what `gnmr eval` looks for the tokenizer in, besides
    GNMR_CACHE, which is not told.
    """
    tree = to_dict(config)
    tree["run_dir"], tree["runs_dir"] = None, Config.runs_dir
    tree["plan"] = None  # what it says stands in paths
    cache = tree["data"]["cache_dir"]
    tree["data"]["cache_dir"] = DataConfig.cache_dir if cache == os.environ.get("GNMR_CACHE") else place(cache)
    if tree["scores"]["data"] is not None:
        tree["scores"]["data"] = Path(place(tree["scores"]["data"])).name
    return tree
