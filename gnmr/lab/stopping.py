"""Collecting signals, so that a run or a sweep can stop at a safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_insist = True
"""Whether a second signal ends this process at once."""
_came = False
"""Whether one was collected."""


def ending() -> list[signal.Signals]:
    """The signals besides Ctrl-C that end a run well: SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and
    SIGHUP (the terminal is closed). What was ignored when the process began (nohup) stays so."""
    others = [one for one in (signal.SIGUSR1, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    return [signal.SIGTERM, *others]


@contextmanager
def handled(numbers: list[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[Callable[[], None]]:
    """Has `handler` called at these signals; yields what sets the handlers back that were there before.

    Only the main thread can set handlers: in another one, nothing is set.
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
    """Collects Ctrl-C or one of `ending` and calls `then`; a second one of any kind acts as usual."""
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
    """Whether a signal that comes now says nothing new: this process ends already, and no second one is to hurry it."""
    return _came and not _insist


def ends() -> None:
    """This process ends by itself, by an error: the signal with which others end it says nothing new."""
    global _came
    _came = True


def never_at_once() -> None:
    """Makes a second signal have no effect: a worker may get one from its sweep and one from its job."""
    global _insist
    _insist = False
