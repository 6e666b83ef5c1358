"""Arms that take turns, by a clock that only the arms move."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnmr.errors import UserError
from gnmr.lab.bench.timing import Stopwatch, alternate, clock_of, samples


class FakeClock:
    """Seconds that pass where `work` says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.now += seconds


def test_every_arm_runs_once_a_round_and_the_order_turns():
    clock = FakeClock()
    arms = {name: lambda name=name, s=s: clock.work(name, s) for name, s in (("a", 2.0), ("b", 3.0), ("c", 5.0))}
    seconds = alternate(arms, range(4), clock)
    assert "".join(clock.log) == "abcbcacababc"
    assert list(seconds) == ["a", "b", "c"]
    assert [values.tolist() for values in seconds.values()] == [[2.0] * 4, [3.0] * 4, [5.0] * 4]


def test_a_slow_machine_slows_both_arms_and_not_their_ratio():
    clock = FakeClock()
    slowness = iter([1.0, 1.0, 7.0, 7.0, 2.0, 2.0, 30.0, 30.0])
    arms = {name: lambda s=s: clock.work("", s * next(slowness)) for name, s in (("with", 1.25), ("without", 1.0))}
    seconds = alternate(arms, range(4), clock)
    assert (seconds["with"] / seconds["without"]).tolist() == [1.25] * 4
    assert len(set(seconds["with"])) == 4


def test_rounds_that_warm_up_run_and_are_not_kept():
    clock = FakeClock()
    cost = iter([100.0, 50.0, 1.0, 1.0])
    assert alternate({"a": lambda: clock.work("a", next(cost))}, range(-2, 2), clock)["a"].tolist() == [1.0, 1.0]
    values = iter([9.0, 1.0, 2.0])
    assert samples(lambda: next(values), range(-1, 2)).tolist() == [1.0, 2.0]


class Worker:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def think(self, seconds: float) -> str:
        self.clock.work("think", seconds)
        return f"thought for {seconds}"


def test_parts_of_a_step_are_timed_where_they_run():
    clock = FakeClock()
    watch, worker, plain = Stopwatch(clock), Worker(clock), Worker.think
    with watch.inside((Worker, "think", "thinking")):
        worker.think(99.0)  # before the first step
        for step in range(3):
            watch.lap()
            clock.work("rest", 10.0)
            assert worker.think(step + 1.0) == f"thought for {step + 1.0}"
            worker.think(0.5)
            if step == 1:
                with watch.part("writing"):
                    clock.work("write", 4.0)
    assert Worker.think is plain
    np.testing.assert_allclose(watch.seconds("thinking", 2), [2.5, 3.5])
    np.testing.assert_allclose(watch.seconds("writing", 3), [0.0, 4.0, 0.0])


def test_what_is_timed_is_put_back_after_an_error():
    plain = Worker.think
    with pytest.raises(KeyError), Stopwatch(FakeClock()).inside((Worker, "think", "thinking")):
        raise KeyError
    assert Worker.think is plain


def test_the_cpu_clock_is_for_the_cpu_alone():
    assert clock_of(torch.device("cpu"), "wall") is not clock_of(torch.device("cpu"), "cpu")
    with pytest.raises(UserError, match="clock=cpu"):
        clock_of(torch.device("cuda"), "cpu")
