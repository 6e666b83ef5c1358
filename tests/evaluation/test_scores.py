"""Scores of a run, against lm-eval on what the run exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("peft")

from gnmr.errors import RunFailed, UserError
from gnmr.lab.evaluation import scores
from gnmr.records.reader import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("evaluation")]
LONG = ["training.seq_len=256", "training.dtype=float32"]


def theirs(folder: Path, tasks: list[str], data: Path, **options: Any) -> dict[str, dict[str, float]]:
    """What lm-eval says of a folder in Hugging Face's layout."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: Any = simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder), "dtype": "float32", **options},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(data), include_defaults=False),
        device="cpu",
        log_samples=False,
    )
    return {name: found["results"][name] for name in tasks}


def test_scores_of_a_run_are_those_of_its_export(train, task_data, tmp_path, monkeypatch) -> None:
    """Log-likelihoods, rolling ones and greedy answers, of a model of ours."""
    tasks = "scores.tasks=[hellaswag,wikitext2,mmlu]"
    monkeypatch.setattr(scores, "SHOTS", {})
    folder = train(tmp_path / "run", *LONG, "training.export_hf=true", tasks, f"scores.data={task_data}")
    (row,) = read_jsonl(folder / "scores.jsonl")
    with scores.undisturbed():
        expected = theirs(folder / "hf", ["hellaswag", "wikitext"], task_data)
    own = {name: task["metrics"] for name, task in row["tasks"].items()}
    assert own["hellaswag"]["acc_norm"]["value"] == expected["hellaswag"]["acc_norm,none"]
    assert own["wikitext2"]["word_perplexity"]["value"] == pytest.approx(
        expected["wikitext"]["word_perplexity,none"], rel=1e-4
    )
    assert own["wikitext2"]["token_perplexity"]["value"] > 1
    assert (row["tasks"]["mmlu"]["items"], row["tasks"]["hellaswag"]["items"]) == (3, 6)


def test_a_fine_tuned_run_has_all_four_scores(train, checkpoint, task_data, tmp_path) -> None:
    """The setting of the paper's table 7, on either path."""
    words = [
        "model.name=pretrained",
        f"model.checkpoint={checkpoint}",
        "precision.low=sim_int4",
        "precision.recovery=null",
    ]
    words += ["training.steps=1", "scores.tasks=[gsm8k,mmlu,hellaswag,wikitext2]", f"scores.data={task_data}"]
    found = {}
    for path in ("16bit", "low"):
        folder = train(tmp_path / path, *LONG, *words, "scores.limit=2", f"scores.path={path}")
        (row,) = read_jsonl(folder / "scores.jsonl")
        assert (row["step"], row["path"], row["tasks"]["gsm8k"]["shots"]) == (1, path, 5)
        assert set(row["tasks"]["gsm8k"]["metrics"]) == {"exact_match,strict-match", "exact_match,flexible-extract"}
        found[path] = row["tasks"]["wikitext2"]["metrics"]["token_perplexity"]["value"]
    assert found["16bit"] != found["low"]


def test_greedy_answers_of_our_models_are_those_of_the_export(train, task_data, tmp_path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from gnmr.lab.config import read
    from gnmr.lab.evaluation.subjects import load_subject

    folder = train(tmp_path / "run", *LONG, "training.export_hf=true", "training.steps=2")
    theirs = HFLM(str(folder / "hf"), dtype="float32", device="cpu", batch_size=1)
    subject = load_subject(str(folder), device="cpu")
    parts: Any = type(
        "Parts", (), {"config": read(folder / "config.yaml"), "model": subject.model, "device": subject.device}
    )
    ours = HFLM(scores._Live(parts), backend="causal", tokenizer=theirs.tokenizer, batch_size=1)
    asked = [("abc def", {"until": ["\n"], "max_gen_toks": 12}), ("ghi", {"until": ["\n"], "max_gen_toks": 12})]
    requests = [Instance("generate_until", {}, one, 0) for one in asked]
    with torch.no_grad():
        assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_a_run_is_scored_at_its_cadence_and_is_otherwise_the_same(train, task_data, tmp_path) -> None:
    words = ["training.seq_len=64", "precision.site=forward"]
    plain = train(tmp_path / "plain", *words)
    asked = [
        "scores.tasks=[wikitext2]",
        f"scores.data={task_data}",
        "scores.limit=2",
        "scores.path=low",
        "scores.every=3",
    ]
    scored = train(tmp_path / "scored", *words, *asked)
    rows = read_jsonl(scored / "scores.jsonl")
    assert [(row["step"], row["path"]) for row in rows] == [(step, "low") for step in (3, 6, 8)]
    assert len({row["tasks"]["wikitext2"]["metrics"]["token_perplexity"]["value"] for row in rows}) == 3
    losses = [[row["loss"] for row in read_jsonl(folder / "steps.jsonl")] for folder in (plain, scored)]
    assert losses[0] == losses[1]


def test_scores_that_a_run_cannot_have_are_refused_before_it_begins(train, task_data, tmp_path) -> None:
    cases = (
        ([f"scores.data={task_data}", "scores.path=low"], "scores.path=low"),
        ([f"scores.data={tmp_path / 'nowhere'}"], "scores.data"),
        ([], "hellaswag cannot be read from the hub"),
        (["scores.tasks=[piqa]"], "scores.tasks=piqa"),
    )
    for words, key in cases:
        with pytest.raises(UserError, match=key):
            train(tmp_path / "run", "scores.tasks=[hellaswag]", *words)
        assert not (tmp_path / "run").exists()


def test_a_run_that_fails_in_scoring_goes_on_where_it_was(train, task_data, tmp_path, monkeypatch) -> None:
    words = ["training.seq_len=64", "scores.tasks=[hellaswag]", f"scores.data={task_data}", "scores.limit=1"]
    words += ["scores.every=4", "training.checkpoint_every=100"]

    def lost(*_args: Any) -> None:
        raise UserError("the disk with the rows is gone")

    with monkeypatch.context() as patch:
        patch.setattr(scores, "_scored", lost)
        with pytest.raises(RunFailed, match="scores after step 4: the disk with the rows is gone"):
            train(tmp_path / "run", *words)
    train(tmp_path / "run", *words)
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "steps.jsonl")] == list(range(1, 9))
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "scores.jsonl")] == [4, 8]
