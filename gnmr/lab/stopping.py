"""Collecting signals, so that a run or a sweep can stop at a safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_insist = True
"""True if a second signal ends this process at once."""
_came = False
"""True if a signal was collected."""


def ending() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that end a run gracefully.

    They are SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and SIGHUP (the terminal is closed). SIGUSR1 and
    SIGHUP are left out if they were ignored when the process began (nohup).
    """
    others = [one for one in (signal.SIGUSR1, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    return [signal.SIGTERM, *others]


@contextmanager
def handled(numbers: list[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[Callable[[], None]]:
    """Call `handler` at these signals, and yield a function that restores the previous handlers.

    Only the main thread can set handlers. In another thread, nothing is set.
    """
    if threading.current_thread() is not threading.main_thread():
        numbers = []

    def restore() -> None:
        for number, old in before.items():
            signal.signal(number, old)

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield restore
    finally:
        restore()


@contextmanager
def signals_collected(then: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Collect Ctrl-C or a signal of `ending` and call `then`. A second signal of any kind acts as usual."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        global _came
        _came = True
        received.append(number)
        if _insist:
            restore()
        if then is not None:
            then()

    with handled([signal.SIGINT, *ending()], note) as restore:
        yield received


def expected() -> bool:
    """Return True if a signal can be ignored: this process is ending, and a second signal must not hurry it."""
    return _came and not _insist


def ends() -> None:
    """Mark that this process is ending with an error, so that a signal with which others end it is expected."""
    global _came
    _came = True


def never_at_once() -> None:
    """Disable the effect of a second signal, because a worker may get one from its sweep and one from its job."""
    global _insist
    _insist = False
