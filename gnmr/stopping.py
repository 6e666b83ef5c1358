"""Stopping a process on Ctrl-C or SIGTERM when it is ready, not at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_collected(then: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Collects Ctrl-C or SIGTERM and calls `then`; a second one of either kind acts as usual."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
        restore()
        if then is not None:
            then()

    def restore() -> None:
        for number, old in before.items():
            signal.signal(number, old)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        restore()
