"""Arms that take turns. On a machine that others use too, seconds mean little and ratios of neighbours a lot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gnmr.errors import UserError

Clock = Callable[[], float]


def clock_of(device: torch.device, kind: str) -> Clock:
    """Seconds: `wall`, on an accelerator after everything that was queued is done, or `cpu`, used by all threads."""
    if kind == "cpu":
        if device.type != "cpu":
            raise UserError(
                f"clock=cpu: the benchmark runs on {device.type}, whose work it does not see; use clock=wall"
            )
        return time.process_time
    if device.type == "cpu":
        return time.perf_counter

    def synchronized() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return synchronized


def alternate(
    arms: Mapping[str, Callable[[], object]], rounds: Iterable[int], clock: Clock = time.perf_counter
) -> dict[str, np.ndarray]:
    """Seconds of every arm in every round, (rounds,) each.

    In each round every arm runs once; the order turns by one from round to round, so that none is always the first.
    Rounds that are numbered below 0 warm up: they run and are not kept.
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in rounds:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = clock()
            arms[name]()
            if number >= 0:
                seconds[name].append(clock() - began)
    return {name: np.array(values) for name, values in seconds.items()}


def samples(measure: Callable[[], float], rounds: Iterable[int]) -> np.ndarray:
    """What `measure` returns in every round, (rounds,); rounds below 0 warm up and are not kept."""
    taken = [(number, measure()) for number in rounds]
    return np.array([value for number, value in taken if number >= 0])


class Stopwatch:
    """Seconds spent in named parts of a step, from within the step as it really runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._laps: list[dict[str, float]] = []

    def lap(self) -> None:
        """A new step begins."""
        self._laps.append({})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to a part of the step; does nothing before the first step."""
        began = self._clock()
        yield
        if self._laps:
            lap = self._laps[-1]
            lap[name] = lap.get(name, 0.0) + self._clock() - began

    @contextmanager
    def inside(self, *parts: tuple[object, str, str]) -> Iterator[None]:
        """Inside, each (owner, attribute, part) is a function whose calls are timed as that part."""
        with ExitStack() as stack:
            for owner, attribute, name in parts:
                stack.enter_context(patch.object(owner, attribute, self._timed(getattr(owner, attribute), name)))
            yield

    def seconds(self, name: str, last: int) -> np.ndarray:
        """Of one part in the `last` steps; 0 where the part did not run."""
        return np.array([lap.get(name, 0.0) for lap in self._laps[-last:]])

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed
