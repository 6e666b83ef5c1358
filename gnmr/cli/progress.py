"""How far a command is that takes more than seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def showing(doing: str, of: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar with the time left on a terminal's standard error; anywhere else a line every ten seconds. Gives what is to
    be called with how many are done and how many there are. doing, of: `diagnosing`, `batches`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(of), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(doing, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said, first = time.monotonic(), (0, 0.0)  # how many were done at the first call, and when

    def tell(done: int, total: int | None) -> None:
        nonlocal said, first
        now = time.monotonic()
        first = first if first[0] else (done, now)  # what is before it, as preparing data, is no measure of the rest
        if total is not None and done < total and now - said >= 10:
            said = now
            since = done - first[0]
            left = f", {(now - first[1]) / since * (total - done):.0f} s left" if since else ""
            print(f"gnmr: {doing}: {done} of {total} {of}{left}", file=sys.stderr, flush=True)

    yield tell
