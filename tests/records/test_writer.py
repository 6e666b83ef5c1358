from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_rows import eval_row, event_row, step_row, unit_rows

from gnmr.errors import RunFailed, UserError
from gnmr.records import writer as writer_module
from gnmr.records.reader import read_json, read_jsonl, read_units
from gnmr.records.schema import STEP_FIELDS
from gnmr.records.writer import RunWriter

FILES = ("steps.jsonl", "eval.jsonl", "events.jsonl")


def run_to(folder: Path, first: int, last: int, resume_step: int | None) -> RunWriter:
    """Steps first to last with a row of everything in each."""
    writer = RunWriter(folder, resume_step)
    for step in range(first, last + 1):
        writer.step(step_row(step))
        writer.eval(eval_row(step))
        writer.events([event_row(step), event_row(step, event="release", cause="lock")])
        writer.units(unit_rows(step))
    return writer


def test_rows_round_trip_with_all_digits_and_non_finite_numbers(tmp_path: Path) -> None:
    rows = [
        step_row(1, loss=math.nan, grad_norm_pre_clip=math.inf, skipped=True, nonfinite_unit="layers.0.q_proj"),
        step_row(2, loss=0.1 + 0.2, lr=-math.inf),
    ]
    writer = RunWriter(tmp_path, None)
    for row in rows:
        writer.step(row)
    # Readable while the run goes on: nothing waits in a buffer.
    strict = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "steps.jsonl").open()]
    assert (strict[0]["loss"], strict[0]["grad_norm_pre_clip"], strict[1]["lr"]) == ("nan", "inf", "-inf")
    first, second = read_jsonl(tmp_path / "steps.jsonl")
    assert math.isnan(first.pop("loss")) and math.isnan(rows[0].pop("loss"))
    assert [first, second] == rows
    assert list(second) == list(STEP_FIELDS)


@pytest.mark.parametrize("spoil", [lambda row: row.pop("lr"), lambda row: row.update(los=1.0)])
def test_a_row_with_other_keys_is_our_own_bug(tmp_path: Path, spoil: Callable[..., Any]) -> None:
    row = step_row(1)
    spoil(row)
    with pytest.raises(AssertionError, match=r"steps\.jsonl: keys"):
        RunWriter(tmp_path, None).step(row)


def test_header_is_written_and_replaced(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, None)
    writer.write_header("a: 1\n", {"units": ["a"], "nested": {"x": [math.inf]}})
    writer.write_header("a: 2\n", {"units": ["a", "b"], "nested": {"x": [math.nan]}})
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    assert read_json(tmp_path / "header.json") == {"units": ["a", "b"], "nested": {"x": ["nan"]}}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_new_run_refuses_a_folder_that_holds_one(tmp_path: Path) -> None:
    RunWriter(tmp_path, None).step(step_row(1))
    with pytest.raises(UserError, match="already holds the records of a run"):
        RunWriter(tmp_path, None)
    assert len(read_jsonl(tmp_path / "steps.jsonl")) == 1


@pytest.mark.parametrize("torn", [False, True])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, torn: bool) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_to(whole, 1, 9, None).finish("done", None, 4, 2)
    run_to(resumed, 1, 7, None).close()  # killed after step 7; the checkpoint is of step 5
    (resumed / "FAILED").write_text("something\n")
    if torn:
        for name in (*FILES, "units.arrows"):
            data = (resumed / name).read_bytes()
            (resumed / name).write_bytes(data[:-37])
        assert [row["step"] for row in read_jsonl(resumed / "steps.jsonl")] == [1, 2, 3, 4, 5, 6]
        assert read_units(resumed)["step"].to_pylist()[-4:] == [6, 6, 6, 6]
    writer = run_to(resumed, 6, 9, 5)
    assert not (resumed / "FAILED").exists()
    assert read_units(resumed).equals(read_units(whole))  # the rows still, written by two processes
    writer.finish("done", None, 4, 2)
    for name in (*FILES, "summary.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert read_units(resumed).equals(read_units(whole))


def test_rows_of_step_0_survive_a_resumption_unless_it_starts_anew(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, None)
    writer.events([event_row(0, cause="warmup")])
    for step in (1, 2, 3):
        writer.step(step_row(step))
    writer.events([event_row(3)])
    writer.close()
    RunWriter(tmp_path, 2).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "events.jsonl")] == [0]
    RunWriter(tmp_path, 0).close()  # no checkpoint yet: all is written again
    assert read_jsonl(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        (
            "steps.jsonl",
            lambda data: data[: len(data) // 2],
            "rows were lost or damaged since the checkpoint of step 6",
        ),
        ("steps.jsonl", lambda data: data[:9] + b"\n" + data[9:], "rows were lost or damaged since the checkpoint"),
        ("eval.jsonl", lambda data: data[:9] + b"\n" + data[9:], "line 1: cannot be read"),
        ("units.arrows", lambda data: data[:8] + b"x" * 8 + data[16:], "units.arrows: cannot be read"),
    ],
)
def test_rows_that_are_lost_or_damaged_before_a_checkpoint_are_refused(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], says: str
) -> None:
    run_to(tmp_path, 1, 6, None).close()
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(spoil(before))
    with pytest.raises(UserError, match=says):
        RunWriter(tmp_path, 6)
    (tmp_path / name).write_bytes(before)
    RunWriter(tmp_path, 6).close()


def test_a_finished_run_is_made_longer(tmp_path: Path) -> None:
    run_to(tmp_path, 1, 6, None).finish("done", None, 4, 2)
    before = read_units(tmp_path)
    writer = run_to(tmp_path, 5, 6, 4)
    assert not any((tmp_path / name).exists() for name in ("DONE", "summary.json"))
    writer.close()
    assert read_units(tmp_path).equals(before)


@pytest.mark.parametrize("status", ["done", "failed", "interrupted"])
def test_ends(tmp_path: Path, status: str) -> None:
    summary = run_to(tmp_path, 1, 3, None).finish(status, "two\nlines" if status == "failed" else None, 4, 2)
    assert read_json(tmp_path / "summary.json") == summary and summary["status"] == status
    assert (tmp_path / "DONE").exists() == (status == "done")
    assert (tmp_path / "FAILED").exists() == (status == "failed")
    if status == "failed":
        assert (tmp_path / "FAILED").read_text() == "two lines\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_the_marker_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = run_to(tmp_path, 1, 3, None)

    def refuse(path: Path, tree: dict[str, Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer_module, "replace_json", refuse)
    with pytest.raises(RunFailed, match=r"cannot write summary\.json in .*: Input/output error"):
        writer.finish("done", None, 4, 2)
    assert not (tmp_path / "DONE").exists()
    writer.finish("failed", "no summary", 4, 2)  # must not raise: it is what a caller does about the error
    assert (tmp_path / "FAILED").read_text() == "no summary\n"


@pytest.mark.parametrize("what", ["steps", "units"])
def test_full_disk_leaves_readable_records_and_a_marker(small_disk: Callable[[str], Path], what: str) -> None:
    folder = small_disk("1m") / "run"
    writer = RunWriter(folder, None)
    units = [f"layers.{i}.mlp.down_proj" for i in range(500)]
    last = 0
    with pytest.raises(RunFailed, match="disk full while writing") as failure:
        for last in range(1, 100_000):
            writer.step(step_row(last))
            if what == "units":
                writer.units(unit_rows(last, units))
    assert writer.finish("failed", str(failure.value), 500, 4)["status"] == "failed"  # marked if there is room
    steps = read_jsonl(folder / "steps.jsonl")
    assert last - 1 <= len(steps) <= last
    if what == "units":
        rows = read_units(folder)["step"].to_pylist()
        assert rows == [step for step in range(1, last) for _ in units]
    # More space, and the run goes on from its checkpoint.
    small_disk("3m")
    resumed = RunWriter(folder, last - 3)
    for step in (last - 2, last - 1):
        resumed.step(step_row(step))
        resumed.units(unit_rows(step, units))
    resumed.finish("done", None, 500, 4)
    assert [row["step"] for row in read_jsonl(folder / "steps.jsonl")] == list(range(1, last))
    assert read_units(folder)["step"].to_pylist()[-1] == last - 1
