"""Pins: GEMMs that are on the recovery recipe always, by hand; what they leave to route, and what they spend."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import test_scaled_mm
import torch
from test_simulated import by_hand, by_us, same, single
from test_units import Net, backward
from torch import nn

import gnmr
from gnmr.attachment import units_of
from gnmr.lab.faults.faults import Fault
from gnmr.lab.faults.schedule import FaultSchedule
from gnmr.names import GEMMS
from gnmr.precision import PathLinear, PathSpec, convert

SOME = [list(gemms) for number in (1, 2, 3) for gemms in itertools.combinations(GEMMS, number)]
WHOLE = list(GEMMS)


@pytest.mark.filterwarnings("ignore:the recovery path", "ignore:recovers=")
@pytest.mark.parametrize("pinned", SOME, ids=str)
@pytest.mark.parametrize("recovery", ["bf16", "fp8_hybrid"])
def test_pinned_gemms_are_the_recovery_recipes_on_both_paths(pinned: list[str], recovery: str) -> None:
    for recovers in SOME:
        net, x, dy = single()
        spec = PathSpec.of("sim_e2m1", recovery, targets=["0"], recovers=recovers, pins={"0": pinned})
        operator = convert(net, spec).operators[0]
        for recovering, high in ((False, pinned), (True, {*pinned, *recovers})):
            operator.switch(recovering)
            expected = tuple(recovery if gemm in high else "sim_e2m1" for gemm in GEMMS)
            assert same(by_us(x, net[0], dy), by_hand(expected)), (recovers, recovering)
        assert operator.routable == (not set(recovers) <= set(pinned))


@pytest.mark.parametrize("pinned", SOME, ids=str)
def test_without_a_recovery_path_a_pin_is_16_bits(pinned: list[str]) -> None:
    net, x, dy = single()
    plan = convert(net, PathSpec.of("sim_int4", None, targets=["0"], pins={"0": pinned}))
    expected = tuple("bf16" if gemm in pinned else "sim_int4" for gemm in GEMMS)
    assert same(by_us(x, net[0], dy), by_hand(expected)) and plan.recovery is None


@pytest.mark.parametrize("site", ["saved", "forward"])
@pytest.mark.parametrize(("recovery", "instead"), [("int8", "int8"), (None, "bf16")])
def test_under_formats_a_pin_is_the_whole_operator(site: str, recovery: str | None, instead: str) -> None:
    found = []
    for low, more in (("int4", {"pins": {"q_proj": WHOLE, "layers.1.*": WHOLE}}), (instead, {})):
        model = Net(blocks=2)
        convert(
            model, PathSpec.of(low, recovery if more else None, site=site, targets=["q_proj", "layers.1.*"], **more)
        )
        backward(model)
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(*found)


def test_a_pin_hits_what_it_names_and_no_other() -> None:
    model = Net()
    pins = {"down_proj": ["fprop"], "layers.2.mlp.down_proj": ["wgrad", "fprop"], "layers.0.attn.q_proj": WHOLE}
    plan = convert(model, PathSpec.of("sim_e2m1", "bf16", pins=pins))
    own = {operator.operator_name: operator.pinned for operator in plan.operators if operator.pinned}
    assert own == {
        "layers.0.attn.q_proj": GEMMS,
        **{f"layers.{i}.mlp.down_proj": ("fprop",) for i in (0, 1, 3)},
        "layers.2.mlp.down_proj": ("fprop", "wgrad"),
    }
    text = [" ".join(line.split()) for line in str(plan).splitlines()]
    mixed = "Linear 16 -> 16 sim_e2m1, simulated; bf16 in"
    assert f"layers.{{0,1,3}}.mlp.down_proj (3 units) {mixed} fprop (pinned) bf16" in text
    assert f"layers.2.mlp.down_proj {mixed} fprop, wgrad (pinned) bf16" in text
    assert "layers.0.attn.q_proj Linear 16 -> 16 bf16 (pinned) none (pinned)" in text
    assert text[-1] == "pinned: 8 of 39 GEMMs, 20.5% of their arithmetic"
    brief = plan.brief().splitlines()
    assert brief[-1] == text[-1] and "low path bf16 (pinned), recovery path none (pinned):" in brief
    assert brief[brief.index("low path bf16 (pinned), recovery path none (pinned):") + 1] == "  layers.0.attn.q_proj"
    plan.restore()
    assert not any(isinstance(module, PathLinear) for module in model.modules()) and not hasattr(
        model.head_proj, "pinned"
    )


def test_what_is_spent_by_hand() -> None:
    model = nn.ModuleDict({"a_proj": nn.Linear(4, 8), "b_proj": nn.Linear(8, 2), "c_proj": nn.Linear(2, 24)})
    areas = {"a": 32, "b": 16, "c": 48}
    plan = convert(
        model, PathSpec.of("sim_e2m1", "bf16", recovers=["fprop"], pins={"a_proj": ["wgrad"], "b_proj": WHOLE})
    )
    assert [unit.recoverable for unit in units_of(plan)] == [True, False, True]
    assert plan.spent() == (pytest.approx((areas["a"] + 3 * areas["b"]) / 288), 0)
    plan.units[0].switch(True)
    plan.units[2].switch(True)
    assert plan.spent()[0] == pytest.approx((2 * areas["a"] + 3 * areas["b"] + areas["c"]) / 288)
    plan.warmup_steps = 1
    plan.begin_step(1)
    assert plan.spent()[0] == 1
    plan.begin_step(2)
    assert plan.spent()[0] < 1

    model = nn.ModuleDict({"a_proj": nn.Linear(4, 8), "b_proj": nn.Linear(4, 8), "c_proj": nn.Linear(8, 4)})
    plan = convert(model, PathSpec.of("int4", "int8", pins={"b_proj": WHOLE}))
    for name, width in (("a_proj", 4), ("b_proj", 4), ("c_proj", 8)):
        model[name](torch.randn(5, width))
    assert plan.spent() == (pytest.approx(1 / 3), 5 * 4 / 2)
    assert plan.extra_bytes_bound(1) == 5 * 4 / 2 + 5 * 8 / 2
    plan.units[2].switch(True)
    assert plan.spent() == (pytest.approx(2 / 3), plan.extra_bytes_bound(1))
    assert [unit.extra_bytes for unit in units_of(plan)] == [2, 1, 4]


def test_a_unit_with_nothing_to_recover_is_watched_and_takes_no_place() -> None:
    model = Net()
    pins = {"layers.0.*": WHOLE, "layers.1.attn.*": WHOLE}
    controller = gnmr.attach(
        model, low="sim_e2m1", recovery="bf16", unit="block", pins=pins, max_o=4, signal="always_high"
    )
    for step in range(2):
        backward(model, step)
        decision = controller.step()
    assert decision.observed.all() and (decision.norm > 0).all(), "watched, the pinned one too"
    assert controller.active == ["layers.1", "layers.2", "layers.3", "head_proj"]
    assert controller.converted.spent()[0] == 1


def test_a_state_belongs_to_its_pins() -> None:
    def state(**more: Any) -> dict[str, Any]:
        return convert(Net(), PathSpec.of("sim_e2m1", "bf16", **more)).state_dict()

    other = convert(Net(), PathSpec.of("sim_e2m1", "bf16", pins={"layers.1.attn.q_proj": ["dgrad"]}))
    other.load_state_dict(state(pins={"layers.1.attn.q_proj": ["dgrad"]}))
    for more in ({}, {"pins": {"layers.1.attn.q_proj": ["fprop"]}}, {"pins": {"layers.2.attn.q_proj": ["dgrad"]}}):
        with pytest.raises(ValueError, match="the paths' state belongs to"):
            other.check_state(state(**more))


@pytest.mark.parametrize(("low", "recovery"), [("int4", "int8"), ("sim_int4", "fp8_hybrid")])
def test_a_fault_breaks_no_operator_that_is_pinned(low: str, recovery: str) -> None:
    found = {}
    for pins in ({}, {"layers.0.*": WHOLE}):
        for windows in ([], [(1, 1)]):
            model = Net(blocks=2)
            plan = convert(model, PathSpec.of(low, recovery, pins=pins))
            if windows:
                schedule = FaultSchedule(
                    plan, Fault("scale_up", magnitude=64.0), ["layers.0.attn.q_proj"], 1, windows=windows
                )
                schedule.begin_step(1)
            backward(model)
            found[bool(pins), bool(windows)] = model.layers[0].attn["q_proj"].weight.grad
    assert not same([found[False, False]], [found[False, True]])
    assert same([found[True, False]], [found[True, True]])


@pytest.mark.parametrize("pinned", SOME, ids=str)
def test_scaled_mm_runs_what_is_not_pinned(pinned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for backend in ("scaled_mm", "simulated"):
        net = nn.Sequential(nn.Linear(32, 48, bias=False))
        net[0].weight.data.copy_(test_scaled_mm.W)
        spec = PathSpec.of("fp8_hybrid", None, targets=["0"], backend=backend, pins={"0": pinned})
        assert convert(net, spec).low.backend == backend
        leaf = test_scaled_mm.X.clone().requires_grad_()
        y = net(leaf)
        y.backward(test_scaled_mm.DY)
        found[backend] = [y.detach(), leaf.grad, net[0].weight.grad]
    for ours, theirs in zip(found["scaled_mm"], found["simulated"], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("weights", ["online", "beside", "instead"])
def test_integers_run_what_is_not_pinned(weights: str) -> None:
    torch.manual_seed(0)
    net, plain = (nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    net.requires_grad_(False)
    plan = convert(net, PathSpec.of("llm_int8", None, targets=["a", "b"], weights=weights, pins={"a": ["fprop"]}))
    x = torch.randn(6, 32)
    assert plan.low.backend == "int_mm"
    assert torch.equal(net["a"](x), plain["a"](x)) == (weights != "instead"), "16 bits, or W8A16"
    assert torch.allclose(net["a"](x), plain["a"](x), atol=0.05)
    with plan.high_precision():
        high = net["b"](x)
    assert not torch.equal(net["b"](x), high)


def test_transformer_engine_runs_whole_pins_and_refuses_others(stub: Any) -> None:
    model = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128)})
    paths = {"low": "fp8_hybrid", "recovery": "bf16", "targets": ["a", "b"], "backend": "te"}
    with pytest.raises(
        ValueError, match=r"^backend='te': Transformer Engine does not run the recipe bf16 in fprop, but"
    ):
        convert(model, PathSpec.of(**paths, pins={"a": ["fprop"]}))
    assert type(model["a"]) is nn.Linear
    plan = convert(model, PathSpec.of(**paths, pins={"a": WHOLE}))
    model["a"](torch.randn(8, 128))
    assert stub.ran == [] and plan.spent()[0] == 0.5
    model["b"](torch.randn(8, 128))
    assert len(stub.ran) == 1


def test_what_is_refused_in_one_line() -> None:
    for pins, line in (
        (3, "pins=3: must be {pattern of operators: "),
        ({"q_proj": []}, r"pins.q_proj=\[\]: must be some of fprop, dgrad, wgrad"),
        ({"q_proj": ["bprop"]}, r"pins.q_proj=\['bprop'\]: must be some of fprop, dgrad, wgrad"),
        ({"q_proj": 3}, "pins.q_proj=3: must be a list of names"),
        ({"up_proj": ["fprop"]}, "pins 'up_proj': no operator has such a name; there are down_proj, head_proj, o_proj"),
    ):
        model = Net()
        with pytest.raises(ValueError, match=line), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gnmr.attach(model, low="sim_e2m1", recovery="bf16", pins=pins)
        assert not any(isinstance(module, PathLinear) for module in model.modules())
    with pytest.raises(ValueError, match=r"pins.q_proj=\['wgrad'\]: low=int4 is a format, and pins the whole operator"):
        PathSpec(pins={"q_proj": ["wgrad"]})


def test_blocks_with_pins_are_compiled_between_the_graphs() -> None:
    model = Net(blocks=2)
    plan = convert(model, PathSpec.of("sim_e2m1", None, pins={"layers.0.attn.q_proj": ["fprop"]}))
    assert "pinned operators have paths of their own" in str(plan.compile([]))
    assert convert(Net(blocks=2), PathSpec.of("sim_e2m1", None)).compile([]) is None
