"""What a sweep says before, during and after, and how it estimates; no cell runs, the clock is told."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from gnmr.errors import UserError
from gnmr.lab.sweep import progress
from gnmr.lab.sweep.progress import Cell, Cost, Progress, last_step, makespan


def write(folder: Path, steps: int = 0, **files: str) -> None:
    """A run folder with that many rows; DONE="", FAILED="why", summary='{...}'."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps({"step": i + 1, "loss": 1.0}) + "\n" for i in range(steps)))
    for name, text in files.items():
        (folder / (name if name.isupper() else f"{name}.json")).write_text(text)


@pytest.fixture
def cell(tiny, tmp_path) -> Callable[..., Cell]:
    """A cell of eight steps after `write`: cell("a", "training.seed=1", steps=4, FAILED="why")."""

    def make(name: str, *words: str, steps: int = 0, **files: str) -> Cell:
        write(tmp_path / name, steps, **files)
        return Cell(list(words), tiny(f"run_dir={tmp_path / name}", *words), 0)

    return make


def refuse(_: object) -> Cost:
    raise AssertionError("nothing is to be measured")


def test_jobs_take_the_pieces_in_order():
    assert makespan([4, 3, 2, 1], 1) == 10
    assert makespan([4, 3, 2, 1], 2) == 5  # 4 + 1 | 3 + 2
    assert makespan([1, 1, 8], 2) == 9  # the long one comes last: 1 + 8 | 1
    assert makespan([3], 4) == 3 and makespan([], 2) == 0


def test_the_last_whole_row_counts(tmp_path, monkeypatch):
    assert last_step(tmp_path) == 0
    write(tmp_path)
    assert last_step(tmp_path) == 0
    write(tmp_path, 300)
    assert last_step(tmp_path) == 300
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 301, "lo')  # killed, or being written
    monkeypatch.setattr(progress, "_TAIL_BYTES", 64)  # begins within a row
    assert last_step(tmp_path) == 300


def test_beforehand_by_the_recorded_steps_of_the_same_arm(cell, tiny, tmp_path):
    def summary(step_s: float) -> str:
        return json.dumps({"steps": 8, "wall_time_s": 8 * step_s})

    slow, fast, other = "precision.low=int2", "precision.low=int4", "precision.low=int3"
    for name, step_s in (("slow", 2.0), ("fast", 0.5)):
        write(tmp_path / name, 8, DONE="", summary=summary(step_s))
    # A run folder's own name is not part of the arm, so the folders may have any.
    cells = [
        Cell([], tiny(f"run_dir={tmp_path / 'slow'}", slow), 0),
        Cell([], tiny(f"run_dir={tmp_path / 'fast'}", fast), 1),
        cell("slow-1", slow, "training.seed=1"),  # 8 * 2 s
        cell("fast-1", fast, "training.seed=1", steps=4),  # killed: 4 * 0.5 s
        cell("other", other),  # 8 * 1.25 s, the mean of the arms
    ]
    line = "sweep: 5 cells, 2 done already, 20 of 40 steps to do"
    time_of_a_step = "(1.25 s a step, in steps alone, as recorded)"
    assert Progress(cells, 1).opening(refuse) == f"{line}: about 0:00:28 {time_of_a_step}"
    assert Progress(cells, 2).opening(refuse) == f"{line}, 2 cells side by side: about 0:00:16 {time_of_a_step}"


def test_beforehand_by_measuring_where_nothing_is_recorded(cell):
    cells = [cell(f"seed-{i}", "training.steps=20", f"training.seed={i}") for i in range(2)]
    asked = []
    line = Progress(cells, 1).opening(lambda config: asked.append(config) or Cost(3.0))
    assert line == "sweep: 2 cells, 0 done already, 40 of 40 steps to do: about 0:02:00 (3 s a step, measured)"
    assert asked == [cells[0].config]

    def cannot(_: object) -> Cost:
        raise UserError("no such corpus")

    assert Progress(cells, 1).opening(cannot) == "sweep: 2 cells, 0 done already, 40 of 40 steps to do"
    few = [cell("few")]
    assert Progress(few, 1).opening(refuse) == "sweep: 1 cell, 0 done already, 8 of 8 steps to do"
    done = [cell("done", steps=8, DONE="", summary='{"steps": 8, "wall_time_s": 8.0}')]
    assert Progress(done, 1).opening(refuse) == "sweep: 1 cell, 1 done already, 0 of 8 steps to do"


def told_left(progress: Progress) -> str | None:
    """What a line says of the time left."""
    found = re.search(r", about (\S+) left$", progress.line())
    return found and found[1]


def test_time_left_before_a_cell_is_done_comes_from_the_steps_that_were_seen(cell, tmp_path):
    """Not from what was before the first of them: 100 s in which data was prepared."""
    progress = Progress([cell("a"), cell("b")], 1)
    assert progress.line() == "sweep: 0 of 2 cells done, 0 failed, 1 running, 0 of 16 steps (0%)"
    write(tmp_path / "a", 1)
    progress.look(progress.began + 100)
    assert told_left(progress) is None
    write(tmp_path / "a", 4)
    progress.look(progress.began + 106)
    assert told_left(progress) == "0:00:24"  # 12 steps of 2 s


def test_time_left_counts_what_is_beside_the_steps(cell, tmp_path):
    """As measured, until a cell is done: then by the whole of it."""
    cells = [cell(name, f"training.seed={i}", "training.steps=20") for i, name in enumerate("abc")]
    progress = Progress(cells, 1)
    opening = progress.opening(lambda _: Cost(step=1.0, beside=10.0))
    assert opening == "sweep: 3 cells, 0 done already, 60 of 60 steps to do: about 0:01:30 (1 s a step, measured)"
    assert told_left(progress) == "0:01:30"
    write(tmp_path / "a", 2)
    progress.look(progress.began + 10)
    write(tmp_path / "a", 10)
    progress.look(progress.began + 26)
    assert told_left(progress) == "0:02:05"  # 50 steps of 2 s, and 10 s a cell of which half of one's is over
    write(tmp_path / "a", 20)
    progress.look(progress.began + 46)
    write(tmp_path / "a", 20, DONE="")
    progress.look(progress.began + 60)  # a last validation
    assert told_left(progress) == "0:02:00"
    write(tmp_path / "b", 10)
    progress.look(progress.began + 100)
    assert told_left(progress) == "0:01:30"  # by what cells took that are done, whatever the next one is slow at


def test_the_rest_of_a_cell_is_no_whole_one(cell, tmp_path):
    """Its start-up would count for the few steps that were left of it."""
    progress = Progress([cell("a", steps=7), cell("b"), cell("c")], 1)
    write(tmp_path / "a", 8, DONE="")
    progress.look(progress.began + 20)
    assert told_left(progress) is None
    write(tmp_path / "b", 8, DONE="")
    progress.look(progress.began + 45)
    assert told_left(progress) == "0:00:40"  # 9 steps in 45 s
    write(tmp_path / "c", 8)
    progress.look(progress.began + 65)
    assert progress.line().endswith("24 of 24 steps (100%)")  # and a last validation


def test_time_left_of_cells_side_by_side(cell, tmp_path):
    cells = [cell("a"), cell("b", steps=2), cell("c")]
    progress = Progress(cells, 2)
    assert progress.line() == "sweep: 0 of 3 cells done, 0 failed, 2 running, 2 of 24 steps (8%)"
    write(tmp_path / "a", 4)
    write(tmp_path / "b", 1)  # continues: rows after its checkpoint are dropped
    progress.look(progress.began + 5)
    write(tmp_path / "b", 4)
    progress.look(progress.began + 11)
    # 3 steps in 2 * 6 s of work: 4 s each. Left 4 and 4, then 8 where 4 were: 12 steps in a row.
    assert progress.line() == "sweep: 0 of 3 cells done, 0 failed, 2 running, 8 of 24 steps (33%), about 0:00:48 left"
    write(tmp_path / "a", 8, DONE="")
    write(tmp_path / "b", 4, FAILED="disk full\n")
    progress.look(progress.began + 22)
    # 11 steps in 2 * 22 s; what b will not do is not left.
    assert progress.line() == "sweep: 1 of 3 cells done, 1 failed, 1 running, 12 of 20 steps (60%), about 0:00:32 left"
    closing = progress.closing()
    assert re.fullmatch(
        r"sweep: 1 of 3 cells done, 1 failed, 1 not finished \(the same command continues\), in 0:00:\d\d", closing[0]
    )
    assert closing[1:] == [f"  {tmp_path / 'b'}: disk full"]


def test_the_bar_fits_in_a_line(cell, tmp_path):
    progress = Progress([cell("a"), cell("b"), *[cell("c")] * 8], 1)
    write(tmp_path / "a", 8, DONE="")
    write(tmp_path / "b", 2, FAILED="disk full\n")
    progress.look(progress.began + 1000)
    for wide in (80, 50):
        out = io.StringIO()
        Console(file=out, width=wide).print(progress.bar())
        (line,) = out.getvalue().splitlines()
        assert re.fullmatch(r"sweep ━+ +1/10 cells, 1 failed  1:46:40 left", line) and len(line) <= wide


def test_an_earlier_failure_does_not_count(cell, tmp_path):
    again = cell("again", steps=3, FAILED="an earlier one")
    again.look()
    assert not again.ended
    os.utime(tmp_path / "again" / "FAILED", (1, 1))  # written anew, as the clock of this machine may have it
    again.look()
    assert again.failure == "an earlier one"


def test_a_line_for_each_cell_that_is_done_and_at_times(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    said = []
    monkeypatch.setattr(progress, "say", lambda line, by_words: said.append(line))

    def wait_for(text: str) -> None:
        until = time.monotonic() + 60
        while not any(text in line for line in said) and time.monotonic() < until:
            time.sleep(0.01)
        assert any(text in line for line in said), said

    with Progress([cell("a"), cell("b")], 1):
        time.sleep(0.1)
        assert said == []
        summary = '{"final_val_ppl": 22.125, "spent_gemm_frac": 0.0781, "wall_time_s": 41.3}'
        write(tmp_path / "a", 8, summary=summary)
        write(tmp_path / "a", 8, DONE="")
        wait_for("sweep: 1 of 2 cells done, 0 failed, 1 running, 8 of 16 steps (50%), about 0:0")
        assert len(said) == 1 and said[0].startswith("#0 a  ppl 22.12  spent 7.8%  0:00:41; sweep: ")
        monkeypatch.setattr(progress, "_SAY_S", 0.05)
        write(tmp_path / "b", 6)
        wait_for("14 of 16 steps")
        monkeypatch.setattr(progress, "_SAY_S", 1000.0)
        time.sleep(0.1)
        said.clear()
        write(tmp_path / "b", 8, DONE="")
    assert said == ["#0 b"], (
        "the last one too, without a summary: that its records cannot be read is the report's to say"
    )
    time.sleep(0.1)
    assert len(said) == 1
