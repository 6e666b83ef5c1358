"""Scores while a run trains: training's `Scorer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gnmr.errors import RunFailed, UserError
from gnmr.lab.config import ScoresConfig
from gnmr.lab.evaluation.progress import now_and_then
from gnmr.lab.evaluation.subjects import Subject, check_low, of_checkpoint, of_run
from gnmr.lab.models.pretrained import need
from gnmr.lab.train.build import Parts


class RunScorer:
    """Scores the model of a run as it is after a step, on the tasks and the path of `scores.*`."""

    def check(self, parts: Parts) -> None:
        """UserError for scores that this run cannot have; their rows are read, from the hub fetched."""
        config = parts.config.scores
        for package in ("lm_eval", "transformers"):
            need(package, f"scores.tasks={config.tasks}")
        from gnmr.lab.evaluation.scoring import check, check_rows

        _subject(parts)
        try:
            check(config.tasks, limit=config.limit, shots=config.shots, batch_size=config.batch_size)
            check_rows(config.tasks, config.shots, _data(config))
        except UserError as error:
            why = str(error).replace("pass data=FOLDER with local files (gnmr eval --help)", "give scores.data=FOLDER")
            raise UserError(f"scores: {why}") from error

    def score(self, parts: Parts, step: int, say: Callable[[str], None]) -> dict[str, Any]:
        """A row of `SCORE_FIELDS`. The model and the generators of random numbers are afterwards as they were.

        RunFailed where it cannot be had; the checkpoint of `step` is saved by then.
        """
        from gnmr.lab.evaluation import scoring

        config, subject = parts.config.scores, _subject(parts)
        try:
            found = scoring.score(
                subject,
                config.tasks,
                limit=config.limit,
                shots=config.shots,
                data=_data(config),
                batch_size=config.batch_size,
                progress=now_and_then(say),
            )
        except (UserError, torch.OutOfMemoryError, MemoryError) as error:
            smaller = f"out of memory, use a smaller scores.batch_size than {config.batch_size}"
            why = error if isinstance(error, UserError) else smaller
            raise RunFailed(f"scores after step {step}: {why}; the same command goes on with them") from error
        return {"step": step, "path": subject.named_path, "tasks": found}


def _data(config: ScoresConfig) -> Path | None:
    return None if config.data is None else Path(config.data).expanduser()


def _subject(parts: Parts) -> Subject:
    config, path, name, device = parts.config, parts.config.scores.path, str(parts.folder), parts.device
    if path == "low":
        try:
            check_low(parts.converted, config)
        except UserError as error:
            raise UserError(f"scores.{error}") from error
    if config.model.checkpoint is not None:
        return of_checkpoint(
            name, parts.model, config.model.checkpoint, device=parts.device, path=path, plan=parts.converted
        )
    tokenizer, longest = parts.corpus.tokenizer_path, config.training.seq_len
    return of_run(name, parts.model, tokenizer, max_length=longest, device=device, path=path, plan=parts.converted)
