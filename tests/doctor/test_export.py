"""Each target runs every GEMM on the recipe that its export says, which is the plan's where the target can say it: read
back from the files by the rule of the library, restated. test_export_libraries.py asks the libraries themselves."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from exported import (
    BF16,
    EXPERTS,
    GPT2,
    IN_TENSORS,
    LLAMA,
    MOE,
    PINS,
    SIZES,
    Read,
    by_megatron,
    casts_of,
    in_hf,
    in_megatron,
    in_te,
    in_titan,
    planned,
    quantizers_read,
    run,
    stubbed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gnmr
from gnmr.auditing.sides import compare
from gnmr.errors import UserError
from gnmr.formats.recipes import RECIPES
from gnmr.lab.cli import main
from gnmr.names import GEMMS
from gnmr.plan.checkpoint_names import linears_of
from gnmr.plan.export import TARGETS, Export, export
from gnmr.plan.export.job import mixes
from gnmr.plan.lists import entries_of
from gnmr.plan.pin_plan import PinPlan, read_plan

NAMES = list(LLAMA)
LOW = tuple(RECIPES["nvfp4"].words().values())
UNITS = {"nvfp4": 1, "mxfp8": 2, "bf16": 4}


def by_te(found: Export, call: Callable[[str], str] = in_hf) -> Read:
    with stubbed():
        space = run(found, "qfactory.py")
        return {name: quantizers_read(space["qfactory"], name=call(name)) for name in NAMES}


def by_te_debug(found: Export) -> Read:
    """Of the sections whose pattern fits, the GEMMs that are not quantized. The pattern means the same by match, search
    and fullmatch."""
    off: dict[str, set[str]] = {name: set() for name in NAMES}
    for section in (yaml.safe_load(found.files["te_debug.yaml"]) or {}).values():
        ((feature, how),) = section["transformer_engine"].items()
        pattern = section["layers"]["layer_name_regex_pattern"]
        for name in NAMES:
            fits = {bool(rule(pattern, in_hf(name))) for rule in (re.match, re.search, re.fullmatch)}
            assert len(fits) == 1 and section["enabled"] and how["enabled"]
            if fits == {True}:
                off[name] |= set(how["gemms"] if feature == "DisableQuantizationGEMM" else GEMMS)
    return {
        name: tuple({} if g in own else words for g, words in zip(GEMMS, LOW, strict=True)) for name, own in off.items()
    }


def by_torchtitan(found: Export) -> Read:
    """Converters one after another: any part of a name; of float8 all but what is left out."""
    classes = {f"{kind}LinearConverter": Converter(kind) for kind in ("Float8", "MXFP8", "NVFP4")}
    with stubbed(**{"torchtitan.components.quantization": classes}):
        converters = run(found, "torchtitan_converters.py")["CONVERTERS"]
    both: list[Read] = []
    for fused in (True, False):
        read: Read = {}
        for name in NAMES:
            fqn, own = in_titan(name, fused), [{}, {}, {}]
            for kind, options in converters:
                assert kind == "Float8" or options["fqns"], "an empty list means all"
                if any(one in fqn for one in options.get("fqns", ())):
                    assert not any(own), "converted twice"
                    own = list(RECIPES[kind.lower()].words().values())
                if kind == "Float8" and not any(one in fqn for one in options["filter_fqns"]):
                    own = list(RECIPES["fp8_hybrid"].words().values())
                    own[2] = own[2] if options["recipe_name"] == "rowwise" else {}
            read[name] = tuple(own)
        both.append(read)
        for kind, options in converters:
            for head in ("output", "lm_head"):
                assert any(one in head for one in options.get("fqns", options.get("filter_fqns"))) == (kind == "Float8")
    assert both[0] == both[1]
    return both[0]


class Converter:
    def __init__(self, kind: str) -> None:
        self.Config = lambda **options: (kind, options)


def left_out(found: Export, which: str, texts: list[str]) -> Read:
    """By the audit's own reading of that list."""
    assert all(entry.names for entry in entries_of(which, texts, [*map(in_hf, NAMES), "lm_head"]))
    kept = {name for entry in entries_of(which, texts, list(map(in_hf, NAMES))) for name in entry.names}
    return {name: tuple({} if in_hf(name) in kept else words for words in LOW) for name in NAMES}


def by_list(file: str, which: str) -> Callable[[Export], Read]:
    return lambda found: left_out(found, which, yaml.safe_load(found.files[file])[which])


def by_rl(found: Export) -> Read:
    tree = yaml.safe_load(found.files["rl.yaml"])
    assert not re.search(r"[&*]id\d", found.files["rl.yaml"]), "each library's part is copied alone"
    read = [left_out(found, key, texts) for own in tree.values() for key, texts in own.items()]
    assert all(one == read[0] for one in read) and len(read) == 5
    return read[0]


def by_modelopt(found: Export) -> Read:
    """The last entry that fits a quantizer."""
    config = run(found, "modelopt_quant_cfg.py")["CONFIG"]["quant_cfg"]
    names = {(4, 3, 32): "e4m3/mx", (2, 1, 16): "e2m1/nv", (4, 3, 0): "e4m3/tensor"}

    def cast(quantizer: str) -> str | None:
        last = [one for one in config if fnmatch(quantizer, one["quantizer_name"])][-1]
        own = last.get("cfg", {})
        return names[*own["num_bits"], own.get("block_sizes", {}).get(-1, 0)] if last["enable"] else None

    assert cast("lm_head.weight_quantizer") is None
    read: Read = {}
    for name in NAMES:
        found_casts = {o: cast(f"{in_hf(name)}.{o}_quantizer") for o in ("input", "weight")}
        read[name] = ({operand: one for operand, one in found_casts.items() if one},)
    return read


READ: dict[str, Callable[[Export], Read]] = {
    "te": by_te,
    "te_debug": by_te_debug,
    "megatron": lambda found: by_megatron(found, NAMES, "nvfp4"),
    "torchtitan": by_torchtitan,
    "transformers": by_list("modules_to_not_convert.yaml", "modules_to_not_convert"),
    "ignore": by_list("ignore.yaml", "ignore"),
    "rl": by_rl,
    "modelopt": by_modelopt,
}
EXACT = ("te", "modelopt")


def read_of(target: str, found: Export) -> Read:
    """What the target runs; it must be what the plan of the export says, and 16 bits in all other linears."""
    gemms = TARGETS[target].gemms
    read = {name: own[: len(gemms)] for name, own in READ[target](found).items()}
    assert read == dict.fromkeys(NAMES, ({},) * len(gemms)) | casts_of(found.plan, target)
    return read


def check(target: str, pins: dict[str, dict[str, str]]) -> None:
    plan = planned(pins)
    found, gemms = export(plan, target), TARGETS[target].gemms
    read_of(target, found)
    assert target not in EXACT or casts_of(found.plan, target) == casts_of(plan, target)
    order = ("nvfp4", "mxfp8", "bf16").index
    for name, own in mixes(plan).items():  # nothing is in lower precision than in the plan
        for gemm, planned_on, now in zip(GEMMS, own, mixes(found.plan)[name], strict=True):
            assert gemm not in gemms or order(now) >= order(planned_on)
    same = all(mixes(plan)[name] == mixes(found.plan)[name] for name in NAMES)
    lines = "\n".join(next(iter(found.files.values())).splitlines()[: len(found.notes) + 1])
    assert ("NOT as the plan says" in lines.replace("Megatron-LM: NOT", "")) <= (not same)


SOME = [pins if i % 2 else pytest.param(pins, marks=pytest.mark.slow) for i, pins in enumerate(PINS)]


@pytest.mark.parametrize("target", READ)
@pytest.mark.parametrize("pins", SOME)
def test_a_target_runs_what_its_export_says(target: str, pins: dict[str, dict[str, str]]) -> None:
    check(target, pins)


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("target", READ)
def test_linears_that_are_not_the_plans_stay_in_16_bits(target: str, priced: bool) -> None:
    """A whole block, a part of an attention, and an MLP's operator were excluded; what a library has in one linear with
    them stays in 16 bits too."""
    out = {"layers.3.self_attn.k_proj", "layers.5.mlp.down_proj"} | {n for n in NAMES if n.startswith("layers.0.")}
    operators = {name: shape for name, shape in LLAMA.items() if name not in out}
    pins = {"layers.4.mlp.down_proj": {"fprop": "mxfp8"}, "layers.7.self_attn.o_proj": BF16}
    prices = {name: {gemm: {"nvfp4": 0.2, "mxfp8": 0.1} for gemm in GEMMS} for name in operators if priced}
    plan = planned(pins, operators, prices=prices, budget=0.5, unconverted=[*sorted(out), "lm_head"])
    read = read_of(target, export(plan, target))
    if target == "megatron":
        assert by_megatron(export(plan, target, 3), NAMES, "nvfp4", 3) == read
    kept = all(read[name.replace("k_", "q_")][0] == {} for name in out)
    assert kept == bool(TARGETS[target].fused)


MIXED = st.dictionaries(
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(GEMMS), st.sampled_from(["mxfp8", "bf16"]), min_size=1),
    max_size=40,
)


@settings(max_examples=3)
@given(pins=MIXED)
@pytest.mark.parametrize(
    "low", ["nvfp4", "deepseek_v3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp8_hybrid", "mxfp8"))]
)
def test_transformer_engine_by_megatrons_names_and_in_stages(low: str, pins: dict[str, dict[str, str]]) -> None:
    """Where q, k and v, and gate and up, have one recipe; of a plan without prices that is the slowest of theirs."""
    plan = planned(pins, low=low)
    found = export(plan, "te")
    assert by_te(found) == casts_of(plan)
    order, own = (low, "mxfp8", "bf16"), mixes(plan)
    alike = {name: [own[one] for one in NAMES if in_megatron(one) == in_megatron(name)] for name in NAMES}
    slowest = {
        name: [max(each, key=order.index) for each in zip(*several, strict=True)] for name, several in alike.items()
    }
    fused = casts_of(replace(plan, pins={name: dict(zip(GEMMS, each, strict=True)) for name, each in slowest.items()}))
    assert by_te(found, in_megatron) == by_te(found, in_te) == fused
    for pp in (1, 3, 12):
        of_stages = export(plan, "megatron", pp)
        with_flags = by_megatron(of_stages, NAMES, low, pp)
        assert with_flags == fused, "pipeline stages count their own layers"
        assert ("stages of" in "".join(of_stages.notes)) == (pp > 1)


def test_what_is_no_linear_of_the_plan_is_kept_and_a_linear_has_a_name() -> None:
    with stubbed():
        ask = run(export(planned(PINS[1]), "te"), "qfactory.py")["qfactory"]
        assert quantizers_read(ask, name="lm_head") == ({}, {}, {})
        assert type(ask(None)).__name__ == "IdentityQuantizer"
        for name in ("", "Layer_7", "Layer_7.fc1"):
            with pytest.raises(ValueError, match="name_modules"):
                quantizers_read(ask, name=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformer_engine_has_a_recipe_or_refuses_it(recipe: str) -> None:
    """Delayed scales in all GEMMs alone; two operands in blocks, other formats and cast results not at all."""
    plan = planned({}, low=recipe, recovery=None)
    none = ("mxfp4", "_floor", "sim_", "llm_int8", "deepseek_v3_blocks", "row_scaled")
    if any(word in recipe for word in none):
        with pytest.raises(UserError, match=f"nothing like low={recipe}"):
            export(plan, "te")
    elif "delayed" in recipe:
        assert "amax_history_len=" in export(plan, "te").files["qfactory.py"]
        kept = export(planned({NAMES[0]: {"fprop": "bf16"}}, low=recipe), "te").plan.pins
        assert kept == {NAMES[0]: BF16}, "a part of an operator cannot have them"
    else:
        assert by_te(export(plan, "te")) == casts_of(plan)


def test_the_cost_of_what_cannot_be_said_is_in_the_first_lines() -> None:
    """By hand: one of twelve equal forward GEMMs on mxfp8 takes one unit more than 12, a linear in 16 bits nine."""
    operators = dict.fromkeys([*NAMES[:11], "layers.1.mlp.down_proj"], (128, 128))
    pins = {"layers.0.self_attn.o_proj": {"fprop": "mxfp8"}}
    for target, extra in (("rl", "75.0% (25.0%"), ("te_debug", "25.0% (8.3%"), ("torchao", "25.0% (8.3%")):
        head = next(iter(export(planned(pins, operators), target).files.values()))
        assert f"extra GEMM time {extra} of all GEMMs), of the plan 8.3%\n" in head, head
    prices = {name: {"fprop": {"nvfp4": 0.5, "mxfp8": 0.25}} for name in operators}
    found = export(planned(pins, operators, prices=prices, budget=0.1), "rl")
    assert (
        "extra GEMM time 0.0% (0.0% of all GEMMs), of the plan 8.3%; nats left by price 6, of the plan 5.75\n"
        in found.files["rl.yaml"]
    )
    head = export(planned(pins, operators), "te").files["qfactory.py"]
    assert head.startswith("# Transformer Engine 2.20.2") and "# as the plan says" in head
    of_backward = planned({NAMES[0]: {"dgrad": "bf16", "wgrad": "bf16"}}, operators)
    (text,) = export(of_backward, "transformers").files.values()
    assert "NOT in it: 2 pins" in text and "extra GEMM time 0.0%" in text


def test_linears_that_their_widths_keep_off_the_low_recipe_are_named_with_their_time() -> None:
    """By hand: of torchao's recipes 352 allows MXFP8, half as fast as NVFP4, and 40 none but 16 bits, a quarter."""
    square, wide, odd = "layers.0.self_attn.o_proj", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"
    whole = dict.fromkeys(GEMMS, "mxfp8")
    for name, width, recipe, times in ((wide, 352, "mxfp8", 2), (odd, 40, "bf16", 4)):
        plan = planned({square: whole}, {square: (128, 128), name: (128, width)})
        (line,) = (note for note in export(plan, "torchao").notes if note.startswith("NOT on"))
        assert line.startswith(f"NOT on nvfp4: 1 linear whose widths it does not take here ({name} 128 -> {width}); ")
        assert line.endswith(f" they run on {recipe}, at {times} times their GEMM time on nvfp4")
    assert not any(note.startswith("NOT on") for note in export(planned({}, {wide: (128, 352)}), "te").notes)
    with pytest.raises(UserError, match=r"nothing like low=nvfp4 for these operators \(128 -> 40\): "):
        export(planned({}, {odd: (128, 40)}), "torchao")


def test_extra_time_is_that_of_what_the_plan_may_move_and_that_of_all_beside_it() -> None:
    """By hand: two operators of 100 multiplications take 200 in fprop, and with 50 of other GEMMs in 16 bits
    3 * (200 + 4 * 50) in all; one GEMM on mxfp8 takes 100 more, an operator in 16 bits 900 more."""
    operators = dict.fromkeys(("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"), (128, 128))
    pins, work = {"layers.0.mlp.down_proj": {"fprop": "mxfp8"}}, dict.fromkeys(operators, 100)
    plan = planned(pins, operators, work=work, rest=50, extra=100 / 200, extra_of_all=100 / 1200)
    assert plan.choice().extra == plan.extra and plan.share_of_all(plan.choice()) == plan.extra_of_all
    found = export(plan, "te")
    assert (
        found.plan is plan
        and "plan's recipe; extra GEMM time 50.0% (8.3% of all GEMMs)\n" in found.files["qfactory.py"]
    )
    found = export(plan, "rl")
    assert (found.plan.extra, found.plan.extra_of_all) == (900 / 200, 900 / 1200)
    assert "extra GEMM time 450.0% (75.0% of all GEMMs), of the plan 50.0%\n" in found.files["rl.yaml"]


def test_times_of_a_users_hardware_do_not_say_which_recipe_has_more_bits() -> None:
    """There, FP8 with a scale per tensor takes less time than MXFP8; both have 8 bits."""
    names = [f"layers.0.self_attn.{x}_proj" for x in "qkv"]
    pins = {names[0]: {"fprop": "fp8_hybrid"}, names[1]: {"fprop": "mxfp8"}}
    plan = planned(pins, dict.fromkeys(names, (128, 128)), times={"fp8_hybrid": 1.5, "mxfp8": 2.0})
    fused = export(plan, "megatron").plan.pins
    assert {fused[name]["fprop"] for name in names} == {"bf16"}


def test_fused_operators_get_one_recipe_and_the_plan_says_what_that_costs() -> None:
    shapes = {f"layers.{i}.mlp.{x}_proj": (32, 32) for i in range(3) for x in ("gate", "up", "down")}
    names = list(shapes)
    nats = dict(zip(names, (0.5, 0.1, 0.3, 0.02, 0.25, 0.01, 0.04, 0.03, 0.2), strict=True))
    prices = {name: {"fprop": {"nvfp4": x, "mxfp8": x / 10, "bf16": 0.0}} for name, x in nats.items()}
    pins = {name: {"fprop": "mxfp8"} for name in (names[0], names[2], names[4], names[8])}
    plan = planned(pins, shapes, prices=prices, extra=4 / 9, expected=(1.45, 1.45 - 0.9 * 1.25))
    anew = export(plan, "megatron").plan
    assert set(anew.pins) == {names[0], names[1], names[2], names[8]} and "gate_up" in anew.fused
    assert anew.expected == (1.45, pytest.approx(1.45 - 0.9 * 1.1)) and anew.extra == pytest.approx(4 / 9)
    assert export(anew, "megatron").plan is anew
    for unpriced in (replace(plan, prices={}), replace(plan, pins=pins | {names[4]: {"dgrad": "mxfp8"}})):
        wider = export(unpriced, "megatron").plan
        assert set(wider.pins) == {*pins, names[1], names[3]} and wider.extra == pytest.approx(6 / 9)
        assert wider.pins[names[3]] == wider.pins[names[4]] == unpriced.pins[names[4]]


@pytest.mark.parametrize("target", READ)
def test_stages_and_lists_are_of_the_models_blocks_and_not_of_the_plans(target: str) -> None:
    """Of a model of twelve blocks the last two were excluded."""
    operators = {name: shape for name, shape in LLAMA.items() if not name.startswith(("layers.10.", "layers.11."))}
    excluded = [name for name in NAMES if name not in operators]
    plan = planned({"layers.9.mlp.down_proj": BF16}, operators, unconverted=[*excluded, "lm_head"])
    read = read_of(target, export(plan, target))
    if target == "megatron":
        for pp in (2, 3, 6):
            assert by_megatron(export(plan, target, pp), NAMES, "nvfp4", pp) == read
    with pytest.raises(UserError, match="does not list the model's other linears"):
        export(replace(plan, unconverted=None), target)


@pytest.mark.parametrize("priced", [False, True])
def test_all_experts_of_a_layer_are_alike_where_they_are_one_tensor(priced: bool) -> None:
    one, other = "model.layers.0.mlp.experts.1.down_proj", "model.layers.1.self_attn.v_proj"
    prices = {name: {"fprop": {"nvfp4": 0.1 + (name == one), "mxfp8": 0.05}} for name in MOE if priced}
    more = {"modules": IN_TENSORS, "prices": prices, "budget": 0.5}
    plan = planned({one: {"fprop": "mxfp8"}, other: BF16}, MOE, **more)
    alike = [name for name in MOE if "layers.0.mlp.experts" in name and "down" in name]
    for target in ("te", "te_debug", "megatron", "modelopt"):
        found = export(plan, target)
        mix = {json.dumps(found.plan.pins.get(name)) for name in alike}
        assert len(mix) == 1 and ("mxfp8" in mix.pop() or priced or target == "te_debug")
        assert "NOT as the plan says" in "".join(found.notes) and ("nats left" in "".join(found.notes)) == priced
    with stubbed():
        found = export(plan, "te")
        ask = run(found, "qfactory.py")["qfactory"]
        for name, own in casts_of(found.plan).items():
            assert quantizers_read(ask, name=re.sub(r"(?<=experts)\.\d+", "", name)) == own
        assert quantizers_read(ask, name="model.layers.0.mlp.gate") == ({}, {}, {})
        fused = casts_of(export(found.plan, "megatron").plan)
        for name, own in fused.items():
            called = in_megatron(name)
            alone = called.replace(".experts.", ".experts.local_experts.2.")
            assert quantizers_read(ask, name=called) == quantizers_read(ask, name=alone) == own
    found = export(plan, "megatron")
    assert by_megatron(found, list(MOE), "nvfp4") == casts_of(found.plan)
    found = export(plan, "te_debug")
    for section in yaml.safe_load(found.files["te_debug.yaml"]).values():
        pattern = section["layers"]["layer_name_regex_pattern"]
        fits = bool(re.match(pattern, "model.layers.0.mlp.experts.down_proj"))
        assert fits == (one in found.plan.pins and "GEMM" in str(section)), "DisableQuantizationGEMM"


@pytest.mark.parametrize("target", ["transformers", "ignore", "rl"])
@pytest.mark.parametrize("operators", [MOE, EXPERTS], ids=["tensor", "linears"])
def test_lists_leave_out_all_experts_of_a_layer_or_none(target: str, operators: dict[str, tuple[int, int]]) -> None:
    """By the audit's own reading of the lists; linears of their own go one by one where no engine fuses them."""
    one = next(name for name in operators if "experts.1." in name)
    modules = IN_TENSORS if operators is MOE else {}
    found = export(planned({one: BF16}, operators, modules=modules), target)
    single = target == "transformers" and operators is EXPERTS
    assert set(found.plan.pins) == ({one} if single else {name for name in operators if "layers.0.mlp" in name})
    tree = yaml.safe_load(next(iter(found.files.values())))
    for which, texts in (pair for own in ([tree] if target != "rl" else tree.values()) for pair in own.items()):
        names = [name if name.startswith("model.") else f"model.{name}" for name in operators]
        if target == "transformers" and operators is MOE:
            names = list(dict.fromkeys(re.sub(r"(?<=experts)\..*", "", name) for name in names))
        kept = {name for entry in entries_of(which, texts, names) for name in entry.names}
        meant = {name for name in names if "layers.0.mlp" in name and (not single or name.endswith(one))}
        assert kept == meant, which


def test_modules_that_a_library_does_not_convert_stay_in_16_bits() -> None:
    plan = planned({"transformer.h.1.mlp.c_fc": {"fprop": "bf16"}}, GPT2, modules=dict.fromkeys(GPT2, "Conv1D"))
    for target in ("te", "modelopt"):
        assert export(plan, target).plan is plan
    for target in ("torchao", "transformers", "ignore", "rl"):
        with pytest.raises(UserError, match=r"has nothing like low=nvfp4|converts none of these operators"):
            export(plan, target)
    for target in ("torchao", "torchtitan"):
        found = export(planned({}, MOE, modules=IN_TENSORS), target)
        assert "NOT converted by it: 12 operators of experts" in "".join(found.notes)
        assert set(found.plan.pins) == {name for name in MOE if "experts" in name}
        code = "".join(found.files.values()).partition("\n\n")[2]
        assert "experts" not in code.partition("OTHERS = ")[0]


@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize("target", ["rl", "torchao", "te_debug"])
def test_with_prices_the_best_of_what_the_library_has_in_the_plans_time(target: str, data: st.DataObject) -> None:
    """Against all choices. Where the plan can be said it stays."""
    operators = {f"layers.0.{name}": SIZES[name] for name in ("self_attn.o_proj", "mlp.down_proj")}
    operators["layers.1.mlp.down_proj"] = (256, 256)
    nats = st.floats(1e-3, 1.0)
    prices = {
        n: {"fprop": {"nvfp4": (low := data.draw(nats)), "mxfp8": low * data.draw(st.floats(0, 1))}} for n in operators
    }
    pins = {name: {"fprop": data.draw(st.sampled_from(["mxfp8", "bf16"]))} for name in list(operators)[1:]}
    plan = planned(pins, operators, prices=prices, budget=1.0)
    found = export(plan, target).plan

    def worth(recipes: Iterable[tuple[str, ...]]) -> tuple[float, float]:
        """(time, nats)"""
        pairs = list(zip(operators, recipes, strict=True))
        time = sum(math.prod(operators[n]) * sum(UNITS[one] for one in mix) for n, mix in pairs)
        return time, sum((prices[n]["fprop"] | {"bf16": 0.0})[mix[0]] for n, mix in pairs)

    whole = [("nvfp4",) * 3, ("bf16",) * 3]
    options = {"rl": whole, "torchao": [*whole, ("mxfp8",) * 3, ("mxfp8", "mxfp8", "bf16")]}
    able = options.get(target) or [("nvfp4",) * 3, ("bf16", "nvfp4", "nvfp4")]
    room = worth(mixes(plan).values())[0]
    best = min(worth(one)[1] for one in product(able, repeat=3) if worth(one)[0] <= room)
    time, left = worth(mixes(found).values())
    sayable = all(mix in able for mix in mixes(plan).values())
    assert found.pins == pins if sayable else (time <= room and left == pytest.approx(best, abs=1e-5))


@pytest.mark.parametrize(("low", "width"), [("fp8_hybrid", 200), ("mxfp8", 208), ("nvfp4", 192)])
@pytest.mark.parametrize("target", ["te", "te_debug", "megatron", "torchao", "torchtitan"])
def test_linears_of_widths_that_a_library_refuses_are_in_16_bits(low: str, width: int, target: str) -> None:
    """16 divides the widths of scaled GEMMs, 32 those of MXFP8, and 128 those of NVFP4 in torchao and torchtitan."""
    if low == "nvfp4" and target not in ("torchao", "torchtitan"):
        width = 200
    operators = {f"layers.0.mlp.{name}_proj": (128, 256) for name in ("gate", "up")}
    operators["layers.0.mlp.down_proj"] = (width, 128)
    plan = replace(planned({}, operators), low=low)
    assert export(plan, target).plan.pins == {"layers.0.mlp.down_proj": BF16}


def test_other_models_keep_their_names_or_are_refused() -> None:
    plan = planned({"encoder.0.up_proj": BF16}, {"encoder.0.up_proj": (128, 128), "encoder.1.up_proj": (128, 128)})
    assert yaml.safe_load(export(plan, "ignore").files["ignore.yaml"])["ignore"] == ["encoder.0.up_proj", "lm_head"]
    assert "no names of Megatron-LM" in export(plan, "te").files["qfactory.py"]
    short = planned({"encoder.0.up": BF16}, {"encoder.0.up": (128, 128), "encoder.0.up2": (128, 128)})
    assert "# NOT for nemo_rl" in export(short, "rl").files["rl.yaml"]
    for target in ("torchtitan", "megatron"):
        with pytest.raises(UserError, match=r"no linear such as encoder.0.up_proj$"):
            export(plan, target)
    moe = planned({"layers.0.mlp.experts.1.up_proj": BF16}, EXPERTS)
    found = export(moe, "megatron")
    assert {name for name in found.plan.pins if "down" in name} == set()
    assert by_megatron(found, list(EXPERTS), "nvfp4") == casts_of(found.plan)
    with pytest.raises(UserError, match="nothing like low=nvfp4"):
        export(moe, "torchtitan")
    with pytest.raises(UserError, match="low=int4 is a format"):
        export(planned({}, low="int4", recovery=None), "te")


# ---- names: in memory, in the checkpoint, and what is no operator ----


def of_transformers(family: str) -> nn.Module:
    """A tiny model of transformers, of which mixtures have some experts."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 96, "num_key_value_heads": 4}
    more = {
        "Mixtral": {"num_local_experts": 4},
        "Phimoe": {"num_local_experts": 4, "bos_token_id": 1, "eos_token_id": 2},
        "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
        "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | more.get(family, {}))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    return model


def plan_of(model: nn.Module, **options: Any) -> PinPlan:
    batches = [torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    run = lambda tokens: model(input_ids=tokens)
    return gnmr.diagnose(model, run, batches, confirm=0, **{"recipe": "mxfp4"} | options).plan()


@pytest.mark.parametrize("family", ["Mixtral", "Phimoe", "MiniMaxM2", "Qwen3Moe", "Llama"])
def test_names_in_the_checkpoint_are_those_that_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = of_transformers(family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = {n.removesuffix(".weight") for n in file.keys() if len(file.get_slice(n).get_shape()) == 2}  # noqa: SIM118
    held = nn.ModuleDict({"policy": model})
    for subject in (model, held):
        found = linears_of(subject, tmp_path)
        assert {one for saved in found.saved.values() for one in saved} == written - {"model.embed_tokens"}
        assert not found.unloaded
    assert all(name.startswith("policy.") for name in linears_of(held).saved)


@pytest.mark.parametrize("target", ["ignore", "transformers", "rl"])
@pytest.mark.parametrize("family", ["Mixtral", "Phimoe"])
def test_lists_name_every_linear_in_16_bits_as_its_readers_do(family: str, target: str) -> None:
    """Readers of a checkpoint know no `mlp` of a Mixtral, and those of a model in memory no `block_sparse_moe`."""
    plan = plan_of(of_transformers(family), budget=9.0, fused=["qkv", "moe"])
    low = {name for name in plan.operators if name not in plan.pins}
    assert not low and plan.unconverted, "the budget is for all"
    found = export(plan, target)
    assert "NOT" not in "".join(found.notes).replace("NOT as the plan says", "")
    tree = yaml.safe_load(next(iter(found.files.values())))
    lists = tree.values() if target == "rl" else [tree]
    experts = [o for o in plan.operators if "experts" in o and o in found.plan.pins and "fprop" in found.plan.pins[o]]
    parts = {"self_attn.q_proj": False, "mlp.router" if family == "Phimoe" else "mlp.gate": True}
    for which, texts in ((which, texts) for own in lists for which, texts in own.items() if "megatron" not in which):
        texts = [text.replace("\\", "") for text in texts]
        assert any("lm_head" in text for text in texts), which
        for part, is_router in parts.items():
            saved = "block_sparse_moe.gate" if is_router else part
            in_memory = target != "rl" or which == "ignore_patterns"
            wanted = {f"model.layers.1.{saved}", *([f"model.layers.1.{part}"] if in_memory else [])}
            if is_router or "model.layers.1.self_attn.q_proj" in found.plan.pins:
                assert all(any(name in text for text in texts) for name in wanted), (which, wanted)
        if experts:
            assert any("layers.1.block_sparse_moe.experts" in text for text in texts), which
        assert (family != "Phimoe") or not any("mlp.gate" in text for text in texts), "it has no such linear"


def test_linears_in_the_checkpoints_file_alone_stay_in_16_bits(tmp_path: Path) -> None:
    """Such as a layer that predicts further tokens."""
    model = of_transformers("Qwen3Moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {n.replace("layers.1.", "layers.2."): x.clone() for n, x in tensors.items() if "layers.1." in n}
    more["model.layers.2.eh_proj.weight"], more["model.layers.2.embed_tokens.weight"] = (
        torch.ones(8, 16),
        torch.ones(8, 8),
    )
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    plan = plan_of(type(model).from_pretrained(tmp_path).eval())
    assert "model.layers.2.eh_proj" in plan.unloaded and not any("embed" in name for name in plan.unloaded)
    file = tmp_path / "plan.json"
    file.write_text(plan.text())
    assert read_plan(file) == plan
    found = export(plan, "ignore")
    (ignored,) = yaml.safe_load(found.files["ignore.yaml"]).values()
    names = [*plan.unloaded, *plan.unconverted]
    kept = {name for entry in entries_of("ignore", ignored, names) for name in entry.names}
    assert kept == {*names} and "file alone" in "".join(found.notes)


def test_experts_without_an_adapter_and_tables_that_are_no_linears() -> None:
    """Of experts that gnmr cannot run in low precision an engine must not quantize any, and tables are not theirs."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    experts = nn.Module()
    experts.up = nn.Parameter(torch.randn(4, 16, 16))
    mlp = nn.ModuleDict({"experts": experts, "gate": nn.Linear(64, 4), "up_proj": nn.Linear(64, 64)})
    bias = nn.Embedding(32, 8)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp, "bias": bias})])})
    assert [*linears_of(model).saved] == [f"layers.0.mlp.{name}" for name in ("gate", "up_proj", "experts")]
    plan = planned({}, {"layers.0.mlp.up_proj": (64, 64)}, unconverted=["layers.0.mlp.gate", "layers.0.mlp.experts"])
    (ignored,) = yaml.safe_load(export(plan, "ignore").files["ignore.yaml"]).values()
    assert {r"re:model\.layers\.0\.mlp\.experts\b", "model.layers.0.mlp.gate"} < {*ignored}


def test_modules_that_peft_trains_keep_their_names() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for trained in (["down_proj"], ["mlp"]):
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=trained)
        model = peft.get_peft_model(of_transformers("Llama"), config)
        model.add_adapter("other", config)  # a second copy, which does not run
        plan = plan_of(model)
        assert [*plan.operators] == [f"model.{name}" for name in LLAMA if name.startswith(("layers.0.", "layers.1."))]
        assert plan.unconverted == ["lm_head"]


@pytest.mark.parametrize("linears", [False, True], ids=["one tensor", "linears"])
def test_an_expert_that_no_token_reached_goes_with_its_group(linears: bool) -> None:
    """In no file is another operator moved to 16 bits for it, and stages need no number of blocks."""
    model = of_transformers("Qwen3Moe")
    with torch.no_grad():
        gate = model.model.layers[0].mlp.gate.weight
        gate[2] = 0  # never among the two highest
        gate[:2] += 2
        gate[3:] -= 2
    idle = [f"model.layers.0.mlp.experts.2.{name}" for name in ("gate_up_proj", "down_proj")]
    batches = [torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    class Routed(nn.Module):
        """Two of the three experts that are linears are reached."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(96, 64), nn.Linear(64, 96)
            experts = nn.ModuleList(nn.ModuleDict({"up_proj": nn.Linear(64, 64)}) for _ in range(3))
            self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})])

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.embed(tokens)
            first, second, _ = (one["up_proj"] for one in self.layers[0]["mlp"]["experts"])
            return self.lm_head(h + torch.tanh(first(h)) + torch.tanh(second(h)))

    run = lambda tokens: model(input_ids=tokens)
    if linears:
        idle, run = ["layers.0.mlp.experts.2.up_proj"], (model := Routed().eval())
    found = gnmr.diagnose(model, run, batches, recipe="mxfp4", confirm=0, budget=0.6)
    assert found.idle == dict.fromkeys(idle, "no token reached them") and "no token reached them" in found.verdict()
    plan = found.plan()
    assert {*idle} < {*plan.operators} and plan.targets is None and not {*idle} & {*plan.pins}
    every = [name for name in plan.operators if "layers.0.mlp.experts" in name]
    for target in ("modelopt", "ignore", "rl", *(() if linears else ("transformers",))):
        made = export(plan, target)
        assert (
            len({json.dumps(made.plan.pins.get(name)) for name in every if name.endswith(every[0][-7:])}) == 1
            or linears
        )
        assert made.plan.extra is not None and made.plan.extra <= plan.extra + 1e-9, target
        assert "NOT measured, as no token reached them" in "".join(made.notes)
    grouped = gnmr.diagnose(model, run, batches, recipe="mxfp4", confirm=0, budget=9.0, fused=["moe"]).plan()
    assert len({json.dumps(grouped.pins.get(name)) for name in every}) == 1 and idle[0] in grouped.pins
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gnmr.attach(model, plan=plan, max_o=1).detach()


ATTENTIONS = [
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("w1", "w3"),
]


@pytest.mark.parametrize("parts", ATTENTIONS, ids="+".join)
def test_engines_build_one_linear_of_these(parts: tuple[str, str]) -> None:
    names = [f"model.layers.0.mixer.{part}" for part in (*parts, "o_proj")]
    plan = planned({names[1]: {"fprop": "bf16"}}, dict.fromkeys(names, (128, 128)))
    for target in ("ignore", "rl"):
        assert {*export(plan, target).plan.pins} == {*names[:2]}
    found = export(plan, "modelopt")
    assert found.plan is plan and "NOT for vLLM and SGLang" in "".join(found.notes)
    split = compare([*names, "lm_head"], trainer={"filter_fqns": ["lm_head"]}, rollout={"ignore": [names[1]]})
    assert "split" in [one.kind for one in split.findings]


# ---- the model that a file converts ----


def like_llama(blocks: int = 12, wide: int = 1, prefix: str = "model.", cls: type[nn.Module] = nn.Linear) -> nn.Module:
    """The linears of `LLAMA` below a prefix, and a head."""
    root = nn.Module()
    shapes = {f"layers.{i}.{name}": shape for i in range(blocks) for name, shape in SIZES.items()}
    for name, (inputs, outputs) in [*shapes.items(), ("lm_head", (128, 32))]:
        *path, leaf = f"{prefix}{name}".split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(leaf, cls(inputs * wide, outputs, device="meta"))
    return root


def held(name: str, model: nn.Module) -> nn.Module:
    return nn.ModuleDict({name: model})


AO = {
    "torchao": {},
    "torchao.float8": dict.fromkeys(("CastConfig", "Float8LinearConfig", "ScalingType", "convert_to_float8_training")),
    "torchao.quantization": {"quantize_": None},
}


def test_torchao_converts_all_of_the_plans_linears_or_says_why_not() -> None:
    kept = {"layers.1.mlp.up_proj": BF16}
    with stubbed(**AO):
        space = run(export(planned(kept, unconverted=["lm_head"]), "torchao"), "torchao_convert.py")
    labels_of = space["labels_of"]
    for model in (
        like_llama(),
        like_llama(prefix=""),
        held("model", like_llama()),
        held("policy", like_llama(prefix="")),
        held("a", held("b", held("model", like_llama()))),
        held("_orig_mod", held("module", like_llama())),
    ):
        labels = labels_of(model)
        assert set(labels.values()) == {"nvfp4"} and len(labels) == len(LLAMA) - 1
        own = {name.split("layers.", 1)[-1] for name, one in model.named_modules() if one in labels}
        assert own == {name.removeprefix("layers.") for name in LLAMA} - {"1.mlp.up_proj"}
    both = nn.ModuleDict({"policy": like_llama(), "reference": like_llama()})
    for model, why in (
        (like_llama(wide=2), "is 256 -> 128, and 128 -> 128 in the plan"),
        (held("model", like_llama(wide=2)), "is 256 -> 128, and 128 -> 128 in the plan"),
        (like_llama(blocks=24), "it has model.layers.12.self_attn.q_proj, which the plan does not know"),
        (like_llama(blocks=6), "of the plan's 83 linears are not in it"),
        (nn.Sequential(nn.Linear(8, 8)), "none of its linears has a name of the plan's"),
        (both, r"several parts of it fit the plan \(policy, reference\)"),
    ):
        with pytest.raises(ValueError, match=why):
            labels_of(model)
    within = {f"policy.model.{name}": shape for name, shape in LLAMA.items()}
    with stubbed(**AO):
        labels_of = run(export(planned({}, within), "torchao"), "torchao_convert.py")["labels_of"]
    for model in (held("policy", like_llama()), like_llama(), like_llama(prefix="")):
        assert len(labels_of(model)) == len(LLAMA), "a plan of a model within another"


class Quantized(nn.Module):
    """As Transformer Engine's Linear."""

    def __init__(self, inputs: int, outputs: int, device: str = "") -> None:
        super().__init__()
        self.in_features, self.out_features, self.name = inputs, outputs, None


Quantized.__module__ = "transformer_engine.pytorch.module.linear"


@pytest.mark.parametrize("prefix", ["", "model.", "model.model.", "policy.base.model."])
def test_transformer_engine_finds_the_plans_linears_below_a_prefix_or_refuses(prefix: str) -> None:
    plan = planned({"layers.1.mlp.down_proj": BF16})
    with stubbed():
        space = run(export(plan, "te"), "qfactory.py")
        model = like_llama(prefix=prefix, cls=Quantized)
        if prefix.count(".") > 1:
            with pytest.raises(ValueError, match="call name_modules"):
                quantizers_read(space["qfactory"], name=f"{prefix}{NAMES[0]}")
        space["name_modules"](model)
        called = {name: model.get_submodule(f"{prefix}{name}").name for name in NAMES}
        assert {name: quantizers_read(space["qfactory"], name=own) for name, own in called.items()} == casts_of(plan)
        assert quantizers_read(space["qfactory"], name=model.get_submodule(f"{prefix}lm_head").name) == ({}, {}, {})
        for other in (like_llama(wide=2, prefix=prefix, cls=Quantized), held("x", Quantized(8, 8))):
            with pytest.raises(ValueError, match=r"it is another model|none of its linears"):
                space["name_modules"](other)


# ---- the command ----


def test_the_command_writes_all_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(planned(PINS[1]).text())
    out = tmp_path / "out"
    assert main(["export", str(tmp_path), f"out={out}"]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {name for target in TARGETS for name in export(planned(PINS[1]), target).files}
    written, exact, *departures = capsys.readouterr().out.splitlines()
    assert written.startswith(f"written to {out}: qfactory.py, ") and exact.startswith("as the plan says: qfactory.py")
    assert departures and all(re.match(r"\w+ \(\w+\.\w+.*\): NOT ", line) for line in departures), departures
    assert all("what it can express: " in line for line in departures if "NOT as the plan says" in line)
    assert main(["export", str(tmp_path), f"out={tmp_path / 'pp'}", "to=megatron", "pp=3"]) == 0
    assert {path.name for path in (tmp_path / "pp").iterdir()} == {"te_precision.yaml", "gnmr_megatron.py"}
    (tmp_path / "blocked" / "rl.yaml").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "plan.json").write_text(json.dumps({"gnmr_plan": 1}))
    bad = [
        ([str(tmp_path), f"out={tmp_path / 'a' / 'b'}"], "out="),
        ([str(tmp_path), f"out={tmp_path / 'new'}", "to=tf"], "to=tf"),
        ([str(tmp_path), f"out={tmp_path / 'new'}", "to=te,rl", "pp=2"], "pp=2: is for to=megatron alone"),
        ([str(tmp_path), f"out={tmp_path / 'new'}", "to=megatron", "pp=5"], "pp=5"),
        ([str(tmp_path), f"out={tmp_path / 'blocked'}"], "rl.yaml"),
        ([str(tmp_path / "old"), f"out={tmp_path / 'new'}"], "gnmr_plan=1"),
    ]
    capsys.readouterr()
    for words, key in bad:
        assert main(["export", *words]) == 2
        error = capsys.readouterr().err
        assert key in error and error.count("\n") == 1, error
    assert not (tmp_path / "new").exists() and len(list((tmp_path / "blocked").iterdir())) == 1
