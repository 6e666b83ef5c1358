"""Write the quantizer of each operand of a linear for Transformer Engine and Megatron-LM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gnmr.errors import UserError
from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS, Words
from gnmr.options import require
from gnmr.plan.export.job import (
    Job,
    Mix,
    Target,
    adapted,
    as_python,
    as_yaml,
    difference,
    filled,
    low_or_16_by_gemm,
)

_FP8_BLOCKS = "Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=False, "
_TE = {
    "e4m3/tensor": 'Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda"))',
    "e5m2/tensor": 'Float8CurrentScalingQuantizer(DType.kFloat8E5M2, torch.device("cuda"))',
    "e4m3/tile": f"{_FP8_BLOCKS}block_scaling_dim=1)",
    "e4m3/block": f"{_FP8_BLOCKS}block_scaling_dim=2)",
    "e4m3/mx": "MXFP8Quantizer(DType.kFloat8E4M3)",
    "e2m1/nv": "NVFP4Quantizer()",
    "e2m1/nv/hadamard": "NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)",
    "e2m1/nv/stochastic": "NVFP4Quantizer(stochastic_rounding=True)",
    "e2m1/nv/hadamard/stochastic": "NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True)",
    "e2m1/nv2d": "NVFP4Quantizer(with_2d_quantization=True)",
    "e2m1/nv_4over6": "NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256)",
    "e2m1/nv2d_4over6": "NVFP4Quantizer(with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)",
    "e2m1/nv_row": "NVFP4Quantizer(row_scaled_nvfp4=True)",
}
for _format in ("e4m3", "e5m2"):
    _TE[f"{_format}/delayed"] = "DelayedScalingRequest(Format.HYBRID, amax_history_len=16)"
    _TE[f"{_format}/delayed/1024"] = "DelayedScalingRequest(Format.HYBRID, amax_history_len=1024)"
"""The quantizer of each cast."""
_SLOTS = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""The GEMMs that read an operand's rowwise and its columnwise copy."""


def _te(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if Transformer Engine runs these casts.

    The two operands of a GEMM have one kind of quantizer, and are not both in blocks. Row scales occur only in fprop,
    and delayed scales in all GEMMs or none. 16 divides the widths of all that is cast, and 32 those of MXFP8.
    """
    if _refused(casts, shape):
        return False
    # A delayed scale is a state of the whole linear.
    if "delayed" in str(casts):
        return casts in (RECIPES["fp8_delayed"].words(), RECIPES["fp8_delayed_1024"].words())
    for gemm, operands in casts.items():
        if not operands:
            continue
        # Both operands of a product need one kind of quantizer, whatever its options.
        kinds = {_TE.get(cast, cast).partition("(")[0] for cast in operands.values()}
        if len(operands) != 2 or len(kinds) != 1 or any(cast not in _TE for cast in operands.values()):
            return False
        if set(operands.values()) == {"e4m3/block"} or (gemm != "fprop" and "e2m1/nv_row" in operands.values()):
            return False
    return True


def _te_debug(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if every GEMM is on the low recipe, or in 16 bits."""
    return low_or_16_by_gemm(casts, low, shape) and not _refused(casts, shape)


def _refused(casts: Words, shape: tuple[int, int]) -> bool:
    """Return True if Transformer Engine refuses to cast operands of these widths."""
    multiple = 32 if "/mx" in str(casts) else 16
    return any(casts.values()) and any(width % multiple for width in shape)


def _quantizers(labels: Mapping[str, Words]) -> str:
    """Return Python source that defines `quantizer(label, role)` for these labels."""
    no_casts: Words = {gemm: {} for gemm in GEMMS}
    casts = {
        label: {operand: [words[gemm].get(operand, "bf16") for gemm in gemms] for operand, gemms in _SLOTS.items()}
        for label, words in {"bf16": no_casts, **labels}.items()
    }
    used = sorted({cast for slots in casts.values() for copies in slots.values() for cast in copies} - {"bf16"})
    source = "".join(f'    "{cast}": lambda: {_TE[cast]},\n' for cast in used)
    return filled("quantizers.py.j2", CASTS=as_python(casts), QUANTIZERS=source)


def te(job: Job) -> dict[str, str]:
    """Write a quantizer factory for CustomRecipe, with the names of Hugging Face and of Megatron-LM."""
    # A model of Megatron-LM has q, k and v in one linear, so that its plan may be another.
    fused, casts = dict[str, str](), dict(job.casts)
    try:
        plan = adapted(job.plan, MEGATRON)
    except UserError:
        job.notes.append("it has no names of Megatron-LM: the operators are not those of LLaMA's blocks")
    else:
        in_megatron = Job(plan, MEGATRON)
        fused, casts = in_megatron.labels, casts | in_megatron.casts
        job.notes += [f"by the names of Megatron-LM: {line}" for line in difference(job.plan, plan, MEGATRON)]
    job.notes.append("te.autocast(recipe=CustomRecipe(qfactory=qfactory)), after name_modules(model)")
    linears = {name: [label, *job.widths[name]] for name, label in job.labels.items()}
    names = filled("qfactory.py.j2", LINEARS=as_python(linears), FUSED=as_python(fused))
    return {"qfactory.py": "import re\n\n" + _quantizers(casts) + "\n" + names}


_FLAGS = {
    "nvfp4": ("fp4_quantization_recipe", "nvfp4", "--fp4-format e2m1 --fp4-recipe nvfp4"),
    "mxfp8": ("fp8_quantization_recipe", "mxfp8", "--fp8-format e4m3 --fp8-recipe mxfp8"),
}
"""Recipes that Megatron-LM has built in: key and value of its YAML, and the flags of a whole model."""
_BY_STAGE = """

def by_stage(labels, role):
    from megatron.core import parallel_state

    return quantizer(labels[parallel_state.get_pipeline_model_parallel_rank()], role)
"""


def megatron(job: Job) -> dict[str, str]:
    """Write YAML with a matcher for each linear that is not on the low recipe, and the factories that it names.

    Raises ValueError if the stages do not all have the same number of layers.
    """
    linears = job.labels | {name: "bf16" for name in job.outside if not name.endswith(".router")}
    layers = 1 + max(int(name.split(".")[2]) for name in linears)
    require(layers % job.pp == 0, "pp", job.pp, f"must divide the model's {layers} layers")

    # The label of each linear in every stage of the pipeline; its names count layers within a stage.
    by_name: dict[str, list[str]] = {}
    for name, label in linears.items():
        _, _, number, inner = name.split(".", 3)
        inner = inner.replace("experts.", "experts.*")  # grouped, or one by one: experts.local_experts.3.linear_fc1
        stage, local = divmod(int(number), layers // job.pp)
        by_name.setdefault(f"decoder.layers.{local}.{inner}", [job.low] * job.pp)[stage] = label

    # A config for each set of labels: built in, or a factory of gnmr_megatron.py.
    bits = {"bf16": 8} | {label: 4 if "e2m1" in str(words) else 8 for label, words in job.casts.items()}
    stages, factories = dict[tuple[str, ...], str](), dict[str, str]()
    configs, matchers = dict[str, Any](), dict[str, Any]()
    for name, labels in by_name.items():
        if set(labels) == {job.low}:
            continue
        same = len(set(labels)) == 1
        config = labels[0] if same else stages.setdefault(tuple(labels), f"stages_{len(stages)}")
        recipe = {}
        if config in _FLAGS:
            key, value, _ = _FLAGS[config]
            recipe = {key: value}
        elif config != "bf16":
            factories[config] = f"quantizer, {config!r}" if same else f"by_stage, {labels}"
            key = f"fp{min(bits[label] for label in labels)}_quantization_recipe"
            recipe = {key: "custom", "custom_recipe_factory": f"gnmr_megatron.{config}"}
        configs[config] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
        matcher = {"type": "glob", "enabled": True, "pattern": f"*{name}", "config": config}
        matchers[name.replace("*", "").replace(".", "_")] = matcher

    # The flags of the job put all other linears on the low recipe.
    if job.low in _FLAGS:
        flags = _FLAGS[job.low][2]
    else:
        fp = f"fp{bits[job.low]}"
        flags = f"--{fp}-format {'e2m1' if fp == 'fp4' else 'hybrid'} --{fp}-recipe custom "
        flags += f"--{fp}-quantizer-factory gnmr_megatron.{job.low}"
        factories[job.low] = f"quantizer, {job.low!r}"
    job.notes.append(f"{flags} --te-precision-config-file te_precision.yaml, with this folder in PYTHONPATH")
    for_stages = "with pipeline parallelism export it with pp="
    if job.pp > 1:
        for_stages = f"for {job.pp} stages of {layers // job.pp}, none virtual"
    job.notes.append(f"its names count layers within a stage: {for_stages}")
    code = "from functools import partial\n\n" + _quantizers(job.casts) + (_BY_STAGE if stages else "")
    code += "\n\n" + "".join(f"{name} = partial({arguments})\n" for name, arguments in factories.items())
    return {"te_precision.yaml": as_yaml({"configs": configs, "matchers": matchers}), "gnmr_megatron.py": code}


def te_debug(job: Job) -> dict[str, str]:
    """Write YAML of DisableQuantizationGEMM and DisableQuantizationLayer, a section for each set of GEMMs."""
    # Linears with the same GEMMs in 16 bits share a section, whose pattern has all their names.
    sets: dict[Mix, list[str]] = {}
    for name in job.left_out:
        words, low = job.casts[job.labels[name]], job.casts[job.low]
        sets.setdefault(tuple(gemm for gemm in GEMMS if words[gemm] != low[gemm]), []).append(name)
    if job.outside:
        sets.setdefault(GEMMS, []).extend(job.outside)
    sections = {}
    for gemms, names in sets.items():
        section = "gnmr_layer"
        feature: dict[str, dict[str, Any]] = {"DisableQuantizationLayer": {"enabled": True}}
        if gemms != GEMMS:
            section = f"gnmr_{'_'.join(gemms)}"
            feature = {"DisableQuantizationGEMM": {"enabled": True, "gemms": list(gemms)}}
        pattern = f"^(?:{'|'.join(map(re.escape, names))})$"
        layers = {"layer_name_regex_pattern": pattern}
        sections[section] = {"enabled": True, "layers": layers, "transformer_engine": feature}
    return {"te_debug.yaml": as_yaml(sections)}


MEGATRON = Target(
    "Megatron-LM (d98e8a64, core 0.16.1)",
    "q, k and v are one linear for it, gate and up too, and each of these of all experts: they have one recipe; 16 "
    "divides the widths of what is cast, 32 those of MXFP8",
    megatron,
    _te,
    "megatron",
    ("qkv", "gate_up", "experts"),
    "experts",
)
TE = Target(
    "Transformer Engine 2.20.2, CustomRecipe",
    "by the names of Hugging Face every operator has its own recipes, all experts in one tensor the same (a "
    "GroupedLinear of its name); results of GEMMs are not cast, nor widths that 16 does not divide, in "
    "MXFP8 32",
    te,
    _te,
    experts="experts",
    modules=("*",),
)
TE_DEBUG = Target(
    "Transformer Engine 2.20.2, debug features",
    "a GEMM is on the recipe of autocast or in 16 bits, of other widths than 16 divides (MXFP8: 32) in 16 bits; "
    "names are Hugging Face's",
    te_debug,
    _te_debug,
    experts="experts",
    modules=("*",),
    formats=False,
)
