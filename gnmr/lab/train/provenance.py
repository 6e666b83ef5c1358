"""Provenance of a result: commit, machine, command and config, without personal data that a repetition does not need.

Host and user are omitted. A path below the working folder is written relative to it, and a path below the home folder
with ~. Other paths stay complete if the command reads them (data.path, model.checkpoint), so that the command still
works. Only the last component is kept of the program's path and of output paths.
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
from gnmr.errors import warn
from gnmr.lab.config import Config, to_dict
from gnmr.records.schema import versions

_ABSOLUTE = re.compile(r"(?<![^=,\[({'\"])/[^,\])}'\"]*")
"""An absolute path at the beginning of a word or of a value in it."""
_WRITTEN = ("run", "run_dir", "runs_dir", "out", "html", "hydra.run.dir", "hydra.sweep.dir")
"""Keys of paths that a command writes to."""


def machine(device: torch.device) -> dict[str, Any]:
    """Return processor, cores, CPU threads, the device's name, and how the CPU multiplies 16-bit tensors."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**versions()["machine"], "cores": os.cpu_count(), "device": name}


@cache
def commit() -> str | None:
    """Return the commit of the checkout, with -dirty if it has changes, or None for an installed package."""
    root = Path(gnmr.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    # A hook or a manager of dotfiles exports GIT_DIR, which would win over -C; without a ceiling, git would look above
    # the checkout. A container often runs as another user than the owner of the checkout.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(root.parent)
    git = ["git", "-C", str(root), "-c", f"safe.directory={root}"]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True, env=environment)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
        warn(f"the records name no commit: git gives none for {root} ({why})")
        return None


def place(path: str, from_here: bool = True) -> str:
    """Return a path relative to the working folder or the home folder if it lies below one of them, else unchanged.

    If `from_here` is false, only the home folder is considered.
    """
    for find, start in ((Path.cwd, ""), (Path.home, "~/"))[not from_here :]:
        with suppress(OSError, RuntimeError):  # the folder is gone, or there is no HOME and no passwd entry
            folder = find()
            if folder != folder.parent and Path(path).is_relative_to(folder):
                below = str(Path(path).relative_to(folder))
                return below if not start else "~" if below == "." else start + below
    return path


def portable_command(command: str) -> str:
    """Return the command with its absolute paths shortened; it still runs on the machine where it ran before."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quotation mark
        words = command.split()

    def shortened(number: int, word: str) -> str:
        # Where a program or its output lies is of no use to a repetition.
        written = number == 0 or word.lstrip("+").partition("=")[0] in _WRITTEN

        def shorter(match: re.Match[str]) -> str:
            path = place(match[0])
            return path if path != match[0] or not written else Path(path).name or path

        return _ABSOLUTE.sub(shorter, word)

    return shlex.join(shortened(number, word) for number, word in enumerate(words))


def portable_config(config: Config) -> dict[str, Any]:
    """Return the config as a tree for config.yaml, without the places where this run was kept.

    `data.path` and `model.checkpoint` stay as they were given, because they are part of the run's hash.
    """
    tree = to_dict(config)
    # The folder of a run says nothing about what it computes.
    tree["run_dir"], tree["runs_dir"] = None, Config.runs_dir
    tree["plan"] = None  # precision.* contains the plan's content
    if tree["scores"]["data"] is not None:
        tree["scores"]["data"] = place(tree["scores"]["data"])
    return tree
