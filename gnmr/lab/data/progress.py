"""Progress lines of long work: at most one in 2 seconds, at least one in 4."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SAY_EVERY = 2.0  # seconds between two lines about work that reports itself
SILENCE = 4.0  # seconds after which the last line is said again, with the time that the work has taken


class Progress:
    """Called with the state of the work; passes it to `say` now and then.

    Within its `with` block a thread repeats the last line while nothing else is said: training the tokenizer is one
    long call into a library.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._text = ""
        self._begun = self._said = time.monotonic()
        self._ended = threading.Event()

    def begin(self, text: str) -> None:
        """A new kind of work; always said."""
        self._begun = time.monotonic()
        self._speak(text)

    def __call__(self, text: str) -> None:
        """The state of the work; said if the last line is old enough."""
        if time.monotonic() - self._said >= SAY_EVERY:
            self._speak(text)

    def __enter__(self) -> Progress:
        threading.Thread(target=self._repeat, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _speak(self, text: str) -> None:
        self._text, self._said = text, time.monotonic()
        self._say(text)

    def _repeat(self) -> None:
        while not self._ended.wait(0.25):
            now = time.monotonic()
            if self._text and now - self._said >= SILENCE:
                self._said = now
                self._say(f"{self._text} ({now - self._begun:.0f} s)")
