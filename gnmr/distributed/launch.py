"""Which processes were started together, and starting them on this machine without torchrun (torch's elastic_launch).

Needs no torch before it starts some.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gnmr.errors import RunFailed, UserError

_TO_BE_ENDED = 5.0
"""Seconds for which a process waits that another one's end be noticed first: that one's is the line to tell."""


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
    here as UserError, RunFailed and SystemExit, however long the others would go on. RunFailed too where a process is
    killed, or none can be started.
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
    # A pipe each, and no file: the disk may be full, which is why they end.
    ours, theirs = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(processes)), strict=True)
    try:
        by_rank: dict[int, tuple[str, Any]] = elastic_launch(config, _rank)(theirs, run, *args)
    except SignalException as error:
        raise SystemExit(128 + int(error.sigval)) from None
    except OSError as error:
        raise RunFailed(f"{processes} processes cannot be started ({error.strerror or error})") from error
    except ChildFailedError as error:
        if not (by_rank := _told(ours, theirs)):
            rank, failure = error.get_first_failure()
            how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            line = f"process {rank} of {processes} ended ({how}); the same command continues the run"
            raise RunFailed(line) from error
    finally:
        for pipe in (*ours, *theirs):
            pipe.close()
    found = [by_rank[rank] for rank in sorted(by_rank)]
    for kind in ("mistake", "failed", "ended"):
        for told, what in found:
            if told == kind == "ended":
                raise SystemExit(what)
            if told == kind:
                raise UserError(what) if kind == "mistake" else RunFailed(what)
    return [what for _, what in found]


def _rank(pipes: Sequence[Connection], run: Callable[..., tuple[str, Any]], *args: Any) -> tuple[str, Any]:
    """One of the processes. Where it does not get done it says why and ends by itself: elastic would keep it, with its
    connections open, until all have returned, and another one may wait for it in a collective.

    The first tells for all, so others that end let it go before them. One that only lost another says nothing: that
    one's end is what is told.
    """
    rank = int(os.environ["RANK"])
    try:
        kind, what = run(*args)
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        _end()
    if kind == "done":
        return kind, what
    lost = kind != "ended" and what.startswith("another process")
    if not lost:
        pipes[rank].send((kind, what))
    if lost or rank > 0:
        time.sleep(_TO_BE_ENDED)
    _end()


def _end() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a file on the full disk
            stream.flush()
    os._exit(1)


def _told(ours: Sequence[Connection], theirs: Sequence[Connection]) -> dict[int, tuple[str, Any]]:
    """Why processes, which have all ended, did so, by rank; nothing where one was killed."""
    for pipe in theirs:
        pipe.close()
    found = {}
    for rank, pipe in enumerate(ours):
        with suppress(EOFError, OSError):  # it was ended before or while it wrote
            if pipe.poll():
                found[rank] = pipe.recv()
    return found
