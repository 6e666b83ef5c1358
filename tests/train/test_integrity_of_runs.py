"""Runs whose folder is moved, emptied, damaged or laid as a trap: none ends DONE with other figures than its own."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from everything import differences, everything

from gnmr.errors import RunFailed, UserError
from gnmr.lab.report.runs import load
from gnmr.lab.train.step import TrainStep
from gnmr.records.ledger import check_records
from gnmr.records.reader import read_json


@pytest.fixture
def in_mid_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has a function called before the fifth step of every run."""
    plain = TrainStep.__call__

    def install(happens: Callable[[], object]) -> None:
        def call(self, *args):
            if self.router.t == 4:
                happens()
            return plain(self, *args)

        monkeypatch.setattr(TrainStep, "__call__", call)

    return install


@pytest.mark.parametrize("how", ["removed", "moved", "exchanged"])
def test_a_folder_that_goes_while_the_run_does(how, train, in_mid_run, tmp_path):
    folder, away = tmp_path / "run", tmp_path / "away"

    def happens() -> None:
        folder.rename(away)
        if how == "removed":
            shutil.rmtree(away)
        if how == "exchanged":
            folder.mkdir()

    in_mid_run(happens)
    with pytest.raises(RunFailed, match=r"the run folder .* was removed, moved or replaced while the run was going"):
        train(folder)
    assert list(folder.iterdir()) == [] if how == "exchanged" else not folder.exists()
    assert not (away / "DONE").exists()


@pytest.mark.parametrize("name", ["steps.jsonl", "eval.jsonl", "events.jsonl", "ratios.rows", "config.yaml"])
def test_a_file_that_goes_while_the_run_does(name, train, in_mid_run, tmp_path):
    folder = tmp_path / "run"
    in_mid_run((folder / name).unlink)
    with pytest.raises(RunFailed, match=f"{name} was removed, moved or replaced while the run was going"):
        train(folder)
    assert (folder / "FAILED").exists() and not (folder / "DONE").exists()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000003"]


@pytest.fixture(scope="module")
def ended(train, tmp_path_factory) -> Path:
    """A whole run without its marker: its checkpoints are of steps 6 and 8."""
    folder = train(tmp_path_factory.mktemp("ended") / "run")
    (folder / "DONE").unlink()
    return folder


@pytest.fixture
def copied(ended, tmp_path) -> Path:
    return shutil.copytree(ended, tmp_path / "run")


def test_a_run_that_lost_rows_ends_marked(copied, train):
    os.truncate(copied / "steps.jsonl", (copied / "steps.jsonl").stat().st_size // 2)
    why = "steps.jsonl lost or changed some of the 8 rows that the checkpoint of step 8 counted"
    for _ in range(2):
        with (
            pytest.raises(RunFailed, match=f"the records are incomplete, the weights are not: {why}"),
            pytest.warns(UserWarning, match=f"{why}; the run goes on and will end FAILED"),
        ):
            train(copied)
    assert not (copied / "DONE").exists() and why in (copied / "FAILED").read_text()
    assert read_json(copied / "summary.json")["incomplete"] == why
    run = load(copied)
    assert run.status == "failed" and why in run.reason


@pytest.mark.slow
def test_files_of_a_run_that_was_damaged_are_never_its_figures(copied, ended, train, uninterrupted):
    """A flip anywhere in the folder of a stopped run: it goes on to the same figures, or does not end DONE."""
    draw, want = random.Random(0), uninterrupted()
    files = sorted(p.relative_to(ended) for p in ended.rglob("*") if p.is_file() and p.name != ".lock")
    for file in files:
        shutil.rmtree(copied)
        shutil.copytree(ended, copied)
        content = bytearray((copied / file).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (copied / file).write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                train(copied)
            except (UserError, RunFailed) as error:
                assert "\n" not in str(error), file
                assert not (copied / "DONE").exists(), file
            else:
                for aside in (copied / "checkpoints").glob("*.corrupt"):
                    shutil.rmtree(aside)
                found = everything(copied)
                assert differences({**want, "checkpoints": found["checkpoints"]}, found) == [], file
                check_records(copied)


def test_the_report_leaves_a_damaged_run_out(train, gnmr, tmp_path):
    folder = train(tmp_path / "run")
    assert load(folder).status == "done"
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace('"steps": 8', '"steps": 9'))
    with pytest.raises(UserError, match=r"summary\.json: damaged \(it is not what records\.sha256 names\)"):
        load(folder)
    assert "summary.json: damaged" in gnmr("replay", str(folder)).mistake


# ---- what was laid in the folder ----


def test_the_lock_is_no_way_out_of_the_folder(train, tmp_path):
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    folder.mkdir()
    (folder / ".lock").symlink_to(mine)
    with pytest.raises(UserError, match=r"\.lock: is a symbolic link, which a run folder does not hold: remove it"):
        train(folder)
    assert mine.read_text() == "mine" and [p.name for p in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "name", ["order", "checkpoints", "steps.jsonl", "summary.json.tmp", "checkpoints/step-00000008"]
)
def test_links_in_a_folder_that_goes_on(name, copied, train, tmp_path):
    away = tmp_path / "away"
    if (copied / name).exists():
        (copied / name).rename(away)
    else:
        away.write_text("mine")
    (copied / name).symlink_to(away)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{name}: is a symbolic link"):
        train(copied)
    assert sorted(p for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["steps.jsonl", "header.json", "ratios.rows", "order/epoch-0.npy"])
def test_a_pipe_keeps_nobody_waiting(name, copied, train):
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    with pytest.raises(UserError, match=f"{name}: is no regular file, which a run folder does not hold"):
        train(copied)


@pytest.mark.parametrize("name", ["steps.jsonl", "header.json", "ratios.parquet", "summary.json", ".reserve"])
def test_a_folder_in_the_place_of_a_file_is_one_line(name, copied, train):
    (copied / name).unlink(missing_ok=True)
    (copied / name).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((UserError, RunFailed), match=name) as caught:
            train(copied)
    assert "\n" not in str(caught.value) and not (copied / "DONE").exists()


@pytest.fixture
def immutable(copied) -> Iterator[Path]:
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", copied], capture_output=True).returncode != 0:
        pytest.skip("this file system or user cannot make a folder immutable")
    yield copied
    subprocess.run(["chattr", "-i", copied], check=True)


def test_an_immutable_folder_is_one_line(immutable, train):
    with pytest.raises(UserError, match=r"cannot be written .*choose another run_dir"):
        train(immutable)


def test_a_folder_that_may_not_be_written_is_one_line(copied, train, monkeypatch):
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("gnmr.lab.train.folder.TemporaryFile", refused)
    with pytest.raises(UserError, match=r"cannot be written .*choose another run_dir"):
        train(copied)


@pytest.mark.parametrize(
    "change",
    [
        lambda host: host.pop("records"),
        lambda host: host.pop("counters"),
        lambda host: host["counters"].update(step="8"),
        lambda host: host["counters"].update(step=7),
        lambda host: host["counters"].update(more=1),
        lambda host: host["blocks"].update(position="x"),
        lambda host: host.update(records=[]),
    ],
)
def test_a_checkpoint_whose_numbers_make_no_sense(change, copied, train):
    """Written so, with sums that fit: by somebody else, or by another version."""
    import hashlib

    folder = copied / "checkpoints" / "step-00000008"
    meta = json.loads((folder / "meta.json").read_text())
    change(meta["host"])
    text = json.dumps(meta)
    (folder / "meta.json").write_text(text)
    (folder / "meta.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  meta.json\n")
    with pytest.raises(UserError) as caught:
        train(copied)
    assert "\n" not in str(caught.value)
