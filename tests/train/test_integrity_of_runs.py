"""Runs whose folder is moved, emptied, damaged or laid as a trap: none ends DONE with other figures than its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gnmr.errors import RunFailed, UserError


@pytest.mark.parametrize("how", ["removed", "moved", "exchanged"])
def test_a_folder_that_goes_while_the_run_does(how, train, before_step, tmp_path):
    folder, away = tmp_path / "run", tmp_path / "away"

    def happens() -> None:
        folder.rename(away)
        if how == "removed":
            shutil.rmtree(away)
        if how == "exchanged":
            folder.mkdir()

    before_step(5, happens)
    with pytest.raises(RunFailed, match=r"the run folder .* was removed, moved or replaced while the run was going"):
        train(folder)
    assert list(folder.iterdir()) == [] if how == "exchanged" else not folder.exists()
    assert not (away / "DONE").exists()


@pytest.mark.parametrize("how", [Path.unlink, pytest.param(lambda file: os.truncate(file, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["steps.jsonl", "eval.jsonl", "events.jsonl", "units.arrows"])
def test_a_file_that_goes_or_is_emptied_while_the_run_goes_on(name, how, train, before_step, tmp_path):
    folder = tmp_path / "run"
    before_step(5, lambda: how(folder / name))
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


def test_a_run_that_lost_rows_is_refused(copied, train):
    os.truncate(copied / "steps.jsonl", (copied / "steps.jsonl").stat().st_size // 2)
    with pytest.raises(UserError, match=r"steps\.jsonl: rows were lost or changed since the checkpoint of step 8"):
        train(copied)
    assert not (copied / "DONE").exists()


# ---- what was laid in the folder ----


LINKED = ["checkpoints", "checkpoints/step-00000008", "steps.jsonl", "units.arrows"]
LINKED += ["header.json", "summary.json", ".lock"]


@pytest.mark.parametrize("name", LINKED)
def test_links_in_a_folder_that_goes_on(name, copied, train, tmp_path):
    away = tmp_path / "away"
    (copied / name).rename(away)
    (copied / name).symlink_to(away)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{name}: is a symbolic link"):
        train(copied)
    assert sorted(p for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda host: host.pop("records"),
        lambda host: host["counters"].update(step="8"),
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
