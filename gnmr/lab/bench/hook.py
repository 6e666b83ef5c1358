"""What compressing gradients costs a step, two workers: as two processes (gloo, DDP's hook) and as virtual ones.

Arms take turns, each with a model of its own: forward, loss, backward with its reduction, and AdamW, no control.

    dense        gradients sent whole
    low          GreedyLore, every matrix on the low path
    recovery     GreedyLore, every matrix on the recovery path: all is sent, and nothing is held back
    refresh      GreedyLore, a new basis: a dense step and a singular value decomposition of every matrix
    PowerSGD     torch's

Seconds are the wall clock's, waiting for the other process among them, and beside them the CPU time of the process,
which has no waiting in it and no network either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.distributed.compressed import GreedyLore
from gnmr.distributed.world import ALONE, World
from gnmr.errors import UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.parallel import in_processes
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import alternate
from gnmr.lab.config import Config
from gnmr.lab.train import step
from gnmr.lab.train.build import Parts, assemble, first_batch

WORKERS = 2
LONG = 10**6
"""Steps from one basis to the next, where none is to come."""
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"name": "none", "workers": None},
    "low": {"name": "greedylore", "dense_steps": 0, "refresh_every": LONG},
    "recovery": {"name": "greedylore", "dense_steps": 0, "refresh_every": LONG},
    "refresh": {"name": "greedylore", "dense_steps": 0, "refresh_every": 1},
    "PowerSGD": {"name": "powersgd", "dense_steps": 2},
}
"""Of `compression.`."""
WARM_UP = 3
"""Rounds that are not kept: GreedyLore's first basis, the dense steps of PowerSGD and the first that it compresses."""


def check(setting: Setting) -> None:
    """UserError unless it can be measured."""
    config = setting.config
    if config.training.device not in ("auto", "cpu"):
        raise UserError(f"bench hook: training.device={config.training.device}: it measures gloo on the CPU")
    if config.model.name == "moe":
        raise UserError("bench hook: model.name=moe: an expert without tokens has no gradient to send compressed")


def hook(setting: Setting) -> list[Figure]:
    """Steps of every arm over dense ones, of both kinds of workers."""
    rounds, config = setting.repeats or 30, setting.static("bf16")
    setting.say(f"hook: steps of {len(ARMS)} arms in two processes, then of virtual workers ({rounds} times)")
    two = in_processes(measured, WORKERS, config, rounds)
    return [
        *_figures(two, "two processes", config.compression.refresh_every),
        *_figures([measured(config, ALONE, rounds)], "virtual workers", config.compression.refresh_every),
    ]


def measured(config: Config, world: World, rounds: int) -> dict[str, np.ndarray]:
    """Of one process, by arm, seconds of both clocks (`wall low`, `cpu low`), (rounds,) each, and which share of dense
    gradients its last step sent (`sent low`), (1,); all processes call it."""
    parts = {name: assemble(_config(config, name, world), Path(), lambda _: None, world) for name in ARMS}
    cpu: dict[str, list[float]] = {name: [] for name in ARMS}
    arms = {name: _timed(_step(one, name), cpu[name]) for name, one in parts.items()}
    wall = alternate(arms, range(-WARM_UP, rounds))
    found = {f"wall {name}": seconds for name, seconds in wall.items()}
    found |= {f"cpu {name}": np.array(seconds[-rounds:]) for name, seconds in cpu.items()}
    return found | {f"sent {name}": np.array([_sent(one)]) for name, one in parts.items()}


def _sent(parts: Parts) -> float:
    return 1.0 if parts.compressed is None else parts.compressed.sent / parts.compressed.dense


def _config(config: Config, arm: str, world: World) -> Config:
    """Of an arm in one of the processes, or with virtual workers."""
    training = replace(config.training, accumulation=WORKERS, processes=None, device="cpu")
    asked = {"workers": WORKERS if world.size == 1 else None} | ARMS[arm]
    control = replace(config.controller, signal="always_low", options={})
    kind = "ddp" if world.size > 1 else "none"
    compression = replace(config.compression, **asked)
    return replace(config, training=training, controller=control, compression=compression, parallel=kind)


def _step(parts: Parts, arm: str) -> Callable[[], None]:
    """A step of it on its first batch."""
    wrapped, compressed = parts.wrapped, parts.compressed
    assert wrapped is not None
    own = first_batch(parts)[parts.world.rank :: parts.world.size]
    if arm == "recovery":
        assert isinstance(compressed, GreedyLore)
        for unit in compressed.units():
            assert unit.switch is not None
            unit.switch(True)

    def take() -> None:
        for i, batch in enumerate(own):
            last = i == len(own) - 1
            with wrapped.accumulating(last):
                loss = step.loss_of(parts.model, batch, wrapped.call)
                (loss / (WORKERS / wrapped.workers)).backward()
            wrapped.after(last)
        parts.optimizer.found_inf = None  # type: ignore[attr-defined]
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        float(loss.detach())

    return take


def _timed(take: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """The same, its CPU time behind the others."""

    def timed() -> None:
        began = time.process_time()
        take()
        seconds.append(time.process_time() - began)

    return timed


def _figures(ranks: list[Mapping[str, np.ndarray]], where: str, refresh_every: int) -> list[Figure]:
    """Of what each process measured."""
    mean = {name: np.mean([rank[name] for rank in ranks], axis=0) for name in ranks[0]}
    found = [median(f"{where}: dense step", mean["wall dense"], "s")]
    for name in ARMS:
        if name == "dense":
            continue
        for clock, told in (("wall", "step over dense"), ("cpu", "CPU time over dense")):
            ratio = mean[f"{clock} {name}"] / mean[f"{clock} dense"]
            note = f"sends {mean[f'sent {name}'][0]:.1%}" if clock == "wall" else ""
            found.append(median(f"{where}: {name}, {told}", ratio, "x", interval=True, note=note))
    low, refresh = (float(np.median(mean[f"cpu {name}"] / mean["cpu dense"])) for name in ("low", "refresh"))
    over = ((refresh_every - 1) * low + refresh) / refresh_every
    note = f"of the medians, a basis every {refresh_every} steps"
    return [*found, Figure(f"{where}: GreedyLore, CPU time over dense", over, "x", n=len(mean["cpu low"]), note=note)]


PARTS = {"hook": hook}
CHECKS = {"hook": check}
