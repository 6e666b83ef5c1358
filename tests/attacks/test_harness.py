"""What the count rests on: a child of every kind, and records that differ or do not."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from .harness import HELD, Arena, Case, Hook, Kind, Outcome, attack, digest, ended, marked


def hang() -> None:
    time.sleep(60)


def crash() -> None:
    os.abort()


def leave_a_child() -> None:
    if os.fork() == 0:
        time.sleep(60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The records of a run of two steps."""
    write(tmp_path, "steps.jsonl", {"step": 1, "loss": 2.5, "step_time_s": 0.1}, {"step": 2, "loss": 2.0})
    write(tmp_path, "summary.json", {"status": "done", "steps": 2, "wall_time_s": 0.2})
    (tmp_path / "DONE").touch()
    return tmp_path


def write(folder: Path, name: str, *rows: dict) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_times_are_no_numbers_of_a_run(run: Path) -> None:
    before = digest(run)
    write(run, "steps.jsonl", {"step": 1, "loss": 2.5, "step_time_s": 9.9}, {"step": 2, "loss": 2.0})
    write(run, "summary.json", {"status": "done", "steps": 2, "wall_time_s": 7.0})
    assert digest(run) == before


@pytest.mark.parametrize("rows", [[{"step": 1, "loss": 2.5}], [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.1}]])
def test_rows_that_are_lost_or_others_show(run: Path, rows: list[dict]) -> None:
    before = digest(run)
    write(run, "steps.jsonl", *rows)
    assert digest(run) != before


def test_a_mark_is_failed_or_said_in_the_summary(run: Path) -> None:
    assert ended(run) == "DONE" and not marked(run)
    write(run, "summary.json", {"status": "done", "steps": 2, "incomplete": "rows were lost"})
    assert marked(run)
    write(run, "summary.json", {"status": "done", "steps": 2})
    (run / "FAILED").touch()
    assert ended(run) == "FAILED" and marked(run)


@pytest.mark.parametrize(
    ("code", "err", "trouble", "refused"),
    [
        (2, "gnmr: no such folder\n", None, True),
        (2, "gnmr: warning: rows were lost\ngnmr: no such folder\n", None, True),
        (2, "gnmr: no such folder\nand more\n", None, False),
        (1, "gnmr: run FAILED: disk full\n", None, False),
        (1, "Traceback (most recent call last):\nKeyError\n", "traceback", False),
        (-11, "", "traceback", False),
        (139, "", "traceback", False),
    ],
)
def test_what_became_of_a_command(code: int, err: str, trouble: str | None, refused: bool) -> None:
    outcome = Outcome(code, 0.1, "", err, hang=False, left=0)
    assert (outcome.trouble, outcome.refused) == (trouble, refused)


def test_cases_are_counted_and_evenly_chosen() -> None:
    def cases(draw: random.Random) -> list[Case]:
        return [Case(f"case {i}", lambda _, i=i: HELD if i % 4 else "leak") for i in range(8)]

    kind, arena = Kind("made up", cases, 4), None
    whole, sample = (attack(kind, arena, number=number) for number in (None, 4))  # type: ignore[arg-type]
    assert whole.tree(names=1) | {"seconds": 0} == {
        "cases": 8,
        "held": 6,
        "broken": {"leak": 2},
        "such as": {"leak": ["case 0"]},
        "seconds": 0,
    }
    assert sample.broken == {"leak": ["case 0", "case 4"]}


@pytest.mark.slow
@pytest.mark.xdist_group("attacks")  # one arena
def test_children_that_hang_crash_or_leave_others_behind(arena: Arena) -> None:
    assert arena.run("--version").code == 0
    assert arena.run(fresh=True).code == 2
    assert arena.run("--version", hook=Hook(hang), limit_s=0.5).trouble == "hang"
    assert arena.run("--version", hook=Hook(crash)).trouble == "traceback"
    assert arena.run("--version", hook=Hook(leave_a_child)).left == 1
