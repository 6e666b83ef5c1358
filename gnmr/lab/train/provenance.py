"""Where a number comes from: commit, machine, command and config, and nothing personal that repeating it does not need.

Host and user are left out. A path below the working folder is written relative to it, one below the home folder with
~. Any other path stays whole where the command reads it (data.path, model.checkpoint, ...), so that the command runs as
it is written; of the program and of a place that is written to, the last part is kept.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gnmr
from gnmr.lab.config import Config, DataConfig, to_dict
from gnmr.records.rows import versions

_ABSOLUTE = re.compile(r"(?<![^=,\[({'\"])/[^,\])}'\"]*")
"""A path from the root, where a word or a value in it begins."""
_WRITTEN = ("run", "run_dir", "runs_dir", "data.cache_dir", "out", "html", "hydra.run.dir", "hydra.sweep.dir")
"""Keys of places that a command writes to."""


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, CPU threads in use, the device's name, and how its CPU multiplies 16-bit tensors."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**versions()["machine"], "cores": os.cpu_count(), "device": name}


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


def place(path: str, from_here: bool = True) -> str:
    """A path as seen from the working folder (unless `from_here` is false) or the home folder where it lies below one
    of them; else as it is."""
    for find, start in ((Path.cwd, ""), (Path.home, "~/"))[not from_here :]:
        with suppress(OSError, RuntimeError):  # the folder is gone; no HOME, and nobody's entry in passwd
            folder = find()
            if folder != folder.parent and Path(path).is_relative_to(folder):
                below = str(Path(path).relative_to(folder))
                return below if not start else "~" if below == "." else start + below
    return path


def portable_command(command: str) -> str:
    """The command without what its absolute paths tell of the machine; it runs where it ran before."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark that is not closed
        words = command.split()

    def told(number: int, word: str) -> str:
        written = number == 0 or word.lstrip("+").partition("=")[0] in _WRITTEN

        def shorter(found: re.Match[str]) -> str:
            path = place(found[0])
            return path if path != found[0] or not written else Path(path).name or path

        return _ABSOLUTE.sub(shorter, word)

    return shlex.join(told(number, word) for number, word in enumerate(words))


def portable_config(config: Config, folder: Path) -> dict[str, Any]:
    """Return the config as a tree for config.yaml, without the places where this run was kept.

    `data.path` and `model.checkpoint` stay as they were given, because they are part of the run's hash.
    `data.cache_dir` is written as seen from the run's `folder`, because `gnmr diagnose` looks for the tokenizer in it.
    """
    tree = to_dict(config)
    tree["run_dir"], tree["runs_dir"] = None, Config.runs_dir
    tree["plan"] = None  # what it says stands in paths
    cache = tree["data"]["cache_dir"]
    tree["data"]["cache_dir"] = DataConfig.cache_dir if cache == os.environ.get("GNMR_CACHE") else _cache(cache, folder)
    if tree["scores"]["data"] is not None:
        tree["scores"]["data"] = place(tree["scores"]["data"])
    return tree


def _cache(path: str, folder: Path) -> str:
    """A path as seen from `folder` where both lie below the working folder; else from the home folder, or whole."""
    if path.startswith("~"):
        return path
    with suppress(OSError):
        here, there = Path.cwd(), os.path.realpath(path)
        run = os.path.realpath(folder.expanduser())
        if here != here.parent and all(Path(one).is_relative_to(here) for one in (there, run)):
            return os.path.relpath(there, run)
        return place(str(Path(path).absolute()), from_here=False)
    return path
