"""Pins: GEMMs that are always on one recipe, by hand; what they leave to route, and what they spend."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_linear import Block
from test_simulated import assert_by_hand, by_us, same, single
from test_units import Net, backward
from torch import nn

import gnmr
from gnmr.attachment import units_of
from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.conversion.cost import gemm_time
from gnmr.formats import RECIPES, Recipe
from gnmr.lab.fault_injection import Fault, FaultSchedule
from gnmr.names import GEMMS
from gnmr.plan.pin_plan import PinPlan
from gnmr.records.reader import read_json

WHOLE = list(GEMMS)


@pytest.mark.filterwarnings("ignore:recovers=")
@pytest.mark.parametrize("unit", ["operator", "gemm"])
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_every_pinned_gemm_keeps_its_own_recipe_on_both_paths(first: int, second: int, unit: str) -> None:
    """Each pair of recipes in each pair of GEMMS."""
    recipes = [(None, "mxfp8", "fp8_hybrid")[i % 3] for i in (first, second, first + second)]
    pins = {gemm: recipe for gemm, recipe in zip(GEMMS, recipes, strict=True) if recipe}
    for recovery, recovers in (("bf16", GEMMS), ("bf16", ("fprop", "wgrad")), (None, GEMMS)):
        net, x, dy = single()
        spec = PathSpec(
            low="sim_e2m1",
            recovery=recovery,
            targets=["0"],
            unit=unit,
            recovers=[*recovers],
            pins={"0": pins} if pins else {},
        )
        converted = convert(net, spec)
        (operator,) = converted.operators
        assert operator.pinned == (*pins,)
        assert operator.routable == (recovery is not None and not {*recovers} <= {*pins})
        assert_by_hand(by_us(x, operator, dy), tuple(pins.get(gemm, "sim_e2m1") for gemm in GEMMS))
        for one in converted.units:
            if one.routable:
                one.switch(True)
        high = dict.fromkeys(recovers, recovery or "sim_e2m1") | pins
        assert_by_hand(by_us(x, operator, dy), tuple(high.get(gemm, "sim_e2m1") for gemm in GEMMS))


def test_operators_that_read_the_same_tensor_have_each_its_own_recipes() -> None:
    """Casts are shared by cast, not by operator; recipes of one's own are pins too, and in a checkpoint's name."""
    own = {"mine": {"fprop": {"input": "e4m3/tensor", "weight": "e4m3/row"}, "wgrad": {"input": "e5m2/tensor"}}}
    pins = {"q_proj": {"fprop": "mxfp4_floor", "wgrad": "mine"}, "layers.0.attn.o_proj": {"fprop": "mine"}}
    ours, theirs = Net(blocks=1, width=32), Net(blocks=1, width=32)
    spec = PathSpec(low="nvfp4", recovery=None, recipes=own, pins=pins)
    converted, by_hand = convert(ours, spec), convert(theirs, replace(spec, pins={}))
    mine, floor = Recipe.of("mine", own["mine"]), RECIPES["mxfp4_floor"]
    for operator, gemms in zip(
        by_hand.operators, ({"fprop": floor.fprop, "wgrad": mine.wgrad}, {"fprop": mine.fprop}), strict=False
    ):
        assert isinstance(operator.low, Recipe)
        operator.low = replace(operator.low, **gemms)
    found = []
    for model in (ours, theirs):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        (model(x) - x).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert same(*found)
    other = convert(Net(blocks=1, width=32), replace(spec, recipes={"mine": {"fprop": own["mine"]["fprop"]}}))
    with pytest.raises(ValueError, match="the paths' state belongs to"):
        converted.load_state_dict(other.state_dict())


def test_only_pinned_operators_have_to_fit_their_recipe() -> None:
    model = nn.ModuleDict({"a_proj": nn.Linear(32, 64), "b_proj": nn.Linear(24, 40)})
    with pytest.raises(ValueError, match="b_proj has 24 inputs"):
        convert(model, PathSpec.of("sim_e2m1", "bf16", pins={"*": {"fprop": "mxfp8"}}))
    convert(model, PathSpec.of("sim_e2m1", "bf16", pins={"a_proj": {"fprop": "mxfp8"}}))


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
    converted = convert(model, PathSpec.of("sim_e2m1", "bf16", pins=pins))
    own = {operator.operator_name: operator.pinned for operator in converted.operators if operator.pinned}
    assert own == {
        "layers.0.attn.q_proj": GEMMS,
        **{f"layers.{i}.mlp.down_proj": ("fprop",) for i in (0, 1, 3)},
        "layers.2.mlp.down_proj": ("fprop", "wgrad"),
    }
    assert "pinned: 8 of 39 GEMMs, 20.5% of their arithmetic" in str(converted).splitlines()[-1]
    assert "layers.{0,1,3}.mlp.down_proj  (3 units)" in str(converted)
    assert "  layers.0.attn.q_proj" in converted.brief().splitlines()
    converted.restore()
    assert not any(isinstance(module, PathLinear) for module in model.modules()) and not hasattr(
        model.head_proj, "pinned"
    )


def test_what_is_spent_by_hand() -> None:
    model = nn.ModuleDict({"a_proj": nn.Linear(4, 8), "b_proj": nn.Linear(8, 2), "c_proj": nn.Linear(2, 24)})
    areas = {"a": 32, "b": 16, "c": 48}
    converted = convert(
        model, PathSpec.of("sim_e2m1", "bf16", recovers=["fprop"], pins={"a_proj": ["wgrad"], "b_proj": WHOLE})
    )
    assert [unit.recoverable for unit in units_of(converted)] == [True, False, True]
    more = areas["a"] + 3 * areas["b"]  # GEMMs in 16 bits, which take 3 more each than in 4 bits
    assert converted.cost.spent() == (pytest.approx(more / 288), 0, pytest.approx(3 * more / 288))
    converted.units[0].switch(True)
    converted.units[2].switch(True)
    assert converted.cost.spent()[0] == pytest.approx((2 * areas["a"] + 3 * areas["b"] + areas["c"]) / 288)
    converted.warmup_steps = 1
    converted.begin_step(1)
    assert converted.cost.spent() == (1, 0, 3)
    converted.begin_step(2)
    assert converted.cost.spent()[0] < 1

    model = nn.ModuleDict({"a_proj": nn.Linear(4, 8), "b_proj": nn.Linear(4, 8), "c_proj": nn.Linear(8, 4)})
    converted = convert(model, PathSpec.of("int4", "int8", pins={"b_proj": WHOLE}))
    for name, width in (("a_proj", 4), ("b_proj", 4), ("c_proj", 8)):
        model[name](torch.randn(5, width))
    assert converted.cost.spent() == (pytest.approx(1 / 3), 5 * 4 / 2, 0)
    converted.units[2].switch(True)
    assert converted.cost.spent() == (pytest.approx(2 / 3), 5 * 4 / 2 + 5 * 8 / 2, 0)
    assert [unit.extra_bytes for unit in units_of(converted)] == [2, 1, 4]


EXTRA = [  # a and b have 1 : 2 multiplications; fprop of a is on mxfp8, which takes 1 more, dgrad of b on bf16, 3 more
    ({}, 0, (1 * 32 + 3 * 64) / 288),
    ({}, 1, (1 * 32 + 3 * 32 * 2 + 3 * 64) / 288),
    ({}, 2, (1 * 32 + 3 * 32 * 2 + 3 * 64 * 3) / 288),
    ({"8": 1.5, "16": 3}, 0, (0.5 * 32 + 2 * 64) / 288),
    ({"4": 2}, 0, (0 * 32 + 2 * 64) / 576),
    ({"mxfp8": 1.2, "8": 9, "bf16": 5}, 0, (0.2 * 32 + 4 * 64) / 288),
    ({"nvfp4": 0.5}, 0, (1.5 * 32 + 3.5 * 64) / 144),
]


@pytest.mark.parametrize(("times", "recovering", "extra"), EXTRA, ids=str)
@pytest.mark.parametrize("unit", ["operator", "gemm"])
def test_extra_gemm_time_by_hand(times: dict[str, float], recovering: int, extra: float, unit: str) -> None:
    model = nn.ModuleDict({"a_proj": nn.Linear(32, 32), "b_proj": nn.Linear(64, 32)})
    pins = {"a_proj": {"fprop": "mxfp8"}, "b_proj": {"dgrad": "bf16"}}
    converted = convert(model, PathSpec(low="nvfp4", recovery="bf16", unit=unit, pins=pins, times=times))
    for operator in converted.operators[:recovering]:
        operator.switch(True)
    assert converted.cost.spent().extra_time == pytest.approx(extra)
    plain = convert(nn.ModuleDict({"a_proj": nn.Linear(32, 32)}), PathSpec(low="nvfp4", recovery=None, times=times))
    assert plain.cost.spent() == (0, 0, 0)


@pytest.mark.parametrize(
    ("recipe", "gemm", "time"),
    [
        ("nvfp4", "wgrad", 1),
        ("fp8_hybrid", "dgrad", 2),
        ("bf16", "fprop", 4),
        ("sim_e2m3", "fprop", 2),  # 6 bits
        ("llm_int8", "fprop", 2),
        ("llm_int8", "wgrad", 4),
        ("llm_int8_dgrad", "dgrad", 4),  # grad_output is not cast
    ],
)
def test_the_widest_operand_decides_the_time_of_a_gemm(recipe: str, gemm: str, time: float) -> None:
    assert gemm_time(RECIPES[recipe], gemm) == time
    mixed = RECIPES["mxfp4"].with_gemms({gemm: RECIPES[recipe]})
    assert gemm_time(mixed, gemm, {recipe: 7.5}) == (7.5 if RECIPES[recipe].words()[gemm] or recipe == "bf16" else 4)
    mine = Recipe.of("mine", {"fprop": {"input": "int2/row", "weight": "e2m1/row"}})
    assert [gemm_time(mine, one) for one in GEMMS] == [1, 4, 4]
    assert gemm_time(mixed.with_gemms({"fprop": mine}), "fprop", {"mine": 0.7}, {"mine": mine}) == 0.7


OPTIONS = ["bf16", "fp8_hybrid", "mxfp8", "mxfp4", "sim_e3m2", None]
"""Recipes that a random plan may keep a GEMM on; None: it is not pinned."""


def random_plan(seed: int, operators: dict[str, tuple[int, int]]) -> PinPlan:
    draw = random.Random(seed)
    pins = {name: {gemm: recipe for gemm in GEMMS if (recipe := draw.choice(OPTIONS))} for name in operators}
    pins = {name: own for name, own in pins.items() if own}
    low, recovery = draw.choice(["nvfp4", "sim_e2m1", "mxfp4_floor"]), draw.choice(["bf16", None])
    times = draw.choice([{}, {"8": 1.5, "mxfp8": 1.75, low: 0.5}])
    return PinPlan(operators=operators, low=low, recovery=recovery, times=times, pins=pins)


def extra_time(plan: PinPlan) -> float:
    return plan.share_of_all(plan.choice())


def put_by_hand(converted: ConvertedModel, plan: PinPlan) -> None:
    for operator in converted.operators:
        assert isinstance(operator.low, Recipe)
        pins = plan.pins.get(operator.operator_name, {})
        gemms = {gemm: getattr(RECIPES[recipe], gemm) for gemm, recipe in pins.items()}
        operator.low = replace(operator.low, **gemms)


@pytest.mark.filterwarnings("ignore:recipe .* is simulated")
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(i, marks=pytest.mark.slow) for i in range(5, 20))])
def test_a_loop_under_a_random_plan_is_that_of_recipes_by_hand(seed: int, tmp_path: Path) -> None:
    ours, theirs = (nn.Sequential(Block(32), Block(32)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    plan = random_plan(seed, {name: (32, 32) for name, one in ours.named_modules() if type(one) is nn.Linear})
    (tmp_path / "plan.json").write_text(plan.text())
    controller = gnmr.attach(ours, plan=tmp_path / "plan.json", signal="always_low", seed=seed, record=tmp_path / "r")
    by_hand = convert(theirs, PathSpec(low=plan.low, recovery=None), seed=seed)
    put_by_hand(by_hand, plan)
    for step in range(2):
        x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(step))
        found = []
        for model in (ours, theirs):
            loss = (model(x) - x).square().mean()
            loss.backward()
            found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
            torch.optim.SGD(model.parameters(), 0.1).step()
        assert same(*found)
        controller.step()
        by_hand.end_step()
        for model in (ours, theirs):
            model.zero_grad()
    controller.detach()
    assert read_json(tmp_path / "r" / "summary.json")["spent_extra_time"] == pytest.approx(extra_time(plan))


@pytest.mark.parametrize(("low", "recovery"), [("int4", "int8"), ("sim_int4", "fp8_hybrid")])
def test_a_fault_breaks_no_operator_that_is_pinned(low: str, recovery: str) -> None:
    found = {}
    for pins in ({}, {"layers.0.*": WHOLE}):
        for windows in ([], [(1, 1)]):
            model = Net(blocks=2)
            converted = convert(model, PathSpec.of(low, recovery, pins=pins))
            if windows:
                schedule = FaultSchedule(
                    converted, Fault("scale_up", magnitude=64.0), ["layers.0.attn.q_proj"], 1, windows=windows
                )
                schedule.begin_step(1)
            backward(model)
            found[bool(pins), bool(windows)] = model.layers[0].attn["q_proj"].weight.grad
    assert not same([found[False, False]], [found[False, True]])
    assert same([found[True, False]], [found[True, True]])


@pytest.mark.parametrize(
    ("pins", "key"),
    [
        (3, "pins=3"),
        ({"q_proj": []}, r"pins.q_proj=\[\]"),
        ({"q_proj": ["bprop"]}, r"pins.q_proj=\['bprop'\]"),
        ({"q_proj": 3}, "pins.q_proj=3"),
        ({"up_proj": ["fprop"]}, "pins 'up_proj'"),
        ({"q_proj": {}}, "pins.q_proj={}"),
        ({"q_proj": {"bprop": "bf16"}}, "pins.q_proj="),
        ({"q_proj": {"fprop": "int4"}}, "pins.q_proj.fprop=int4"),
        ({"q_proj": {"fprop": ["bf16"]}}, "pins.q_proj.fprop="),
        ({"q_proj": {"fprop": "mxfp8"}, "layers.1.*": ["fprop"]}, "pins.layers.1.*.fprop=bf16: .* on mxfp8"),
    ],
    ids=str,
)
def test_pins_that_are_refused(pins: Any, key: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=key):
        convert(model, PathSpec.of("sim_e2m1", "bf16", pins=pins))
    assert not any(isinstance(module, PathLinear) for module in model.modules())


@pytest.mark.parametrize("times", [{"12": 1}, {"8": 0}, {"8": float("inf")}, {"mxfp9": 1}], ids=str)
def test_times_that_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"times\.{next(iter(times))}="):
        PathSpec(times=times)


def test_a_pin_of_a_format_is_the_whole_operator() -> None:
    with pytest.raises(ValueError, match=r"pins.q_proj=\['wgrad'\]"):
        PathSpec(pins={"q_proj": ["wgrad"]})
    with pytest.raises(ValueError, match=r"pins.q_proj.dgrad=bf16"):
        PathSpec(pins={"q_proj": dict.fromkeys(GEMMS, "int8") | {"dgrad": "bf16"}})
    whole = PathSpec(pins={"q_proj": dict.fromkeys(GEMMS, "int8")})
    assert whole.pinned == PathSpec(pins={"q_proj": WHOLE}).pinned
