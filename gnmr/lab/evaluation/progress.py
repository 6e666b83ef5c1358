"""Progress of scoring, one line every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (task, requests done, requests of the task)."""

SAY_EVERY = 30.0  # seconds between two lines


def now_and_then(say: Callable[[str], None]) -> Progress:
    """Tells `say` the progress at most every `SAY_EVERY` seconds."""
    said = time.monotonic()

    def tell(task: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            say(f"scoring {task}: {done} of {total}")

    return tell
