"""What `launch` makes of two processes of which the second fails by itself, while the first waits for it."""

from __future__ import annotations

import os
import time
from typing import Any

from gnmr.cli import train
from gnmr.distributed import launch as launching
from gnmr.distributed.launch import launch
from gnmr.errors import RunFailed
from gnmr.lab.config.compose import compose

launching._TO_BE_ENDED = 0.5  # the processes import this file too


def fails(*_: Any) -> None:
    """As a run's `_train` ends in a process that is not the first."""
    raise SystemExit(1) from RunFailed("disk full")


def alone() -> tuple[str, Any]:
    if os.environ["RANK"] == "1":
        train._train = fails
        return train.rank_of_run(compose([]), "")
    time.sleep(60)
    return "failed", "waited in vain"


if __name__ == "__main__":
    try:
        print(launch(2, alone))
    except RunFailed as error:
        print(f"{error}")
