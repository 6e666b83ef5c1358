"""A budget of costs: against a slow reading of the rule, and what the controller makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contexts import step as take
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gnmr import attach
from gnmr.attachment.model_units import costs_of
from gnmr.control import NO_CAP, Controller, ControlSpec, Decision, Unit, decide
from gnmr.control.policy import Budget
from gnmr.conversion import PathSpec, convert
from gnmr.lab.config import ControllerConfig


@st.composite
def cases(draw: st.DrawFn) -> dict:
    number = draw(st.integers(1, 8))

    def each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=number, max_size=number))

    return {
        "risk": each(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 8.0, math.inf])),
        "observed": each(st.booleans()),
        "recoverable": each(st.sampled_from([True, True, False])),
        "lock": each(st.integers(0, 2)),
        "cost": each(st.sampled_from([0.0, 1.0, 1.0, 2.0, 4.0, 8.0])),
        "most": draw(st.integers(0, 20)),
        "max_o": draw(st.integers(1, 9)),
        "trigger": draw(st.sampled_from([0.0, 1.0])),
    }


def slow(case: dict) -> list[int]:
    """One unit at a time: the candidate of the largest risk per cost that still fits, until none does."""
    units = range(len(case["risk"]))
    over = [case["observed"][b] and case["risk"][b] > case["trigger"] for b in units]
    left = [b for b in units if case["recoverable"][b] and (over[b] or case["lock"][b] > 0)]

    def key(b: int) -> float:
        if not case["observed"][b]:
            return -1.0
        if case["cost"][b] > 0 or case["risk"][b] in (0, math.inf):
            return case["risk"][b] / (case["cost"][b] or 1)
        return 1e300  # free

    chosen: list[int] = []
    for b in sorted(left, key=lambda b: -key(b)):
        if len(chosen) < case["max_o"] and sum(case["cost"][i] for i in chosen) + case["cost"][b] <= case["most"]:
            chosen.append(b)
    return sorted(chosen)


def decided(case: dict, budget: Budget | None):
    flags = [np.array(case[name]) for name in ("observed", "recoverable", "lock")]
    risk = np.array(case["risk"], dtype=np.float64)
    return decide(risk, *flags, case["max_o"], 2, case["trigger"], budget)


@given(cases())
def test_the_set_is_that_of_a_slow_reading(case: dict) -> None:
    free = [b for b, cost in enumerate(case["cost"]) if cost == 0]
    choice = decided(case, Budget.of(case["most"], case["cost"]))
    found = np.flatnonzero(choice.active).tolist()
    if len(free) <= 1 or case["max_o"] >= len(case["risk"]):  # of several free ones the order shows under a cap alone
        assert found == slow(case)
    assert sum(case["cost"][b] for b in found) <= case["most"] and len(found) <= case["max_o"]
    assert choice.lock[~choice.active].sum() == 0


@settings(max_examples=40)
@given(cases())
def test_a_budget_that_everything_fits_changes_nothing_but_the_order(case: dict) -> None:
    """Of equal costs the ranks are the same too."""
    roomy = Budget.of(1000, [3.0] * len(case["cost"]))
    for ours, theirs in zip(decided(case, roomy), decided(case, None), strict=True):
        assert np.array_equal(ours, theirs)


class Given:
    """A signal that is told its risks."""

    columns, needs = (), ()
    risks: list[list[float]]

    def __init__(self, _context: object) -> None:
        pass

    def observe(self, evidence, step):
        return evidence["norm"], ()

    def thresholds(self, step):
        return ()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def controller(costs: list[float], **spec: object) -> Controller:
    units = [Unit(f"u{i}", (nn.Parameter(torch.zeros(1)),), lambda _: None, cost) for i, cost in enumerate(costs)]
    return Controller(units, ControlSpec(**{"signal": Given, "max_o": NO_CAP} | spec))


def step(made: Controller, *risks: float) -> Decision:
    norm = torch.tensor(risks, dtype=torch.float64)
    return take(made, norm=norm)


def test_sets_events_and_the_cap_beside_it() -> None:
    made = controller([1, 2, 3, 4], budget=0.5)  # 5 of 10
    assert step(made, 2, 2, 0, 0).active.tolist() == [True, True, False, False]
    decision = step(made, 2, 2, 60, 0)  # 20 a cost before 2 and 1
    assert decision.active.tolist() == [True, False, True, False]
    assert [(e.unit, e.event, e.cause) for e in decision.events] == [
        ("u1", "release", "budget"),
        ("u2", "promote", "risk"),
    ]
    both = controller([1, 2, 3, 4], budget=0.5, max_o=1)
    assert step(both, 2, 2, 0, 0).active.tolist() == [True, False, False, False]
    assert step(both, 2, 60, 0, 0).events[0].cause == "max_o"


def test_a_unit_that_is_no_candidate_is_never_taken() -> None:
    """A signal of a user's own may give risks below 0, and costs below 1 enlarge them."""
    state = (np.array([0.0, -1.0]), np.ones(2, bool), np.ones(2, bool), np.array([0, 1]))
    choice = decide(*state, max_o=1, t_lock=2, budget=Budget.of(0.4, [0.3, 0.3]))
    assert choice.candidate.tolist() == choice.active.tolist() == [False, True]


def test_hold_and_overflow_keep_the_budget() -> None:
    held = controller([1, 2, 3, 4], budget=0.5, hold=3)
    step(held, 2, 2, 0, 0)
    assert step(held, 0, 0, 90, 90).active.tolist() == [True, True, False, False]
    assert step(held, 0, 0, math.inf, 0).active.tolist() == [True, False, True, False]  # 3 + 1
    made = controller([1, 2, 3, 4], budget=0.5)
    before = step(made, 2, 2, 0, 0).active.tolist()
    assert step(made, *[math.inf] * 4).active.tolist() == before  # blames nobody


def test_a_state_that_spends_too_much_is_refused() -> None:
    rich, poor = controller([1, 2, 3, 4], budget=0.5), controller([1, 2, 3, 4], budget=0.1)
    step(rich, 2, 2, 0, 0)
    with pytest.raises(ValueError, match="cost more than the budget allows"):
        poor.load_state_dict(rich.state_dict())


@pytest.mark.parametrize(
    ("costs", "budget", "said"),
    [
        ([1, 1], 0, "budget=0: must be a share above 0, at most 1"),
        ([1, 1], 0.3, "budget=0.3: is too small for any unit; the cheapest takes 0.5"),
        ([1, -1], 0.5, "unit 'u1' must cost a number"),
    ],
)
def test_budgets_without_sense(costs: list[float], budget: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        controller(costs, budget=budget)


def test_random_units_do_not_depend_on_what_they_cost() -> None:
    """One of two fits: the one that costs three times as much as often as the other."""
    made = controller([1, 3], signal="random", budget=0.76, routing="ranked")
    often = [0, 0]
    for _ in range(120):
        active = step(made, 1, 1).active.tolist()
        often = [a + b for a, b in zip(often, active, strict=True)]
    assert abs(often[1] - 60) < 25 and sum(often) == 120


# ---- attached ----


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32))


AREAS = [8 * 16, 16 * 32]
PATHS = {"low": "sim_e2m1", "recovery": "bf16", "targets": ["*"]}


@pytest.mark.parametrize("unit", ["operator", "gemm"])
def test_costs_are_what_is_spent(unit: str) -> None:
    for more in ({}, {"pins": {"0": ["fprop"]}}, {"recovers": ["fprop"]}):
        converted = convert(model(), PathSpec(**PATHS, unit=unit, **more))
        costs, pinned = converted.cost.of_units("gemm")
        assert converted.cost.spent()[0] == pytest.approx(pinned)
        for one, cost in zip(converted.units, costs, strict=True):
            if one.routable:
                one.switch(True)
                assert converted.cost.spent()[0] == pytest.approx(pinned + cost)
                one.switch(False)


def test_costs_by_hand() -> None:
    whole, spec = 3 * sum(AREAS), ControlSpec(budget=0.5)
    converted = convert(model(), PathSpec(**PATHS, unit="gemm", pins={"0": ["fprop"]}))
    costs, pinned = costs_of(converted, spec)
    assert costs == pytest.approx([0, *[AREAS[0] / whole] * 2, *[AREAS[1] / whole] * 3])
    assert pinned == pytest.approx(AREAS[0] / whole)
    bytes_, _ = costs_of(converted, ControlSpec(budget=0.5, cost="bytes"))
    assert bytes_ == pytest.approx([0, 0, 8 / 24, 0, 0, 16 / 24])  # wgrad's input alone is kept
    formats = convert(model(), PathSpec(low="int4", recovery="int8", targets=["*"]))
    assert formats.cost.of_units("gemm")[0] == pytest.approx([area / sum(AREAS) for area in AREAS])
    table = {unit.name: float(i) for i, unit in enumerate(converted.units)}
    assert costs_of(converted, ControlSpec(budget=0.5, cost=table)) == ([i / 15 for i in range(6)], 0)
    for wrong, said in (({"0:fprop": 1.0}, "is missing"), (table | {"x": 1.0}, "'x' is no unit")):
        with pytest.raises(ValueError, match=said):
            costs_of(converted, ControlSpec(budget=0.5, cost=wrong))
    with pytest.raises(ValueError, match="keeps no more bits"):
        convert(model(), PathSpec(**PATHS, recovers=["fprop"])).cost.of_units("bytes")


def test_pins_count_against_it() -> None:
    def active(budget: float) -> list[str]:
        net = model()
        made = attach(
            net, **PATHS, unit="gemm", pins={"0": ["fprop", "dgrad"]}, signal="always_high", budget=budget, max_o=NO_CAP
        )
        net(torch.randn(4, 8)).sum().backward()
        made.step()
        assert made.converted.cost.spent()[0] <= budget + 1e-9
        return made.active

    share = AREAS[0] / (3 * sum(AREAS))
    assert active(3 * share) == ["0:wgrad"] and active(1.0) == ["0:wgrad", "2:fprop", "2:dgrad", "2:wgrad"]
    with pytest.raises(ValueError, match=r"too small for any unit in addition to pins, which take 0\.133"):
        active(2.5 * share)


def test_the_config_becomes_the_spec() -> None:
    assert ControllerConfig(budget="10%", max_o=None).spec(10).budget == 0.1
    assert ControllerConfig(budget=0.1, max_o=None).spec(10).max_o == NO_CAP
