"""What every benchmark is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from gnmr.lab.config import Config, PrecisionConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The composed config, the words that it was composed of, and how long to measure."""

    config: Config
    overrides: list[str]
    repeats: int | None
    """Measurements of each figure; None: the benchmark's own choice."""
    clock: str = "wall"
    """wall or cpu, see `timing.clock_of`."""
    console: Console = field(default_factory=lambda: Console(stderr=True))
    """Where progress goes."""

    def say(self, text: str) -> None:
        """One line of progress."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def rounds(self, what: str, default: int, warm_up: int = 0) -> Iterable[int]:
        """Numbers of the rounds with progress on a terminal, else one line; those that warm up lie below 0."""
        repeats = self.repeats or default
        text = f"{what} ({repeats} times)"
        shown = self.console.is_terminal
        if not shown:
            self.say(text)
        return track(range(-warm_up, repeats), text, console=self.console, transient=True, disable=not shown)

    def over(self, work: Sequence[T], what: str) -> Iterable[T]:
        """The pieces of work, with progress and time left on a terminal, else one line."""
        shown = self.console.is_terminal
        if not shown:
            self.say(f"{what} ({len(work)} pieces)")
        return track(work, what, console=self.console, transient=True, disable=not shown)

    def static(self, fmt: str) -> Config:
        """The config with that format on every operator and nothing to recover to."""
        paths: PrecisionConfig = replace(self.config.precision, name=fmt, low=fmt, recovery=None)
        return replace(self.config, precision=paths, controller=replace(self.config.controller, warmup_frac=0.0))
