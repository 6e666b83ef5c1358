"""The libraries themselves read what was written for them: their matchers, converters and quantizers give every linear
the recipes that its export says. Those that cannot stand in our environment are in .libraries (make test-libraries);
of them no CUDA kernel runs: compiled modules and Triton are stand-ins."""

from __future__ import annotations

import enum
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from close import apart
from exported import (
    BF16,
    GPT2,
    IN_TENSORS,
    LLAMA,
    MOE,
    PINS,
    SIZES,
    Read,
    casts_of,
    in_hf,
    in_megatron,
    in_titan,
    planned,
    quantizers_read,
    recipe_read,
    run,
    stubbed,
)
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.conversion import PathSpec, convert
from gnmr.conversion.unit_names import unit_of
from gnmr.formats.recipes import RECIPES
from gnmr.plan.export import export

pytestmark = pytest.mark.slow
NAMES = list(LLAMA)
of_pins = pytest.mark.parametrize("pins", PINS, ids=len)
Pins = dict[str, dict[str, str]]


def network(blocks: int = 12, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A LLaMA's linears, called as Hugging Face does."""
    torch.manual_seed(0)

    def block() -> nn.ModuleDict:
        parts: dict[str, nn.ModuleDict] = {"self_attn": nn.ModuleDict(), "mlp": nn.ModuleDict()}
        for name, (inputs, outputs) in SIZES.items():
            part, _, short = name.partition(".")
            parts[part][short] = nn.Linear(inputs, outputs, bias=False)
        return nn.ModuleDict(parts)

    layers = nn.ModuleList(block() for _ in range(blocks))
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers}), "lm_head": nn.Linear(128, 32)}).to(dtype)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def words(**gemms: object) -> tuple[dict[str, str], ...]:
    """The casts of recipes by GEMM; False: none."""
    return tuple(RECIPES[recipe].words()[gemm] if recipe else {} for gemm, recipe in gemms.items())


# ---- torchao ----


@pytest.mark.parametrize("low", ["nvfp4", "mxfp8", "fp8_hybrid"])
@of_pins
def test_torchao(pins: Pins, low: str) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    plan = planned(pins, low=low)
    found = export(plan, "torchao")
    read: Read = {}
    for name, module in linears(run(found, "torchao_convert.py")["convert"](network())).items():
        own, kind, wrapped = {}, type(module).__name__, type(module.weight).__name__
        if kind == "NVFP4Linear":
            own = dict.fromkeys(("fprop", "dgrad", "wgrad"), "nvfp4")
        elif wrapped == "MXFP8TrainingWeightWrapperTensor":
            config = module.weight.config
            assert config.scale_calculation_mode.name == "RCEIL"
            own = {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": not config.wgrad_with_hp and "mxfp8"}
        elif kind == "Float8Linear":
            cast = {
                "fprop": (module.config.cast_config_input, module.config.cast_config_weight),
                "dgrad": (module.config.cast_config_grad_output, module.config.cast_config_weight_for_grad_input),
                "wgrad": (
                    module.config.cast_config_input_for_grad_weight,
                    module.config.cast_config_grad_output_for_grad_weight,
                ),
            }
            on = {gemm: {one.scaling_type.name for one in both} for gemm, both in cast.items()}
            assert all(len(one) == 1 for one in on.values())
            own = {gemm: one == {"DYNAMIC"} and "fp8_hybrid" for gemm, one in on.items()}
        else:
            assert wrapped == "Parameter" and kind == "Linear"
        read[name] = words(**own) if own else ({}, {}, {})
    assert read.pop("lm_head") == ({}, {}, {})
    assert read == {in_hf(name): own for name, own in casts_of(found.plan).items()}
    assert low != "fp8_hybrid" or found.plan.pins == plan.pins, "float8 GEMM by GEMM is exact"


WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")


def test_names_are_looked_up_below_wrappers() -> None:
    """Of the whole model, and of each block; peft's linears are a module further down."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    names = [in_hf(name) for name in ("layers.0.self_attn.q_proj", "layers.10.mlp.up_proj", "layers.1.mlp.up_proj")]
    kept = {"layers.1.mlp.up_proj": BF16}
    with stubbed():
        label_of = run(export(planned(kept), "te"), "qfactory.py")["label_of"]
    unwrapped = run(export(planned(kept), "torchao"), "torchao_convert.py")["unwrapped"]
    for wraps in (*((one,) for one in WRAPPERS), WRAPPERS, WRAPPERS[::-1]):
        around, inner = "".join(wraps), "".join(wrap for wrap in wraps if wrap.startswith("_"))
        for name in names:
            at = name.replace("layers.", f"layers.{inner}").replace("mlp.", f"mlp.{inner}")
            below = (f"{around}{at}{end}" for end in (".base_layer", ".modules_to_save.default"))
            for called in (around + name, at, around + at, *below):
                assert label_of(called) == ("bf16" if name == names[2] else "nvfp4"), called
                assert unwrapped(called) == name
        assert label_of(f"{around}lm_head") == "bf16"
        assert label_of(f"{around}vision.model.layers.0.self_attn.q_proj") == "bf16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("low", "pins"),
    [
        ("fp8_hybrid", {}),
        ("fp8_hybrid", {"gate_proj": ["fprop"], "up_proj": ["dgrad"], "down_proj": ["fprop", "wgrad"]}),
        ("mxfp8", {"gate_proj": ["wgrad"], "up_proj": ["fprop", "dgrad", "wgrad"]}),
    ],
)
def test_torchaos_results_are_ours(low: str, pins: dict[str, list[str]], dtype: torch.dtype) -> None:
    """Output and both gradients of every operator; those of pinned GEMMs are nn.Linear's. Largest elements make the
    scales of tensors powers of two: of others torchao rounds 448 / amax, and we amax / 448. Native BF16 products sum in
    an order of their own, so there the results may differ by one rounding."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from torchao.quantization.quantize_.common import KernelPreference

    shapes = {f"layers.0.{name}": shape for name, shape in SIZES.items()}
    plan = planned({f"layers.0.mlp.{n}": dict.fromkeys(own, "bf16") for n, own in pins.items()}, shapes, low=low)
    theirs, ours, plain = (network(1, dtype) for _ in range(3))
    options = {"emulate": True} if low == "fp8_hybrid" else {"out_dtype": dtype}
    options |= {} if low == "fp8_hybrid" else {"kernel_preference": KernelPreference.EMULATED}
    run(export(plan, "torchao"), "torchao_convert.py")["convert"](theirs, **options)
    convert(ours, PathSpec(**plan.paths(), backend="simulated"))
    for name, shape in shapes.items():
        results = [_passes(model.get_submodule(in_hf(name)), shape, dtype) for model in (theirs, ours, plain)]
        for gemm, own, same, kept in zip(("fprop", "dgrad", "wgrad"), *results, strict=True):
            assert apart(own, same, terms=256) == {}, (name, gemm)
            assert (apart(own, kept, terms=256) == {}) == (gemm in plan.pins.get(name, {})), (name, gemm)


def _passes(linear: nn.Module, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Output and gradients of input and weight."""
    draws = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(64, width, generator=draws).to(dtype) for width in shape)
    x[0, 0], gradient[0, 0] = 448 * 2.0**-6, 57344 * 2.0**-12
    with torch.no_grad():
        linear.weight[0, 0] = 448 * 2.0**-11
    x.requires_grad_()
    y = linear(x)
    y.backward(gradient)
    return y.detach(), x.grad, linear.weight.grad


# ---- transformers and accelerate ----


@of_pins
def test_transformers_and_accelerate(pins: Pins) -> None:
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils", reason="transformers is not installed")
    ao = pytest.importorskip("accelerate.utils.ao", reason="accelerate is not installed")
    found = export(planned(pins), "transformers")
    (entries,) = yaml.safe_load(found.files["modules_to_not_convert.yaml"]).values()
    wanted = {"lm_head", *(in_hf(name) for name, own in found.plan.pins.items() if "fprop" in own)}
    asked = linears(network())
    assert {name for name in asked if not utils.should_convert_module(name, entries)} == wanted
    assert {name for name, module in asked.items() if not ao.filter_linear_layers(module, name, entries)} == wanted


# ---- what stands in .libraries ----


class StandIns:
    """Finds modules that are compiled, or Triton's, as mocks."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        mocked = name.partition(".")[0] in ("triton", "transformer_engine_torch") or name.endswith(".onnx_extensions")
        return ModuleSpec(name, self, is_package=True) if mocked else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = MagicMock(__path__=[], __spec__=spec, __version__="3.5.0")
        members = {
            "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
            "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
        }
        for name, own in members.items():
            setattr(made, name, enum.IntEnum(name, own, start=0))
        return made

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture(scope="module")
def stood_in() -> Iterator[None]:
    """Imports of libraries without their compiled parts."""
    pytest.importorskip("pulp", reason="they are not in .libraries: make test-libraries")
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics
    import torch.utils.flop_counter  # noqa: F401  before there is a Triton

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setitem(os.environ, "NVTE_PROJECT_BUILDING", "1")  # Transformer Engine is not to load what is compiled
        patch.setattr(sys, "meta_path", [StandIns(), *sys.meta_path])
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("triton", "transformer_engine_torch"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def te(stood_in: None) -> Iterator[Any]:
    """transformer_engine.pytorch, which makes its tensors and modules on the CPU."""
    import transformer_engine.common as common

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "load_framework_extension", lambda _name: None)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        import transformer_engine.pytorch as te

        yield te


def asked_of_te(factory: Callable[[Any], Any], name: str = "", role: Any = None) -> tuple[Any, ...]:
    """The casts of a linear's GEMMs, by the quantizers that CustomRecipe's own state makes."""
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.quantization import CustomRecipeState, QuantizerRole

    def ask(role: Any) -> Any:
        backward = role.tensor_type == "grad_output"
        options = {"mode": "backward" if backward else "forward", "num_quantizers": 1, "device": "cpu"}
        state = CustomRecipeState(CustomRecipe(qfactory=factory), roles=[role], **options)
        return state.make_quantizers()[0]

    return quantizers_read(ask, role or QuantizerRole, name)


@pytest.mark.parametrize("low", ["nvfp4", "fp8_hybrid", "deepseek_v3"])
@of_pins
def test_transformer_engine(pins: Pins, low: str, te: Any) -> None:
    plan = planned(pins, low=low)
    factory = run(export(plan, "te"), "qfactory.py")["qfactory"]
    assert {name: asked_of_te(factory, in_hf(name)) for name in NAMES} == casts_of(plan)
    fused = casts_of(export(plan, "megatron").plan)
    assert {name: asked_of_te(factory, in_megatron(name)) for name in NAMES} == fused
    assert asked_of_te(factory, "lm_head") == ({}, {}, {})


def test_transformer_engines_own_layers(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLayer under the names that `name_modules` gives it, or its own name=; the roles are its modules'."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = planned({n: {"fprop": "mxfp8"} for n in NAMES if n.startswith("layers.1.") and "gate" not in n})
    space = run(export(plan, "te"), "qfactory.py")
    fused = casts_of(export(plan, "megatron").plan)
    parts = {"qkv": "self_attn.q_proj", "proj": "self_attn.o_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}
    for named in (False, True):
        options = [{"name": f"layers.{i}"} if named else {} for i in range(3)]
        layers = [te.TransformerLayer(128, 256, 4, layer_number=1, device="cpu", **own) for own in options]
        model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        roles = [role for module in model.modules() for role in _roles(module)]
        if not named:
            with pytest.raises(ValueError, match="name_modules"):
                space["qfactory"](roles[0])
            space["name_modules"](model)
            roles = [role for module in model.modules() for role in _roles(module)]
        seen = {role.name for role in roles}
        assert len(seen) == 12, "four linears a layer"
        for name in seen:
            ours = f"{'.'.join(name.split('.')[:2])}.{next(own for end, own in parts.items() if name.endswith(end))}"
            assert asked_of_te(space["qfactory"], name) == fused[ours], name


def _roles(module: nn.Module) -> list[Any]:
    if not hasattr(module, "get_quantizer_roles"):
        return []
    found = [*(module.get_quantizer_roles(fwd=True, num_quantizers=6) or ())]
    return [role for role in found if role is not None and role.module_type == "linear"]


KEPT = {"model.layers.0.mlp.experts.1.down_proj": {"fprop": "mxfp8"}, "model.layers.1.self_attn.v_proj": BF16}
"""Pins of a mixture of experts."""


def test_transformer_engines_grouped_linear(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own roles: one name for the weights of all experts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = export(planned(KEPT, MOE, modules=IN_TENSORS), "te")
    factory, read = run(found, "qfactory.py")["qfactory"], casts_of(found.plan)
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        linear = te.GroupedLinear(3, 128, 128, bias=False, device="cpu", name=name)
        roles = [*linear.get_quantizer_roles(fwd=True, num_quantizers=9)]
        roles += linear.get_quantizer_roles(fwd=False, num_quantizers=6)
        by_operand: dict[str, Any] = {role.tensor_type: role for role in roles if role is not None}
        assert set(by_operand) == {"input", "weight", "grad_output"}

        def role(tensor_type: str, own: dict[str, Any] = by_operand, **_: str) -> Any:
            return own[tensor_type]

        for number in range(3):
            assert asked_of_te(factory, role=role) == read[name.replace("experts.", f"experts.{number}.")]


@pytest.mark.parametrize("blocks", [12, 10])
@pytest.mark.parametrize("pp", [1, 3])
@of_pins
def test_megatron(pins: Pins, pp: int, blocks: int, te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matchers, its parser of recipes and its custom recipes, in each stage of a pipeline; of twelve blocks the
    last two may be excluded."""
    import megatron.core  # noqa: F401  before its extensions
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.fp8_utils import _get_custom_recipe
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.quantization.utils import get_quant_config_or_none

    operators = {name: shape for name, shape in LLAMA.items() if int(name.split(".")[1]) < blocks}
    excluded = [name for name in LLAMA if name not in operators]
    pins = {name: own for name, own in pins.items() if name in operators}
    plan = planned(pins, operators, unconverted=[*excluded, "lm_head"])
    found, read = export(plan, "megatron", pp), Read()
    recipes = RecipeConfig.from_config_dict(yaml.safe_load(found.files["te_precision.yaml"]))
    module = ModuleType("gnmr_megatron")
    module.__dict__.update(run(found, "gnmr_megatron.py"))
    monkeypatch.setitem(sys.modules, "gnmr_megatron", module)
    for name in NAMES:
        stage = int(name.split(".")[1]) // (12 // pp)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        config = get_quant_config_or_none(in_megatron(name, stage * (12 // pp)), recipes)
        recipe = None if config is None else TEQuantizationParams.parse_from_config(config).training_recipe
        if recipe is not None and recipe.custom_recipe_factory:
            read[name] = asked_of_te(_get_custom_recipe(recipe.custom_recipe_factory).qfactory)
        else:
            own = [] if recipe is None else [recipe.fp8_quantization_recipe, recipe.fp4_quantization_recipe]
            named = None if recipe is None else {str(i): one for i, one in enumerate(own) if one}
            read[name] = recipe_read(named, "nvfp4", {})
    assert read == dict.fromkeys(NAMES, ({}, {}, {})) | casts_of(found.plan)
    assert get_quant_config_or_none("output_layer", recipes) is None


def test_megatrons_experts(te: Any) -> None:
    """Its matchers, over the names of grouped experts and of single ones."""
    import megatron.core  # noqa: F401
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.quantization.utils import get_quant_config_or_none

    found = export(planned(KEPT, MOE, modules=IN_TENSORS), "megatron")
    recipes = RecipeConfig.from_config_dict(yaml.safe_load(found.files["te_precision.yaml"]))
    for name in MOE:
        grouped = in_megatron(name)
        for called in (grouped, grouped.replace(".experts.", ".experts.local_experts.2.")):
            config = get_quant_config_or_none(called, recipes)
            assert (config is None) == (name not in found.plan.pins), called
    for other in ("decoder.layers.0.mlp.router", "decoder.layers.0.mlp.shared_experts.linear_fc2"):
        assert get_quant_config_or_none(other, recipes) is None


def titan_config(fuse_qkv: bool) -> Any:
    """The config of a LLaMA of twelve blocks, as torchtitan's registry makes it."""
    from dataclasses import replace

    from torchtitan.models.common import attention
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


@pytest.mark.parametrize("low", ["nvfp4", "mxfp8", "fp8_hybrid"])
@pytest.mark.parametrize("fuse_qkv", [True, False])
@of_pins
def test_torchtitan(pins: Pins, fuse_qkv: bool, low: str, stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its converters, one after another; their checks for a GPU are left out."""
    import torchtitan.components.quantization as quantization
    from torchtitan.models.common.linear import Linear

    for name in ("float8", "mx", "nvfp4"):
        monkeypatch.setattr(getattr(quantization, name), "has_cuda_capability", lambda *_: True)
    found, config = export(planned(pins, low=low), "torchtitan"), titan_config(fuse_qkv)
    for converter in run(found, "torchtitan_converters.py")["CONVERTERS"]:
        config = converter.build().convert(config)
    kinds = {"Float8Linear": "fp8_hybrid", "MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}
    read = {}
    for fqn, one, *_ in config.traverse(Linear.Config):
        recipe = kinds.get(type(one).__qualname__.partition(".")[0])
        exact = recipe == "fp8_hybrid" and one._torchao_config.cast_config_input_for_grad_weight.scaling_type.name
        read[fqn] = words(fprop=recipe, dgrad=recipe, wgrad=exact != "DISABLED" and recipe)
    assert read.pop("lm_head", read.pop("output", None)) == ({}, {}, {})
    assert read == {in_titan(name, fuse_qkv): own for name, own in casts_of(found.plan).items()}


@pytest.mark.parametrize("low", ["bf16", "fp8_hybrid", "mxfp8"])
def test_experts_of_torchtitan_are_the_same_linears_one_by_one(low: str, stood_in: None) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    torch.manual_seed(0)
    model = nn.ModuleDict({"inner_experts": GroupedExperts.Config(dim=32, hidden_dim=64, num_experts=4).build()})
    experts, keys = model["inner_experts"], ["w1_EFD", "w2_EDF", "w3_EFD"]
    alike = nn.ModuleDict({key: nn.ModuleList() for key in keys})
    for key in keys:
        nn.init.normal_(getattr(experts, key), std=0.1)
        for matrix in getattr(experts, key).detach():
            alike[key].append(nn.Linear(*matrix.T.shape, bias=False, dtype=torch.bfloat16))
            alike[key][-1].weight.data.copy_(matrix)
    x, sizes = torch.randn(24, 32), torch.tensor([7, 0, 12, 5])

    def one_by_one() -> Tensor:
        w1, w2, w3 = alike.values()
        parts = x.bfloat16().split(sizes.tolist())
        found = [w2[i](F.silu(w1[i](part)) * w3[i](part)) for i, part in enumerate(parts) if len(part)]
        return torch.cat(found).float()

    def results() -> list[Tensor]:
        model.zero_grad()
        out = experts(x, sizes)
        out.square().mean().backward()
        return [out.detach(), *(getattr(experts, key).grad for key in keys)]

    plain = results()
    converted = convert(model, PathSpec.of(low, None, targets=["*"]))
    assert [one.operator_name for one in converted.operators][:4] == [
        *(f"inner_experts.0.{key}" for key in keys),
        "inner_experts.1.w1_EFD",
    ]
    assert unit_of("inner_experts.0.w1_EFD", "expert") == "inner_experts.0"
    found = results()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)) is (low == "bf16")
    convert(alike, PathSpec.of(low, None, targets=["*"]))
    expected = one_by_one()
    expected.square().mean().backward()
    assert torch.equal(found[0], expected)
    for gradient, linears in zip(found[1:], alike.values(), strict=True):
        wanted = [torch.zeros_like(one.weight) if one.weight.grad is None else one.weight.grad for one in linears]
        assert torch.equal(gradient, torch.stack(wanted).float())
    assert list(model.state_dict()) == [f"inner_experts.{key}" for key in keys]
    converted.restore()
    assert type(experts) is GroupedExperts


@of_pins
@pytest.mark.parametrize("low", ["nvfp4", "mxfp8", "fp8_hybrid"])
def test_modelopt(pins: Pins, low: str, stood_in: None) -> None:
    """Its own conversion of the model, and what each quantizer is set to by the end."""
    import modelopt.torch.quantization as mtq

    plan = planned(pins, low=low)
    model = mtq.quantize(network(), run(export(plan, "modelopt"), "modelopt_quant_cfg.py")["CONFIG"])
    casts = {(4, 3, 32): "e4m3/mx", (2, 1, 16): "e2m1/nv", (4, 3, 0): "e4m3/tensor"}
    read: Read = {}
    for name, module in linears(model).items():
        own = {"input": module.input_quantizer, "weight": module.weight_quantizer}
        assert not module.output_quantizer.is_enabled
        on = {operand: one for operand, one in own.items() if one.is_enabled}
        read[name] = ({o: casts[*one.num_bits, (one.block_sizes or {}).get(-1, 0)] for o, one in on.items()},)
    assert read.pop("lm_head") == ({},)
    assert read == {in_hf(name): own for name, own in casts_of(plan, "modelopt").items()}


def mixture() -> nn.Module:
    """Hugging Face's Mixtral with the shapes of `MOE`, without weights to speak of."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def test_experts_of_modelopt_and_its_conv1d(stood_in: None) -> None:
    import modelopt.torch.quantization as mtq
    from transformers import GPT2Config, GPT2LMHeadModel

    casts = {(4, 3, 32): "e4m3/mx", (2, 1, 16): "e2m1/nv"}

    def on(quantizer: Any) -> str | None:
        return casts[*quantizer.num_bits, quantizer.block_sizes[-1]] if quantizer.is_enabled else None

    def meant(plan: Any, name: str) -> tuple[str | None, ...]:
        return tuple(casts_of(plan, "modelopt")[name][0].get(operand) for operand in ("input", "weight"))

    found = export(planned(KEPT, MOE, modules=IN_TENSORS), "modelopt")
    model = mtq.quantize(mixture(), run(found, "modelopt_quant_cfg.py")["CONFIG"])
    for i in range(2):
        experts = model.get_submodule(f"model.layers.{i}.mlp.experts")
        for x in ("gate_up_proj", "down_proj"):
            shared = on(getattr(experts, f"{x}_input_quantizer"))
            for n, one in enumerate(getattr(experts, f"{x}_weight_quantizers")):
                assert (shared, on(one)) == meant(found.plan, f"model.layers.{i}.mlp.experts.{n}.{x}")
    value = model.get_submodule("model.layers.1.self_attn.v_proj")
    assert not (value.input_quantizer.is_enabled or model.lm_head.weight_quantizer.is_enabled)

    plan = planned({"transformer.h.1.mlp.c_fc": {"fprop": "bf16"}}, GPT2, modules=dict.fromkeys(GPT2, "Conv1D"))
    model = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=32))
    model = mtq.quantize(model, run(export(plan, "modelopt"), "modelopt_quant_cfg.py")["CONFIG"])
    for name in GPT2:
        linear = model.get_submodule(name)
        assert (on(linear.input_quantizer), on(linear.weight_quantizer)) == meant(plan, name), name


def test_experts_in_lists_of_transformers_and_compressed_tensors(stood_in: None) -> None:
    """transformers over the modules of a Mixtral; compressed-tensors over the linears that it is saved as, of which
    vLLM asks for those of the first expert."""
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils", reason="transformers is not installed")
    from compressed_tensors.utils.match import is_match

    pins = KEPT | {"model.layers.0.mlp.experts.1.down_proj": {"fprop": "bf16"}}
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    plan = planned(pins, MOE, modules=IN_TENSORS, unconverted=[*routers, "lm_head"])
    (entries,) = yaml.safe_load(export(plan, "transformers").files["modules_to_not_convert.yaml"]).values()
    model = mixture()
    asked = [*linears(model), *(name for name, _ in model.named_modules() if name.endswith(".experts"))]
    kept = {name for name in asked if not utils.should_convert_module(name, entries)}
    assert kept == {"lm_head", "model.layers.0.mlp.experts", "model.layers.1.self_attn.v_proj"}
    (ignored,) = yaml.safe_load(export(plan, "ignore").files["ignore.yaml"]).values()
    for i in range(2):
        for name in (f"model.layers.{i}.mlp.experts.{n}.{x}_proj" for n in (0, 2) for x in ("gate", "up", "down")):
            assert is_match(name, nn.Linear(1, 1), "Linear", ignored) == (i == 1), name
        assert not is_match(f"model.layers.{i}.mlp.gate", nn.Linear(1, 1), "Linear", ignored)


@of_pins
def test_compressed_tensors(pins: Pins, stood_in: None) -> None:
    """Its matcher over the checkpoint's linears, and over those that vLLM fuses."""
    from compressed_tensors.utils.match import is_match, match_named_modules

    found = export(planned(pins), "ignore")
    (ignored,) = yaml.safe_load(found.files["ignore.yaml"]).values()
    meant = {in_hf(name) for name, own in casts_of(found.plan).items() if own[0]}
    assert {name for name, _ in match_named_modules(network(), ["Linear"], ignored)} == meant
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for i in range(12):
        for built, parts in fused.items():
            name = f"model.layers.{i}.{'self_attn' if built == 'qkv_proj' else 'mlp'}.{built}"
            left = is_match(name, SimpleNamespace(), ignored, fused=fused)
            of_parts = {name.replace(built, part) in meant for part in parts}
            assert of_parts == {not left}, name
