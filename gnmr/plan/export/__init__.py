"""Write a plan for other libraries, and state in the first lines of each file what the library cannot do.

    te           Transformer Engine: a quantizer factory, each GEMM separately
    te_debug     its debug features: which GEMMs are not quantized
    megatron     Megatron-LM: YAML of --te-precision-config-file and the factories that it names
    torchao      a function that converts: float8 GEMM by GEMM, MXFP8 and NVFP4 by linear
    torchtitan   its converters, by linear
    transformers `modules_to_not_convert`
    modelopt     ModelOpt's `quant_cfg`: the recipe of fprop, by linear
    ignore       the `ignore` of compressed-tensors and vLLM
    rl           what NeMo-RL, verl, prime-rl and miles leave out

A library may have one linear for several operators (`Target.fused`), including all experts of a layer, or may lack a
set of recipes. A plan with prices is then solved again within its own extra time. Without prices, an operator gets the
cheapest set of the library that lowers no GEMM's precision. Operators in modules that a library does not convert
(`Conv1D`, experts in one tensor: the plan's `modules`) stay in 16 bits.

Libraries that change a model in memory get the names in memory. Lists that an engine reads while it loads a checkpoint
get the checkpoint's names (`gnmr.plan.checkpoint_names`), and lists with readers of either kind get both. All lists
name every linear of the model that the plan does not convert: heads, routers, and what was left out.

A model with the operators of LLaMA's blocks (`layers.N.self_attn.q_proj`) gets the names of Hugging Face, torchtitan or
Megatron. Any other model keeps its names, and cannot be exported to the latter two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gnmr.options import one_of
from gnmr.plan.export.job import Job, adapted, difference, mixes
from gnmr.plan.export.pytorch import IGNORE, MODELOPT, RL, TORCHAO, TORCHTITAN, TRANSFORMERS
from gnmr.plan.export.te import MEGATRON, TE, TE_DEBUG
from gnmr.plan.pin_plan import PinPlan


@dataclass(frozen=True)
class Export:
    """A plan for another library."""

    files: dict[str, str]
    """Texts by their usual file names."""
    plan: PinPlan
    """The plan that the library then runs: the given plan, or the nearest that the library can express."""
    notes: tuple[str, ...]
    """First lines of the files: the differences from the plan, and their cost."""


def export(plan: PinPlan, target: str, pp: int = 1) -> Export:
    """Write a plan for one of `TARGETS`.

    Args:
        plan: the plan.
        target: one of `TARGETS`.
        pp: pipeline stages of equal length (megatron).

    Returns:
        The texts, the plan that the library then runs, and the differences from `plan`.

    Raises:
        UserError: the target cannot express an operator or the low recipe, or the plan does not list the model's other
            linears.
        ValueError: the stages do not divide the blocks.
    """
    one_of(TARGETS, to=target)
    library = TARGETS[target]
    nearest = adapted(plan, library)
    job = Job(nearest, library, pp)
    texts = library.write(job)
    notes = (*difference(plan, nearest, library), *job.notes, library.limits)
    counts = Counter(recipe for mix in mixes(nearest).values() for recipe in library.configured(mix).values())
    shares = ", ".join(f"{number} on {recipe}" for recipe, number in counts.most_common())
    lines = (f"{library.library}, by gnmr export: of {counts.total()} GEMMs {shares}", *notes)
    head = "".join(f"# {line}\n" for line in lines)
    return Export({name: head + text for name, text in texts.items()}, nearest, notes)


TARGETS = {
    "te": TE,
    "te_debug": TE_DEBUG,
    "megatron": MEGATRON,
    "torchao": TORCHAO,
    "torchtitan": TORCHTITAN,
    "transformers": TRANSFORMERS,
    "modelopt": MODELOPT,
    "ignore": IGNORE,
    "rl": RL,
}
"""Targets by the value of `to=`."""
