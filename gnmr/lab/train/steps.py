"""The steps of a run, one after the other: what a batch, its rate and the stress of a step are.

A fork's last steps heal: they are steps in 16 bits, whatever the paths; no unit is routed in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnmr.attachment import Router, units_of
from gnmr.attachment.blame import Levels
from gnmr.control import Controller, ControlSpec, Unit
from gnmr.errors import RunFailed
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.build import Blocks, Parts, train_step
from gnmr.lab.train.loss import evaluate
from gnmr.lab.train.result import StepResult
from gnmr.lab.train.step import TrainStep


class Steps:
    """Calling it with a step's number, from 1 on and each in its turn, takes that step."""

    def __init__(self, parts: Parts, blocks: Blocks, levels: Levels | None = None, stop: Sequence[int] = ()) -> None:
        """`levels`: of the steps before, for verdicts on steps that spike; None: none are wanted. `stop`: see
        `TrainStep`."""
        self._parts, self._blocks, self._stop = parts, blocks, stop
        self._routed = train_step(parts, levels=levels, stop=stop)
        self._healing: TrainStep | None = None

    def __call__(self, step: int) -> StepResult:
        """Takes one step, its batch from the blocks; waits for the device once."""
        parts, training = self._parts, self._parts.config.training
        for stress in parts.stress:
            stress.begin_step(step)
        if parts.draws is not None:
            parts.draws.begin_step(step)
        micro_batches = [self._blocks.next(training.batch_size) for _ in range(training.accumulation)]
        for i in range(parts.world.rank, training.accumulation, parts.world.size):  # the others are other processes'
            micro_batches[i] = micro_batches[i].to(parts.device)
        lr = parts.learning_rate(step)
        result = self._heal(micro_batches, lr) if heals(parts, step) else self._routed(micro_batches, lr)
        if parts.faults is not None and (ranks := parts.router.controller.ranks) is not None:
            parts.faults.end_step(ranks.take_largest)
        return result

    def _heal(self, micro_batches: list[Tensor | Batch], lr: float) -> StepResult:
        if self._healing is None:  # not before: it begins a step of the converted model
            self._healing = train_step(self._parts, _unrouted(self._parts), stop=self._stop)
        with self._parts.converted.high_precision():
            return self._healing(micro_batches, lr)


def heals(parts: Parts, step: int) -> bool:
    """Whether the step is one of a fork's healing."""
    return step > parts.config.training.steps


def _unrouted(parts: Parts) -> Router:
    """Return a router of the same units that routes none of them."""
    units = [Unit(unit.name, unit.parameters, None) for unit in units_of(parts.converted)]
    ranks = parts.router.controller.ranks
    spec, steps = ControlSpec(signal="always_low"), parts.config.total_steps
    return Router(parts.converted, Controller(units, spec, steps=steps, ranks=ranks), parts.model)


def phase(parts: Parts, step: int) -> str | None:
    """What an evaluation after this step is of a fork: base, low (the end of training.steps) or healed; else None."""
    config = parts.config
    if parts.base is None:
        return None
    found = {0: "base", config.total_steps: "healed", config.training.steps: "low"}
    return found.get(step)


def validated(parts: Parts, held_out: Tensor | Batch, step: int) -> dict[str, Any]:
    """The figures of `records.schema.EVAL_FIELDS`: validation losses after `step`, of a fork on both paths.

    RunFailed for one that is not finite. Waits for the device.
    """
    batch_size = parts.config.training.batch_size
    if parts.draws is not None:
        parts.draws.begin_step(step)
    loss = evaluate(parts.model, parts.converted, held_out, batch_size, world=parts.world, draws=parts.draws)
    low = None
    if parts.base is not None:
        low = loss
        if parts.converted.casts_forward:
            low = evaluate(
                parts.model, parts.converted, held_out, batch_size, low=True, world=parts.world, draws=parts.draws
            )
    if not all(math.isfinite(found) for found in (loss, low) if found is not None):
        raise RunFailed(f"the validation loss after step {step} is {loss if low is None else f'{loss}, {low} low'}")
    ppl = torch.tensor(loss, dtype=torch.float64).exp().item()
    return {"val_loss": loss, "val_ppl": ppl, "val_loss_low": low, "phase": phase(parts, step)}
