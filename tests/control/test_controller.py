"""The controller on scripted norms with exact sets, and what the paper leaves open."""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from contexts import context, units
from contexts import step as take
from torch import Tensor, nn

from gnmr.control import NO_CAP, Controller, ControlSpec, Decision, GnmrSignal, HostPacket, TwoStage, Unit


class Script:
    """A controller over units a, b, c, ... that is fed norms by hand."""

    def __init__(
        self, num_units: int, max_o: int = 1, t_lock: int = 1, warmup_steps: int = 0, hold: int = 1, **signal
    ) -> None:
        self.on: dict[str, bool] = {}
        self.switches = 0
        names = "abcdef"[:num_units]
        made = [Unit(name, (nn.Parameter(torch.zeros(1)),), self._switch(name)) for name in names]
        signal = GnmrSignal(context(num_units), **signal)
        self.controller = Controller(
            made, ControlSpec(signal=signal, max_o=max_o, t_lock=t_lock, warmup_steps=warmup_steps, hold=hold)
        )

    def _switch(self, name: str):
        def switch(recovering: bool) -> None:
            self.on[name] = recovering
            self.switches += 1

        return switch

    def __call__(self, *norms: float | None) -> Decision:
        norm = torch.tensor([0.0 if n is None else n for n in norms], dtype=torch.float64)
        observed = torch.tensor([n is not None for n in norms])
        return take(self.controller, norm=norm, observed=observed)

    @property
    def chosen(self) -> np.ndarray:
        return np.isin(self.controller.names, self.controller.active)

    @property
    def active(self) -> str:
        return "".join(name for name, on in sorted(self.on.items()) if on)


def test_a_locked_unit_loses_its_place_to_riskier_ones() -> None:
    step = Script(2, alpha=1.5, beta=None, t_lock=3)
    step(1, 1)
    assert (step(1, 10), step.active)[1] == "b"
    decision = step(10, 1)  # b is a candidate by its lock, a by its risk
    assert decision.candidate.tolist() == [True, True]
    assert step.active == "a"
    assert decision.lock.tolist() == [3, 0]
    assert [(e.unit, e.event, e.cause) for e in decision.events] == [
        ("a", "promote", "gnmr"),
        ("b", "release", "max_o"),
    ]


def test_keep_leaves_set_and_locks_whatever_the_risks() -> None:
    step = Script(3, alpha=1.5, beta=None, t_lock=5)
    step(1, 1, 1)
    before = step(1, 10, 1)
    norm = torch.tensor([math.inf, 1, 100], dtype=torch.float64)
    evidence = {"norm": norm, "observed": torch.ones(3, dtype=torch.bool)}
    decision = step.controller.apply(step.controller.observe(evidence).to_host(), keep=True)
    assert step.active == "b" and not decision.events
    assert decision.lock.tolist() == before.lock.tolist() == [0, 5, 0]
    step(1, 1, 1)
    assert step.active == "b", "nothing of the kept step is left"


def test_promoted_units_replace_the_least_risky_and_their_events_come_with_the_next_step() -> None:
    step = Script(4, max_o=2, alpha=1.5, beta=None, t_lock=4)
    step(1, 1, 1, 1)
    before = step(1, 10, 1.2, 5)
    assert step.active == "bd"
    step(1, 4, 1, 1)  # below their thresholds, 0.73 and 0.33 times the mean, and locked
    controller = step.controller
    assert not controller.promote("abc") and step.active == "bd", "three exceed max_o"
    assert controller.promote("a") and step.active == "ab"
    with pytest.raises(KeyError):
        controller.promote("z")
    decision = step(1, 1, 1, 1)
    retried = [(e.step, e.unit, e.event, e.cause) for e in decision.events]
    assert retried == [(4, "a", "promote", "retry"), (4, "d", "release", "max_o")]
    assert decision.in_force.tolist() == [True, True, False, False] and step.active == "ab"
    assert before.lock.tolist() == [0, 4, 0, 4] and decision.lock.tolist() == [3, 2, 0, 0]


def test_a_held_set_stays_until_its_steps_are_over() -> None:
    step = Script(2, alpha=1.5, beta=None, hold=3)
    # Decisions after steps 1, 4 and 7; what triggers between them is not looked at.
    sets = [(step(*norms), step.active)[1] for norms in ((1, 1), (9, 1), (1, 1), (9, 1), (1, 99), (1, 1), (1, 1))]
    assert sets == ["", "", "", "a", "a", "a", "a"], "the lock keeps it for one more decision"
    step(1, 1), step(1, 1), step(1, 1)
    assert step.active == ""


def test_a_nonfinite_norm_takes_the_place_of_the_least_risky_held_unit_alone() -> None:
    step = Script(4, alpha=1.5, beta=None, max_o=2, hold=2)
    held = [(step(*norms), step.active)[1] for norms in ((1, 1, 1, 1), (1, 1, 1, 1), (9, 8, 1, 1), (2, 9, 7, math.nan))]
    assert held == ["", "", "ab", "bd"], "a goes, b stays, and c, which triggers, waits"


def test_two_stage_thresholds() -> None:
    step = Script(1, alpha=TwoStage(init=4.0, main=1.5, init_steps=3), beta=None)
    sets = [(step(norm), step.active)[1] for norm in (1, 3, 6, 10)]
    # GNMR: 1, 3, 3, 3; the threshold is 4 up to step 3 and 1.5 from step 4
    assert sets == ["", "", "", "a"]


def test_high_fidelity_warmup_puts_every_unit_on_the_recovery_path_and_fills_the_history() -> None:
    step = Script(3, max_o=1, warmup_steps=2, alpha=1.5, beta=None)
    assert step.active == "abc"
    first = step(1, 1, 1)
    assert first.in_force.all() and step.active == "abc"
    assert [(e.step, e.event, e.cause) for e in first.events] == [(0, "promote", "warmup")] * 3
    second = step(1, 9, 1)  # its set, in force in step 3, is the first that is decided
    assert second.in_force.all() and step.active == "b"
    assert {(e.unit, e.event, e.cause) for e in second.events} == {
        ("a", "release", "warmup"),
        ("c", "release", "warmup"),
    }
    assert step.controller.signal.history.count.tolist() == [2, 2, 2]


def test_causes() -> None:
    step = Script(2, alpha=1.5, beta=1.3, delta=1, max_o=2)
    step(1, 1)
    step(1, 1)
    decision = step(1.45, 4.0)  # GNMR/alpha = 0.97 and 2.67, dGNMR/beta = 1.12 and 3.08
    assert [(e.unit, e.cause) for e in decision.events] == [("a", "delta_gnmr"), ("b", "delta_gnmr")]
    released = [*step(1.45, 4.0).events, *step(1.45, 4.0).events]
    assert ("release", "lock") in [(e.event, e.cause) for e in released]


def test_bf16_norms_are_accumulated_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    controller = Controller(
        [Unit("w", (parameter,), lambda _on: None)], ControlSpec(signal=GnmrSignal(context(1)), max_o=1)
    )
    assert controller.step().norm[0] == pytest.approx(float(parameter.grad[0]) * 256, rel=1e-5)


@pytest.mark.parametrize("hold", [1, 4])
def test_state_dict_continues_exactly(hold: int) -> None:
    rows = torch.rand(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2).exp()
    whole = Script(5, max_o=2, t_lock=2, alpha=1.2, beta=1.2, delta=3, hold=hold)
    sets = [whole(*row.tolist()).by_risk(whole.chosen) for row in rows]
    first = Script(5, max_o=2, t_lock=2, alpha=1.2, beta=1.2, delta=3, hold=hold)
    for row in rows[:17]:
        first(*row.tolist())
    second = Script(5, max_o=2, t_lock=2, alpha=1.2, beta=1.2, delta=3, hold=hold)
    second.controller.load_state_dict(first.controller.state_dict())
    assert second.active == first.active, "loading puts every unit on the path it had"
    assert [second(*row.tolist()).by_risk(second.chosen) for row in rows[17:]] == sets[17:]


def state_with(**changed: object) -> dict[str, object]:
    """Of a controller in mid-run, with some of it replaced, or (...) left out."""
    step = Script(3, max_o=1, t_lock=2, alpha=1.5, beta=None)
    for norms in ((1, 1, 1), (1, 9, 1)):
        step(*norms)
    state = {**step.controller.state_dict(), **changed}
    return {name: value for name, value in state.items() if value is not ...}


HISTORY = dict(Script(3).controller.signal.state_dict())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"active": torch.tensor([True, True, False])}, "2 units are on the recovery path, max_o=1 allows 1"),
        ({"units": ["a", "b"]}, "other units"),
        ({"signal": HISTORY | {"history.mean": torch.ones(2)}}, "'history.mean' is torch.float32 of shape (2,)"),
        (
            {"signal": HISTORY | {"history.mean": torch.ones(3, dtype=torch.int64)}},
            "'history.mean' is torch.int64 of shape",
        ),
        *[({name: ...}, f"state: has no {name}") for name in ("t", "active", "lock", "signal")],
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(changed: dict[str, object], told: str) -> None:
    step = Script(3, max_o=1, t_lock=2, alpha=1.5, beta=None)
    for norms in ((1, 1, 1), (5, 1, 1)):
        step(*norms)
    before, switches = copy.deepcopy(step.controller.state_dict()), step.switches
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        step.controller.load_state_dict(state_with(**changed))
    assert "\n" not in str(refused.value)
    assert step.switches == switches and step.active == "a"
    assert_same(step.controller.state_dict(), before)
    step.controller.load_state_dict(state_with())
    assert step.active == "b"


def test_a_state_in_mid_warm_up_has_every_unit_on_the_recovery_path() -> None:
    first, second = (Script(3, max_o=1, warmup_steps=3) for _ in range(2))
    first(1, 1, 1)
    second.controller.load_state_dict(first.controller.state_dict())
    assert second.active == "abc"
    with pytest.raises(ValueError, match="3 units are on the recovery path"):
        Script(3, max_o=1).controller.load_state_dict(first.controller.state_dict())


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert state["t"] == other["t"]
    for own, theirs in ((state, other), (state["signal"], other["signal"])):
        assert all(torch.equal(v, theirs[name]) for name, v in own.items() if isinstance(v, Tensor))


class Sticky(Script):
    """Some of its switches fail."""

    stuck = ""

    def _switch(self, name: str):
        switch = super()._switch(name)

        def sticky(recovering: bool) -> None:
            if name in self.stuck:
                raise OSError(f"{name} is stuck")
            switch(recovering)

        return sticky


def test_a_switch_that_raises_in_a_step_leaves_the_set_as_far_as_it_came() -> None:
    step = Sticky(4, max_o=2, t_lock=2, alpha=1.5, beta=None)
    step(1, 1, 1, 1)
    step(9, 8, 1, 1)
    assert step.active == "ab"
    step.stuck = "d"
    with pytest.raises(OSError, match="d is stuck"):
        step(1, 1, 50, 40)  # a and b leave, c joins, d does not
    controller = step.controller
    assert step.active == "c" and controller.active == ["c"] and controller.t == 3
    assert controller.state_dict()["lock"].tolist() == [0, 0, 2, 0]
    step.stuck = ""
    decision = step(1, 1, 1, 500)
    assert decision.step == 4 and decision.in_force.tolist() == [False, False, True, False]
    assert [(e.step, e.unit, e.event) for e in decision.events] == [
        (3, "a", "release"),
        (3, "b", "release"),
        (3, "c", "promote"),
        (4, "d", "promote"),
    ]
    assert step.active == "cd" and controller.active == ["c", "d"]


def test_a_switch_that_raises_while_a_state_is_loaded_leaves_everything_as_it_was() -> None:
    step = Sticky(3, max_o=1, t_lock=2, alpha=1.5, beta=None)
    for norms in ((1, 1, 1), (5, 1, 1)):
        step(*norms)
    before = copy.deepcopy(step.controller.state_dict())
    step.stuck = "c"
    with pytest.raises(OSError, match="c is stuck"):
        step.controller.load_state_dict(state_with())
    assert step.active == "a" and step.controller.active == ["a"]
    assert_same(step.controller.state_dict(), before)


def test_a_signal_that_raises_while_its_state_is_loaded_leaves_everything_as_it_was() -> None:
    class Odd(GnmrSignal):
        def load_state_dict(self, state):  # type: ignore[no-untyped-def]
            self.history.mean = state["history.mean"]
            if "bad" in state:
                raise RuntimeError("half of it")
            super().load_state_dict(state)

    controller = Controller(units("abc"), ControlSpec(signal=Odd(context(3)), max_o=1, t_lock=2))
    before = copy.deepcopy(controller.state_dict())
    with pytest.raises(RuntimeError, match="half of it"):
        controller.load_state_dict(state_with(signal=HISTORY | {"history.mean": torch.ones(3), "bad": 1}))
    assert_same(controller.state_dict(), before)


@pytest.mark.parametrize("where", ["alpha", "beta", "delta", "max_o", "t_lock", "hold", "eps", "warmup_steps"])
@pytest.mark.parametrize("value", [-1, math.nan, True])
def test_senseless_values_are_refused_by_name(where: str, value: object) -> None:
    with pytest.raises(ValueError, match=where):
        Script(2, **{where: value})


@pytest.mark.parametrize(
    ("signal", "max_o", "warns"), [("gnmr_delta", 2, 1), ("gnmr_delta", NO_CAP, 0), ("always_high", 2, 0)]
)
def test_a_max_o_that_caps_nothing_warns(signal: str, max_o: int, warns: int) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Controller(units("ab"), ControlSpec(signal=signal, max_o=max_o))
    assert len(told) == warns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_observing_does_not_wait_for_the_device() -> None:
    layer = nn.Linear(8, 8, device="cuda")
    controller = Controller(
        [Unit("l", tuple(layer.parameters()), lambda _on: None)],
        ControlSpec(signal=GnmrSignal(context(1, "cuda")), max_o=1),
    )
    layer(torch.ones(2, 8, device="cuda")).sum().backward()
    controller.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packet = controller.observe(controller.measure())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert controller.apply(packet.to_host()).norm[0] > 0


def test_a_packet_brings_each_tensor_in_its_own_shape_and_all_its_digits() -> None:
    packet = HostPacket({"rows": torch.rand(2, 3).bfloat16(), "flags": torch.tensor([True, False])})
    packet.add(count=torch.tensor(2**53 - 1), loss=torch.tensor(0.1, requires_grad=True))
    host = packet.to_host()
    assert [host[name].tolist() for name in host] == [sent.tolist() for sent in packet.tensors.values()]
    assert {name: str(values.dtype) for name, values in host.items()} == {
        "rows": "float64",
        "flags": "bool",
        "count": "int64",
        "loss": "float64",
    }
    host["rows"][:] = 0  # a copy
    assert packet.tensors["rows"].any()
    with pytest.raises(ValueError, match="loss: is in the packet already"):
        packet.add(loss=torch.zeros(()))


def test_what_a_signal_or_a_caller_writes_reaches_nobody_else() -> None:
    """Evidence is a signal's own copy, because the loop clips by the same norms; so is a decision a caller's."""

    class Loud(GnmrSignal):
        def observe(self, evidence: Any, step: int) -> Any:
            evidence["norm"].mul_(1000)
            return super().observe(evidence, step)

    layer = nn.Linear(2, 2, bias=False)
    layer.weight.grad = torch.ones(2, 2)
    unit = Unit("l", tuple(layer.parameters()), lambda _on: None)
    controller = Controller([unit], ControlSpec(signal=Loud(context(1)), max_o=1))
    norm = torch.tensor([2.0], dtype=torch.float64)
    packet = controller.observe(controller.measure(norms=(norm, torch.tensor([True]))))
    decision = controller.apply(packet.to_host())
    assert norm.tolist() == [2.0]
    decision.in_force[0] = True
    assert controller.active == []
