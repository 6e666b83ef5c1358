"""Stopping: the sweep's process tells its workers, and workers end with their parent."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from gnmr.launch import say
from gnmr.stopping import signals_collected

_WATCH_S = 0.25  # between a worker's looks at its parent

T = TypeVar("T")


def stop_file(parent: int) -> Path:
    """Where the sweep of process `parent` tells its workers to stop."""
    return Path(tempfile.gettempdir(), f"gnmr-stop-{os.getuid()}-{parent}")


@contextmanager
def stoppable() -> Iterator[list[int]]:
    """Collects Ctrl-C or SIGTERM and tells the workers; a second one of either kind acts as usual.

    Dying at once would not do: joblib kills its workers then, and what they made since their checkpoints is lost.
    """
    stop = stop_file(os.getpid())
    stop.unlink(missing_ok=True)  # of a process of the same number, which was killed

    def tell() -> None:
        stop.touch()
        say("sweep: stopping, each cell that runs saves a checkpoint first")

    try:
        with signals_collected(tell) as received:
            yield received
    finally:
        stop.unlink(missing_ok=True)


def in_worker(work: Callable[[], T], parent: int) -> T | None:
    """`work()` in a worker of the sweep of process `parent`.

    When that is gone, or stops, the worker sends itself SIGTERM, at which a run saves a checkpoint and ends: None.
    Without its parent the worker ends too.
    """
    watch = _watch(parent)
    if watch.stop_file.exists():
        return None
    before = signal.signal(signal.SIGTERM, watch.end)  # for the time before the run's own handler
    watch.begin()
    try:
        return work()
    except SystemExit:
        if not watch.told:
            raise
        return None
    finally:
        watch.finish()
        signal.signal(signal.SIGTERM, before)


class _Watch(threading.Thread):
    """A worker's look at its parent, four times a second for as long as it lives: nothing else tells a loky worker
    that its parent was killed."""

    def __init__(self, parent: int) -> None:
        super().__init__(daemon=True)
        self.stop_file = stop_file(parent)
        self._parent = parent
        self._lock = threading.Lock()
        self._busy = False
        self.told = False
        """SIGTERM was sent: once, because a second one would end the run without its checkpoint."""

    def begin(self) -> None:
        with self._lock:
            self._busy, self.told = True, False

    def finish(self) -> None:
        with self._lock:
            self._busy = False
            self._end_if_orphaned()

    def end(self, number: int, _frame: object) -> None:
        """Handler of SIGTERM."""
        if self._busy:
            raise SystemExit(128 + number)

    def run(self) -> None:
        while True:
            with self._lock:
                if not self._busy:
                    self._end_if_orphaned()
                elif not self.told and (os.getppid() != self._parent or self.stop_file.exists()):
                    self.told = True
                    os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_WATCH_S)

    def _end_if_orphaned(self) -> None:
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)


@cache
def _watch(parent: int) -> _Watch:
    with suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the parent, which tells the workers
    watch = _Watch(parent)
    watch.start()
    return watch
