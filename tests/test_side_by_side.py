"""Calls in workers, and workers that die."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gnmr.errors import RunFailed, UserError
from gnmr.lab.cli.side_by_side import run_side_by_side


def square(number: int) -> int:
    return number * number


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def refuse() -> None:
    raise UserError("a=1: a mistake")


def run(*calls: tuple, n_jobs: int = 2) -> list:
    return run_side_by_side([(function, arguments, {}) for function, *arguments in calls], list("abcdef"), n_jobs)


def test_results_come_in_the_order_of_the_calls() -> None:
    assert run(*((square, number) for number in range(5))) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, r"failed: its process was killed by SIGKILL \(out of memory\?\)"),
        (signal.SIGSEGV, "failed: its process was killed by SIGSEGV"),
        (signal.SIGTERM, "was stopped by SIGTERM"),
    ],
)
def test_a_worker_that_dies_is_named_and_the_others_go_on(number, how, capsys) -> None:
    with pytest.raises(RunFailed, match=f"^b {how}; the same command continues it$"):
        run((square, 1), (die, number), (print, "third"), (print, "last"), n_jobs=1)
    assert capsys.readouterr().out.splitlines()[0].startswith("b ")


def test_an_error_comes_after_all_calls(tmp_path) -> None:
    with pytest.raises(UserError, match="a=1"):
        run((refuse,), (square, 2), (os.mkdir, str(tmp_path / "made")), n_jobs=1)
    assert (tmp_path / "made").is_dir()
