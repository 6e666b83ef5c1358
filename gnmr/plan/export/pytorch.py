"""Write the conversions of each linear for torchao and torchtitan."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS, Words
from gnmr.plan.export.job import UNWRAPPED, Job, Target, as_python, filled

_TENSOR = {"input": "e4m3/tensor", "weight": "e4m3/tensor", "grad_output": "e5m2/tensor"}


def _family(casts: Words, low: Words, shape: tuple[int, int]) -> str:
    """Return torchao's conversion of an operator: bf16, float8, mxfp8 or nvfp4; "" if it has none."""
    if not any(casts.values()):
        return "bf16"
    if all(len(own) in (0, 2) and own.items() <= _TENSOR.items() for own in casts.values()):
        return "float8" * (not any(width % 16 for width in shape))
    mxfp8, nvfp4 = RECIPES["mxfp8"].words(), RECIPES["nvfp4"].words()
    if all(own == mxfp8[gemm] or (gemm == "wgrad" and not own) for gemm, own in casts.items()):
        return "mxfp8" * (not any(width % 32 for width in shape))
    return "nvfp4" * (casts == nvfp4 and not any(width % 128 for width in shape))


def _torchao(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    return bool(_family(casts, low, shape))


def _torchtitan(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if torchtitan has it: MXFP8 only with low wgrad, float8 only with row scales (two recipes)."""
    kind = _family(casts, low, shape)
    of_rows = bool(casts["fprop"] and casts["dgrad"])
    return bool(kind) and (kind != "mxfp8" or bool(casts["wgrad"])) and (kind != "float8" or of_rows)


_TORCHAO = r"""import re
from dataclasses import replace

from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.quantization import quantize_


def float8(fprop, dgrad, wgrad):
    # One scale a tensor, E5M2 for gradients; a GEMM that is False stays in 16 bits.
    def cast(on):
        return CastConfig() if on else CastConfig(scaling_type=ScalingType.DISABLED)

    return Float8LinearConfig(
        cast_config_input=cast(fprop),
        cast_config_weight=cast(fprop),
        cast_config_grad_output=cast(dgrad),
        cast_config_weight_for_grad_input=cast(dgrad),
        cast_config_input_for_grad_weight=cast(wgrad),
        cast_config_grad_output_for_grad_weight=cast(wgrad),
    )


def mxfp8(fprop, dgrad, wgrad):
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

    return replace(MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL), wgrad_with_hp=not wgrad)


def nvfp4(fprop, dgrad, wgrad):
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig

    return NVFP4TrainingConfig()


CONFIGS = {
[CONFIGS]}
# The linears to convert, with inputs and outputs.
LINEARS = [LINEARS]
# The model's other linears, which stay in 16 bits; None: they are not known.
OTHERS = [OTHERS]

[UNWRAPPED]

def misfit(linears, start, before, way):
    # Why these linears are not those of the plan; "" if they are.
    if lacking := [name for name in LINEARS if name not in way]:
        return f"{len(lacking)} of the plan's {len(LINEARS)} linears are not in it, such as {lacking[0]}"
    for name, here in way.items():
        (_, *planned), widths = LINEARS[name], [linears[here].in_features, linears[here].out_features]
        if widths != planned:
            return f"{here} is {widths[0]} -> {widths[1]}, and {planned[0]} -> {planned[1]} in the plan"
    kinds, ours = {re.sub(r"\d+", "*", here) for here in way.values()}, {*way.values()}
    alike = [here for here in linears if here not in ours and re.sub(r"\d+", "*", here) in kinds]
    more = [here for here in alike if start + here[len(before):] not in (OTHERS or ())]
    return f"it has {more[0]}, which the plan does not know" if OTHERS is not None and more else ""


def labels_of(model):
    # The config of each module to convert. Raises ValueError unless the plan's linears, all of them, are here.
    linears = {unwrapped(fqn): module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    ways = placements(linears, LINEARS)
    whys = [misfit(linears, *one) for one in ways]
    fits = [one for one, why in zip(ways, whys) if not why]
    if LINEARS and not fits:
        why = (whys or ["none of its linears has a name of the plan's"])[0]
        raise ValueError(f"model: is not the model of the plan, as {why}; nothing was converted")
    whole = [one for one in fits if one[0] == one[1]] or fits
    if len(whole) > 1:
        places = ", ".join(before.rstrip(".") or "the model itself" for _, before, _ in whole)
        raise ValueError(f"model: several parts of it fit the plan ({places}); call convert with one of them")
    return {linears[here]: LINEARS[name][0] for _, _, way in whole for name, here in way.items()}


def convert(model, **options):
    # In place. `options` replace fields of the configs: emulate=True of float8.
    labels = labels_of(model)
    for label, config in CONFIGS.items():
        config = replace(config(), **options)

        def chosen(module, fqn, label=label):
            return labels.get(module) == label

        if isinstance(config, Float8LinearConfig):
            convert_to_float8_training(model, config=config, module_filter_fn=chosen)
        else:
            quantize_(model, config, chosen)
    return model
"""


def torchao(job: Job) -> dict[str, str]:
    """Write a Python file with `convert(model)`."""
    used, configs = set(job.labels.values()), ""
    for label, words in job.casts.items():
        kind, on = _family(words, {}, (128, 128)), ", ".join(f"{gemm}={bool(words[gemm])}" for gemm in GEMMS)
        configs += f'    "{label}": lambda: {kind}({on}),\n' * (kind != "bf16" and label in used)
    linears = {name: [label, *job.widths[name]] for name, label in job.labels.items() if label != "bf16"}
    others = [*(name for name in job.labels if name not in linears), *job.outside]
    job.notes.append("convert(model) converts the model in place, and raises ValueError if it is another one")
    parts = {"LINEARS": as_python(linears), "OTHERS": "None" if job.unlisted else as_python(others)}
    text = filled(_TORCHAO, CONFIGS=configs, UNWRAPPED=UNWRAPPED, **parts)
    return {"torchao_convert.py": text}


def torchtitan(job: Job) -> dict[str, str]:
    """Write a Python file with its converters. Raises UserError if parts of names do not separate the linears."""
    by_kind: dict[tuple[str, bool], list[str]] = {}
    for name, label in job.labels.items():
        words = job.casts[label]
        if ".experts." in name:
            continue  # no linear of its models, so no converter here takes it
        name = name.removesuffix("wqkv")  # or wq and wkv
        by_kind.setdefault((_family(words, {}, (128, 128)), bool(words["wgrad"])), []).append(name)
    by_kind["bf16", False] = by_kind.get(("bf16", False), []) + [
        name.removesuffix("wqkv") for name in job.outside if ".experts." not in name
    ]
    every, text = list(dict.fromkeys(name for names in by_kind.values() for name in names)), ""
    classes = {"float8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter", "nvfp4": "NVFP4LinearConverter"}
    for (kind, wgrad), names in by_kind.items():
        others = [name for name in every if name not in names]
        if kind == "float8":
            recipe = "rowwise" if wgrad else "rowwise_with_gw_hp"
            listed = (
                f'recipe_name="{recipe}", filter_fqns={as_python(["output", "lm_head", *_parts(others, names)], 2)}'
            )
            job.notes.append(f"NOT the plan's float8: {recipe} has a scale a row, a power of two, and E4M3 gradients")
        elif kind != "bf16":
            listed = f"fqns={as_python(_parts(names, others), 2)}"
        if kind != "bf16":
            text += f"    {classes[kind]}.Config(\n        {listed},\n    ),\n"
    job.notes.append("model_registry(..., converters=CONVERTERS); model_compile_enabled is for the config to set")
    head = f"from torchtitan.components.quantization import {', '.join(sorted(set(classes.values())))}\n\n"
    return {"torchtitan_converters.py": f"{head}CONVERTERS = [\n{text}]\n"}


def _parts(wanted: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return texts such that each wanted name contains one of them, and no other name contains any.

    For whole blocks and attentions the text is `layers.1.`, whose dot excludes `layers.10.`; otherwise it is the name.
    """
    found: dict[str, None] = {}
    for name in wanted:
        if not any(part in name for part in found):
            block, inside = re.match(r"(layers\.\d+\.)(\w+\.)", name).groups()  # type: ignore[union-attr]
            parts = (block, block + inside, name)
            found[next(one for one in parts if not any(one in other for other in others))] = None
    return list(found)


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
