"""The steps of a run, and the records, validation, checkpoints and scores between them.

The last steps of a fork heal: they run in 16 bits, whatever the paths, and no unit is routed.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from gnmr.attachment import Router, units_of
from gnmr.attachment.blame import Levels
from gnmr.attachment.ranks import reduce
from gnmr.control import Controller, ControlSpec, Unit
from gnmr.errors import RunFailed
from gnmr.lab.data.batch import Batch
from gnmr.lab.data.sequences import SequenceOrder
from gnmr.lab.stopping import is_bypassed
from gnmr.lab.train.build import Parts, train_step
from gnmr.lab.train.checkpoint import Checkpointer
from gnmr.lab.train.loss import bits_per_byte, bytes_per_target, evaluate
from gnmr.lab.train.rows import Counters, step_row, verdict_row
from gnmr.lab.train.step import StepResult, TrainStep
from gnmr.lab.train.throughput import peak_flops, throughput
from gnmr.lab.views.recorder import Recorder, Silent
from gnmr.records.reader import read_jsonl
from gnmr.records.schema import event_rows, unit_rows

MAX_NONFINITE_STREAK = 10
"""Number of consecutive skipped steps (non-finite loss or gradient) after which a run ends as FAILED."""


class Steps:
    """Takes the steps of a run. Call it with the step number, from 1 in ascending order."""

    def __init__(
        self, parts: Parts, blocks: SequenceOrder, levels: Levels | None = None, stop: Sequence[int] = ()
    ) -> None:
        """Take `levels` and `stop` as `TrainStep` does."""
        self._parts, self._blocks, self._stop = parts, blocks, stop
        self._routed = train_step(parts, levels=levels, stop=stop)
        self._healing: TrainStep | None = None

    def __call__(self, step: int) -> StepResult:
        """Take one step on the next batch. Waits for the device once."""
        parts, training = self._parts, self._parts.config.training
        # What happens before a step depends on its number alone, so that a resumed run repeats it.
        for stress in parts.stress:
            stress.begin_step(step)
        if parts.draws is not None:
            parts.draws.begin_step(step)
        micro_batches = [self._blocks.next(training.batch_size) for _ in range(training.accumulation)]
        bytes_of_target = bytes_per_target(micro_batches, parts.token_bytes)
        for i in range(parts.world.rank, training.accumulation, parts.world.size):  # only this process's micro-batches
            micro_batches[i] = micro_batches[i].to(parts.device)
        lr = parts.learning_rate(step)
        result = self._heal(step, micro_batches, lr) if heals(parts, step) else self._routed(micro_batches, lr)
        if parts.faults is not None and (ranks := parts.router.controller.ranks) is not None:
            parts.faults.end_step(ranks.take_largest)
        return replace(result, bits_per_byte=bits_per_byte(result.loss, bytes_of_target))

    def _heal(self, step: int, micro_batches: list[Batch], lr: float) -> StepResult:
        if self._healing is None:  # not earlier, because building it begins a step of the converted model
            self._healing = train_step(self._parts, _unrouted(self._parts, step), stop=self._stop)
        with self._parts.converted.high_precision():
            return self._healing(micro_batches, lr)


def heals(parts: Parts, step: int) -> bool:
    """Return True if the step belongs to a fork's healing."""
    return step > parts.config.training.steps


def _unrouted(parts: Parts, step: int) -> Router:
    """Return a router that has the same units, routes none of them, and counts from `step`."""
    units = [Unit(unit.name, unit.parameters, None) for unit in units_of(parts.converted)]
    ranks = parts.router.controller.ranks
    spec, steps = ControlSpec(signal="always_low"), parts.config.total_steps
    controller = Controller(units, spec, steps=steps, ranks=ranks)
    controller.t = step - 1  # transforms and stochastic rounding read the number of the step
    return Router(parts.converted, controller, parts.model)


def phase(parts: Parts, step: int) -> str | None:
    """Return the phase of a fork that an evaluation after this step belongs to, or None.

    The phase is base, low (the end of training.steps) or healed.
    """
    config = parts.config
    if parts.base is None:
        return None
    phases = {0: "base", config.total_steps: "healed", config.training.steps: "low"}
    return phases.get(step)


def validated(parts: Parts, held_out: Batch, step: int) -> dict[str, Any]:
    """Return the fields `records.schema.EVAL_FIELDS`: validation losses after `step`, for a fork on both paths.

    Waits for the device.

    Raises:
        RunFailed: if a loss is not finite.
    """
    batch_size = parts.config.training.batch_size
    if parts.draws is not None:
        parts.draws.begin_step(step)
    loss = evaluate(parts.model, parts.converted, held_out, batch_size, world=parts.world, draws=parts.draws)
    low = None
    if parts.base is not None:
        low = loss
        # Without a cast in the forward pass, both paths have the same loss.
        if parts.converted.casts_forward:
            low = evaluate(
                parts.model, parts.converted, held_out, batch_size, low=True, world=parts.world, draws=parts.draws
            )
    if not all(math.isfinite(value) for value in (loss, low) if value is not None):
        raise RunFailed(f"the validation loss after step {step} is {loss if low is None else f'{loss}, {low} low'}")
    # A large loss gives infinity here, where math.exp would raise OverflowError.
    ppl = torch.tensor(loss, dtype=torch.float64).exp().item()
    bits = bits_per_byte(loss, bytes_per_target([held_out], parts.token_bytes))
    losses = {"val_loss": loss, "val_ppl": ppl, "val_bits_per_byte": bits, "val_loss_low": low}
    return {**losses, "phase": phase(parts, step)}


class Scorer(Protocol):
    """Scores a run's model on the tasks of `scores.*` (implemented in `gnmr.lab.evaluation.scores`)."""

    def check(self, parts: Parts) -> None:
        """Raise UserError if this run cannot be scored; called before the run begins."""
        ...

    def score(self, parts: Parts, step: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Return a row of `records.schema.SCORE_FIELDS`.

        The model and the random number generators are unchanged afterwards.

        Raises:
            RunFailed: if scoring fails.
        """
        ...


@dataclass
class Loop:
    """The training loop. Call it to train until the end or until a signal arrives."""

    parts: Parts
    blocks: SequenceOrder
    held_out: Batch
    counters: Counters
    checkpointer: Checkpointer
    recorder: Recorder | Silent
    levels: Levels = field(default_factory=Levels)
    """Loss and gradient norm of the most recent steps."""
    scorer: Scorer | None = None
    """Required if scores.tasks is not empty."""

    def __post_init__(self) -> None:
        counters = self.counters
        self._streak_began = counters.step + 1 - counters.nonfinite_streak
        self._streak_unit = "a step before the resumption"
        self._peak_flops = peak_flops(self.parts.device)
        self.stopped: int | None = None
        """The signal that ended the loop."""

    def __call__(self, stop: list[int]) -> tuple[str, str | None]:
        """Train until the end or until `stop` holds a signal; return ("done", None) or ("interrupted", reason)."""
        training, counters, total = self.parts.config.training, self.counters, self.parts.config.total_steps
        take_step = Steps(self.parts, self.blocks, self.levels if self.parts.config.records.verdicts else None, stop)
        # The evaluation of a fork before its first step is that of its base.
        if counters.step == 0 and self.parts.base is not None:
            self._validate()
        if self._score_is_due():
            self.score()
        while counters.step < total:
            result = self._step(take_step)
            step, last = counters.step, counters.step == total
            if last or step == training.steps or step % training.eval_every == 0:
                self._validate()
            # Several processes stop after the same step, because its collective told all of them of the signal.
            self.stopped = result.stop if self.parts.world.size > 1 else next(iter(stop), None)
            # A checkpoint precedes scoring, which takes long and may fail.
            if self.stopped or last or self._score_is_due() or step % training.checkpoint_every == 0:
                self._save()
            if self._score_is_due():
                self.score()
                received = self.parts.world.gather(next(iter(stop), None))  # the checkpoint is saved already
                self.stopped = next((number for number in received if number is not None), None)
            if self.stopped and not last:
                name = signal.Signals(self.stopped).name
                if not is_bypassed(self.stopped):
                    return "interrupted", f"stopped after step {step} by {name}, checkpoint saved"
                self.recorder.say(f"{name} after step {step}: checkpoint saved; going on until submitit's own signal")
                stop[:] = [number for number in stop if not is_bypassed(number)]
        return "done", None

    def score(self) -> None:
        """Score after the current step, unless an earlier process of this run has recorded the scores."""
        parts, step = self.parts, self.counters.step
        if self.scorer is None:
            return
        scored = parts.world.from_first(lambda: {row["step"] for row in read_jsonl(parts.folder / "scores.jsonl")})
        if step not in scored:  # every process scores, because forward passes gather shards
            self.recorder.scores(self.scorer.score(parts, step, self.recorder.say))

    def _step(self, take_step: Steps) -> StepResult:
        """Take one step and record it. Raises RunFailed after too many consecutive non-finite steps."""
        training, counters = self.parts.config.training, self.counters
        began = time.perf_counter()
        step = counters.step + 1
        result = take_step(step)

        # Count, then record, then stop if too many steps in a row were not finite
        counters.step = step
        counters.tokens += training.tokens_per_step
        nonfinite = result.nonfinite_unit is not None
        counters.nonfinite_total += nonfinite
        counters.nonfinite_streak = counters.nonfinite_streak + 1 if nonfinite else 0
        if counters.nonfinite_streak == 1:
            self._streak_began, self._streak_unit = step, str(result.nonfinite_unit)
        healing = heals(self.parts, step)
        seconds = time.perf_counter() - began
        speed = throughput(
            training.tokens_per_step, seconds, self.parts.flops_per_token, self._peak_flops, self.parts.world.size
        )
        row = step_row(result, counters, seconds, healing, self._weights_digest(), speed)
        self.recorder.step(row, None if healing else unit_rows(result.decision))
        self.recorder.events(event_rows(result.decision))
        if result.verdict is not None:
            self.recorder.verdict(verdict_row(result.verdict), str(result.verdict))
        if counters.nonfinite_streak >= MAX_NONFINITE_STREAK:
            raise RunFailed(
                f"{counters.nonfinite_streak} steps in a row had a non-finite loss or gradient; it began at step "
                f"{self._streak_began} in {self._streak_unit}; weights are those of step {self._streak_began - 1}"
            )
        return result

    def _weights_digest(self) -> str | None:
        """Return `reduce.digest` in the steps of checkpoints if there are several processes, else None."""
        world, step = self.parts.world, self.counters.step
        if world.size == 1 or step % self.parts.config.training.checkpoint_every:
            return None
        return reduce.digest(dict(self.parts.model.named_parameters()), world, step)

    def _validate(self) -> None:
        step = self.counters.step
        row = validated(self.parts, self.held_out, step)
        self.recorder.eval({"step": step, "tokens": self.counters.tokens, **row})

    def _save(self) -> None:
        # Rows reach the disk before the checkpoint, so that a resumed run finds all of them.
        self.recorder.sync()
        host: dict[str, Any] = {"counters": asdict(self.counters), "blocks": self.blocks.state_dict()}
        host["levels"] = [list(pair) for pair in self.levels.seen]
        self.checkpointer.save(self.counters.step, host)

    def _score_is_due(self) -> bool:
        """Return True if scores are due before the last step, which is scored after the export."""
        step, every = self.counters.step, self.parts.config.scores.every
        tasks, steps = self.parts.config.scores.tasks, self.parts.config.total_steps
        return bool(tasks) and every is not None and 0 < step < steps and step % every == 0
