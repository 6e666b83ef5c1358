"""Write a plan for libraries of PyTorch: the conversions of each linear, or the linears that stay in 16 bits.

torchao, torchtitan and ModelOpt convert by name. transformers, compressed-tensors, the engines and the trainers and
rollouts of reinforcement learning read lists of names to leave out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnmr.errors import first_few
from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS, Words
from gnmr.plan.export.job import ONE_LINEAR, Job, Target, as_python, as_yaml, filled, low_or_16_by_linear
from gnmr.plan.knapsack import groups_of
from gnmr.plan.lists import called

_FLOAT8 = {"input": "e4m3/tensor", "weight": "e4m3/tensor", "grad_output": "e5m2/tensor"}
_FPROP = ("fprop",)
_IN_ENGINES = ("qkv", "gate_up", "moe")
"""Kinds that vLLM and SGLang fuse; all experts of a layer, with all projections, share one scheme there."""


# ---- torchao and torchtitan ----


def _family(casts: Words, shape: tuple[int, int]) -> str:
    """Return torchao's conversion of an operator: bf16, float8, mxfp8 or nvfp4; "" if it has none."""
    if not any(casts.values()):
        return "bf16"
    mxfp8, nvfp4 = RECIPES["mxfp8"].words(), RECIPES["nvfp4"].words()
    family, multiple = "", 1
    if all(len(operands) in (0, 2) and operands.items() <= _FLOAT8.items() for operands in casts.values()):
        family, multiple = "float8", 16
    elif all(operands == mxfp8[gemm] or (gemm == "wgrad" and not operands) for gemm, operands in casts.items()):
        family, multiple = "mxfp8", 32
    elif casts == nvfp4:
        family, multiple = "nvfp4", 128
    return "" if any(width % multiple for width in shape) else family


def _torchao(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    return bool(_family(casts, shape))


def _torchtitan(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if torchtitan has it: MXFP8 only with low wgrad, float8 only with row scales (two recipes)."""
    family = _family(casts, shape)
    if family == "mxfp8":
        return bool(casts["wgrad"])
    return bool(family) and (family != "float8" or bool(casts["fprop"] and casts["dgrad"]))


def torchao(job: Job) -> dict[str, str]:
    """Write a Python file with `convert(model)`."""
    used, configs = set(job.labels.values()), ""
    for label, words in job.casts.items():
        family, options = _family(words, (128, 128)), ", ".join(f"{gemm}={bool(words[gemm])}" for gemm in GEMMS)
        if family != "bf16" and label in used:
            configs += f'    "{label}": lambda: {family}({options}),\n'
    linears = {name: [label, *job.widths[name]] for name, label in job.labels.items() if label != "bf16"}
    # Of another model with more blocks the file refuses to convert a part.
    other_names = [*(name for name in job.labels if name not in linears), *job.outside]
    job.notes.append("convert(model) converts the model in place, and raises ValueError if it is another one")
    lists = {"LINEARS": as_python(linears), "OTHERS": as_python(other_names)}
    return {"torchao_convert.py": filled("torchao_convert.py.j2", CONFIGS=configs, **lists)}


def torchtitan(job: Job) -> dict[str, str]:
    """Write a Python file with its converters; each has the parts of names that separate its linears from all others.

    Experts are no linears of its models, so no converter here takes them.
    """
    by_converter: dict[tuple[str, bool], list[str]] = {}
    for name, label in job.labels.items():
        if ".experts." not in name:
            words = job.casts[label]
            short = name.removesuffix("wqkv")  # or wq and wkv
            by_converter.setdefault((_family(words, (128, 128)), bool(words["wgrad"])), []).append(short)
    outside = [name.removesuffix("wqkv") for name in job.outside if ".experts." not in name]
    by_converter["bf16", False] = by_converter.get(("bf16", False), []) + outside
    every = list(dict.fromkeys(name for names in by_converter.values() for name in names))
    classes = {"float8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
    text = ""
    for (family, wgrad), names in by_converter.items():
        if family == "bf16":
            continue
        other_names = [name for name in every if name not in names]
        # MX and NVFP4 converters list what they convert, that of float8 what it leaves out.
        options = f"fqns={as_python(_separating(names, other_names), 2)}"
        if family == "float8":
            recipe = "rowwise" if wgrad else "rowwise_with_gw_hp"
            left_out = ["output", "lm_head", *_separating(other_names, names)]
            options = f'recipe_name="{recipe}", filter_fqns={as_python(left_out, 2)}'
            job.notes.append(f"NOT the plan's float8: {recipe} has a scale a row, a power of two, and E4M3 gradients")
        text += f"    {classes[family]}.Config(\n        {options},\n    ),\n"
    job.notes.append("model_registry(..., converters=CONVERTERS); model_compile_enabled is for the config to set")
    head = f"from torchtitan.components.quantization import {', '.join(sorted(set(classes.values())))}\n\n"
    return {"torchtitan_converters.py": f"{head}CONVERTERS = [\n{text}]\n"}


def _separating(names: Sequence[str], other_names: Sequence[str]) -> list[str]:
    """Return texts such that each name contains one of them, and no other name contains any.

    For whole blocks and attentions the text is `layers.1.`, whose dot excludes `layers.10.`; otherwise it is the name.
    """
    texts: dict[str, None] = {}
    for name in names:
        if not any(text in name for text in texts):
            block, module = re.match(r"(layers\.\d+\.)(\w+\.)", name).groups()  # type: ignore[union-attr]
            # The shortest text first, which stands for the most linears.
            candidates = (block, block + module, name)
            texts[next(text for text in candidates if not any(text in other for other in other_names))] = None
    return list(texts)


# ---- ModelOpt ----


_MODELOPT = {
    "e4m3/tensor": {"num_bits": (4, 3), "axis": None},
    "e4m3/mx": {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "e2m1/mx": {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "e2m1/nv": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}
_MODELOPT["e2m1/nv2d"] = _MODELOPT["e2m1/nv"]


def _in_modelopt(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    fprop = casts["fprop"]
    return not fprop or (len(fprop) == 2 and all(cast in _MODELOPT for cast in fprop.values()))


def modelopt(job: Job) -> dict[str, str]:
    """Write a Python file with the config of `mtq.quantize`."""
    casts = {label: words["fprop"] for label, words in job.casts.items() if words["fprop"]}
    linears = {name: label for name, label in job.labels.items() if label in casts}
    # ModelOpt itself quantizes q, k and v separately, but engines load them as one linear.
    groups = groups_of(job.labels, ("qkv", "gate_up"))
    if unlike := [group for group in groups if len({job.labels[name] for name in group}) > 1]:
        which = f"{len(unlike)} such groups have several recipes ({first_few(unlike[0], 3)})"
        job.notes.append(
            f"NOT for vLLM and SGLang, which build q, k and v as one linear, gate and up too: {which}; diagnose with "
            "fused=qkv,gate_up"
        )
    sources = ""
    for label, operands in casts.items():
        sources += f"    {label!r}: { {operand: _MODELOPT[cast] for operand, cast in operands.items()}!r},\n"
    experts = [name for name in linears if name in job.experts]
    lists = {"LINEARS": as_python(linears), "EXPERTS": as_python(experts)}
    return {"modelopt_quant_cfg.py": filled("modelopt_quant_cfg.py.j2", CASTS=sources, **lists)}


# ---- lists of linears that stay in 16 bits ----


def transformers(job: Job) -> dict[str, str]:
    """Write the list `modules_to_not_convert`, which transformers reads in memory, and vLLM in the checkpoint."""
    names = job.in_both([*job.left_out, *job.outside, *job.heads()])
    return {"modules_to_not_convert.yaml": as_yaml({"modules_to_not_convert": names})}


def ignore(job: Job) -> dict[str, str]:
    """Write the list `ignore`, which compressed-tensors reads in memory, and vLLM and SGLang in the checkpoint."""
    names = job.in_both([*job.left_out, *job.outside, *job.heads()])
    entries = [rf"re:{re.escape(name)}\b" if _all_experts(name) else name for name in names]
    return {"ignore.yaml": as_yaml({"ignore": entries})}


def rl(job: Job) -> dict[str, str]:
    """Write the lists of reinforcement-learning trainers and rollouts, by library and key.

    prime-rl's trainer reads the model in memory; NeMo-RL, verl and miles read the checkpoint. Megatron-LM has one name
    of its own for the experts, however a checkpoint calls them.
    """
    in_memory = [*job.left_out, *job.outside]
    saved = job.in_checkpoint(in_memory)
    saved_low = job.in_checkpoint(name for name in job.labels if name not in {*in_memory})
    for name in saved:
        if swept := [low for low in saved_low if name in low and low not in saved]:
            job.notes.append(f"NOT for nemo_rl, where any part of a name counts: {name} would leave out {swept[0]} too")
    # Several linears of the checkpoint have one name there.
    megatron = dict.fromkeys(called(name, "megatron") for name in in_memory)
    tree = {
        "nemo_rl": {"quantization_ignored_layer_kws": [*saved]},  # a list of its own, or YAML refers to the other
        "verl": {"ignored_layers": saved},
        "prime_rl": {"ignore_patterns": [rf"(?:^|\.){re.escape(name)}(?![^.])" for name in job.in_both(in_memory)]},
        "miles": {
            "extra_high_precision_layers_hf": [_part_of_weight(name) for name in saved],
            "extra_high_precision_layers_megatron": [_part_of_weight(name) for name in megatron],
        },
    }
    return {"rl.yaml": as_yaml(tree)}


def _all_experts(name: str) -> bool:
    """Return True if a name stands for all experts of a layer."""
    return name.endswith("experts")


def _part_of_weight(name: str) -> str:
    """Return the part of a weight's name by which miles leaves out a linear."""
    return f"{name}." if _all_experts(name) else f"{name}.weight"


TORCHAO = Target(
    "torchao 0.18.0",
    "float8 GEMM by GEMM, of widths that 16 divides; MXFP8 whole, or with wgrad in 16 bits; NVFP4 whole, of widths "
    "that 128 divides",
    torchao,
    _torchao,
)
TORCHTITAN = Target(
    "torchtitan 0.3.0",
    "one recipe a linear, and q, k and v are one; NVFP4 of widths that 128 divides; no experts",
    torchtitan,
    _torchtitan,
    "torchtitan",
    ("qkv",),
)
TRANSFORMERS = Target(
    "transformers 5.23.0, modules_to_not_convert",
    "a linear is on the format of the model's config or in 16 bits, and so are all experts of a layer",
    transformers,
    low_or_16_by_linear,
    experts="moe",
    gemms=_FPROP,
    formats=False,
)
MODELOPT = Target(
    "nvidia-modelopt 0.47.0, mtq.quantize(model, CONFIG)",
    "fprop's operands, of NVFP4 in blocks of 1 x 16; all experts in one tensor alike; backward is in 16 bits",
    modelopt,
    _in_modelopt,
    experts="experts",
    modules=("Conv1D",),
    gemms=_FPROP,
)
IGNORE = Target(
    "compressed-tensors 0.20.0 and vLLM, ignore",
    "a linear is on the scheme of its config or in 16 bits; " + ONE_LINEAR,
    ignore,
    low_or_16_by_linear,
    fused=_IN_ENGINES,
    experts="moe",
    gemms=_FPROP,
    formats=False,
)
RL = Target(
    "NeMo-RL, verl, prime-rl and miles (August 2026)",
    "trainer and rollout alike: a linear is on the low recipe or in 16 bits; " + ONE_LINEAR,
    rl,
    low_or_16_by_linear,
    fused=_IN_ENGINES,
    experts="moe",
    formats=False,
)
