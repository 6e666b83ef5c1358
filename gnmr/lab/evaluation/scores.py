"""Scores of a run's model on language tasks, with lm-eval's class for Hugging Face models and its tasks.

The live model is scored on its 16-bit or its low path, so that no copy is made and sharded weights stay sharded. A
finished run is scored by lm-eval on the folder that `training.export_hf=true` writes:

    lm_eval --model hf --model_args pretrained=RUN/hf --tasks hellaswag,wikitext
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.errors import RunFailed, UserError
from gnmr.formats import Recipe
from gnmr.lab.evaluation.subjects import tokenizer_of_kind
from gnmr.lab.models import pretrained
from gnmr.lab.train.build import Parts
from gnmr.lab.train.memory import out_of_memory

LM_EVAL_TASK = {"gsm8k": "gsm8k", "mmlu": "mmlu", "hellaswag": "hellaswag", "wikitext2": "wikitext"}
"""lm-eval's name of each of `gnmr.names.TASKS`."""
FOLDERS = {"mmlu": "mmlu/default"}
"""Folder of lm-eval's definition of a task, if it differs from the task's name."""
SHOTS = {"gsm8k": 5, "mmlu": 5}
"""Number of examples in a prompt."""
BATCH_SIZE = 8
"""Inputs per forward pass."""
BLOCK = 2048
"""Tokens per block of token_perplexity, unless the model's context is shorter."""


class RunScorer:
    """Scores the current model of a run on the tasks and the path of `scores.*`."""

    def check(self, parts: Parts) -> None:
        """Raise UserError if this run cannot be scored. The rows of the tasks are fetched from the hub."""
        config = parts.config.scores
        for package in ("lm_eval", "transformers"):
            pretrained.need(package, f"scores.tasks={config.tasks}")
        if config.path == "low" and not parts.converted.casts_forward:
            low = parts.converted.low
            low_name = f"the recipe {low.name}" if isinstance(low, Recipe) else f"precision.low={low.name}"
            raise UserError(f"scores.path=low: {low_name} casts nothing in the forward pass here; use path=16bit")
        with undisturbed():
            _tokenizer(parts)
            for name in config.tasks:
                _loaded(parts, name)

    def score(self, parts: Parts, step: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Return a row of `SCORE_FIELDS`. The model and the random number generators are unchanged afterwards.

        Raises RunFailed if scoring fails; the checkpoint of `step` is saved by then.
        """
        config, converted, model = parts.config.scores, parts.converted, parts.model
        # Weights that exist as codes alone (precision.weights=instead) are in 8 bits on the 16-bit path too: w8a16.
        coded = any(not operator.weight.is_floating_point() for operator in converted.operators)
        on_path = converted.on_low_path() if config.path == "low" else converted.high_precision()
        was_training, tasks = model.training, {}
        model.eval()
        try:
            with undisturbed(), torch.no_grad(), on_path:
                for name in config.tasks:
                    say(f"scoring {name}")
                    tasks[name] = _scored(parts, name)
        except Exception as error:
            if not isinstance(error, UserError) and not out_of_memory(error):
                raise
            why = error if isinstance(error, UserError) else f"out of memory in batches of {BATCH_SIZE}"
            raise RunFailed(f"scores after step {step}: {why}; the same command goes on with them") from error
        finally:
            model.train(was_training)
        return {"step": step, "path": "w8a16" if coded and config.path == "16bit" else config.path, "tasks": tasks}


class _Live:
    """Adapts the live model to the interface that lm-eval's class for Hugging Face models calls."""

    def __init__(self, parts: Parts) -> None:
        self._model: Any = parts.model
        self._hugging_face = parts.config.model.checkpoint is not None
        self.device = parts.device
        seq_len = parts.config.training.seq_len
        self.config = self._model.config if self._hugging_face else SimpleNamespace(max_position_embeddings=seq_len)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        if self._hugging_face:
            return self._model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return SimpleNamespace(logits=self._model(input_ids))

    def generate(self, input_ids: Tensor, max_length: int, stopping_criteria: Any, **options: Any) -> Tensor:
        """Return greedy answers. Our models have neither a cache nor a mask, so their rows must have no padding."""
        if self._hugging_face:
            options |= {"max_length": max_length, "stopping_criteria": stopping_criteria}
            return self._model.generate(input_ids=input_ids, **options)
        while input_ids.shape[1] < max_length:
            token_B1 = self._model(input_ids)[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token_B1], dim=1)
            if stopping_criteria(input_ids, None).all():
                break
        return input_ids


def _tokenizer(parts: Parts) -> Any:
    if (checkpoint := parts.config.model.checkpoint) is None:
        return pretrained.tokenizer_of(parts.corpus.tokenizer_path)
    return tokenizer_of_kind(checkpoint)


def _loaded(parts: Parts, name: str) -> tuple[Any, Any]:
    """Return lm-eval's manager of only this task, and the task. Raises UserError if its rows cannot be read."""
    import lm_eval.tasks

    data, task = parts.config.scores.data, LM_EVAL_TASK[name]
    try:
        shipped = Path(lm_eval.tasks.__file__).parent / FOLDERS.get(name, task)
        where = shipped if data is None else Path(data).expanduser().resolve(strict=True)
        manager = lm_eval.tasks.TaskManager(include_path=str(where), include_defaults=False)  # defaults take 10 s
        return manager, lm_eval.tasks.get_task_dict([task], manager)
    except Exception as error:  # datasets, the hub's client, HTTP: many libraries without a common base class
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        source = f"scores.data={data}" if data is not None else "the hub (check the network, HF_ENDPOINT and the proxy)"
        raise UserError(f"scores.tasks: {name} cannot be read from {source}: {reason}") from error


def _scored(parts: Parts, name: str) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    config, from_scratch = parts.config.scores, parts.config.model.checkpoint is None
    # Our models have no mask (`_Live.generate`), so prompts must not be padded to a common length.
    size = 1 if from_scratch and name == "gsm8k" else BATCH_SIZE
    lm = HFLM(_Live(parts), backend="causal", tokenizer=_tokenizer(parts), batch_size=size)
    manager, tasks = _loaded(parts, name)
    shots = SHOTS.get(name, 0)
    few = {"num_fewshot": shots, "limit": config.limit}
    results: Any = simple_evaluate(lm, tasks=[LM_EVAL_TASK[name]], task_manager=manager, log_samples=False, **few)
    row = results.get("groups", {}).get(LM_EVAL_TASK[name]) or results["results"][LM_EVAL_TASK[name]]
    metrics = {}
    for key, value in row.items():  # `metric,filter` and `metric_stderr,filter`
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = row.get(f"{metric}_stderr,{filter_name}")
            shown = metric if filter_name == "none" else key
            metrics[shown] = {"value": float(value), "stderr": error if isinstance(error, float) else None}
    if name == "wikitext2":
        pages = [document["page"] for document in tasks["wikitext"].eval_docs][: config.limit]
        metrics["token_perplexity"] = {"value": token_perplexity(lm, pages), "stderr": None}
    items = sum(size["effective"] for size in results["n-samples"].values())
    return {"metrics": metrics, "items": items, "shots": shots}


def token_perplexity(lm: Any, pages: list[str]) -> float:
    """Return the perplexity per token as in GPTQ and later work: separate blocks of the whole text.

    The text is the rows of wikitext-2-raw-v1, which are lines, joined by two newlines. Every token of a block but the
    first is scored.
    """
    lines = "\n".join(pages).removesuffix("\n").split("\n")
    tokens = lm.tok_encode("\n\n".join(f"{line}\n" if line.strip() else "" for line in lines))
    size = min(BLOCK, lm.max_length)
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)] or [tokens]
    likelihoods = lm._loglikelihood_tokens([(("", ""), block[:1], block[1:]) for block in blocks])
    # Blocks have equal lengths, so the mean of their means is the mean over tokens.
    means = [-value / (len(block) - 1) for block, (value, _) in zip(blocks, likelihoods, strict=True)]
    # exp overflows above 709.
    return math.exp(min(float(np.mean(means)), 700.0))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global random number generators, which lm-eval seeds, and silence lm-eval's log."""
    python, numpy, log = random.getstate(), np.random.get_state(), logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            log.setLevel(level)
