"""Write lists of the linears that a library leaves in 16 bits, and ModelOpt's list of those that it quantizes."""

from __future__ import annotations

import re

from gnmr.errors import first_few
from gnmr.names import Words
from gnmr.plan.export.job import ONE_LINEAR, Job, Target, as_python, as_yaml, whole
from gnmr.plan.knapsack import groups_of
from gnmr.plan.lists import called

_FPROP = ("fprop",)
_IN_ENGINES = ("qkv", "gate_up", "moe")
"""Kinds that vLLM and SGLang fuse; all experts of a layer, with all projections, share one scheme there."""


def transformers(job: Job) -> dict[str, str]:
    """Write the list `modules_to_not_convert`, which transformers reads in memory, and vLLM in the checkpoint."""
    names = job.in_both([*job.kept, *job.outside, *job.heads()])
    return {"modules_to_not_convert.yaml": as_yaml({"modules_to_not_convert": names})}


def ignore(job: Job) -> dict[str, str]:
    """Write the list `ignore`, which compressed-tensors reads in memory, and vLLM and SGLang in the checkpoint."""
    names = job.in_both([*job.kept, *job.outside, *job.heads()])
    entries = [rf"re:{re.escape(name)}\b" if _all_experts(name) else name for name in names]
    return {"ignore.yaml": as_yaml({"ignore": entries})}


def rl(job: Job) -> dict[str, str]:
    """Write the lists of reinforcement-learning trainers and rollouts, by library and key.

    prime-rl's trainer reads the model in memory; NeMo-RL, verl and miles read the checkpoint. Megatron-LM has one name
    of its own for the experts, however a checkpoint calls them.
    """
    in_memory = [*job.kept, *job.outside]
    kept, others = (
        job.in_checkpoint(in_memory),
        job.in_checkpoint(name for name in job.labels if name not in {*in_memory}),
    )
    for name in kept:
        if swept := [other for other in others if name in other and other not in kept]:
            job.notes.append(f"NOT for nemo_rl, where any part of a name counts: {name} would leave out {swept[0]} too")
    fused = dict.fromkeys(called(name, "megatron") for name in in_memory)
    ends = {name: "." if _all_experts(name) else ".weight" for name in (*kept, *fused)}
    tree = {
        "nemo_rl": {"quantization_ignored_layer_kws": [*kept]},  # a list of its own, or YAML refers to the other
        "verl": {"ignored_layers": kept},
        "prime_rl": {"ignore_patterns": [rf"(?:^|\.){re.escape(name)}(?![^.])" for name in job.in_both(in_memory)]},
        "miles": {
            "extra_high_precision_layers_hf": [f"{name}{ends[name]}" for name in kept],
            "extra_high_precision_layers_megatron": [f"{name}{ends[name]}" for name in fused],
        },
    }
    return {"rl.yaml": as_yaml(tree)}


def _all_experts(name: str) -> bool:
    """Return True if a name stands for all experts of a layer."""
    return name.endswith("experts")


_MODELOPT = {
    "e4m3/tensor": {"num_bits": (4, 3), "axis": None},
    "e4m3/mx": {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "e2m1/mx": {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
    "e2m1/nv": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}
_MODELOPT["e2m1/nv2d"] = _MODELOPT["e2m1/nv"]


def _in_modelopt(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    own = casts["fprop"]
    return not own or (len(own) == 2 and all(cast in _MODELOPT for cast in own.values()))


def modelopt(job: Job) -> dict[str, str]:
    """Write a Python file with the config of `mtq.quantize`."""
    casts = {label: words["fprop"] for label, words in job.casts.items() if words["fprop"]}
    attributes = {label: {operand: _MODELOPT[cast] for operand, cast in own.items()} for label, own in casts.items()}
    linears = {name: label for name, label in job.labels.items() if label in casts}
    groups = groups_of(job.labels, ("qkv", "gate_up"))
    if unlike := [own for own in groups if len({job.labels[name] for name in own}) > 1]:
        which = f"{len(unlike)} such groups have several recipes ({first_few(unlike[0], 3)})"
        job.notes.append(
            f"NOT for vLLM and SGLang, which build q, k and v as one linear, gate and up too: {which}; diagnose with "
            "fused=qkv,gate_up"
        )
    text = "".join(f"    {label!r}: {own!r},\n" for label, own in attributes.items())
    text = f"CASTS = {{\n{text}}}\nLINEARS = {as_python(linears)}\n"
    text += f"EXPERTS = {as_python([name for name in linears if name in job.experts])}\n" + _QUANT_CFG
    return {"modelopt_quant_cfg.py": text}


_QUANT_CFG = """
# The last entry that fits a quantizer counts: everything off, then these linears.
CONFIG = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
for name, label in LINEARS.items():
    for operand, cast in CASTS[label].items():
        # Of experts in one tensor there is a quantizer for the input of all, and one for the weight of each.
        quantizer = f"{name}_{operand}_quantizer*" if name in EXPERTS else f"{name}.{operand}_quantizer"
        CONFIG["quant_cfg"].append({"quantizer_name": quantizer, "cfg": cast, "enable": True})
"""


TRANSFORMERS = Target(
    "transformers 5.23.0, modules_to_not_convert",
    "a linear is on the format of the model's config or in 16 bits, and so are all experts of a layer",
    transformers,
    whole,
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
    whole,
    fused=_IN_ENGINES,
    experts="moe",
    gemms=_FPROP,
    formats=False,
)
RL = Target(
    "NeMo-RL, verl, prime-rl and miles (August 2026)",
    "trainer and rollout alike: a linear is on the low recipe or in 16 bits; " + ONE_LINEAR,
    rl,
    whole,
    fused=_IN_ENGINES,
    experts="moe",
    formats=False,
)
