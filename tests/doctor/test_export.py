"""Each target keeps the plan's operators in 16 bits and no others, by its own rule of names, said again here."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gnmr.doctor.export import TARGETS, Export, export, first_last
from gnmr.doctor.plan import PinPlan
from gnmr.errors import UserError
from gnmr.names import GEMMS

SIZES = {f"self_attn.{x}_proj": (16, 16) for x in "qkvo"}
SIZES |= {"mlp.gate_proj": (16, 48), "mlp.up_proj": (16, 48), "mlp.down_proj": (48, 16)}
LLAMA = {f"layers.{i}.{name}": shape for i in range(12) for name, shape in SIZES.items()}
"""Twelve blocks: layers.1 is the beginning of layers.10."""
WHOLE = list(GEMMS)
TITAN = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3"} | {
    "down_proj": "w2"
}


def planned(pins: dict[str, list[str]], operators: dict[str, tuple[int, int]] = LLAMA, **more: Any) -> PinPlan:
    return PinPlan(operators=operators, **({"low": "sim_e2m1", "recovery": "bf16"} | more), pins=pins)


def in_hf(name: str) -> str:
    return f"model.{name}"


LAYOUTS: dict[str, dict[str, str]] = {
    "older": {"wq": "wq", "wk": "wk", "wv": "wv"},
    "0.3": {"wq": "qkv_linear.wq", "wk": "qkv_linear.wkv", "wv": "qkv_linear.wkv"},
    "0.3, fused": dict.fromkeys(("wq", "wk", "wv"), "qkv_linear.wqkv"),
}
"""What torchtitan's versions call the configs of queries, keys and values."""


def in_titan(name: str, layout: str) -> str:
    _, number, part, short = name.split(".")
    own = LAYOUTS[layout].get(TITAN[short], TITAN[short])
    return f"layers.{number}.{'attention' if part == 'self_attn' else 'feed_forward'}.{own}"


def in_megatron(name: str) -> str:
    _, number, part, *_, short = name.split(".")
    fused = {"q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj"}
    fused |= {"gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    inside = ".experts" if "experts" in name else ""
    return f"decoder.layers.{number}.{'self_attention' if part == 'self_attn' else 'mlp'}{inside}.{fused[short]}"


# ---- what each target keeps in 16 bits, by its own rule ----


def by_torchao(found: Export, names: list[str]) -> set[str]:
    """torchao asks module_filter_fn(module, fqn) of each linear, and converts where it is true."""
    space: dict[str, Any] = {}
    exec(found.text, space)
    ask: Callable[[Any, str], bool] = space["module_filter_fn"]
    assert not ask(nn.Linear(16, 16), "lm_head")
    converted = {name for name in names if ask(nn.Linear(16, 16), in_hf(name))}
    assert converted == {n for n in names if ask(None, f"module.{in_hf(n).replace('layers', '_orig_mod.layers')}")}
    return set(names) - converted


WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")


@pytest.mark.parametrize("wraps", [*permutations(WRAPPERS, 1), *permutations(WRAPPERS, 2), WRAPPERS, WRAPPERS[::-1]])
def test_torchaos_filter_looks_below_wrappers(wraps: tuple[str, ...]) -> None:
    """Of the whole model, and of each block; peft's linears are a module further down."""
    names = ["layers.0.self_attn.q_proj", "layers.10.mlp.up_proj", "layers.0.mlp.up_proj"]
    plan = PinPlan(operators=dict.fromkeys(names, (16, 16)), low="nvfp4", recovery="bf16", pins={names[2]: ["fprop"]})
    space: dict[str, Any] = {}
    exec(export(plan, "torchao").text, space)
    around, inner = "".join(wraps), "".join(wrap for wrap in wraps if wrap.startswith("_"))
    for end in ("", ".base_layer"):
        for name in map(in_hf, names):
            at = name.replace("layers.", f"layers.{inner}").replace("self_attn.", f"self_attn.{inner}")
            for called in (f"{around}{name}{end}", f"{at}{end}", f"{around}{at}{end}"):
                assert space["module_filter_fn"](None, called) == (name != in_hf(names[2])), called
    assert not space["module_filter_fn"](None, f"{around}lm_head")
    assert not space["module_filter_fn"](None, f"{around}vision.model.layers.0.self_attn.q_proj")


def listed(found: Export, key: str) -> list[str]:
    """As TOML and as Python."""
    space: dict[str, Any] = {}
    exec(found.text, space)
    assert tomllib.loads(found.text) == {key: space[key]}
    return space[key]


def by_torchtitan_float8(found: Export, names: list[str]) -> set[str]:
    """torchtitan's module_filter_fn: not converted where any entry is a part of the name."""
    entries = listed(found, "filter_fqns")
    assert all(any(entry in head for entry in entries) for head in ("output", "lm_head"))
    return in_every_layout(names, lambda fqn: any(entry in fqn for entry in entries))


def by_torchtitan_nvfp4(found: Export, names: list[str]) -> set[str]:
    """torchtitan's NVFP4LinearConverter: converted where the list is empty or any entry is a part of the name."""
    entries = listed(found, "fqns")
    assert entries and not any(entry in head for entry in entries for head in ("output", "lm_head"))
    return in_every_layout(names, lambda fqn: not any(entry in fqn for entry in entries))


def in_every_layout(names: list[str], kept: Callable[[str], bool]) -> set[str]:
    """The operators that are kept, which are the same in all versions."""
    found = [{name for name in names if kept(in_titan(name, layout))} for layout in LAYOUTS]
    assert found[0] == found[1] == found[2]
    return found[0]


def by_megatron(found: Export, names: list[str]) -> set[str]:
    """Megatron's RecipeConfig: the first matcher in order that is enabled and fits; an empty recipe is 16 bits."""
    tree = yaml.safe_load(found.text)

    def sixteen(path: str) -> bool:
        for matcher in tree["matchers"].values():
            assert matcher["type"] == "glob"
            if matcher["enabled"] and fnmatch.fnmatch(path, matcher["pattern"]):
                config = tree["configs"][matcher["config"]]
                return config == {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        return False

    assert not sixteen("output_layer")
    return {name for name in names if sixteen(in_megatron(name))}


def gemms_by_te_debug(found: Export, names: list[str]) -> dict[str, set[str]]:
    """Transformer Engine's debug features: of the sections whose pattern fits, the GEMMs that are not quantized. The
    pattern means the same by match, search and fullmatch."""
    off: dict[str, set[str]] = {name: set() for name in names}
    for section in (yaml.safe_load(found.text) or {}).values():
        assert section["enabled"] is True
        ((feature, how),) = section["transformer_engine"].items()
        pattern = section["layers"]["layer_name_regex_pattern"]
        for name in names:
            fits = {bool(rule(pattern, in_hf(name))) for rule in (re.match, re.search, re.fullmatch)}
            assert len(fits) == 1
            if fits == {True} and how["enabled"]:
                off[name] |= set(how["gemms"] if feature == "DisableQuantizationGEMM" else GEMMS)
    return off


def by_te_debug(found: Export, names: list[str]) -> set[str]:
    return {name for name, gemms in gemms_by_te_debug(found, names).items() if gemms}


def by_ignore(found: Export, names: list[str]) -> set[str]:
    """transformers' should_convert_module: a regular expression from the name's beginning to a dot or its end, or how
    the name ends."""
    entries = json.loads(found.text)

    def kept(name: str) -> bool:
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(re.match(rf"(?:{entry}){boundary}", name) or name.endswith(entry) for entry in entries)

    assert kept("lm_head")
    return {name for name in names if kept(in_hf(name))}


RULES: dict[str, Callable[[Export, list[str]], set[str]]] = {
    "torchao": by_torchao,
    "torchtitan_float8": by_torchtitan_float8,
    "torchtitan_nvfp4": by_torchtitan_nvfp4,
    "megatron": by_megatron,
    "te_debug": by_te_debug,
    "ignore": by_ignore,
}


def fused(names: set[str], target: str) -> set[str]:
    """With the operators that the target has in one linear with them."""
    called = {"megatron": in_megatron, "torchtitan_float8": in_fused_titan, "torchtitan_nvfp4": in_fused_titan}
    call = called.get(target, in_hf)
    own = {call(name) for name in names}
    return {name for name in LLAMA if call(name) in own}


def in_fused_titan(name: str) -> str:
    return in_titan(name, "0.3, fused")


PINS = [
    {},
    {"layers.1.mlp.down_proj": ["fprop"], "layers.10.mlp.down_proj": ["wgrad"]},
    {name: WHOLE for name in LLAMA if name.startswith("layers.1.")},
    {name: WHOLE for name in LLAMA if name.split(".")[1] in ("0", "10", "11")},
    {name: ["fprop"] for name in LLAMA if "self_attn" in name and not name.startswith("layers.2.")},
    {name: WHOLE for name in LLAMA if name != "layers.11.self_attn.o_proj"},
    {"layers.1.self_attn.v_proj": WHOLE, "layers.11.mlp.down_proj": WHOLE},
]


def check(target: str, pins: dict[str, list[str]]) -> None:
    plan, names = planned(pins), list(LLAMA)
    if target == "torchtitan_nvfp4" and fused(set(pins), target) == set(names):
        with pytest.raises(UserError, match="an empty fqns converts all"):
            export(plan, target)
        return
    found = export(plan, target)
    kept = RULES[target](found, names)
    assert kept == set(found.kept) == fused(set(pins), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pins", PINS, ids=len)
def test_a_target_keeps_what_the_plan_keeps(target: str, pins: dict[str, list[str]]) -> None:
    check(target, pins)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=15, deadline=None)
@given(
    pins=st.dictionaries(
        st.sampled_from(list(LLAMA)), st.sampled_from([["fprop"], ["dgrad", "wgrad"], WHOLE]), max_size=83
    )
)
def test_of_any_pins(target: str, pins: dict[str, list[str]]) -> None:
    check(target, pins)


def test_transformer_engine_takes_gemms_by_themselves() -> None:
    pins = {
        "layers.1.mlp.down_proj": ["fprop"],
        "layers.10.mlp.up_proj": ["dgrad", "wgrad"],
        "layers.3.mlp.up_proj": WHOLE,
    }
    found = export(planned(pins), "te_debug")
    off = gemms_by_te_debug(found, list(LLAMA))
    assert {name: sorted(gemms) for name, gemms in off.items() if gemms} == {n: sorted(own) for n, own in pins.items()}
    assert found.notes == (), "nothing is lost"


def test_first_and_last_blocks_have_flags_in_megatron() -> None:
    def blocks(*numbers: int) -> PinPlan:
        return planned({name: WHOLE for name in LLAMA if int(name.split(".")[1]) in numbers})

    for plan, flags in (
        (blocks(0, 1, 11), (2, 1)),
        (blocks(10, 11), (0, 2)),
        (blocks(0), (1, 0)),
        (blocks(*range(12)), (12, 0)),
        (blocks(0, 5), None),
        (blocks(), None),
        (planned(blocks(0).pins | {"layers.1.mlp.up_proj": WHOLE}), None),
    ):
        assert first_last(plan, tuple(plan.pins)) == flags
        text = export(plan, "megatron").text
        assert ("--first-last-layers-bf16" in text) == (flags is not None)
        if flags is not None:
            assert f"--num-layers-at-start-in-bf16 {flags[0]} --num-layers-at-end-in-bf16 {flags[1]}\n" in text


def test_other_models_keep_their_names_or_are_refused() -> None:
    plan = planned({"encoder.0.up_proj": WHOLE}, {"encoder.0.up_proj": (16, 16), "encoder.1.up_proj": (16, 16)})
    assert json.loads(export(plan, "ignore").text) == ["encoder.0.up_proj", "lm_head"]
    for target, whose in (
        ("torchtitan_float8", "torchtitan"),
        ("torchtitan_nvfp4", "torchtitan"),
        ("megatron", "Megatron"),
    ):
        with pytest.raises(UserError, match=f"^export: {whose}'s models have no linear such as encoder.0.up_proj$"):
            export(plan, target)
    of_hf = planned({"model.layers.0.mlp.up_proj": WHOLE}, {"model.layers.0.mlp.up_proj": (16, 16)})
    assert json.loads(export(of_hf, "ignore").text)[0] == "model.layers.0.mlp.up_proj"
    with pytest.raises(UserError, match=r"every operator is kept in 16 bits, and an empty fqns converts all"):
        export(of_hf, "torchtitan_nvfp4")
    with pytest.raises(UserError, match=r"^export=tf: must be one of torchao, torchtitan_float8"):
        export(of_hf, "tf")
    experts = {f"layers.0.mlp.experts.{i}.up_proj": (16, 16) for i in range(3)}
    moe = export(planned({"layers.0.mlp.experts.1.up_proj": WHOLE}, experts), "megatron")
    assert set(moe.kept) == set(experts) == by_megatron(moe, list(experts))
    assert "all experts in one linear each: 2 operators more are kept" in moe.notes[1]
    with pytest.raises(UserError, match=r"torchtitan's models have no linear such as layers.0.mlp.experts.0.up_proj"):
        export(planned({}, experts), "torchtitan_float8")


# ---- the packages themselves, where they are installed ----


def network() -> nn.Module:
    """A LLaMA's linears, called as Hugging Face does."""

    def block() -> nn.ModuleDict:
        parts: dict[str, nn.ModuleDict] = {"self_attn": nn.ModuleDict(), "mlp": nn.ModuleDict()}
        for name, (inputs, outputs) in SIZES.items():
            part, _, short = name.partition(".")
            parts[part][short] = nn.Linear(inputs, outputs)
        return nn.ModuleDict(parts)

    layers = nn.ModuleList(block() for _ in range(12))
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers}), "lm_head": nn.Linear(16, 32)})


@pytest.mark.slow
@pytest.mark.parametrize("pins", PINS[:4], ids=len)
def test_torchao_itself(pins: dict[str, list[str]]) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    space: dict[str, Any] = {}
    exec(export(planned(pins), "torchao").text, space)
    model = float8.convert_to_float8_training(network(), module_filter_fn=space["module_filter_fn"])
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == {"lm_head", *map(in_hf, pins)}


@pytest.mark.slow
@pytest.mark.parametrize("pins", PINS, ids=len)
def test_transformers_and_accelerate_themselves(pins: dict[str, list[str]]) -> None:
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils", reason="transformers is not installed")
    ao = pytest.importorskip("accelerate.utils.ao", reason="accelerate is not installed")
    entries = json.loads(export(planned(pins), "ignore").text)
    linears = {name: module for name, module in network().named_modules() if isinstance(module, nn.Linear)}
    wanted = {"lm_head", *map(in_hf, pins)}
    assert {name for name in linears if not utils.should_convert_module(name, entries)} == wanted
    assert {name for name, module in linears.items() if not ao.filter_linear_layers(module, name, entries)} == wanted


def test_megatron_itself() -> None:
    config = pytest.importorskip("megatron.core.quantization.quant_config", reason="Megatron-LM is not installed")
    tree = yaml.safe_load(export(planned(PINS[1]), "megatron").text)
    recipe = config.RecipeConfig.from_config_dict(tree)
    contexts = {name: config.MatchContext(in_megatron(name), int(name.split(".")[1])) for name in LLAMA}
    assert {name for name in LLAMA if recipe.match_to_config_key(contexts[name]) == "bf16"} == set(PINS[1])


def titan_config(fuse_qkv: bool) -> Any:
    """The config of a LLaMA of twelve blocks, as torchtitan's registry makes it."""
    attention = pytest.importorskip("torchtitan.models.common.attention", reason="torchtitan is not installed")
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["1B"](attn_backend="flex")
    config.layers = config.layers[:12]
    for layer in config.layers:
        qkv = layer.attention.qkv_linear
        if not fuse_qkv:
            layer.attention.qkv_linear = attention.QKVLinear.Config(
                head_dim=qkv.head_dim, wq=replace(qkv.wqkv), wkv=replace(qkv.wqkv)
            )
    return config


@pytest.mark.slow
@pytest.mark.parametrize("fuse_qkv", [True, False])
@pytest.mark.parametrize("pins", PINS, ids=len)
def test_torchtitan_itself(pins: dict[str, list[str]], fuse_qkv: bool) -> None:
    """Its converters of float8 and NVFP4; the latter's check for a GPU is left out."""
    config, layout = titan_config(fuse_qkv), "0.3, fused" if fuse_qkv else "0.3"
    from torchtitan.components.quantization import (
        Float8Linear,
        Float8LinearConverter,
        NVFP4Linear,
        NVFP4LinearConverter,
    )
    from torchtitan.models.common.linear import Linear

    kept = fused(set(pins), "torchtitan_float8")
    wanted = {"lm_head", *(in_titan(name, layout) for name in kept)}
    entries = listed(export(planned(pins), "torchtitan_float8"), "filter_fqns")
    Float8LinearConverter.Config(filter_fqns=entries, emulate=True).build().convert(config)
    found = {fqn for fqn, one, *_ in config.traverse(Linear.Config) if not isinstance(one, Float8Linear.Config)}
    assert found == wanted

    config = titan_config(fuse_qkv)
    converter = object.__new__(NVFP4LinearConverter)
    entries = listed(export(planned(pins), "torchtitan_nvfp4"), "fqns")
    converter.config = NVFP4LinearConverter.Config(fqns=entries)
    converter.convert(config)
    found = {fqn for fqn, one, *_ in config.traverse(Linear.Config) if not isinstance(one, NVFP4Linear.Config)}
    assert found == wanted
