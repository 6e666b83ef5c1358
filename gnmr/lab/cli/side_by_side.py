"""Run calls in worker processes that save their work when they, or the process that started them, are stopped.

A pool of joblib or loky kills all its workers when one of them is killed, and when its own process is interrupted. Here
each worker is a pool of its own, so the death of one ends its call alone, and signals are passed on and waited for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

from gnmr.console import say
from gnmr.errors import RunFailed, plural
from gnmr.lab.stopping import Stopped, end_at_once, ending, handled, never_at_once

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]
"""A function and its arguments, as `joblib.delayed` returns them."""
_WATCH_S = 0.5
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_working = threading.Event()
"""In a worker: set while it runs a call."""


def run_side_by_side(calls: Sequence[Call], names: Sequence[str], n_jobs: int = -1) -> list[Any]:
    """Return the results of the calls, of which `n_jobs` run at a time in workers (-1: one for each CPU).

    Ctrl-C and the signals of `stopping.ending` are passed on to the workers, and no further call begins. A second
    signal kills the workers.

    Args:
        calls: The functions and their arguments, which can be pickled.
        names: How a message names each call.
        n_jobs: As in joblib.

    Returns:
        The results in the order of the calls.

    Raises:
        RunFailed: Workers were killed. All other calls have ended before.
        Exception: The first exception of a call, once all calls have ended.
        KeyboardInterrupt: After Ctrl-C, once all workers have stopped. `Stopped` after another signal.
    """
    from joblib import effective_n_jobs
    from joblib.externals.loky.backend.resource_tracker import ensure_running

    ensure_running()  # before signals are blocked, because it unblocks them
    workers = _Workers(calls, names, min(effective_n_jobs(n_jobs), len(calls)))
    with handled(workers.signals, workers.pass_on):
        workers.run()
    return workers.outcome()


class _Workers:
    """The workers of some calls, each a pool of one process."""

    def __init__(self, calls: Sequence[Call], names: Sequence[str], jobs: int) -> None:
        from joblib import cpu_count

        # The workers share the CPUs; more threads than cores would slow all of them.
        threads = str(max(cpu_count() // max(jobs, 1), 1))
        self.signals = [signal.SIGINT, *ending()]
        self._calls, self._names, self._jobs = calls, names, jobs
        self._environment = {name: os.environ.get(name, threads) for name in _THREADS}
        self._waiting = deque(range(len(calls)))
        self._running: dict[Future[Any], tuple[int, Any, Any]] = {}
        """The number of the call, the pool and its process, by the future of the call."""
        self._idle: list[Any] = []
        """Pools without a call."""
        self._results: dict[int, Any] = {}
        self._received: list[int] = []
        """Signals that came."""
        self._killed: list[str] = []
        """A line for each worker that was killed."""
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Run all calls, or those that began before a signal came."""
        try:
            while self._running or (self._waiting and not self._received):
                while self._waiting and len(self._running) < self._jobs and not self._received:
                    self._start(self._waiting.popleft())
                for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                    self._end(future)
        except BaseException:
            for _, pool, _ in self._running.values():
                pool.shutdown(wait=False, kill_workers=True)
            raise
        finally:
            for pool in self._idle:
                pool.shutdown(wait=True)

    def outcome(self) -> list[Any]:
        """Return the results in order, or raise what ended the calls."""
        if self._received:
            raise _ended_by(self._received[0])
        if self._errors:
            raise self._errors[0]
        if self._killed:
            raise RunFailed("; ".join(self._killed))
        return [self._results[number] for number in range(len(self._calls))]

    def pass_on(self, number: int, _frame: object) -> None:
        """Handle a signal in this process: send it to the workers; a second one ends them at once."""
        self._received.append(number)
        if len(self._received) > 1:
            raise _ended_by(number)
        self._send(number)
        line = f"{signal.Signals(number).name}: waiting until {plural(len(self._running), 'run')} saved a checkpoint"
        line += "; a second signal ends them at once"
        threading.Thread(target=say, args=(line,), daemon=True).start()  # the signal may have interrupted a print

    def _send(self, number: int) -> None:
        for _, pool, _ in list(self._running.values()):
            for pid in list(_processes(pool)):  # loky may have replaced a worker that needs much memory
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _start(self, number: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        options = {"env": self._environment, "initializer": _begin, "initargs": (os.getpid(),)}
        pool = self._idle.pop() if self._idle else ProcessPoolExecutor(1, **options)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)  # a worker inherits this for its beginning
        try:
            future = pool.submit(_work, *self._calls[number])
            self._running[future] = number, pool, next(iter(_processes(pool).values()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if self._received:
            # The signal came while the worker was starting, and has not reached it.
            self._send(self._received[0])

    def _end(self, future: Future[Any]) -> None:
        from joblib.externals.loky.process_executor import BrokenProcessPool

        number, pool, process = self._running.pop(future)
        error = future.exception()
        # This worker is gone, and its pool with it; the other calls go on.
        if isinstance(error, BrokenProcessPool | Stopped):
            pool.shutdown(wait=False)
            if not self._received:
                self._killed.append(
                    f"{self._names[number]} {_how_ended(error, process)}; the same command continues it"
                )
                say(self._killed[-1])
            return
        self._idle.append(pool)
        if error is None:
            self._results[number] = future.result()
        else:
            self._errors.append(error)


def _processes(pool: Any) -> dict[int, Any]:
    """Return the processes of a pool by their numbers; neither loky nor the standard library has a public way."""
    processes: dict[int, Any] = pool._processes
    return processes


def _ended_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)


def _how_ended(error: BaseException, process: Any) -> str:
    if isinstance(error, Stopped):
        return f"was stopped by {signal.Signals(error.number).name}"
    process.join(_WATCH_S)
    if process.exitcode is None or process.exitcode >= 0:
        return f"failed: its process ended (exit code {process.exitcode})"
    memory = " (out of memory?)" if process.exitcode == -signal.SIGKILL else ""
    return f"failed: its process was killed by {signal.Signals(-process.exitcode).name}{memory}"


# ---- in a worker ----


def _begin(parent: int) -> None:
    """Prepare a worker: signals are blocked until it handles them, and it ends if its parent ends."""
    never_at_once()  # the terminal signals a worker, and its parent does
    signals = [signal.SIGINT, *ending()]
    for number in signals:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _work(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    _working.set()
    try:
        return function(*arguments, **named)
    finally:
        _working.clear()


def _stop(number: int, frame: object) -> None:
    """End a worker; outside a call it has nothing to save."""
    if not _working.is_set():
        sys.stdout.flush()
        os._exit(128 + number)
    end_at_once(number, frame)


def _watch(parent: int) -> None:
    """End this worker with SIGTERM when its parent has ended; nobody would take its result or stop it."""
    # An orphan gets another parent.
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
    while _working.is_set():
        time.sleep(_WATCH_S)
    os._exit(128 + signal.SIGTERM)
