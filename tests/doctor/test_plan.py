"""plan.json: what it says, who reads it, and what is refused of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gnmr
from gnmr.conversion import PathLinear
from gnmr.errors import MAX_LINE, UserError
from gnmr.lab import config
from gnmr.lab.config.compose import compose
from gnmr.names import GEMMS
from gnmr.plan.knapsack import budget_of
from gnmr.plan.pin_plan import PinPlan, read_plan

Z = {"operators": {"layers.0.up_proj": [8, 16], "layers.1.up_proj": [8, 16], "layers.1.down_proj": [16, 8]}}
PLAN: dict[str, Any] = {
    "gnmr_plan": 2,
    **Z,
    "low": "sim_e2m1",
    "recovery": "bf16",
    "pins": {"layers.1.down_proj": {"fprop": "fp8_hybrid"}, "layers.0.up_proj": {"dgrad": "bf16", "wgrad": "bf16"}},
    "times": {"8": 1.5},
    "budget": 0.8,
    "extra": 0.5 / 9 + 6 / 9,
    "fused": ["gate_up"],
    "modules": {"layers.1.down_proj": "Conv1D"},
    "prices": {"layers.1.down_proj": {"fprop": {"sim_e2m1": 0.2, "fp8_hybrid": 0.01}}},
    "expected": {"before": 0.1, "after": 0.02},
    "triggers": {"price": 0.001},
    "provenance": {"command": "gnmr diagnose run"},
}


def written(folder: Path, tree: object) -> Path:
    file = folder / "plan.json"
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return file


def network(prefix: str = "") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(8, 16), "down_proj": nn.Linear(16, 8)}) for _ in "ab")
    del layers[0]["down_proj"]
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})} if prefix else {"layers": layers})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, PLAN))
    assert plan.operators["layers.1.down_proj"] == (16, 8) and plan.expected == (0.1, 0.02)
    assert (plan.targets, plan.recipes, plan.budget, plan.triggers) == (None, {}, 0.8, {"price": 0.001})
    assert read_plan(written(tmp_path, plan.text())) == plan
    names = {"unconverted": ["lm_head"], "saved_as": {"lm_head": ["output"]}, "unloaded": ["layers.2.eh_proj"]}
    named = read_plan(written(tmp_path, PLAN | names))
    assert read_plan(written(tmp_path, named.text())) == named != plan and named.saved_as == names["saved_as"]
    least = PinPlan(operators={"a_proj": (2, 3)}, low="int4", recovery=None)
    assert read_plan(written(tmp_path, least.text())) == least
    assert json.loads(least.text()) == {
        "gnmr_plan": 2,
        "operators": {"a_proj": [2, 3]},
        "low": "int4",
        **{key: [] for key in ("exclude", "fused")},
        **{key: {} for key in ("pins", "recipes", "provenance", "times", "prices", "work")},
        "rest": 0,
        **dict.fromkeys(("targets", "recovery", "budget", "extra", "extra_of_all", "expected", "triggers")),
    }
    assert read_plan(written(tmp_path, PLAN | {"extra": 1e6})).extra == 1e6, "times= may be of any size"
    written(tmp_path, least.text())
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    assert read_plan(str(tmp_path / "link.json")) == least, "a path that the user names may be a link"


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"gnmr_plan": 1}, "gnmr_plan=1: this version reads 2; have `gnmr diagnose` write it anew"),
    ({"bugdet": 0.1}, "bugdet: is not a key of a plan: did you mean budget?"),
    ({"budget": -0.1}, "budget=-0.1: must be extra GEMM time, a share above 0 (+10%, or 0.1)"),
    ({"extra": "much"}, "extra=much: must be a number from -1"),
    ({"work": {"layers.1.down_proj": -1}}, "work.layers.1.down_proj=-1: must be a whole number"),
    ({"work": dict.fromkeys(PLAN["operators"], 0)}, "work=...: is 0 of every operator, so there is no GEMM time"),
    ({"prices": {"layers.2.down_proj": {}}}, "prices.layers.2.down_proj: is not an operator of this plan"),
    ({"prices": {"layers.1.down_proj": {"fprop": {"bf16": 0}}}}, "must be {recipe: nats}, sim_e2m1 among them"),
    ({"prices": {"layers.1.down_proj": {"fprop": {"sim_e2m1": 1, "fp9": 0}}}}, "down_proj.fprop=fp9: must be one of"),
    ({"prices": {"layers.1.down_proj": {"fprop": {"sim_e2m1": 1e300}}}}, "fprop.sim_e2m1=1e+300: must be a number"),
    ({"pins": {"layers.1.down_proj": {"fprop": "bf17"}}}, "pins.layers.1.down_proj.fprop=bf17"),
    (
        {"pins": {"layers.2.down_proj": {"fprop": "bf16"}}},
        "pins.layers.2.down_proj: is not an operator of this plan: did you mean",
    ),
    ({"operators": {"a": [3]}}, "operators.a=[3]: must be [inputs, outputs]"),
    ({"operators": {"a*": [3, 3]}}, "operators='a*': an operator's name is printable"),
    ({"expected": {"before": 1}}, "expected.after=None: must be a number from -1e+09"),
    ({"triggers": {"prices": 1}}, "triggers.prices: is not a key of a plan: did you mean price?"),
    ({"provenance": {"a": 1}}, "provenance={'a': 1}: must be {name: text}"),
    ({"saved_as": {"mlp.gate": "gate"}}, "saved_as.mlp.gate=...: must be a list of names"),
]


@pytest.mark.parametrize(("change", "line"), CHANGES, ids=[line[:40] for _, line in CHANGES])
def test_a_mistake_is_one_line(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    file = written(tmp_path, PLAN | change)
    with pytest.raises(UserError) as told:
        read_plan(file)
    assert str(told.value).startswith(f"plan={file}: ") and line in str(told.value) and "\n" not in str(told.value)


def test_a_folder_that_holds_a_plan_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What out= of `gnmr diagnose` was given."""
    file = written(tmp_path, PLAN)
    monkeypatch.chdir(tmp_path.parent)
    for place in (tmp_path, str(tmp_path) + "/", f"{tmp_path.name}/", tmp_path.name):
        assert read_plan(place) == read_plan(file)
    assert compose([f"plan={tmp_path}"]).precision.low == "sim_e2m1"
    assert gnmr.attach(network(), plan=tmp_path, max_o=1).converted.low.name == "sim_e2m1"


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    for text, line in (
        ("", "is not a gnmr plan"),
        ("[1]", "a JSON object with gnmr_plan was expected"),
        ("{}", "a JSON object with gnmr_plan was expected"),
        ('{"gnmr_plan": 2}', "operators: is missing"),
        ('{"gnmr_plan": 2, "low": "a", "low": "b"}', "'low' appears twice"),
        ('{"gnmr_plan": 2, "budget": NaN}', "NaN is not a number"),
        ("[" * 100_000, "is not a gnmr plan"),
        ('{"gnmr_plan": 2, "provenance": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 deep"),
        ("\xff", "is not a gnmr plan"),
    ):
        with pytest.raises(UserError, match=line):
            read_plan(written(tmp_path, text))
    with pytest.raises(UserError, match="there is no such file"):
        read_plan(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty/plan\.json: there is no such file"):
        read_plan(tmp_path / "empty")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 25)
    with pytest.raises(UserError, match=r"16,777,216 are the most"):
        read_plan(tmp_path / "large")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(list(PLAN)),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(["a", *PLAN]), inside, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*PLAN, "more"]), value=JUNK)
def test_whatever_a_key_says_is_read_or_refused_in_one_line(key: str, value: object, tmp_path: Path) -> None:
    try:
        plan = read_plan(written(tmp_path, PLAN | {key: value}))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) <= MAX_LINE
    else:
        assert read_plan(written(tmp_path, plan.text())) == plan


def test_a_budget_in_a_word() -> None:
    assert [budget_of(word) for word in ("+10%", "10%", "0.1", 0.1, "300%", "2.5%")] == [0.1, 0.1, 0.1, 0.1, 3.0, 0.025]
    for word in ("0", "-10%", "+-1%", "%", "much", "nan", "inf%", 0, -0.1, math.nan, True, None):
        with pytest.raises(ValueError, match=f"^budget={re.escape(str(word))}: must be extra GEMM time"):
            budget_of(word)


@pytest.mark.parametrize("budget", ["10", "+10", "10.0", "1.5", 10, 2])
def test_a_budget_above_the_whole_time_needs_a_percent_sign(budget: str | int) -> None:
    with pytest.raises(ValueError, match=rf"^budget=.*: is a share of the GEMM time.*; write {float(budget):g}%"):
        budget_of(budget)
    assert budget_of("150%") == budget_of(1.5) == 1.5 and budget_of("1") == budget_of(1) == 1


@pytest.mark.parametrize("layout", ["", "model."])
def test_attach_takes_paths_and_pins_of_it(layout: str, tmp_path: Path) -> None:
    """Of a model in either layout."""
    model = network(layout)
    controller = gnmr.attach(model, plan=written(tmp_path, PLAN), max_o=1, alpha=1.5)
    own = {operator.operator_name.removeprefix(layout): operator.pinned for operator in controller.converted.operators}
    assert own == {
        "layers.0.up_proj": ("dgrad", "wgrad"),
        "layers.1.up_proj": (),
        "layers.1.down_proj": ("fprop",),
    }
    assert (controller.converted.low.name, controller.converted.cost.spent()[0]) == ("sim_e2m1", pytest.approx(1 / 3))
    assert "signal gnmr_delta, trigger 1, max_o=1, 3 of 9 GEMMs pinned by the plan of a model of one's own" in repr(
        controller
    )
    controller.detach()
    static = gnmr.attach(
        model, plan=replace(read_plan(tmp_path / "plan.json"), provenance={"subject": "runs/a"}), signal="always_low"
    )
    assert "static (always_low), 3 of 9 GEMMs pinned by the plan of runs/a; step 0" in repr(static)
    static.detach()
    again = gnmr.attach(model, plan=read_plan(tmp_path / "plan.json"), unit="block", max_o=1)
    assert len(again.converted.units) == 2, "what it does not say is given as ever"


def test_attach_refuses_another_model_and_paths_beside_it(tmp_path: Path) -> None:
    file = written(tmp_path, PLAN)
    with pytest.raises(ValueError, match=r"^low: the plan says which paths; leave one of them out$"):
        gnmr.attach(network(), plan=file, low="sim_e2m1")
    with pytest.raises(ValueError, match=r"^paths: the plan says which paths"):
        gnmr.attach(network(), gnmr.PathSpec(), plan=file)
    other = network()
    other["layers"][1]["up_proj"] = nn.Linear(8, 12)
    more = network()
    more["layers"][0]["down_proj"] = nn.Linear(16, 8)
    less = network()
    del less["layers"][1]["down_proj"]
    twice = nn.ModuleDict({"layers": network()["layers"], "other": network()})
    for model, line in (
        (other, r"layers.1.up_proj is 8 -> 16 there, 8 -> 12 here"),
        (more, r"3 operators, here 4; layers.0.down_proj only here"),
        (less, r"3 operators, here 2; no layers.1.down_proj here"),
        (twice, r"3 operators, here 6; other.layers.0.up_proj only here"),
    ):
        with pytest.raises(UserError, match=rf"^plan={file}: was made for another model \({line}\)"):
            gnmr.attach(model, plan=file)
        assert not any(isinstance(module, PathLinear) for module in model.modules())


def test_a_name_that_ends_as_another_is_refused() -> None:
    plan = PinPlan(
        operators={"a.up_proj": (4, 4), "b.a.up_proj": (4, 4)},
        low="sim_e2m1",
        recovery=None,
        pins={"a.up_proj": {"fprop": "bf16"}},
    )
    model = nn.ModuleDict({"a": nn.ModuleDict({"up_proj": nn.Linear(4, 4)})})
    model["b"] = nn.ModuleDict({"a": nn.ModuleDict({"up_proj": nn.Linear(4, 4)})})
    with pytest.raises(UserError, match=r"^plan: pins.a.up_proj: this model has several of this name \(a.up_proj, b.a"):
        gnmr.attach(model, plan=plan)


@pytest.fixture
def of_tiny(tiny: Callable[..., config.Config]) -> PinPlan:
    """A plan of conftest's tiny model."""
    sizes = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), (32, 32))
    sizes |= {"mlp.gate_proj": (32, 48), "mlp.up_proj": (32, 48), "mlp.down_proj": (48, 32)}
    pins = {
        "layers.0.mlp.down_proj": {"fprop": "fp8_hybrid"},
        "layers.0.self_attn.o_proj": dict.fromkeys(GEMMS, "bf16"),
    }
    operators = {f"layers.0.{name}": shape for name, shape in sizes.items()}
    return PinPlan(operators=operators, low="sim_e2m1", recovery="bf16", pins=pins, times={"8": 1.5})


@pytest.mark.slow
def test_train_takes_paths_and_pins_of_it(of_tiny: PinPlan, tmp_path: Path, gnmr: Any, tiny_words: list[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(of_tiny.text())
    found = compose([*tiny_words, f"plan={file}"])
    assert (found.precision.low, found.precision.recovery, found.precision.pins) == ("sim_e2m1", "bf16", of_tiny.pins)
    assert found.precision.name == "sim_e2m1_bf16_pins"
    whole = "layers.0.self_attn.o_proj: {fprop: bf16, dgrad: bf16, wgrad: bf16}"
    by_hand = f"precision.pins={{layers.0.mlp.down_proj: {{fprop: fp8_hybrid}}, {whole}}}"
    assert found.precision.times["8"] == 1.5
    by_words = ["precision.low=sim_e2m1", "precision.recovery=bf16", "precision.times.8=1.5", by_hand]
    same = compose([*tiny_words, *by_words])
    assert config.config_hash(same) == config.config_hash(found), "the file's own name is no part of a run"
    outcome = gnmr("train", *tiny_words, f"plan={file}")
    assert outcome.code == 0 and "pinned: 4 of 21 GEMMs, 8.4% of their arithmetic" in outcome.out
    (saved,) = (tmp_path / "runs").rglob("config.yaml")
    assert (config.read(saved).precision, config.read(saved).plan) == (found.precision, None), "it needs no plan.json"


@pytest.mark.slow
def test_train_refuses_another_model_and_paths_beside_it(
    of_tiny: PinPlan, tmp_path: Path, gnmr: Any, tiny_words: list[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(of_tiny.text())
    for word in ("precision.low=sim_e2m1", "precision.pins.down_proj=[fprop]", "precision=bf16"):
        line = f"{word}: plan={file} says which precision; leave one of them out"
        assert gnmr("train", *tiny_words, f"plan={file}", word).mistake == line
    words = [*tiny_words, f"plan={file}", "model.num_layers=2"]
    line = f"plan={file}: was made for another model (7 operators, here 14; layers.1.self_attn.q_proj only here)"
    assert gnmr("train", *words).mistake.startswith(line)
    assert gnmr("train", *tiny_words, "plan=nowhere.json").mistake == "plan=nowhere.json: there is no such file"
    assert not (tmp_path / "runs").exists()


def test_zero_is_the_price_of_what_costs_nothing_and_infinity_that_of_what_was_not_measured() -> None:
    shapes = dict.fromkeys(("a_proj", "b_proj"), (4, 4))
    prices = {name: {"fprop": {"sim_e2m1": 0.5}} for name in shapes}
    plan = PinPlan(operators=shapes, low="sim_e2m1", recovery="fp8_hybrid", prices=prices)
    known = {"sim_e2m1": 0.5, "bf16": 0.0}
    assert plan.nats() == {(name, "fprop"): known for name in shapes}
    kept = replace(plan, pins={"a_proj": {"fprop": "fp8_hybrid", "dgrad": "fp8_hybrid"}})
    assert kept.nats()["b_proj", "fprop"] == known | {"fp8_hybrid": 0.0}
    assert (kept.choice().before, kept.choice().after, kept.choice().extra) == (1.0, 0.5, pytest.approx(2 / 2))
    other = replace(plan, pins={"a_proj": {"fprop": "mxfp8"}})
    assert other.nats()["a_proj", "fprop"] == known | {"mxfp8": math.inf} and other.choice().after == math.inf
    assert replace(plan, pins={"a_proj": ["fprop"]}).pins == {"a_proj": {"fprop": "fp8_hybrid"}}


def test_its_trigger_is_the_threshold_of_a_signal_of_prices_that_has_none() -> None:
    plan = PinPlan(operators={"a_proj": (2, 3)}, low="int4", recovery=None, triggers={"price": 0.25})
    assert plan.threshold("price", {"every": 2}) == plan.threshold("pin_excess", {}) == {"threshold": 0.25}
    for signal, options in (
        ("recovery_gap", {}),
        (object, {}),
        ("price", {"threshold": 1.0}),
        ("pin_excess", {"evidence": "mse"}),
    ):
        assert plan.threshold(signal, options) == {}
    for triggers in ({}, {"price": 0}, {"price": None}):
        assert replace(plan, triggers=triggers).threshold("price", {}) == {}
