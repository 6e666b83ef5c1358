"""Attacks on runs: after each of them the same command gives equal numbers, or the run says in one line why not.

Links and lost rows: tests/train/test_integrity_of_runs.py; numbers that are not finite: test_nonfinite.py.

`make attacks` runs this file with its slow tests: kills at random moments, damaged files, and a full disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from gnmr.errors import RunFailed, UserError
from gnmr.lab.config import Config
from gnmr.records.reader import read_json, read_jsonl, read_units

WORDS = ("training.steps=12", "training.checkpoint_every=2")
MEASURED = ("wall_time_s", "step_time_median_s", "tokens_per_s", "mfu", "peak_memory_bytes")
Train = Callable[..., Path]
Tiny = Callable[..., Config]


def records(folder: Path) -> str:
    """Every record of a run but what was measured of the machine."""
    steps = [{**row, "step_time_s": 0, "tokens_per_s": 0} for row in read_jsonl(folder / "steps.jsonl")]
    summary = {key: value for key, value in (read_json(folder / "summary.json") or {}).items() if key not in MEASURED}
    others = [read_jsonl(folder / name) for name in ("eval.jsonl", "events.jsonl", "faults.jsonl")]
    return repr([steps, others, read_units(folder).to_pylist(), summary])


CHILDREN = multiprocessing.get_context("forkserver")
"""Children come from a process without threads: a fork of one that has trained may crash."""
CHILDREN.set_forkserver_preload(["pytest", "gnmr.lab.evaluation.scores", "gnmr.lab.train.run"])


def train_quietly(config: Config) -> None:
    from gnmr.lab.evaluation.scores import RunScorer
    from gnmr.lab.train.run import run

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run(config, lambda _line: None, scorer=RunScorer())


def in_child(target: Callable[..., object], *args: Any) -> BaseProcess:
    """Start a child; it need not wait for the imports again."""
    child = CHILDREN.Process(target=target, args=args)
    child.start()
    return child


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nobody disturbs, and the seconds that it takes in a child."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    in_child(len, "").join()  # the imports
    began = time.monotonic()
    child = in_child(train_quietly, tiny(f"run_dir={folder}", *WORDS))
    child.join()
    assert child.exitcode == 0
    assert read_jsonl(folder / "events.jsonl"), "a run without promotions shows little"
    return folder, time.monotonic() - began


@pytest.mark.slow
def test_kills_at_random_moments(undisturbed, tiny: Tiny, train: Train, tmp_path: Path) -> None:
    """SIGKILL again and again, in a run that goes on each time; afterwards its records are those of one run."""
    whole, seconds = undisturbed
    folder, draw, kills, at = tmp_path / "run", random.Random(20), 0, 0
    while kills < 20:
        if (folder / "DONE").exists():  # the next run
            assert records(folder) == records(whole)
            at += 1
            folder = tmp_path / f"run-{at}"
        child = in_child(train_quietly, tiny(f"run_dir={folder}", *WORDS))
        time.sleep(draw.uniform(0, seconds))
        child.kill()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        assert child.exitcode in (0, -signal.SIGKILL)
        read_units(folder), read_jsonl(folder / "steps.jsonl")  # readable at every moment
    train(folder, *WORDS)
    assert (folder / "DONE").exists() and records(folder) == records(whole)
    state, other = (max((one / "checkpoints").glob("step-*")) for one in (folder, whole))
    assert {file.name for file in state.iterdir()} == {file.name for file in other.iterdir()}


# ---- damaged files ----


def spoiled(data: bytes, how: str, draw: random.Random) -> bytes:
    """The data with a flipped bit, cut short, empty, or with a run of zeros in it."""
    at = draw.randrange(max(1, len(data)))
    match how:
        case "flip":
            return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :] if data else b"x"
        case "cut":
            return data[:at]
        case "empty":
            return b""
    return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "zeros"])
def test_a_stopped_run_with_a_damaged_file(how: str, undisturbed, train: Train, tmp_path: Path) -> None:
    """Every file of a checkpoint: equal numbers or one line, and never other numbers."""
    whole, draw = undisturbed[0], random.Random(how)
    files = sorted(file.relative_to(whole) for file in (whole / "checkpoints").rglob("*") if file.is_file())
    for name in files:
        folder = Path(shutil.copytree(whole, tmp_path / "run"))
        (folder / "DONE").unlink()
        (folder / name).write_bytes(spoiled((folder / name).read_bytes(), how, draw))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                train(folder, *WORDS)
            except (UserError, RunFailed) as error:
                assert "\n" not in str(error) and not (folder / "DONE").exists(), name
            else:
                assert records(folder) == records(whole), name
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps.jsonl", "eval.jsonl", "events.jsonl", "units.arrows", "config.yaml"])
def test_report_and_replay_of_damaged_records(name: str, undisturbed, gnmr, tmp_path: Path) -> None:
    """A run whose records cannot be read costs one line and no traceback."""
    draw = random.Random(name)
    for how in ("flip", "cut", "empty", "zeros"):
        folder = Path(shutil.copytree(undisturbed[0], tmp_path / "runs" / "run", ignore=shutil.ignore_patterns("ch*")))
        (folder / name).write_bytes(spoiled((folder / name).read_bytes(), how, draw))
        for words in (["report", str(folder), f"out={tmp_path / 'out'}"], ["replay", str(folder)]):
            outcome = gnmr(*words)
            assert outcome.code in (0, 2) and "Traceback" not in outcome.err, (how, words)
            assert outcome.code == 0 or outcome.err.splitlines()[-1].startswith("gnmr: "), (how, words)
        shutil.rmtree(folder)


# ---- a full disk ----


@pytest.mark.slow
@pytest.mark.parametrize("size", ["100k", "300k", "600k", "900k"])
def test_a_disk_that_is_full(size: str, small_disk, undisturbed, train: Train) -> None:
    """The run ends in one line and keeps its rows; with more space it gives what it gives without."""
    folder = small_disk(size) / "run"
    with pytest.raises((RunFailed, UserError), match=r"disk full|cannot be written|No space left") as caught:
        train(folder, *WORDS)
    assert "\n" not in str(caught.value) and not (folder / "DONE").exists()
    steps = [row["step"] for row in read_jsonl(folder / "steps.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert set(read_units(folder)["step"].to_pylist()) == {*steps}
    small_disk("30m")
    train(folder, *WORDS)
    assert records(folder) == records(undisturbed[0])


# ---- what others wrote ----


def test_a_header_that_others_wrote_is_data(train: Train, tmp_path: Path) -> None:
    """What a resumed run reads back is neither imported nor resolved."""
    folder = train(tmp_path / "run", "training.steps=2")
    before = records(folder)
    (folder / "DONE").unlink()
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | {"run_id": "${oc.env:HOME}"}))
    train(folder, "training.steps=2")
    assert json.loads((folder / "header.json").read_text())["run_id"] == "${oc.env:HOME}"
    assert records(folder) == before
