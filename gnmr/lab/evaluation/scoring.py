"""Scores a subject on lm-eval's tasks; prints nothing."""

from __future__ import annotations

import logging
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from gnmr.errors import UserError, told_as, whole
from gnmr.lab.evaluation import tasks as definitions
from gnmr.lab.evaluation.harness import Harness
from gnmr.lab.evaluation.progress import Progress
from gnmr.lab.evaluation.subjects import Subject
from gnmr.lab.evaluation.tasks import TASKS, Task

SHOTS_SEED = 1234
"""Draws GSM8K's examples; lm-eval's own."""
BLOCK = 2048
"""Tokens of a block of token_perplexity, where the model's context is not shorter."""


def score(
    subject: Subject,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    limit: int | None = None,
    shots: int | None = None,
    data: Path | None = None,
    block: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores `subject` on `tasks`, on its path in force.

    Args:
        tasks: names of `gnmr.lab.evaluation.tasks.TASKS`.
        limit: items of a task at the most, the first ones (of MMLU: of each subject); None: all.
        shots: examples in the prompts of GSM8K and MMLU; None: 5.
        data: folder of local files (`gnmr.lab.evaluation.tasks`); None: lm-eval's own sources on the hub.
        block: tokens of a block of WikiText-2's token_perplexity; None: 2048, or the model's context if it is shorter.
        batch_size: inputs a pass.
        progress: called with (task, requests done, requests of the task).

    Returns {task: {"metrics": {name: {"value", "stderr"}}, "items", "items_there", "shots", "tokens_scored",
    "tokens_read", "tokens_generated", "truncated", "seconds", "convention", ...}}; stderr is None where there is none
    (MMLU also has "subjects", see `pooled_stderr`; WikiText-2 "block"). The model is afterwards as it was, and so are
    the generators of random numbers. Waits for the device. UserError for what cannot be scored, in one line.
    """
    check(tasks, limit=limit, shots=shots, block=block, batch_size=batch_size, subject=subject)
    found = {}
    with subject.serving(), _quiet(), _undisturbed():
        for name in dict.fromkeys(tasks):
            began = time.perf_counter()
            harness = Harness(subject, batch_size, None if progress is None else partial(progress, name))
            found[name] = _score_task(name, harness, limit, _shots(name, shots), data, block)
            found[name]["seconds"] = time.perf_counter() - began
    return found


def check(
    tasks: Sequence[str],
    *,
    limit: int | None,
    shots: int | None,
    batch_size: int,
    block: int | None = None,
    subject: Subject | None = None,
) -> None:
    """UserError for an invalid value, and for one that does not fit `subject`."""
    definitions.check_names(tasks)
    with told_as():
        whole(or_null=True, limit=limit, batch_size=batch_size)
        whole(0, or_null=True, shots=shots)
        whole(2, or_null=True, block=block)
    if shots is not None and not any(TASKS[name].shots for name in tasks):
        raise UserError(f"shots={shots}: has no effect on {', '.join(tasks)}, which have no examples")
    if shots is not None and shots > 5 and "mmlu" in tasks:
        raise UserError(f"shots={shots}: a subject of mmlu has 5 examples; use 5 or fewer, or leave mmlu out of tasks")
    if block is not None and "wikitext2" not in tasks:
        raise UserError(f"block={block}: has no effect without the task wikitext2")
    if subject is not None and block is not None and block > subject.max_length:
        raise UserError(f"block={block}: {subject.name} reads {subject.max_length} tokens at most")


def check_rows(tasks: Sequence[str], shots: int | None, data: Path | None) -> None:
    """UserError for rows that cannot be scored: missing, malformed, too few for `shots`, or out of the hub's reach.

    From the hub they are fetched into its own cache, where `score` finds them.
    """
    with _quiet(), _undisturbed():
        for name in dict.fromkeys(tasks):
            with _defined(name, _shots(name, shots), data) as where:
                if data is None:
                    _load(TASKS[name], where, local=False)


def _shots(name: str, asked: int | None) -> int:
    return TASKS[name].shots if asked is None else asked


@contextmanager
def _defined(name: str, shots: int, data: Path | None) -> Iterator[Path]:
    """The folder with the definition of a task: lm-eval's own, or a temporary one over local files."""
    if data is None:
        yield definitions.shipped(name)
        return
    with tempfile.TemporaryDirectory(prefix="gnmr-eval-") as scratch:
        definitions.define(name, definitions.read(name, data), Path(scratch), shots)
        yield Path(scratch)


def _score_task(
    name: str, harness: Harness, limit: int | None, shots: int, data: Path | None, block: int | None
) -> dict[str, Any]:
    task = TASKS[name]
    with _defined(name, shots, data) as where:
        loaded = _load(task, where, local=data is not None)
        for leaf in loaded["tasks"].values():
            if task.shots:
                leaf.set_config(key="num_fewshot", value=shots)
            leaf.set_fewshot_seed(seed=SHOTS_SEED)
        results = evaluate(lm=harness, task_dict=loaded, limit=limit, log_samples=False)
        found = _found(task, results)
        if name == "wikitext2":
            (leaf,) = loaded["tasks"].values()
            documents = [row["page"] for row in leaf.eval_docs][:limit]
            block = min(BLOCK, harness.subject.max_length) if block is None else block
            found["tokens_scored"] = harness.counts["scored"]  # token_perplexity says itself how many it scored
            found["metrics"]["token_perplexity"] = token_perplexity(harness, definitions.lines_of(documents), block)
            found["block"] = block
    counts = harness.counts
    read = {"tokens_read": counts["read"], "tokens_generated": counts["generated"], "truncated": counts["truncated"]}
    about = {"shots": shots if task.shots else 0, **read, "convention": task.convention.format(block=block)}
    return {"tokens_scored": counts["scored"]} | found | about


def _load(task: Task, where: Path, local: bool) -> Any:
    try:
        return TaskManager(include_path=str(where), include_defaults=False).load([task.theirs])
    except Exception as error:  # datasets, the hub's client, HTTP: many libraries, no common base
        if local:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            f"{task.hub} cannot be read from the hub ({reason}); check the network, HF_ENDPOINT and the proxy, or pass "
            "data=FOLDER with local files (gnmr eval --help)"
        ) from error


def _found(task: Task, results: Any) -> dict[str, Any]:
    """The results of one task or group by our names."""
    groups = results.get("groups", {})
    own = groups.get(task.theirs) or results["results"][task.theirs]
    sizes = results["n-samples"]
    found: dict[str, Any] = {
        "metrics": _metrics(own),
        "items": sum(size["effective"] for size in sizes.values()),
        "items_there": sum(size["original"] for size in sizes.values()),
    }
    if groups:
        found["subjects"] = {
            leaf.removeprefix(f"{task.theirs}_"): {"items": size["effective"]} | _metrics(results["results"][leaf])
            for leaf, size in sizes.items()
        }
        for name, metric in found["metrics"].items():
            metric["stderr"] = pooled_stderr([(row["items"], row[name]) for row in found["subjects"].values()])
    return found


def pooled_stderr(parts: Sequence[tuple[int, dict[str, float | None]]]) -> float | None:
    """The standard error of a mean over the items of several subjects, from (items, value and standard error) of each.

    lm-eval's formula: the pooled variance within subjects. lm-eval gives no number where a subject has one item; here
    the other subjects are pooled, and where none has two items, the spread over all items is taken, which includes the
    differences between subjects. None for fewer than two items.
    """
    total = sum(items for items, _ in parts)
    freedom = total - len(parts)
    inside = math.fsum(items * (items - 1) * (row["stderr"] or 0.0) ** 2 for items, row in parts)
    if freedom == 0 and total > 1:
        values = [row["value"] or 0.0 for _, row in parts]
        mean, freedom = math.fsum(values) / total, total - 1
        inside = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(inside / freedom / total) if freedom > 0 else None


def _metrics(row: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """{metric: value and standard error}; lm-eval's keys are `metric,filter` and `metric_stderr,filter`."""
    found = {}
    for key, value in row.items():
        metric, comma, kept_by = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = row.get(f"{metric}_stderr,{kept_by}")
        shown = metric if kept_by == "none" else key
        found[shown] = {"value": float(value), "stderr": stderr if isinstance(stderr, float) else None}
    return found


def token_perplexity(harness: Harness, text: str, block: int) -> dict[str, float | int | None]:
    """exp of the mean negative log-likelihood a token of `text`: encoded in one piece, cut into blocks of `block`
    tokens that are read each by itself; every token of a block but its first is scored, the rest at the end is not.

    Returns value, stderr and the number of scored tokens. A text shorter than a block is one block. The standard error
    is that of the mean over blocks (the delta method), None for fewer than two. UserError for a text of fewer than two
    tokens.
    """
    tokens = harness.tok_encode(text)
    if len(tokens) < 2:
        raise UserError("wikitext2: the text has fewer than two tokens")
    blocks = [tokens[i : i + block] for i in range(0, len(tokens) - block + 1, block)] or [tokens]
    values = harness._loglikelihood_tokens([(None, own[:1], own[1:]) for own in blocks])
    means = torch.tensor([-value / (len(own) - 1) for own, (value, _) in zip(blocks, values, strict=True)]).double()
    perplexity = math.exp(min(float(means.mean()), 700.0))
    error = float(means.std() / math.sqrt(len(blocks))) * perplexity if len(blocks) > 1 else None
    return {"value": perplexity, "stderr": error, "tokens": sum(len(own) - 1 for own in blocks)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress bars and log lines of the libraries; our callback reports progress."""
    import datasets
    from tqdm import tqdm

    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # lm-eval has no switch for the bar under which it builds prompts.
        with mock.patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True)):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores the global generators of random numbers, which the libraries draw from."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def version() -> str:
    """Version of lm-eval."""
    return str(lm_eval.__version__)
