"""The steps of a run, and what is due between them: records, validation, checkpoints, scores."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gnmr.attachment.blame import Levels
from gnmr.distributed import shards
from gnmr.errors import RunFailed
from gnmr.lab.data.batch import Batch
from gnmr.lab.records.recorder import Recorder, Silent
from gnmr.lab.train.build import Blocks, Parts
from gnmr.lab.train.checkpoint import Checkpointer
from gnmr.lab.train.result import StepResult
from gnmr.lab.train.rows import Counters, step_row, verdict_row
from gnmr.lab.train.steps import Steps, heals, validated
from gnmr.records.reader import read_jsonl
from gnmr.records.rows import event_rows, unit_rows


class Scorer(Protocol):
    """Scores a run's model on the tasks of `scores.*` (`gnmr.lab.evaluation.scores` has one)."""

    def check(self, parts: Parts) -> None:
        """UserError for scores that this run cannot have; called before the run begins."""
        ...

    def score(self, parts: Parts, step: int, say: Callable[[str], None]) -> dict[str, Any]:
        """A row of `records.schema.SCORE_FIELDS`. RunFailed where it cannot be had.

        The model and the generators of random numbers are afterwards as they were.
        """
        ...


@dataclass
class Loop:
    """Calling it trains until the end, or until a signal arrives."""

    parts: Parts
    blocks: Blocks
    held_out: Tensor | Batch
    counters: Counters
    checkpointer: Checkpointer
    recorder: Recorder | Silent
    levels: Levels = field(default_factory=Levels)
    """Loss and gradient norm of the last steps."""
    scorer: Scorer | None = None
    """Needed where scores.tasks asks for any."""

    def __post_init__(self) -> None:
        counters = self.counters
        self._streak_began = counters.step + 1 - counters.nonfinite_streak
        self._streak_unit = "a step before the resumption"
        self.stopped: int | None = None
        """The signal that ended it."""

    def __call__(self, stop: list[int]) -> tuple[str, str | None]:
        """Steps until the end, or until `stop` holds a signal: ("done", None) or ("interrupted", why)."""
        training, counters, total = self.parts.config.training, self.counters, self.parts.config.total_steps
        take_step = Steps(self.parts, self.blocks, self.levels if self.parts.config.records.verdicts else None, stop)
        if counters.step == 0 and self.parts.base is not None:
            self._validate()
        if self._score_is_due():
            self.score()
        while counters.step < total:
            result = self._step(take_step)
            step, last = counters.step, counters.step == total
            if last or step == training.steps or step % training.eval_every == 0:
                self._validate()
            self.stopped = result.stop if self.parts.world.size > 1 else next(iter(stop), None)
            if self.stopped or last or self._score_is_due() or step % training.checkpoint_every == 0:
                self._save()
            if self._score_is_due():
                self.score()
                told = self.parts.world.gather(next(iter(stop), None))  # the checkpoint is there
                self.stopped = next((number for number in told if number is not None), None)
            if self.stopped and not last:
                name = signal.Signals(self.stopped).name
                return "interrupted", f"stopped after step {step} by {name}, checkpoint saved"
        return "done", None

    def score(self) -> None:
        """Scores after the step, unless the records have them already: the run was ended after them."""
        parts, step = self.parts, self.counters.step
        if self.scorer is None:
            return
        there = parts.world.from_first(lambda: {row["step"] for row in read_jsonl(parts.folder / "scores.jsonl")})
        if step not in there:  # every process scores: shards are gathered in passes
            self.recorder.scores(self.scorer.score(parts, step, self.recorder.say))

    def _step(self, take_step: Steps) -> StepResult:
        """One step and its records; RunFailed after too many steps in a row that were not finite."""
        training, counters = self.parts.config.training, self.counters
        began = time.perf_counter()
        step = counters.step + 1
        result = take_step(step)

        counters.step = step
        counters.tokens += training.tokens_per_step
        nonfinite = result.nonfinite_unit is not None
        counters.nonfinite_total += nonfinite
        counters.nonfinite_streak = counters.nonfinite_streak + 1 if nonfinite else 0
        if counters.nonfinite_streak == 1:
            self._streak_began, self._streak_unit = step, str(result.nonfinite_unit)
        healing = heals(self.parts, step)
        row = step_row(result, counters, time.perf_counter() - began, healing, self._weights_digest())
        self.recorder.step(row, None if healing else unit_rows(result.decision))
        self.recorder.events(event_rows(result.decision))
        if result.verdict is not None:
            self.recorder.verdict(verdict_row(result.verdict), str(result.verdict))
        if counters.nonfinite_streak >= training.max_nonfinite_streak:
            raise RunFailed(
                f"{counters.nonfinite_streak} steps in a row had a non-finite loss or gradient; it began at step "
                f"{self._streak_began} in {self._streak_unit}; weights are those of step {self._streak_began - 1}"
            )
        return result

    def _weights_digest(self) -> str | None:
        """Return `shards.digest` every `records.check_every` steps of several processes."""
        world, step = self.parts.world, self.counters.step
        if world.size == 1 or step % self.parts.config.records.check_every:
            return None
        return shards.digest(dict(self.parts.model.named_parameters()), world, step)

    def _validate(self) -> None:
        step = self.counters.step
        found = validated(self.parts, self.held_out, step)
        self.recorder.eval({"step": step, "tokens": self.counters.tokens, **found})

    def _save(self) -> None:
        records = self.recorder.sync()
        host: dict[str, Any] = {"counters": asdict(self.counters), "blocks": self.blocks.state_dict()}
        host |= {"records": records, "levels": [list(pair) for pair in self.levels.seen]}
        if self.parts.compressed is not None and self.parts.wrapped is not None:
            host["workers"] = self.parts.wrapped.workers
        self.checkpointer.save(self.counters.step, host)

    def _score_is_due(self) -> bool:
        """Between the first and the last step; the last one's scores come after the export."""
        step, every = self.counters.step, self.parts.config.scores.every
        tasks, steps = self.parts.config.scores.tasks, self.parts.config.total_steps
        return bool(tasks) and every is not None and 0 < step < steps and step % every == 0
