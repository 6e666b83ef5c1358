"""Sweeps: done cells are skipped, failed ones run again, an edited YAML changes no later cell."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml

from gnmr.cli import train
from gnmr.lab import config
from gnmr.lab.config.compose import conf_dir
from gnmr.lab.sweep.progress import Cell
from gnmr.lab.train import run as run_module
from gnmr.records.reader import read_json

SEEDS = "training.seed=0,1"


def folders(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("runs/*/*-s*"))


def cells(tmp_path: Path) -> dict[int, Path]:
    """Run folders by seed."""
    return dict(sorted((int(p.name.rsplit("-s", 1)[1]), p) for p in folders(tmp_path)))


def done(tmp_path: Path) -> list[int]:
    """Seeds of the cells that are."""
    return [seed for seed, folder in cells(tmp_path).items() if (folder / "DONE").exists()]


@pytest.mark.parametrize(("sent", "told"), [(None, "spent 3.0%"), (0.271, "sent 27.1%")])
def test_a_line_tells_what_recovery_costs(tmp_path, sent, told):
    cell = Cell([], config.load({"run_dir": str(tmp_path)}), 0)
    (tmp_path / "DONE").touch()
    summary = {"final_val_ppl": 36.19, "spent_gemm_frac": 0.03, "numbers_sent_frac": sent, "wall_time_s": 45.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    cell.look()
    assert cell.line() == f"#0 {tmp_path.name}  ppl 36.19  {told}  0:00:45"


@pytest.mark.usefixtures("composed_once")
def test_cells_that_are_done_are_skipped(gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_words[:2], "-m", *tiny_words[2:], SEEDS, "records.live=auto"]
    first = gnmr("train", *words)
    assert first.code == 0 and not first.err
    *_, end = first.out.splitlines()
    assert end == f"next: gnmr report {tmp_path / 'runs' / 'custom'}"
    told = [line for line in first.out.splitlines() if line.startswith("#")]
    for number, (line, folder) in enumerate(zip(told, cells(tmp_path).values(), strict=True)):
        ppl = read_json(folder / "summary.json")["final_val_ppl"]
        assert re.match(rf"#{number} {folder.name}  ppl {ppl:.2f}  spent \d+\.\d%  0:00:\d\d(; sweep: |$)", line), line
        log = (folder / "log.txt").read_text()
        assert "layers.0.mlp.down_proj" in log and "step 2/2  loss" in log and f"next: gnmr report {folder}" in log
    assert "down_proj" not in first.out, "details are in each cell's folder"
    assert re.search(r"^ int4_int8-gnmr +2 of 2 +\d+\.\d+ ± ", first.out, re.MULTILINE), first.out
    assert done(tmp_path) == [0, 1]
    before = {p: p.stat().st_mtime_ns for folder in cells(tmp_path).values() for p in folder.rglob("*")}
    again = gnmr("train", *words)
    assert again.code == 0
    assert [line for line in again.out.splitlines() if line.endswith("skipped")] == [
        f"{folder} is done: skipped" for folder in cells(tmp_path).values()
    ]
    assert "sweep: 2 cells, 2 done already, 0 of 4 steps to do\n" in again.out
    assert "sweep: 2 of 2 cells done (2 before), 0 failed, in 0:00:" in again.out
    assert before == {p: p.stat().st_mtime_ns for folder in cells(tmp_path).values() for p in folder.rglob("*")}
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    for seed, folder in cells(tmp_path).items():  # each tells how it is run alone
        assert read_json(folder / "header.json")["command"].endswith(f" training.seed={seed}")


def test_a_glob_that_matches_nothing_is_told(gnmr, tiny_words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = gnmr("train", *tiny_words, "-m", "preset=glob(nothing_*)")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert "preset=glob(nothing_*) matches nothing, so there is no cell" in outcome.err
    assert not folders(tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told(gnmr, tiny_words, tmp_path):
    (tmp_path / "file").write_text("")
    words = [word for word in tiny_words if not word.startswith("runs_dir")]
    outcome = gnmr("train", *words, "-m", f"runs_dir={tmp_path}/file/runs", SEEDS)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert "cannot be written" in outcome.err


@pytest.mark.slow
def test_a_sweep_without_its_flag_says_that_it_is_one_run(gnmr, tiny_words, tmp_path):
    outcome = gnmr("train", *tiny_words, "sweep=act_quant_stress")
    assert outcome.code == 0 and "this is one run; the sweep's arms and seeds need -m" in outcome.out
    assert len(folders(tmp_path)) == 1


@pytest.mark.slow
def test_the_sweep_of_the_paper_makes_its_arms(gnmr, tiny_words, tmp_path):
    words = [*tiny_words, "training.seed=3", "-m", "sweep=act_quant_stress"]
    assert gnmr("train", *words).code == 0
    assert {p.name.rsplit("-", 2)[0] for p in folders(tmp_path)} == {"int4", "int4_int8-gnmr", "int8", "bf16"}
    assert all((p / "DONE").exists() and p.parent.name == "act_quant_stress" for p in folders(tmp_path))


@pytest.mark.slow
def test_a_failed_cell_does_not_stop_the_others_and_runs_again(gnmr, tiny_words, tmp_path, monkeypatch):
    plain = run_module.assemble

    def assemble(config, *args):
        parts = plain(config, *args)
        if config.training.seed == 0:
            parts.model.norm.weight.register_hook(lambda gradient: gradient * math.nan)
        return parts

    words = [*tiny_words, SEEDS, "training.max_nonfinite_streak=1", "-m"]
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "assemble", assemble)
        ended = gnmr("train", *words)
    assert ended.code == 1
    assert ended.err.startswith("gnmr: run FAILED: 1 steps in a row") and ended.err.count("\n") == 1
    assert "#0 failed: 1 steps in a row" in ended.out
    lines = ended.out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("sweep: 1 of 2 cells done, 1 failed, in 0:0"))
    assert lines[at + 1].startswith(f"  {cells(tmp_path)[0]}: 1 steps in a row")
    assert done(tmp_path) == [1] and (cells(tmp_path)[0] / "FAILED").exists()

    again = gnmr("train", *words)
    assert again.code == 0 and again.out.count("is done: skipped") == 1
    assert done(tmp_path) == [0, 1] and not (cells(tmp_path)[0] / "FAILED").exists()


@pytest.mark.slow
def test_a_mistake_in_one_cell_leaves_the_others(gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, "controller.alpha=-1,1.5", "-m")
    assert ended.mistake == "controller.alpha=-1.0: must be a positive number or null"
    assert len(folders(tmp_path)) == 1 and done(tmp_path) == [0]


@pytest.mark.slow
def test_a_run_that_is_only_kept_otherwise_is_no_cell_of_its_own(gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, "training.checkpoint_every=50,100", "-m")
    assert ended.code == 0 and "sweep: 1 of 1 cell done, 0 failed" in ended.out
    line = "sweep: training.checkpoint_every=100 makes the run of training.checkpoint_every=50 again: left out\n"
    assert line in ended.out and len(folders(tmp_path)) == 1


@pytest.mark.slow
def test_two_runs_of_one_folder_are_refused(gnmr, tiny_words, tmp_path):
    ended = gnmr("train", *tiny_words, f"run_dir={tmp_path / 'run'}", SEEDS, "-m")
    assert "holds a run of another config: training.seed is 0 there and 1 here" in ended.mistake
    assert (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_a_mistake_in_all_cells_writes_nothing(gnmr, tiny_words, tmp_path):
    assert "Key 'unknown' not in 'Config'" in gnmr("train", *tiny_words, SEEDS, "unknown=1", "-m").mistake
    assert "nowhere: there is no such folder" in gnmr("train", *tiny_words, "-m", "--config-dir=nowhere").mistake
    assert "controller.alpha=-1.0: must be" in gnmr("train", *tiny_words, "controller.alpha=-1,-2", "-m").mistake
    for words in (["memory_plan=true"], ["++memory_plan=true,false"], ["hydra.sweeper.max_batch_size=0"]):
        assert gnmr("train", *tiny_words, SEEDS, *words, "-m").mistake
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_cell_without_done_is_not_finished(gnmr, tiny_words, tmp_path, monkeypatch):
    """Whatever the launcher says of it."""
    plain = run_module.run
    with monkeypatch.context() as patch:
        patch.setattr(
            run_module, "run", lambda config, *a, **named: config.training.seed and plain(config, *a, **named)
        )
        ended = gnmr("train", *tiny_words, SEEDS, "-m")
    assert ended.code == 1
    assert ended.err == "gnmr: sweep: 1 of 2 not finished; the same command continues\n"
    assert "sweep: 1 of 2 cells done, 0 failed, 1 not finished (the same command continues), in" in ended.out
    assert gnmr("train", *tiny_words, SEEDS, "-m").code == 0 and done(tmp_path) == [0, 1]


@pytest.fixture
def edit_after_the_first_cell(monkeypatch):
    """Has a function called when the first cell of a sweep has ended."""

    def install(edit) -> None:
        plain, ended = run_module.run, []

        def run(*args, **more):
            folder = plain(*args, **more)
            if not ended:
                edit()
            ended.append(folder)
            return folder

        monkeypatch.setattr(run_module, "run", run)

    return install


@pytest.mark.parametrize("flag", [["--config-dir={}"], ["-cd", "{}"]], ids=["attached", "detached"])
@pytest.mark.slow
def test_editing_an_own_experiment_changes_no_later_cell(flag, gnmr, tiny_words, tmp_path, edit_after_the_first_cell):
    file = tmp_path / "mine" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\noptim: {lr: 0.5}\n")
    edit_after_the_first_cell(lambda: file.write_text("# @package _global_\noptim: {lr: 0.25}\n"))
    words = [word.format(tmp_path / "mine") for word in flag]
    assert gnmr("train", *tiny_words, "-m", *words, "experiment=mine", SEEDS).code == 0
    assert [yaml.safe_load((p / "config.yaml").read_text())["optim"]["lr"] for p in cells(tmp_path).values()] == [
        0.5
    ] * 2
    assert "0.25" in file.read_text()


@pytest.mark.slow
def test_editing_conf_changes_no_later_cell(gnmr, tiny_words, tmp_path, monkeypatch, edit_after_the_first_cell):
    """The sweep's own copy of the tree is gone when it has ended."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(train, "conf_dir", lambda: conf)
    edit_after_the_first_cell(lambda: shutil.rmtree(conf))
    assert gnmr("train", *tiny_words, "-m", SEEDS).code == 0
    assert done(tmp_path) == [0, 1] and not conf.exists()
    assert not list((tmp_path / "scratch").iterdir())
