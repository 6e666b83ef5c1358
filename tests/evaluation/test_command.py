"""`gnmr eval`: the table, scores.json, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("peft")

from gnmr.cli import eval as command
from gnmr.lab.evaluation import progress

pytestmark = pytest.mark.xdist_group("evaluation")

TASK_KEYS = {
    "metrics",
    "items",
    "items_there",
    "shots",
    "tokens_scored",
    "tokens_read",
    "tokens_generated",
    "truncated",
    "seconds",
    "convention",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./scores.json is not to be written into the repository."""
    monkeypatch.chdir(tmp_path)


def test_a_checkpoint_on_all_tasks(gnmr, checkpoint, task_data, tmp_path) -> None:
    words = [str(checkpoint), f"data={task_data}", "limit=2", "shots=1", "block=32", "device=cpu"]
    outcome = gnmr("eval", *words)
    assert outcome.code == 0 and outcome.err == ""
    tree = json.loads((tmp_path / "scores.json").read_text())
    assert tree.keys() == {
        *("subject", "path", "tasks", "limit", "data", "batch_size", "command", "commit", "machine"),
        *("gnmr", "lm_eval", "torch", "transformers"),
    }
    assert (tree["path"], tree["limit"], tree["data"]) == ("16bit", 2, str(task_data))
    inputs = [str(checkpoint), f"data={task_data}", *words[2:]]
    assert tree["command"] == f"gnmr eval {' '.join(inputs)}", "it runs as it is written"
    assert (tree["subject"]["kind"], tree["subject"]["model"], tree["subject"]["dtype"]) == (
        "checkpoint",
        "llama",
        "float32",
    )
    tasks = tree["tasks"]
    assert {name: set(task) - TASK_KEYS for name, task in tasks.items()} == {
        "gsm8k": set(),
        "mmlu": {"subjects"},
        "hellaswag": set(),
        "wikitext2": {"block"},
    }
    assert {name: list(task["metrics"]) for name, task in tasks.items()} == {
        "gsm8k": ["exact_match,strict-match", "exact_match,flexible-extract"],
        "mmlu": ["acc"],
        "hellaswag": ["acc", "acc_norm"],
        "wikitext2": ["word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity"],
    }
    assert [task["shots"] for task in tasks.values()] == [1, 1, 0, 0]
    assert [task["items"] for task in tasks.values()][:3] == [2, 4, 2]  # of MMLU two of each subject
    assert tasks["gsm8k"]["tokens_scored"] == 0 < tasks["gsm8k"]["tokens_generated"]
    for name, task in tasks.items():
        for metric, row in task["metrics"].items():
            figure = f"{row['value']:.4f}" if row["value"] < 1e6 else f"{row['value']:.4g}"
            assert figure in outcome.out and metric in outcome.out
        assert f"{name}: " in outcome.out
    assert "path in force: 16bit" in outcome.out and outcome.out.endswith("scores: scores.json\n")
    assert [file.name for file in tmp_path.iterdir()] == ["scores.json"]


def test_a_run_on_its_low_path(gnmr, train, task_data, tmp_path) -> None:
    run = train(
        tmp_path / "run",
        "training.seq_len=160",
        "training.steps=2",
        "precision.low=sim_int8",
        "precision.recovery=null",
    )
    asked = ("eval", str(run), "tasks=[hellaswag]", f"data={task_data}", "path=low", "device=cpu")
    outcome = gnmr(*asked)
    assert outcome.code == 0 and "path in force: low (sim_int8, simulated)" in outcome.out
    tree = json.loads((run / "scores-low.json").read_text())
    assert (tree["path"], tree["subject"]["low_path"], tree["subject"]["step"]) == ("low", "sim_int8, simulated", 2)
    assert gnmr(*asked, f"out={tmp_path / 'own.json'}").code == 0
    assert (
        json.loads((tmp_path / "own.json").read_text())["tasks"]["hellaswag"]["metrics"]
        == tree["tasks"]["hellaswag"]["metrics"]
    )


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "": "eval: name one checkpoint or run folder (gnmr eval --help)",
        "nowhere": "nowhere: there is no such run, checkpoint folder or hub name",
        "CHECKPOINT tasks=[gsm8k,arc]": "tasks: 'arc' is not known: use some of gsm8k, mmlu, hellaswag, wikitext2",
        "CHECKPOINT tasks=[]": "tasks=[]: name at least one of gsm8k, mmlu, hellaswag, wikitext2",
        "CHECKPOINT task=[gsm8k]": "eval: unknown option 'task=[gsm8k]': did you mean tasks? (gnmr eval --help)",
        "CHECKPOINT limit=few": "limit=few: must be a whole number of at least 1",
        "CHECKPOINT limit=0": "limit=0: must be a whole number of at least 1",
        "CHECKPOINT shots=-1": "shots=-1: must be a whole number of at least 0",
        "CHECKPOINT tasks=[hellaswag] shots=3": "shots=3: has no effect on hellaswag, which have no examples",
        "CHECKPOINT shots=6": "shots=6: a subject of mmlu has 5 examples; use 5 or fewer, or leave mmlu out of tasks",
        "CHECKPOINT tasks=[gsm8k] block=9": "block=9: has no effect without the task wikitext2",
        "CHECKPOINT tasks=[wikitext2] data=DATA block=1025": "block=1025: CHECKPOINT reads 1024 tokens at most",
        "CHECKPOINT data=nowhere": "data=nowhere: there is no folder nowhere/gsm8k for the task gsm8k",
        "CHECKPOINT out=nowhere/scores.json": "out=nowhere/scores.json: must be a file in a folder that exists",
        "CHECKPOINT tasks=[hellaswag]": "Rowan/hellaswag cannot be read from the hub (ConnectionError: ",
        "CHECKPOINT tasks=[gsm8k] data=DATA shots=13": "gsm8k: 12 rows of train are too few for shots=13",
    }.items(),
)
def test_mistakes_in_one_line(words, line, gnmr, checkpoint, task_data, tmp_path) -> None:
    typed = words.replace("CHECKPOINT", str(checkpoint)).replace("DATA", str(task_data)).split()
    outcome = gnmr("eval", *(typed or ["limit=1"]))
    assert line.replace("CHECKPOINT", str(checkpoint)) in outcome.mistake
    assert not list(tmp_path.iterdir())


def test_without_its_packages(gnmr, monkeypatch) -> None:
    monkeypatch.setattr("gnmr.cli.words.find_spec", lambda name: None if name == "lm_eval" else object())
    assert (
        gnmr("eval", "nowhere").mistake
        == "eval: lm_eval not installed: pip install -e '.[finetune]' in gnmr's checkout"
    )


def test_progress_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY", 0.0)
    with command._bar() as tell:
        tell("gsm8k", 3, 8)
    assert capsys.readouterr().err == "gnmr: scoring gsm8k: 3 of 8\n"
