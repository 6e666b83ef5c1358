"""Scores while a run trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gnmr.errors import RunFailed, UserError
from gnmr.records.reader import read_jsonl

pytestmark = pytest.mark.slow


def test_a_run_is_scored_at_its_cadence_and_at_its_end_and_is_otherwise_the_same(train, task_data, tmp_path) -> None:
    words = ["training.seq_len=64", "precision.site=forward"]
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
    assert line(f"scores.data={tmp_path / 'nowhere'}").startswith(f"scores: data={tmp_path / 'nowhere'}: there is no")
    assert "scores.tasks=piqa" in line("scores.tasks=[piqa]")


def test_rows_that_cannot_be_scored_are_refused_before_the_first_step(train, task_data, tmp_path) -> None:
    def line(*words: str) -> str:
        with pytest.raises(UserError) as told:
            train(tmp_path / "run", *words)
        assert not (tmp_path / "run").exists()
        return str(told.value)

    told = line("scores.tasks=[hellaswag]")
    assert "Rowan/hellaswag cannot be read from the hub (ConnectionError: " in told
    assert told.endswith("HF_ENDPOINT and the proxy, or give scores.data=FOLDER"), "no word of gnmr eval"
    local = ["scores.tasks=[gsm8k]", f"scores.data={task_data}"]
    assert line(*local, "scores.shots=13") == "scores: gsm8k: 12 rows of train are too few for shots=13"


def test_a_run_that_fails_in_scoring_goes_on_where_it_was(train, task_data, tmp_path, monkeypatch) -> None:
    """No step is trained again, and the scores of that step are there in the end."""
    from gnmr.lab.evaluation import scoring
    from gnmr.lab.train.step import TrainStep

    words = ["training.seq_len=64", "scores.tasks=[hellaswag]", f"scores.data={task_data}", "scores.limit=1"]
    words += ["scores.every=4", "training.checkpoint_every=100"]
    plain, steps, score = TrainStep.__call__, [], scoring.score

    def call(self, *args):
        steps.append(self.router.t + 1)
        return plain(self, *args)

    def lost(*_args, **_named):
        raise UserError("the disk with the rows is gone")

    monkeypatch.setattr(TrainStep, "__call__", call)
    for broken, end in ((True, 4), (False, 8)):
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(scoring, "score", lost)
                with pytest.raises(RunFailed, match="scores after step 4: the disk with the rows is gone; the same"):
                    train(tmp_path / "run", *words)
            else:
                train(tmp_path / "run", *words)
        assert steps == list(range(1, end + 1))
    assert scoring.score is score
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "scores.jsonl")] == [4, 8]


def test_a_run_that_is_done_says_how_to_score_it(train, task_data, tmp_path) -> None:
    words = ["training.seq_len=64", "training.steps=2"]
    folder = train(tmp_path / "run", *words)
    asked = ["scores.tasks=[hellaswag]", f"scores.data={task_data}", "scores.limit=2"]
    told: list[str] = []
    train(folder, *words, *asked, say=told.append)
    command = f"gnmr eval {folder} 'tasks=[hellaswag]' limit=2 data={task_data}"
    assert told == [f"{folder} is done: skipped", f"scores.tasks: it is trained, so score it with {command}"]
    scored, told = train(tmp_path / "scored", *words, *asked), []
    train(scored, *words, *asked, say=told.append)
    assert told == [f"{scored} is done: skipped"]


def test_an_interrupted_run_scores_again_what_it_had_not_saved(train, task_data, tmp_path, monkeypatch) -> None:
    from gnmr.lab.train.step import TrainStep

    plain = TrainStep.__call__

    def call(self, *args):
        if self.router.t == 5:
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
