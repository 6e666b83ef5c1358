"""Scores while a run trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gnmr.errors import UserError
from gnmr.records.reader import read_jsonl


def test_a_run_is_scored_at_its_cadence_and_at_its_end_and_is_otherwise_the_same(train, task_data, tmp_path) -> None:
    words = ["training.seq_len=64", "paths.site=forward"]
    plain = train(tmp_path / "plain", *words)
    scores = ["scores.tasks=[hellaswag,wikitext2]", f"scores.data={task_data}", "scores.limit=2", "scores.path=low"]
    scored = train(tmp_path / "scored", *words, *scores, "scores.every=3")
    rows = read_jsonl(scored / "scores.jsonl")
    assert [(row["step"], row["path"], sorted(row["tasks"])) for row in rows] == [
        (step, "low", ["hellaswag", "wikitext2"]) for step in (3, 6, 8)
    ]
    assert rows[0]["tasks"]["hellaswag"]["items"] == 2
    perplexities = [row["tasks"]["wikitext2"]["metrics"]["token_perplexity"]["value"] for row in rows]
    assert len(set(perplexities)) == 3, "the model that was scored is the one of that step"
    losses = [[row["loss"] for row in read_jsonl(folder / "steps.jsonl")] for folder in (plain, scored)]
    assert losses[0] == losses[1]
    assert not (plain / "scores.jsonl").exists()


def test_scores_that_a_run_cannot_have_are_refused_before_it_begins(train, task_data, tmp_path) -> None:
    def line(*words: str) -> str:
        with pytest.raises(UserError) as told:
            train(tmp_path / "run", "scores.tasks=[hellaswag]", *words)
        assert not (tmp_path / "run").exists()
        return str(told.value)

    assert line(f"scores.data={task_data}", "scores.path=low").startswith("scores.path=low: ")
    assert "hellaswag" in line(f"scores.data={tmp_path / 'nowhere'}")
    assert "scores.tasks=piqa" in line("scores.tasks=[piqa]")


def test_an_interrupted_run_scores_again_what_it_had_not_saved(train, task_data, tmp_path, monkeypatch) -> None:
    from gnmr.training.step import TrainStep

    plain = TrainStep.__call__

    def call(self, *args):
        if self.controller.t == 5:
            raise KeyboardInterrupt
        return plain(self, *args)

    words = ["training.seq_len=64", "scores.tasks=[hellaswag]", f"scores.data={task_data}"]
    words += ["scores.limit=1", "scores.every=2"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", call)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", *words)
    torch.manual_seed(1)
    folder: Path = train(tmp_path / "run", *words)
    assert [row["step"] for row in read_jsonl(folder / "scores.jsonl")] == [2, 4, 6, 8]
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
