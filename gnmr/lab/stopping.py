"""Collecting signals, so that a run or a sweep can stop at a safe point."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_insist = True  # True if a second signal ends this process at once
_came = False  # True if a signal was collected
seen: list[int] = []  # all signals that were collected in this process


def ending() -> list[signal.Signals]:
    """Return the signals besides Ctrl-C that end a run gracefully.

    They are SIGTERM, SIGUSR1 and SIGUSR2 (warnings of Slurm and submitit before the time limit) and SIGHUP (the
    terminal is closed). A signal other than SIGTERM is left out if it is ignored (nohup).
    """
    graceful = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    return [signal.SIGTERM, *(number for number in graceful if signal.getsignal(number) is not signal.SIG_IGN)]


class Stopped(SystemExit):
    """The end of this process by a signal; its exit code is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __reduce__(self) -> tuple[type[Stopped], tuple[int]]:
        """A worker sends it to its sweep."""
        return type(self), (self.number,)


@contextmanager
def then_as_before() -> Iterator[None]:
    """After `Stopped`, call the signal's handler if it is not Python's: it was set before this block began.

    A launcher such as submitit sets one, which puts the job into the queue again and ends the process.
    """
    try:
        yield
    except Stopped as stopped:
        handler = signal.getsignal(stopped.number)
        if handler not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            signal.raise_signal(stopped.number)
        raise


def is_bypassed(number: int) -> bool:
    """Return True if a job goes on after this signal: submitit ignores SIGTERM, because its own signal follows."""
    return number == signal.SIGTERM and "SUBMITIT_EXECUTOR" in os.environ


def end_at_once(number: int, _frame: object) -> None:
    """Handle a signal outside the step loop: raise `Stopped`, unless this process is ending already."""
    global _came
    if not expected() and not is_bypassed(number):
        _came = True
        raise Stopped(number)


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
def signals_collected(then: Callable[[int], None] | None = None) -> Iterator[list[int]]:
    """Collect Ctrl-C or a signal of `ending` and call `then` with it. A second signal of any kind acts as usual."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        global _came
        _came = True
        received.append(number)
        seen.append(number)
        if _insist and not is_bypassed(number):
            restore()
        if then is not None:
            then(number)

    with handled([signal.SIGINT, *ending()], note) as restore:
        yield received


def second_ends() -> bool:
    """Return True if a second signal ends this process at once."""
    return _insist


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
