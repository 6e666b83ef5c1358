"""The trigger from the first steps of a loop, and what controller and decision say of themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contexts import units

from gnmr.control import Controller, ControlSpec
from gnmr.control.calibration import NO_TRIGGER, Trigger


def controller(number: int = 4, **spec) -> Controller:
    return Controller(units([f"u{i}" for i in range(number)], 2), ControlSpec(**{"max_o": 2, **spec}))


def play(it: Controller, steps: int, seed: int = 0):
    """Norms that fluctuate so much that published thresholds are exceeded all the time."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        for unit, norm in zip(it.units, np.exp(draw.normal(size=len(it.units))), strict=True):
            (parameter,) = unit.parameters
            parameter.grad = torch.full((2,), norm / math.sqrt(2))
        found.append(it.step())
    return found


def test_the_trigger_is_a_quantile_of_the_second_half():
    of = Trigger(1.0)
    of.calibrate("25%", first=1, steps=4)
    seen = np.array([True, True, True, False])
    for step in (1, 2):
        of.learn(step, np.full(4, 100.0), seen)  # the first half counts for nothing
    of.learn(3, np.array([1.0, 2.0, math.inf, 50.0]), seen)
    assert of.value == NO_TRIGGER
    of.learn(4, np.array([3.0, 4.0, math.nan, 50.0]), seen)
    assert of.value == 4.0  # of 1, 2, 3, 4


def test_nothing_is_promoted_until_then_and_the_wanted_share_after():
    it = controller(t_lock=1, max_o=4)
    assert sum(d.candidate.sum() for d in play(it, 200)) > 80, "the published thresholds flood"
    it = controller(t_lock=1, max_o=4)
    it.calibrate(fraction=0.05, steps=100)
    early = play(it, 100)
    assert not any(d.active.any() for d in early) and 1 < it.trigger < NO_TRIGGER
    later = play(it, 400, seed=1)
    assert 0.02 < np.mean([d.risk > it.trigger for d in later]) < 0.08
    assert all((d.candidate >= (d.risk > it.trigger)).all() for d in later)


def test_a_norm_that_is_not_finite_promotes_while_it_calibrates():
    it = controller()
    it.calibrate(steps=10)
    play(it, 3)
    it.units[1].parameters[0].grad = torch.tensor([math.inf, 0.0])
    decision = it.step()
    assert decision.by_risk(decision.candidate) == ["u1"] == it.active


def test_a_state_has_the_trigger_and_a_loop_goes_on_with_it():
    it, other = controller(), controller()
    it.calibrate(0.1, steps=20)
    play(it, 20)
    for one in (other, controller()):
        one.calibrate(0.1, steps=20)
        one.load_state_dict(it.state_dict())
        assert one.trigger == it.trigger and "calibrating" not in repr(one)
    assert not {"trigger", "calibration"} & controller().state_dict().keys(), "a loop without has the state that it had"


def test_a_calibration_starts_after_a_state_that_has_none():
    saved = controller()
    play(saved, 7)
    it = controller()
    it.calibrate(fraction=0.05, steps=10)
    it.load_state_dict(saved.state_dict())
    assert it.calibrating == (0, 10) and it.trigger == NO_TRIGGER
    play(it, 9)
    assert it.calibrating == (9, 10)
    play(it, 1)
    assert it.calibrating is None and it.calibrated is not None


@pytest.mark.parametrize("at", [1, 12])
@pytest.mark.parametrize("calls", [True, False], ids=["calibrates", "does not"])
def test_a_state_of_a_calibration_goes_on_with_it(at, calls, tmp_path):
    """As if nothing had happened, whether or not the loop that goes on calls `calibrate` as before."""
    torch.manual_seed(0)
    rows = torch.rand(25, 4, 2)

    def take(it, steps):
        for row in rows[it.t : it.t + steps]:
            for unit, gradient in zip(it.units, row, strict=True):
                unit.parameters[0].grad = gradient
            it.step()

    whole, half, again = controller(), controller(), controller()
    for one in (whole, half):
        one.calibrate(0.1, steps=20)
    take(whole, 25), take(half, at)
    torch.save(half.state_dict(), tmp_path / "state.pt")
    if calls:
        again.calibrate(0.1, steps=20)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert "calibrating" in repr(again) and again.trigger == NO_TRIGGER and again.calibrated is None
    take(again, 25 - at)
    assert again.trigger == whole.trigger == again.calibrated and again.active == whole.active


def test_a_state_without_its_calibration_is_refused():
    it, other = controller(), controller()
    it.calibrate(0.1, steps=20)
    state = {name: value for name, value in it.state_dict().items() if name != "calibration"}
    with pytest.raises(ValueError, match="was saved while calibrating; call calibrate"):
        other.load_state_dict(state)
    assert other.trigger == 1.0 and "calibrating" not in repr(other)


@pytest.mark.parametrize(
    ("spec", "words", "told"),
    [
        ({"routing": "ranked"}, {}, "routing='ranked' has no threshold"),
        ({"signal": "random"}, {}, "random reads no evidence"),
        ({}, {"fraction": 0}, "fraction=0: must be a positive number"),
        ({}, {"steps": 1}, "steps=1: must be a whole number of at least 2"),
    ],
)
def test_what_cannot_be_calibrated(spec, words, told):
    with pytest.raises(ValueError, match=told):
        controller(**spec).calibrate(**words)


def test_without_a_risk_the_trigger_stays():
    it = controller()
    it.calibrate(steps=2)
    with pytest.warns(UserWarning, match="no unit had a risk above 0; the trigger is 1"):
        it.step(), it.step()
    assert it.trigger == 1.0 and it.calibrated is None


def test_controller_and_decision_say_what_they_are():
    it = controller(alpha=1.0, beta=None)
    assert repr(it) == "<Controller of 4 units, signal gnmr_delta, trigger 1, max_o=2; step 0: 0 in recovery>"
    *_, last = play(it, 5)
    assert repr(last).startswith("<Decision of step 5: ") and len(repr(last)) < 200
    metrics = last.metrics()
    assert metrics["gnmr/active_next"] == last.active.sum() and metrics["gnmr/over_gnmr"] == last.over("gnmr")
    assert metrics["gnmr/grad_norm"] == pytest.approx(np.linalg.norm(last.norm))
    assert metrics["gnmr/risk_max"] == last.risk.max() and all(type(value) is float for value in metrics.values())
