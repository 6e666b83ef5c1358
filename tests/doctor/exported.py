"""Plans, and what a library does with what was written of them: the recipes of every GEMM, read back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from types import ModuleType
from typing import Any

import pytest
import yaml

from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS
from gnmr.plan.export import TARGETS, Export
from gnmr.plan.export.job import mixes
from gnmr.plan.pin_plan import PinPlan

SIZES = {f"self_attn.{x}_proj": (128, 128) for x in "qkvo"}
SIZES |= {"mlp.gate_proj": (128, 256), "mlp.up_proj": (128, 256), "mlp.down_proj": (256, 128)}
LLAMA = {f"layers.{i}.{name}": shape for i in range(12) for name, shape in SIZES.items()}
"""Twelve blocks: layers.1 is the beginning of layers.10."""
EXPERTS = {f"layers.0.mlp.experts.{i}.{name}_proj": (128, 128) for i in range(3) for name in ("gate", "up", "down")}
MOE = {f"model.layers.{i}.self_attn.{x}_proj": (128, 128) for i in range(2) for x in "qkvo"}
MOE |= {
    f"model.layers.{i}.mlp.experts.{n}.{x}": shape
    for i in range(2)
    for n in range(3)
    for x, shape in (("gate_up_proj", (128, 256)), ("down_proj", (128, 128)))
}
"""A mixture of Hugging Face's: experts in one tensor."""
IN_TENSORS = {f"model.layers.{i}.mlp.experts": "MixtralExperts" for i in range(2)}
GPT2 = {f"transformer.h.{i}.{x}": (128, 128) for i in range(2) for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")}
TITAN = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3"} | {
    "down_proj": "w2"
}
Read = dict[str, tuple[Mapping[str, str], ...]]
"""The casts of fprop, dgrad and wgrad, by our name of the operator."""

BF16 = dict.fromkeys(GEMMS, "bf16")
PINS: list[dict[str, dict[str, str]]] = [
    {},
    {"layers.1.mlp.down_proj": {"fprop": "mxfp8"}, "layers.10.mlp.down_proj": {"wgrad": "bf16"}},
    {name: BF16 for name in LLAMA if name.startswith("layers.1.")},
    {name: {"fprop": "mxfp8", "dgrad": "bf16"} for name in LLAMA if name.split(".")[1] in ("0", "10", "11")},
    {name: {"fprop": "bf16"} for name in LLAMA if "self_attn" in name and not name.startswith("layers.2.")},
    {name: BF16 for name in LLAMA if name != "layers.11.self_attn.o_proj"},
    {
        "layers.1.self_attn.v_proj": BF16,
        "layers.11.mlp.down_proj": {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8"},
    },
]


def planned(
    pins: dict[str, dict[str, str]], operators: dict[str, tuple[int, int]] = LLAMA, low: str = "nvfp4", **more: Any
) -> PinPlan:
    """A plan of a model that has a head besides. On a low recipe other than nvfp4 all pins are to bf16, because a
    rescue takes more time."""
    if low != "nvfp4":
        pins = {name: dict.fromkeys(own, "bf16") for name, own in pins.items()}
    return PinPlan(operators=operators, **({"recovery": "bf16", "unconverted": ["lm_head"]} | more), low=low, pins=pins)


def casts_of(plan: PinPlan, target: str = "te") -> Read:
    """What a plan says, of the GEMMs that a target configures; ModelOpt says that its blocks of weights are 1 x 16."""
    words = {name: recipe.words() for name, recipe in RECIPES.items()}
    if target == "modelopt":
        words["nvfp4"] = words["nvfp4"] | {"fprop": dict.fromkeys(("input", "weight"), "e2m1/nv")}
    gemms = TARGETS[target].gemms
    return {
        name: tuple(words[recipe][gemm] for gemm, recipe in zip(GEMMS, mix, strict=True) if gemm in gemms)
        for name, mix in mixes(plan).items()
    }


def in_hf(name: str) -> str:
    return f"model.{name}"


def in_titan(name: str, fused: bool = True) -> str:
    """As torchtitan 0.3 calls it; q, k and v are two configs or one."""
    _, number, part, short = name.split(".")
    own = TITAN[short]
    if own in ("wq", "wk", "wv"):
        own = "qkv_linear." + ("wqkv" if fused else "wq" if own == "wq" else "wkv")
    return f"layers.{number}.{'attention' if part == 'self_attn' else 'feed_forward'}.{own}"


def in_megatron(name: str, offset: int = 0) -> str:
    _, number, part, *_, short = name.removeprefix("model.").split(".")
    fused = {
        "gate_up_proj": "linear_fc1",
        "q_proj": "linear_qkv",
        "k_proj": "linear_qkv",
        "v_proj": "linear_qkv",
        "o_proj": "linear_proj",
    }
    fused |= {"gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    inside = ".experts" if "experts" in name else ""
    attention = "self_attention" if part == "self_attn" else "mlp"
    return f"decoder.layers.{int(number) - offset}.{attention}{inside}.{fused[short]}"


def in_te(name: str) -> str:
    """As TransformerLayer calls its modules."""
    _, number, *_, short = name.split(".")
    named = {"o_proj": "self_attention.proj", "down_proj": "layernorm_mlp.fc2"}
    named |= dict.fromkeys(("gate_proj", "up_proj"), "layernorm_mlp.fc1")
    return f"layers.{number}.{named.get(short, 'self_attention.layernorm_linear_qkv')}"


def run(found: Export, file: str) -> dict[str, Any]:
    """The names of a Python file."""
    space: dict[str, Any] = {"__name__": file}
    exec(compile(found.files[file], file, "exec"), space)
    return space


# ---- Transformer Engine ----


class Role:
    """Transformer Engine's QuantizerRole."""

    def __init__(self, module_type: str = "", tensor_type: str = "", name: str = "") -> None:
        self.module_type, self.tensor_type, self.name = module_type, tensor_type, name


def quantizers_read(ask: Any, role: Any = Role, name: str = "") -> tuple[Mapping[str, str], ...]:
    """The casts of the three GEMMs of a linear, by the quantizers that a factory gives its operands: fprop reads the
    rowwise input and weight, dgrad the columnwise weight and the rowwise gradient, wgrad the columnwise input and
    gradient (Transformer Engine's layouts TN, NN and NT)."""
    copies = {
        operand: _copies(ask(role(module_type="linear", tensor_type=operand, name=name)))
        for operand in ("input", "weight", "grad_output")
    }
    found = (
        {"input": copies["input"][0], "weight": copies["weight"][0]},
        {"weight": copies["weight"][1], "grad_output": copies["grad_output"][0]},
        {"input": copies["input"][1], "grad_output": copies["grad_output"][1]},
    )
    return tuple({operand: cast for operand, cast in own.items() if cast != "bf16"} for own in found)


def _copies(quantizer: Any) -> tuple[str, str]:
    """The casts of the rowwise and the columnwise copy."""
    if type(quantizer).__name__ == "HybridQuantizer":
        assert getattr(quantizer, "columnwise_source", "original") == "original"
        return _cast(quantizer.rowwise_quantizer, False), _cast(quantizer.columnwise_quantizer, True)
    return _cast(quantizer, False), _cast(quantizer, True)


def _cast(quantizer: Any, columnwise: bool) -> str:
    """The cast of one copy; rotation is of columnwise ones alone."""
    kind, number = type(quantizer).__name__, getattr(quantizer, "dtype", None)
    if kind == "IdentityQuantizer":
        return "bf16"
    if kind == "NVFP4Quantizer":
        scale = "nv2d" if quantizer.with_2d_quantization else "nv"
        scale += "_4over6" if quantizer.nvfp4_use_4over6 else ""
        assert not quantizer.nvfp4_use_4over6 or quantizer.nvfp4_e4m3_max == 256
        assert quantizer.with_rht == quantizer.with_post_rht_amax
        rotated = "/hadamard" if quantizer.with_rht and columnwise else ""
        return f"e2m1/{scale}{rotated}{'/stochastic' if quantizer.stochastic_rounding else ''}"
    word = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"}[getattr(number, "name", str(number))]
    if kind == "Float8BlockQuantizer":
        assert not quantizer.force_pow_2_scales
        return f"{word}/{ {1: 'tile', 2: 'block'}[quantizer.block_scaling_dim] }"
    return f"{word}/{ {'MXFP8Quantizer': 'mx', 'Float8CurrentScalingQuantizer': 'tensor'}[kind] }"


@contextmanager
def stubbed(pp_rank: int = 0, **modules: Mapping[str, Any]) -> Iterator[None]:
    """Stand-ins for modules that the files import: recorders of Transformer Engine's quantizers."""

    class Recorder:
        with_rht = with_post_rht_amax = with_2d_quantization = stochastic_rounding = force_pow_2_scales = False
        nvfp4_use_4over6 = False

        def __init__(self, dtype: Any = None, _device: Any = None, **options: Any) -> None:
            self.dtype = dtype
            self.__dict__.update(options)

    class Names:
        def __getattr__(self, name: str) -> str:
            return name

    te, kinds = "transformer_engine.pytorch", {}
    for module, kind in (
        ("float8_blockwise", "Float8Block"),
        ("float8", "Float8CurrentScaling"),
        ("hybrid", "Hybrid"),
        ("identity", "Identity"),
        ("mxfp8", "MXFP8"),
        ("nvfp4", "NVFP4"),
    ):
        kinds[f"{te}.tensor.{module}_tensor"] = {f"{kind}Quantizer": type(f"{kind}Quantizer", (Recorder,), {})}
    kinds |= {
        f"{te}.constants": {"DType": Names()},
        f"{te}.quantization": {"DelayedScalingRequest": Recorder},
        "transformer_engine.common.recipe": {"Format": Names()},
        "megatron.core": {"parallel_state": ParallelState(pp_rank)},
        **modules,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, own in kinds.items():
            patch.setitem(sys.modules, name, made := ModuleType(name))
            made.__dict__.update(own)
        yield


class ParallelState:
    """Megatron's, of one process of a pipeline."""

    def __init__(self, rank: int) -> None:
        self.get_pipeline_model_parallel_rank = lambda: rank


def by_megatron(found: Export, names: list[str], low: str, pp: int = 1) -> Read:
    """RecipeConfig, restated: the first matcher that is enabled and fits; its config names a recipe or a factory."""
    tree, read = yaml.safe_load(found.files["te_precision.yaml"]), {}
    matchers = [one for one in tree["matchers"].values() if one["enabled"]]
    assert not any(fnmatch("output_layer", one["pattern"]) for one in matchers)
    number = {name: int(name.removeprefix("model.").split(".")[1]) for name in names}
    layers = (1 + max(number.values())) // pp
    for rank in range(pp):
        with stubbed(rank):
            factories = run(found, "gnmr_megatron.py")
            for name in (name for name in names if number[name] // layers == rank):
                path = in_megatron(name, rank * layers)
                alone = path.replace(".experts.", ".experts.local_experts.1.")
                (fits,) = {
                    next((one["config"] for one in matchers if fnmatch(called, one["pattern"])), None)
                    for called in (path, alone)
                }
                recipe = None if fits is None else tree["configs"][fits]["training_recipe"]
                read[name] = recipe_read(recipe, low, factories)
    return read


def recipe_read(
    recipe: Mapping[str, Any] | None, low: str, factories: Mapping[str, Any]
) -> tuple[Mapping[str, str], ...]:
    """The casts of Megatron's training_recipe; None: that of the model's flags."""
    if recipe is None:
        return tuple(RECIPES[low].words().values())
    if dotted := recipe.get("custom_recipe_factory"):
        assert "custom" in recipe.values()
        return quantizers_read(factories[dotted.removeprefix("gnmr_megatron.")])
    own = next(iter(recipe.values()), "bf16")
    return tuple(RECIPES[own].words().values())
