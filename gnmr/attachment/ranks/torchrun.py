"""The variables of torchrun, or of any launcher that sets them, read without torch."""

from __future__ import annotations

import os

command_done = False
"""Whether the command of this process has done its work, so that the process may end at once."""


def is_torchrun() -> bool:
    """Return True if torchrun's variables are set."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def processes_started() -> int:
    """Return the number of processes that were started together; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if is_torchrun() else 1


def is_first() -> bool:
    """Return True if this process is the one that prints."""
    return not is_torchrun() or os.environ["RANK"] == "0"
