"""Cells side by side: worker processes that the sweep can stop, that end with it, and that die alone."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gnmr.console import say
from gnmr.lab.stopping import ending, never_at_once, signals_collected

if TYPE_CHECKING:
    from joblib.externals.loky import ProcessPoolExecutor

_WATCH_S = 0.25  # between a worker's looks at its parent

T = TypeVar("T")


class Workers:
    """`jobs` processes side by side, while it is entered as a context.

    Each is a pool of its own: loky ends all workers of a pool in which one was killed. In place of that one a new one
    is started for the next task.
    """

    def __init__(self, jobs: int) -> None:
        """jobs: processes at the most; one is started when there is a task for it."""
        self.received: list[int] = []
        """The signal that stopped them, if one did."""
        self._jobs = jobs
        self._open = ExitStack()

    def __enter__(self) -> Workers:
        # A folder of our own, which nobody else can write to.
        self._stop = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="gnmr-stop-")), "stop")
        self.received = self._open.enter_context(signals_collected(self._tell))
        self._idle = [self._pool() for _ in range(self._jobs)]
        self._busy: dict[Future[Any], tuple[int, ProcessPoolExecutor]] = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in (*self._idle, *(pool for _, pool in self._busy.values())):
            pool.shutdown(kill_workers=kind is not None)
        self._open.close()

    def each(self, tasks: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T | BaseException | None]]:
        """As they end: the number of a task, and what it returned or raised, None where it was stopped.

        `BrokenProcessPool` where its worker was killed; the others go on.
        """
        waiting = list(enumerate(tasks))[::-1]
        while waiting or self._busy:
            while waiting and self._idle:
                number, task = waiting.pop()
                future, pool = self._submit(task)
                self._busy[future] = number, pool
            for future in wait(self._busy, return_when=FIRST_COMPLETED).done:
                number, pool = self._busy.pop(future)
                self._idle.append(pool)
                error = future.exception()
                yield number, future.result() if error is None else error

    def _submit(self, task: Callable[[], Any]) -> tuple[Future[Any], ProcessPoolExecutor]:
        """Hands the task to an idle worker, or to a new one where that has died."""
        pool = self._idle.pop()
        try:
            return pool.submit(in_worker, task, os.getpid(), self._stop), pool
        except BrokenProcessPool:
            pool.shutdown()
            pool = self._pool()
            return pool.submit(in_worker, task, os.getpid(), self._stop), pool

    def _pool(self) -> ProcessPoolExecutor:
        from joblib.externals.loky import ProcessPoolExecutor

        threads = str(max(1, (os.cpu_count() or 1) // self._jobs))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return ProcessPoolExecutor(max_workers=1, env={name: os.environ.get(name, threads) for name in names})

    def _tell(self) -> None:
        """Dying at once would not do: what the workers made since their checkpoints would be lost."""
        self._stop.touch()
        say("sweep: stopping, each cell that runs saves a checkpoint first")


def how_it_ended(error: BrokenProcessPool) -> str:
    """Of a worker, by what loky says of it."""
    by = re.search(r"(SIG[A-Z0-9]+)\(-\d+\)", str(error))
    return (
        f"its worker process was ended by {by[1]}" if by else f"its worker process broke ({str(error).splitlines()[0]})"
    )


def in_worker(work: Callable[[], T], parent: int, stop: Path) -> T | None:
    """`work()` in a worker of the process `parent`; None where it was stopped.

    When the parent is gone, or the file `stop` is there, the worker sends itself SIGTERM, at which a run saves a
    checkpoint and ends. Without its parent the worker ends too.
    """
    watch = _watch(parent, stop)
    if stop.exists():
        return None
    watch.begin()
    try:
        return work()
    except SystemExit:
        return None
    finally:
        watch.finish()


class _Watch(threading.Thread):
    """A worker's look at its parent, four times a second for as long as it lives: nothing else tells a loky worker
    that its parent was killed."""

    def __init__(self, parent: int, stop: Path) -> None:
        super().__init__(daemon=True)
        self._parent, self._stop = parent, stop
        self._lock = threading.Lock()
        self._busy = self._told = self._ended = False

    def begin(self) -> None:
        with self._lock:
            self._busy, self._told, self._ended = True, False, False

    def finish(self) -> None:
        with self._lock:
            self._busy = False
            self._end_if_orphaned()

    def end(self, number: int, _frame: object) -> None:
        """Handler of a signal where the run has none of its own: ends the work, once, and an idle worker not at all."""
        if self._busy and not self._ended:
            self._ended = True
            raise SystemExit(128 + number)

    def run(self) -> None:
        while True:
            with self._lock:
                if not self._busy:
                    self._end_if_orphaned()
                elif not self._told and (os.getppid() != self._parent or self._stop.exists()):
                    self._told = True
                    os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_WATCH_S)

    def _end_if_orphaned(self) -> None:
        if os.getppid() != self._parent:
            os._exit(128 + signal.SIGTERM)


@cache
def _watch(parent: int, stop: Path) -> _Watch:
    with suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C in the terminal is for the parent, which tells the workers
    watch = _Watch(parent, stop)
    for number in ending():
        signal.signal(number, watch.end)
    never_at_once()
    watch.start()
    return watch
