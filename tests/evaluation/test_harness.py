"""Our model class against lm-eval's own for Hugging Face models, and against hand-worked answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_tasks import SUBJECTS, rows_of

pytest.importorskip("lm_eval")
pytest.importorskip("peft")

from lm_eval.api.instance import Instance

from gnmr.errors import UserError
from gnmr.lab.evaluation import tasks
from gnmr.lab.evaluation.harness import Harness
from gnmr.lab.evaluation.scoring import SHOTS_SEED, score, token_perplexity
from gnmr.lab.evaluation.subjects import Subject, load_subject

pytestmark = pytest.mark.xdist_group("evaluation")  # lm-eval is imported once

SHOTS = {"gsm8k": 2, "mmlu": 5, "hellaswag": 0, "wikitext2": 0}


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return load_subject(str(checkpoint), device="cpu")


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(scope="module")
def shipped(task_data: Path) -> Callable[[str], dict[str, Any]]:
    """lm-eval's own definitions, untouched, with the hub's answer to `load_dataset` in the place of the hub."""
    import datasets
    from lm_eval.tasks import TaskManager

    def load_dataset(path: str, name: str | None = None, **_: Any) -> Any:
        if path == "openai/gsm8k":
            splits = {split: rows_of(task_data / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}
        elif path == "cais/mmlu":
            rows = {split: rows_of(task_data / "mmlu" / f"{split}.jsonl") for split in ("dev", "test")}
            splits = {split: [row for row in rows[split] if row["subject"] == name] for split in rows}
        elif path == "Rowan/hellaswag":
            rows = rows_of(task_data / "hellaswag" / "validation.jsonl")
            for row in rows:
                row["ctx_a"], row["ctx_b"] = tasks.context_parts(row["ctx"])
                row["label"] = str(row["label"])
            splits = {"train": rows[:1], "validation": rows}
        else:
            assert (path, name) == ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")
            pages = [{"page": page} for page in tasks.pages((task_data / "wikitext2" / "test.txt").read_text())]
            splits = {"train": pages[:1], "validation": pages[:1], "test": pages}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})

    def load(name: str) -> dict[str, Any]:
        manager = TaskManager(include_path=str(tasks.shipped(name)), include_defaults=False)
        names = [f"mmlu_{subject}" for subject in SUBJECTS] if name == "mmlu" else [tasks.TASKS[name].theirs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets, "load_dataset", load_dataset)
            loaded = manager.load(names)
        return prepared(loaded, name)

    return load


def prepared(loaded: dict[str, Any], name: str) -> dict[str, Any]:
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=SHOTS[name])
        task.set_fewshot_seed(seed=SHOTS_SEED)
    return loaded


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.slow
def test_every_metric_equals_that_of_lm_evals_own_class(name, subject, theirs, shipped, task_data, tmp_path):
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    # The local definition builds the very requests of the shipped one.
    tasks.define(name, tasks.read(name, task_data), tmp_path, SHOTS[name])
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    local, reference = prepared(manager.load([tasks.TASKS[name].theirs]), name), shipped(name)
    assert local["tasks"].keys() == reference["tasks"].keys()
    requests = []
    for key, task in reference["tasks"].items():
        for each in (task, local["tasks"][key]):
            each.build_all_requests(limit=None, rank=0, world_size=1)
        assert [one.args for one in task.instances] == [one.args for one in local["tasks"][key].instances]
        one, other = ({**each.dump_config()} for each in (task, local["tasks"][key]))
        for key in (
            "metric_list",
            "filter_list",
            "generation_kwargs",
            "process_results",
            "process_docs",
            "doc_to_text",
        ):
            assert one.get(key) == other.get(key)
        requests += task.instances

    # Request by request.
    kind = requests[0].request_type
    harness = Harness(subject, batch_size=4)
    with subject.serving():
        ours = getattr(harness, kind)(requests)
    expected = getattr(theirs, kind)(requests)
    if kind == "loglikelihood":
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
        ours, expected = [value for value, _ in ours], [value for value, _ in expected]
    if kind == "generate_until":
        assert ours == expected and len(set(ours)) > 1 and any(ours)
    else:
        assert ours == pytest.approx(expected, abs=1e-3, rel=2e-6) and len(set(ours)) > 1

    # Every metric with its standard error.
    shots = None if name in ("mmlu", "hellaswag", "wikitext2") else SHOTS[name]
    found = score(subject, [name], data=task_data, shots=shots, batch_size=4)[name]
    results = evaluate(lm=theirs, task_dict=shipped(name), log_samples=False)
    own = found.pop("subjects") if name == "mmlu" else {"": found["metrics"]}
    for key, row in results["results"].items():
        mine = own[key.removeprefix("mmlu_") if name == "mmlu" else ""]
        named = {key.removesuffix(",none"): value for key, value in row.items() if "," in key}
        for metric, value in named.items():
            if "_stderr" in metric:
                error = mine[metric.replace("_stderr", "")]["stderr"]
                assert error == (None if value == "N/A" else pytest.approx(value, rel=1e-9)), metric
            else:
                assert mine[metric]["value"] == pytest.approx(value, rel=1e-6), metric
    if name == "mmlu":
        size = {key: row["items"] for key, row in own.items()}
        mean = sum(row["acc"]["value"] * size[key] for key, row in own.items()) / sum(size.values())
        assert found["metrics"]["acc"]["value"] == pytest.approx(mean) and found["items"] == sum(size.values())
    assert found["tokens_scored"] + found["tokens_generated"] > 0


# ---- a scripted model: the next token is the last one plus one, of ten, with known odds ----


class Digits:
    """Tokens 0 to 9 are the digits; 9 ends a text and is special."""

    bos, eos = None, 9

    def encode(self, text: str, special: bool) -> list[int]:
        return [int(letter) for letter in text]

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return "".join(str(token) for token in tokens if special or token != 9)


def counting(max_length: int = 8, seen: list[torch.Tensor] | None = None) -> Subject:
    """logits: log 10 for the last token plus one, 0 for the nine others."""

    def logits(tokens_BT: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen.append(tokens_BT)
        return torch.nn.functional.one_hot((tokens_BT + 1) % 10, 10).float() * math.log(10)

    return Subject("digits", torch.nn.Module(), logits, Digits(), max_length, 10, torch.device("cpu"))


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


LIKELY, UNLIKELY = math.log(10 / 19), math.log(1 / 19)


def test_log_likelihoods_by_hand() -> None:
    seen: list[torch.Tensor] = []
    harness = Harness(counting(seen=seen), batch_size=2)
    pairs = [("12", "345"), ("12", "346"), ("5", "5"), ("5", "6"), ("", "01"), ("12345", "678901")]
    found = harness.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    values = [value for value, _ in found]
    expected = [3 * LIKELY, 2 * LIKELY + UNLIKELY, UNLIKELY, LIKELY, 2 * LIKELY, 6 * LIKELY]
    assert values == pytest.approx(expected, abs=1e-6)
    assert [greedy for _, greedy in found] == [True, False, False, True, True, True]
    # Four inputs in batches of two, longest first: 1234567890 without its last token and its first, 9 0 (the end token
    # and a continuation without its last), 1234 for both of its continuations, 5 for both of its.
    assert [batch.tolist() for batch in seen] == [
        [[3, 4, 5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 0, 0, 0, 0]],
        [[9, 0], [5, 0]],
    ]
    assert harness.counts == {"scored": 3 + 3 + 1 + 1 + 2 + 6, "read": 8 + 4 + 2 + 1, "truncated": 1}
    with pytest.raises(
        UserError, match="digits: a continuation of 9 tokens cannot be scored; the model reads 8 at most"
    ):
        harness.loglikelihood([request("loglikelihood", "1", "123456789")])


def test_rolling_log_likelihoods_by_hand() -> None:
    seen: list[torch.Tensor] = []
    harness = Harness(counting(max_length=4, seen=seen), batch_size=1)
    found = harness.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in ("0123456", "13")])
    # The first token is conditioned on the end token, 9; the last window reads as much as fits, and scores 4, 5, 6.
    assert found == pytest.approx([7 * LIKELY, 2 * UNLIKELY], abs=1e-6)
    assert [batch.tolist() for batch in seen] == [[[9, 0, 1, 2]], [[2, 3, 4, 5]], [[9, 1]]]
    assert harness.counts["scored"] == 9


def test_answers_end_at_the_first_stop_the_end_token_or_the_limit() -> None:
    harness = Harness(counting(max_length=40), batch_size=3)

    def ask(prompt: str, **wanted: Any) -> Instance:
        return request("generate_until", prompt, {"until": [], "do_sample": False, **wanted})

    asked = [ask("2"), ask("2", until=["67", "56"]), ask("12", until=["78", "67"]), ask("0", max_gen_toks=3), ask("78")]
    assert harness.generate_until(asked) == ["345678", "34", "345", "123", ""]
    assert harness.counts["generated"] == 6 + 4 + 5 + 3 + 0
    # A prompt and its answer share the model's context: half of it each at the most.
    seen: list[torch.Tensor] = []
    short = Harness(counting(max_length=6, seen=seen), batch_size=1)
    assert short.generate_until([ask("8123401")]) == ["234"]
    assert seen[0].tolist() == [[4, 0, 1]] and short.counts["truncated"] == 1


def test_perplexity_a_token_by_hand() -> None:
    harness = Harness(counting(), batch_size=2)
    # Blocks 0123, 4568, the rest 0 1 is left; three tokens of each are scored: 3 likely; 2 likely, 1 unlikely.
    means = -LIKELY, -(2 * LIKELY + UNLIKELY) / 3
    found = token_perplexity(harness, "0123456801", 4)
    assert found["value"] == pytest.approx(math.exp(sum(means) / 2), rel=1e-6)
    assert found["stderr"] == pytest.approx(found["value"] * abs(means[0] - means[1]) / 2, rel=1e-5)
    assert token_perplexity(harness, "0123", 8) == {
        "value": pytest.approx(math.exp(-LIKELY)),
        "stderr": None,
        "tokens": 3,
    }


def test_perplexity_a_token_is_that_of_the_usual_script(subject, checkpoint, task_data) -> None:
    """The whole text encoded once, in blocks; the mean of Hugging Face's own losses of the blocks."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = (task_data / "wikitext2" / "test.txt").read_text()
    lines = [f"{line}\n" if line.strip() else "" for line in text.removesuffix("\n").split("\n")]
    while not lines[0]:
        lines.pop(0)
    tokens = tokenizer("\n\n".join(lines), return_tensors="pt").input_ids
    blocks = tokens[:, : tokens.shape[1] // 64 * 64].view(-1, 64)
    assert len(blocks) > 3
    with torch.no_grad():
        losses = [model(block[None], labels=block[None]).loss for block in blocks]
    found = score(subject, ["wikitext2"], data=task_data, block=64)["wikitext2"]
    assert found["block"] == 64 and "blocks of 64 tokens" in found["convention"]
    assert found["metrics"]["token_perplexity"]["value"] == pytest.approx(
        float(torch.stack(losses).mean().exp()), rel=1e-5
    )


def test_generation_with_a_cache_equals_recomputation(subject, task_data) -> None:
    prompts = [row["question"] for row in rows_of(task_data / "gsm8k" / "test.jsonl")]
    asked = [request("generate_until", prompt, {"until": ["e"], "max_gen_toks": 24}) for prompt in prompts]
    with subject.serving():
        cached = Harness(subject, batch_size=2).generate_until(asked)
        plain = Harness(replace(subject, generate=None), batch_size=1).generate_until(asked)
    assert cached == plain and len(set(cached)) > 1


def test_scoring_leaves_no_trace(subject, task_data) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    subject.model.train()
    told: list[tuple[str, int, int]] = []
    found = score(
        subject, ["hellaswag", "gsm8k"], limit=2, shots=1, data=task_data, progress=lambda *now: told.append(now)
    )
    assert list(found) == ["hellaswag", "gsm8k"]
    assert [found[name]["items"] for name in found] == [2, 2] and found["gsm8k"]["shots"] == 1
    assert told[-1] == ("gsm8k", 2, 2) and ("hellaswag", 8, 8) in told
    assert subject.model.training and torch.is_grad_enabled()
    subject.model.eval()
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
