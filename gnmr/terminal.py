"""What is printed for people."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """rich's console; a reader that leaves (gnmr report | head) is a BrokenPipeError, as for `print`, and no exit."""

    def on_broken_pipe(self) -> None:
        """rich's own ends the process, which in the middle of a run would be taken for a signal."""
        raise BrokenPipeError
