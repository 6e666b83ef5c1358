"""Runs whose folder lost rows, or was laid as a trap."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gnmr.errors import UserError


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
    with pytest.raises(UserError, match=r"steps\.jsonl: rows were lost or damaged since the checkpoint of step 8"):
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
        lambda host: host["counters"].update(step="8"),
        lambda host: host["counters"].update(more=1),
        lambda host: host["blocks"].update(position="x"),
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
