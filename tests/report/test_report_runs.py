"""Finding and reading run folders, whole and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gnmr.errors import UserError
from gnmr.lab.cli import runs as runs_command
from gnmr.lab.report.recorded_run import load
from gnmr.records.find import find_runs
from gnmr.records.reader import UNITS as UNITS_FILE
from gnmr.records.reader import open_units

Write = Callable[..., Path]


def test_finds_runs_below_a_folder_and_passes_hidden_ones_over(write_run: Write, tmp_path: Path) -> None:
    folders = [write_run(arm="bf16"), write_run(arm="int4")]
    (tmp_path / "runs" / ".multirun").mkdir()
    folders[0].rename(tmp_path / "runs" / ".multirun" / "hidden")
    assert find_runs([tmp_path]) == [folders[1]]
    assert find_runs([folders[1], tmp_path]) == [folders[1]], "a run given twice counts once"


@pytest.mark.parametrize(
    "name, says", [("absent", "no such folder"), ("empty", "no run in it"), ("file", "not a folder")]
)
def test_a_path_without_runs_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=says) as error:
        find_runs([tmp_path / name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["header.json", "the folder's name"])
def test_identity_is_the_headers_or_that_of_the_folders_name(write_run: Write, tmp_path: Path, missing: str) -> None:
    """A key of another version changes nothing about it."""
    folder = write_run(arm="int4_int8", seed=7)
    with (folder / "config.yaml").open("a") as file:
        file.write("a_key_of_the_future: 1\n")
    if missing == "header.json":
        (folder / missing).unlink()
    run = load(folder if missing == "header.json" else folder.rename(tmp_path / "any-name"))
    assert (run.arm, run.seed, run.experiment, run.scale) == ("int4_int8-gnmr", 7, "stress", "cpu")
    assert run.settings["precision.low"] == "int4"


@pytest.mark.parametrize("status", ["done", "failed", "interrupted", "running"])
def test_status(write_run: Write, status: str) -> None:
    run = load(write_run(status=status, reason="why"))
    assert run.status == status
    assert run.reason == {"failed": "why", "interrupted": "why"}.get(status)


def test_a_killed_run_gives_what_it_has(write_run: Write) -> None:
    """No marker, no summary, every file cut in the middle of a row."""
    gnmr = np.array([[1.0, 1.0], [2.0, 1.0], [1.0, 4.0], [1.0, 1.0]])
    folder = write_run(steps=4, planned=10, status="running", gnmr=gnmr, val_loss={2: 3.0, 4: 2.5})
    (folder / "header.json").write_text((folder / "header.json").read_text())
    for name in ("steps.jsonl", "eval.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: -len(text.splitlines()[-1]) // 2])
    stream = (folder / "units.arrows").read_bytes()
    run = load(folder)
    assert run.status == "running"
    assert run.last_step == 3
    assert run.summary["final_val_loss"] == 3.0
    assert run.summary["promotion_frac"] == pytest.approx(1 / 6), "one unit active in step 3, of 3 steps by 2 units"
    assert run.summary["wall_time_s"] == 1.5
    assert run.units().columns["gnmr"] == pytest.approx(gnmr)
    (folder / "units.arrows").write_bytes(stream[:10])
    assert run.units().steps.size == 0


def found(folder: Path) -> None:
    """Read all that a report shows of a run, and its units."""
    load(folder).check().units()


def in_runs_command(folder: Path) -> bool:
    return runs_command._row(folder).status == "damaged"


@pytest.mark.parametrize("name", ["steps.jsonl", "eval.jsonl"])
def test_an_unreadable_line_that_is_not_the_last_is_damage(write_run: Write, name: str) -> None:
    folder = write_run(steps=4, status="running", val_loss={2: 3.0, 3: 2.7, 4: 2.5})
    rows = (folder / name).read_bytes().splitlines(keepends=True)
    (folder / name).write_bytes(b"".join([rows[0], b"z" + rows[1][1:], *rows[2:]]))
    with pytest.raises(UserError, match=rf"{name}, line 2: cannot be read \(ValueError: not a JSON object\)"):
        found(folder)
    assert in_runs_command(folder)


def test_a_message_that_is_not_whole_is_damage_unless_it_is_the_last(write_run: Write) -> None:
    folder = write_run(steps=6, status="running")
    data = (folder / UNITS_FILE).read_bytes()
    ends = [end for _, end in open_units(folder / UNITS_FILE)]
    for number in (0, 3, 4):  # the length of a message, larger than the rest of the file
        at = ends[number]
        (folder / UNITS_FILE).write_bytes(data[: at + 6] + b"\x01" + data[at + 7 :])
        if number < 4:
            with pytest.raises(UserError, match=f"the message at byte {at} is damaged"):
                load(folder).units()
        else:
            assert len(load(folder).units().steps) == 5
    (folder / UNITS_FILE).write_bytes(data[:-5])
    assert len(load(folder).units().steps) == 5


def test_rows_that_contradict_the_end_of_the_run(write_run: Write) -> None:
    """DONE may be there because somebody put it there."""
    early = write_run(steps=4, planned=6, status="running")
    (early / "DONE").touch()
    with pytest.raises(UserError, match="DONE: the rows end after step 4 of 6; remove DONE, and the command that"):
        found(early)
    short = write_run(steps=4, seed=1)
    summary = json.loads((short / "summary.json").read_text())
    (short / "summary.json").write_text(json.dumps(summary | {"steps": 5}))
    with pytest.raises(UserError, match=r"4 rows, and summary.json counts 5"):
        found(short)
    assert in_runs_command(short)
    (short / "summary.json").write_text(json.dumps(summary))
    found(short)
    rows = (short / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (short / "steps.jsonl").write_bytes(b"".join(rows[:1] + rows[2:]))
    with pytest.raises(UserError, match="3 rows up to step 4, so rows are missing"):
        found(short)


def test_nothing_but_a_config(write_run: Write) -> None:
    folder = write_run()
    for file in folder.iterdir():
        if file.name not in ("config.yaml", "steps.jsonl"):
            file.unlink()
    (folder / "steps.jsonl").write_text("")
    run = load(folder)
    assert (run.last_step, run.summary["final_val_ppl"], run.summary["promotion_frac"]) == (0, None, None)
    assert run.units().units == []
    assert run.commit == "unknown"


def test_unit_matrices_are_in_the_headers_unit_order(write_run: Write) -> None:
    gnmr = np.arange(1.0, 7.0).reshape(2, 3)
    folder = write_run(steps=2, units=3, gnmr=gnmr)
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | {"units": header["units"][::-1]}))
    matrices = load(folder).units()
    assert matrices.units == header["units"][::-1]
    assert matrices.columns["gnmr"] == pytest.approx(gnmr[:, ::-1])
    assert matrices.steps.tolist() == [1, 2]
    assert matrices.active_SU.tolist() == [[False] * 3, [True, True, False]], "GNMR 3 and 2 are over alpha = 1.5"
