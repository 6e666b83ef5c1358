"""`gnmr runs`, and `latest` in place of a run's folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gnmr.console import Terminal
from gnmr.errors import UserError
from gnmr.lab.cli import runs as runs_command
from gnmr.lab.cli.parser import Parser, runs, settings_and_places
from gnmr.lab.cli.train import _among_trials
from gnmr.lab.config import load, to_dict
from gnmr.lab.config.compose import compose
from gnmr.lab.train.folder import run_folder
from gnmr.records.find import changed, named

EXAMPLE = Path(__file__).parents[1] / "runs" / "reference" / "example"


def says(run: Path, command: str, **changes: object) -> None:
    """Change the command in the header of a run, and other entries."""
    header = run / "header.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"command": command} | changes))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/study/old and runs/study/new, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, when in (("new", 2_000_000_000), ("old", 1_000_000_000)):
        folder = Path(shutil.copytree(EXAMPLE, f"runs/study/{name}"))
        says(folder, "gnmr train experiment=act_quant_stress_2bit")
        for file in folder.iterdir():
            os.utime(file, (when, when))
    return tmp_path / "runs"


def test_runs_are_listed_oldest_first_with_what_they_came_to(two, gnmr):
    lines = gnmr("runs").out.splitlines()
    rows = [line.split() for line in lines if "study/" in line]
    assert [row[:4] for row in rows] == [["study/old", "done", "40", "276.54"], ["study/new", "done", "40", "276.54"]]
    assert [row[-2][:4] for row in rows] == ["2001", "2033"]


@pytest.mark.parametrize("width", [80, 50])
def test_the_list_fits_a_terminal(two, gnmr, monkeypatch, width):
    """Whole names, whichever width: a folder's is what other commands want."""
    name = "act_quant_stress/int4_int8-gnmr-8ceba21f-s0"[: 36 if width == 80 else None]
    shutil.move(two / "study" / "new", two / "study" / name.replace("/", "-"))
    monkeypatch.setattr(runs_command, "for_tables", lambda: Terminal(width=width))
    lines = gnmr("runs", "runs/study").out.splitlines()
    assert any(line.startswith(name.replace("/", "-")) for line in lines), lines
    assert all(len(line.rstrip()) <= width and "…" not in line for line in lines)
    assert any("done" in line and "276.54" in line for line in lines) and any("2033-05-18" in line for line in lines)


def test_what_is_not_done_says_so(two, gnmr):
    (two / "study/old/DONE").unlink()
    (two / "study/old/summary.json").unlink()
    (two / "study/new/FAILED").write_text("disk full")
    shutil.copytree(two / "study/old", two / "study/odd")
    (two / "study/odd/eval.jsonl").unlink()
    (two / "study/odd/eval.jsonl").mkdir()
    stopped = Path(shutil.copytree(two / "study/old", two / "study/stopped"))
    (stopped / "summary.json").write_text('{"status": "interrupted"}')
    told = {row[0]: row[1:4] for row in map(str.split, gnmr("runs", str(two)).out.splitlines()) if len(row) > 5}
    assert told["study/old"] == ["unfinished", "40", "276.54"]
    assert told["study/new"][0] == "failed" and told["study/odd"][0] == "damaged"
    assert told["study/stopped"][0] == "interrupted"


def test_older_ones_are_counted(two, gnmr):
    out = gnmr("runs", "last=1").out
    assert "study/new" in out and "study/old" not in out and "1 older run hidden; last=null shows all" in out
    assert "study/old" in gnmr("runs", "last=null").out


def test_no_run_is_a_line(tmp_path, monkeypatch, gnmr):
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs/ here; gnmr demo" in gnmr("runs").mistake
    assert "no such folder" in gnmr("runs", "nowhere").mistake
    assert "latest: there is no folder runs/ here" in gnmr("report", "latest").mistake
    Path("runs").mkdir()
    with pytest.raises(UserError, match="no run in it"):
        named("latest")


def test_latest_is_the_one_that_was_written_last(two, gnmr):
    assert named("latest") == "runs/study/new" and changed(two / "study/new") > changed(two / "study/old")
    assert settings_and_places(["latest", "a=1"]) == (["a=1"], ["runs/study/new"])
    assert Parser("diagnose", "", "").of_one_place(["latest"], "run")[1] == "runs/study/new"
    assert runs("run", "latest,shipped") == "runs/study/new,shipped"
    Path("latest").mkdir()
    assert named("latest") == "latest"


def test_a_smoke_run_is_the_latest_of_none_else(two, gnmr):
    (two / "smoke/custom").mkdir(parents=True)
    shutil.move(two / "study/new", two / "smoke/custom/new")
    assert named("latest") == "runs/study/old"
    shutil.rmtree(two / "study")
    assert named("latest") == "runs/smoke/custom/new"


def test_a_trial_below_a_folder_of_ones_own_is_not_the_latest(two):
    for command in ("gnmr train training.steps=20 runs_dir=runs/study", "gnmr train debug=smoke runs_dir=runs/study"):
        says(two / "study/new", command)
        assert named("latest") == "runs/study/old", command
    says(two / "study/new", "gnmr train experiment=fork training.steps=20", base={"step": 600, "sha256": "0"})
    assert named("latest") == "runs/study/new", "a fork has few steps"
    for run in ("study/old", "study/new"):
        says(two / run, "gnmr train training.steps=20 'broken")
    assert named("latest") == "runs/study/new", "a command that cannot be read is of a run"


def test_smoke_runs_have_a_folder_of_their_own():
    words = ["debug=smoke", "experiment=fork_base"]
    assert str(run_folder(_among_trials(compose(words), words))).startswith("runs/smoke/fork_base/")
    assert str(run_folder(compose(["debug=smoke", "runs_dir=mine"]))).startswith("mine/custom/")


@pytest.fixture(scope="module")
def study() -> dict[str, object]:
    return to_dict(compose(["experiment=act_quant_stress"]))


@pytest.mark.parametrize(
    ("words", "below"),
    [
        (["training.steps=20"], "runs/smoke/act_quant_stress"),
        (["training.steps=100"], "runs/act_quant_stress"),
        (["training.steps=20", "runs_dir=mine"], "mine/act_quant_stress"),
        ([], "runs/act_quant_stress"),
    ],
)
def test_a_trial_stays_out_of_its_experiments_folder(words, below, study):
    config = load(OmegaConf.merge(study, OmegaConf.from_dotlist(words)))
    assert run_folder(_among_trials(config, ["experiment=act_quant_stress", *words])).parent == Path(below)


def test_a_short_fork_is_no_trial():
    words = ["experiment=fork", "training.steps=40"]
    assert run_folder(_among_trials(compose(words), words)).parent == Path("runs/fork")


@pytest.mark.usefixtures("composed_once")
def test_a_base_can_be_the_latest_run(two, gnmr):
    """The example was kept without its checkpoints."""
    assert gnmr("train", "experiment=fork", "base=latest").mistake.startswith(
        "base=runs/study/new: is not a run with a"
    )
