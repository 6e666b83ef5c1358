"""Which processes were started together, and starting them on this machine without torchrun (torch's elastic_launch).

Needs no torch before it starts some.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gnmr.errors import RunFailed, UserError


def is_torchrun() -> bool:
    """Whether torchrun, or whoever sets its variables, has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def started() -> int:
    """How many processes it has started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if is_torchrun() else 1


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return not is_torchrun() or os.environ["RANK"] == "0"


def launch(processes: int, run: Callable[..., tuple[str, Any]], *args: Any) -> list[Any]:
    """Runs `run(*args)`, a function that can be pickled, in as many new processes; returns what they did, by rank.

    It returns ("done", what), ("mistake", line), ("failed", line) or ("ended", exit code): the last three are raised
    here as UserError, RunFailed and SystemExit. RunFailed too where a process is killed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what happened is told below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="gnmr",
        start_method="spawn",
        max_restarts=0,
        monitor_interval=0.1,
    )
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="gnmr-ranks-") as folder:
        try:
            by_rank: dict[int, tuple[str, Any]] = elastic_launch(config, _rank)(folder, run, *args)
        except SignalException as error:
            raise SystemExit(128 + int(error.sigval)) from None
        except ChildFailedError as error:
            if not (by_rank := _told(Path(folder))):
                rank, failure = error.get_first_failure()
                how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
                line = f"process {rank} of {processes} ended ({how}); the same command continues the run"
                raise RunFailed(line) from error
    found = [by_rank[rank] for rank in sorted(by_rank)]
    for kind in ("mistake", "failed", "ended"):
        for told, what in found:
            if told == kind == "ended":
                raise SystemExit(what)
            if told == kind:
                raise UserError(what) if kind == "mistake" else RunFailed(what)
    return [what for _, what in found]


def _rank(folder: str, run: Callable[..., tuple[str, Any]], *args: Any) -> tuple[str, Any]:
    """One of the processes. Where it fails it leaves why and ends at once: elastic would keep it, with its connections
    open, until all have returned, and another one may wait for it in a collective. One that only lost another returns:
    that one's end is what is told."""
    kind, what = run(*args)
    if kind in ("mistake", "failed") and not what.startswith("another process"):
        with suppress(OSError):
            Path(folder, os.environ["RANK"]).write_text(json.dumps([kind, what]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return kind, what


def _told(folder: Path) -> dict[int, tuple[str, Any]]:
    """Why ranks failed, by rank; nothing where one was killed."""
    found = {}
    for file in folder.iterdir():
        with suppress(ValueError):  # it was ended while it wrote
            found[int(file.name)] = tuple(json.loads(file.read_text()))
    return found
