"""What control costs a run of several processes (gloo on this machine): shares of a step, and the packet by itself.

Each process has a micro-batch of its own, so a step's work grows with them; where they are more than cores they
take turns, and a figure with waiting in it says as much of the machine as of the code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.control import Controller, Unit
from gnmr.control.norms import UnitNorms
from gnmr.distributed.launch import launch
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.world import World, joined
from gnmr.errors import RunFailed, UserError
from gnmr.lab.bench.figures import Figure, median
from gnmr.lab.bench.setting import Setting
from gnmr.lab.bench.timing import Stopwatch, alternate, clock_of
from gnmr.lab.config import Config
from gnmr.lab.train import step
from gnmr.lab.train.build import assemble, first_batch, train_step

SIZES = (1, 2, 4)
UNITS = (28, 1_000, 10_000)
_PARTS = (
    (UnitNorms, "__call__", "norms"),  # of one process
    (step.TrainStep, "_summed", "packet"),  # of several: norms, packing and the sum
    (Ranks, "sum", "sum"),
    (Controller, "observe", "signal and policy"),
    (Controller, "apply", "switching"),
)


def check(setting: Setting) -> None:
    """UserError unless it can be measured."""
    if setting.clock != "wall":
        raise UserError(f"bench parallel: clock={setting.clock}: processes wait for each other; use clock=wall")
    if setting.config.training.device not in ("auto", "cpu"):
        raise UserError(
            f"bench parallel: training.device={setting.config.training.device}: it measures gloo on the CPU"
        )


def parallel(setting: Setting) -> list[Figure]:
    """Two arms in every process, in turn: forward, loss, backward with its reduction and AdamW; and the step of
    `gnmr train` without records, inside which its parts are timed. Then the sum of a controller alone, of units with
    one number each."""
    rounds, steps, packets = setting.repeats or 15, list[Figure](), list[Figure]()
    for size in SIZES:
        setting.say(f"parallel: steps with and without control, {size} processes ({rounds} times); packets")
        ranks = in_processes(of_process, size, _of_size(setting.config, size), rounds)
        steps += _shares(ranks)
        packets += _sums(ranks)
    return steps + packets


def _shares(ranks: list[dict[str, np.ndarray]]) -> list[Figure]:
    """The figures of what each rank measured."""
    bare = np.mean([rank["bare"] for rank in ranks], axis=0)
    parts = {name: np.stack([rank[name] for rank in ranks]) / np.median(bare) for *_, name in _PARTS}
    mean = {name: values.mean(axis=0) for name, values in parts.items()}
    own = mean["norms"] + mean["packet"] - mean["sum"] + mean["signal and policy"] + mean["switching"]
    of = f"{len(ranks)} process{'es' if len(ranks) > 1 else ''}"
    figures = [median(f"control, {of}", own, "%", note="norms, packing, signal and policy, switching; not the sum")]
    if len(ranks) > 1:
        last = parts["sum"].min(axis=0)
        note = f"{int(ranks[0]['bytes'][0]):,} bytes; of the rank that came last"
        figures += [
            median(f"  its sum over ranks, {of}", last, "%", note=note),
            median(f"  the same with waiting, {of}", mean["sum"], "%", note="mean of the ranks"),
        ]
    ratio = np.mean([rank["controlled"] for rank in ranks], axis=0) / bare
    return [
        *figures,
        median(f"step with control over step without, {of}", ratio, "x", interval=True),
        median(f"step without, {of}", bare, "s"),
    ]


def _of_size(config: Config, size: int) -> Config:
    """That config with a micro-batch for each process."""
    training = replace(config.training, accumulation=size, processes=None, device="cpu")
    kind = "none" if size == 1 else "ddp" if config.parallel == "none" else config.parallel
    return replace(config, training=training, parallel=kind)


def of_process(config: Config, world: World, rounds: int) -> dict[str, np.ndarray]:
    """What one of them measures, by name; all call it together."""
    found = _steps(config, world, rounds)
    return found if world.size == 1 else found | _packets(config, 3 * rounds)


def _steps(config: Config, world: World, rounds: int) -> dict[str, np.ndarray]:
    """Of one process: seconds of every arm and part, (rounds,) each, and the bytes of the sum, (1,)."""
    parts = assemble(config, Path(), lambda _: None, world)
    watch = Stopwatch(clock_of(parts.device, "wall"))
    take_step, batches = train_step(parts), first_batch(parts)
    own, wrapped = batches[world.rank], parts.wrapped
    assert wrapped is not None

    def bare() -> None:
        with wrapped.accumulating(last=True):
            loss = step.loss_of(parts.model, own, wrapped.call)
            step.objective_of(parts.model, loss).backward()
        parts.optimizer.found_inf = None  # type: ignore[attr-defined]
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        float(loss.detach())

    def controlled() -> None:
        watch.lap()
        take_step(batches, config.optim.lr)

    with watch.inside(*_PARTS):
        seconds = alternate({"bare": bare, "controlled": controlled}, range(-2, rounds))
    found = seconds | {name: watch.seconds(name, rounds) for *_, name in _PARTS}
    return found | {"bytes": np.array([_bytes_of_sum(controlled)])}


def _bytes_of_sum(take_step: Callable[[], None]) -> int:
    """What a step's sums over ranks hold."""
    found, real = list[int](), Ranks.sum

    def counted(self: Ranks, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found.append(8 * sum(part.numel() for part in parts.values()))
        return real(self, parts)

    with patch.object(Ranks, "sum", counted):
        take_step()
    return sum(found)


def _sums(ranks: list[dict[str, np.ndarray]]) -> list[Figure]:
    """The packets' figures; none of one process, which sums nothing."""
    found = list[Figure]()
    for units in UNITS if len(ranks) > 1 else ():
        seconds = np.min([rank[f"{units} units"] for rank in ranks], axis=0)
        note = f"{int(ranks[0][f'{units} units, bytes'][0]):,} bytes; of the rank that came last"
        found.append(median(f"sum of {units:,} units, {len(ranks)} processes", 1e3 * seconds, "ms", note=note))
    return found


def _packets(config: Config, rounds: int) -> dict[str, np.ndarray]:
    """Of one process, by the number of units: seconds of their sum, (rounds,), and its bytes, (1,)."""
    found: dict[str, np.ndarray] = {}
    for number in UNITS:
        controller, seconds = _controller(config, number), []
        for _ in range(rounds + 3):
            parts = controller.parts()
            torch.distributed.barrier()
            began = time.perf_counter()
            controller.ranks.sum(parts)
            seconds.append(time.perf_counter() - began)
        found[f"{number} units"] = np.array(seconds[3:])
        found[f"{number} units, bytes"] = np.array([8 * sum(part.numel() for part in parts.values())])
    return found


def _controller(config: Config, number: int) -> Any:
    """Of so many units, each with a gradient of one number, on the ranks that there are."""
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    units = [Unit(f"unit{i}", (parameter,), lambda _recovering: None) for i, parameter in enumerate(parameters)]
    steps = config.training.steps
    return Controller(units, config.controller.spec(steps), steps=steps, ranks=Ranks())


def in_processes(measure: Callable[..., Any], size: int, config: Config, rounds: int) -> list[Any]:
    """What `measure(config, world, rounds)`, which can be pickled, returns in as many new processes, by rank."""
    return launch(size, _told, measure, config, rounds)


def _told(measure: Callable[..., Any], config: Config, rounds: int) -> tuple[str, Any]:
    """What one of the processes measured, as `launch` wants it."""
    try:
        with joined(cuda=False) as world:
            return "done", measure(config, world, rounds)
    except UserError as error:
        return "mistake", str(error)
    except RunFailed as error:
        return "failed", str(error)


PARTS = {"parallel": parallel}
CHECKS = {"parallel": check}
