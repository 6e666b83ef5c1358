"""Scores in training: `gnmr.evaluation` on the model as it is after a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnmr.errors import UserError
from gnmr.models.pretrained import need
from gnmr.training.parts import Parts

SAY_EVERY = 30.0  # seconds between two lines of progress


def check_scores(parts: Parts) -> None:
    """UserError for scores that this run cannot have, before it begins."""
    config = parts.config.scores
    if not config.tasks:
        return
    for package in ("lm_eval", "transformers"):
        need(package, f"scores.tasks={config.tasks}")
    from gnmr.evaluation import tasks
    from gnmr.evaluation.scoring import check

    check(config.tasks, config.limit, config.shots, None, config.batch_size)
    if config.data is not None:
        for name in config.tasks:
            tasks.read(name, Path(config.data).expanduser())
    _subject(parts)


def score_now(parts: Parts, step: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A row of `SCORE_FIELDS`. The model and the generators of random numbers are afterwards as they were."""
    from gnmr.evaluation import score

    config, said = parts.config.scores, time.monotonic()

    def tell(task: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            say(f"scoring {task}: {done} of {total}")

    data = None if config.data is None else Path(config.data).expanduser()
    found = score(
        _subject(parts), config.tasks, config.limit, config.shots, data, batch_size=config.batch_size, progress=tell
    )
    return {"step": step, "path": config.path, "tasks": found}


def _subject(parts: Parts) -> Any:
    from gnmr.evaluation.subjects import check_low, of_checkpoint, of_run

    config, path = parts.config, parts.config.scores.path
    if path == "low":
        try:
            check_low(parts.plan, config)
        except UserError as error:
            raise UserError(f"scores.{error}") from error
    if config.model.checkpoint is not None:
        return of_checkpoint(str(parts.folder), parts.model, config.model.checkpoint, parts.device, path, parts.plan)
    tokenizer, longest = parts.corpus.tokenizer_path, config.training.seq_len
    return of_run(str(parts.folder), parts.model, tokenizer, longest, parts.device, path, parts.plan)
