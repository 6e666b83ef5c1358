"""A run's step, taken on one batch again and again; arms that differ in their config, taking turns at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import alternate, clock_of
from gnmr.lab.config import Config
from gnmr.lab.train.build import Parts, assemble, first_batch, train_step
from gnmr.lab.train.step import StepResult


def same_step(parts: Parts) -> Callable[[], StepResult]:
    """One step of `gnmr train` without records, on that batch each time."""
    take_step, micro_batches = train_step(parts), first_batch(parts)
    return lambda: take_step(micro_batches, parts.config.optim.lr)


@dataclass(frozen=True)
class Compared:
    """What `compare` measured; (rounds,) float64 each."""

    seconds: np.ndarray
    """Of the reference, the first arm."""
    ratios: dict[str, np.ndarray]
    """Of every other arm: its seconds over the reference's in the same round."""
    parts: dict[str, Parts]
    last: dict[str, StepResult]
    """Of every arm the last step."""


def compare(setting: Setting, what: str, arms: Mapping[str, Config]) -> Compared:
    """Steps of `same_step` under each config, one model an arm, taking turns; the first arm is the reference."""
    parts = {name: assemble(config, Path(), setting.say) for name, config in arms.items()}
    last: dict[str, StepResult] = {}

    def arm(name: str) -> Callable[[], None]:
        take_step = same_step(parts[name])

        def step() -> None:
            last[name] = take_step()

        return step

    reference, *others = arms
    clock = clock_of(parts[reference].device, setting.clock)
    rounds = setting.rounds(f"{what} {', '.join(arms)}", 15, warm_up=2)
    seconds = alternate({name: arm(name) for name in arms}, rounds, clock)
    return Compared(seconds[reference], {name: seconds[name] / seconds[reference] for name in others}, parts, last)
