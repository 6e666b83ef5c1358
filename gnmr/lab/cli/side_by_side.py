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

    Raises:
        RunFailed: Workers were killed. All other calls have ended before.
        Exception: The first exception of a call, once all calls have ended.
        KeyboardInterrupt: After Ctrl-C, once all workers have stopped. `Stopped` after another signal.
    """
    from joblib import cpu_count, effective_n_jobs
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.backend.resource_tracker import ensure_running
    from joblib.externals.loky.process_executor import BrokenProcessPool

    jobs = min(effective_n_jobs(n_jobs), len(calls))
    threads = str(max(cpu_count() // max(jobs, 1), 1))
    environment = {name: os.environ.get(name, threads) for name in _THREADS}
    signals = [signal.SIGINT, *ending()]
    waiting, results, idle = deque(range(len(calls))), dict[int, Any](), list[ProcessPoolExecutor]()
    running: dict[Future[Any], tuple[int, ProcessPoolExecutor, Any]] = {}  # the number of the call, pool, process
    received, lost, errors = list[int](), list[str](), list[BaseException]()

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)
        tell(number)
        runs = plural(len(running), "run")
        line = (
            f"{signal.Signals(number).name}: waiting until {runs} saved a checkpoint; a second signal ends them at once"
        )
        threading.Thread(target=say, args=(line,), daemon=True).start()  # the signal may have interrupted a print

    def tell(number: int) -> None:
        for _, pool, _ in list(running.values()):
            for pid in list(pool._processes):  # loky may have replaced a worker that needs much memory
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def start(number: int) -> None:
        options = {"env": environment, "initializer": _begin, "initargs": (os.getpid(),)}
        pool = idle.pop() if idle else ProcessPoolExecutor(1, **options)
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a worker inherits this until it has its handlers
        try:
            future = pool.submit(_work, *calls[number])
            running[future] = number, pool, next(iter(pool._processes.values()))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if received:
            tell(received[0])

    ensure_running()  # before signals are blocked, because it unblocks them
    try:
        with handled(signals, pass_on):
            while running or (waiting and not received):
                while waiting and len(running) < jobs and not received:
                    start(waiting.popleft())
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, pool, worker = running.pop(future)
                    if (error := future.exception()) is None:
                        results[number] = future.result()
                        idle.append(pool)
                    elif isinstance(error, BrokenProcessPool | Stopped):
                        pool.shutdown(wait=False)
                        if not received:
                            lost.append(f"{names[number]} {_ended(error, worker)}; the same command continues it")
                            say(lost[-1])
                    else:
                        errors.append(error)
                        idle.append(pool)
    except BaseException:
        for _, pool, _ in running.values():
            pool.shutdown(wait=False, kill_workers=True)
        raise
    finally:
        for pool in idle:
            pool.shutdown(wait=True)
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else Stopped(received[0])
    if errors:
        raise errors[0]
    if lost:
        raise RunFailed("; ".join(lost))
    return [results[number] for number in range(len(calls))]


def _ended(error: BaseException, worker: Any) -> str:
    if isinstance(error, Stopped):
        return f"was stopped by {signal.Signals(error.number).name}"
    worker.join(_WATCH_S)
    if worker.exitcode is None or worker.exitcode >= 0:
        return f"failed: its process ended (exit code {worker.exitcode})"
    memory = " (out of memory?)" if worker.exitcode == -signal.SIGKILL else ""
    return f"failed: its process was killed by {signal.Signals(-worker.exitcode).name}{memory}"


def _begin(parent: int) -> None:
    """Prepare a worker: signals are blocked until it handles them, and it ends if its parent ends."""
    never_at_once()  # the terminal signals a worker, and its parent does
    signals = [signal.SIGINT, *ending()]
    for number in signals:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _work(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    _working.set()
    try:
        return function(*arguments, **named)
    finally:
        _working.clear()


def _end(number: int, frame: object) -> None:
    """End a worker; outside a call it has nothing to save."""
    if not _working.is_set():
        sys.stdout.flush()
        os._exit(128 + number)
    end_at_once(number, frame)


def _watch(parent: int) -> None:
    """End this worker with SIGTERM when its parent has ended; nobody would take its result or stop it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
    while _working.is_set():
        time.sleep(_WATCH_S)
    os._exit(128 + signal.SIGTERM)
