"""A plan in the words of other libraries: what runs each GEMM on its recipe, or says in its first lines what it cannot.

    te           Transformer Engine: a quantizer factory, every GEMM by itself
    te_debug     its debug features: which GEMMs are not quantized
    megatron     Megatron-LM: YAML of --te-precision-config-file and the factories that it names
    torchao      a function that converts: float8 GEMM by GEMM, MXFP8 and NVFP4 by linear
    torchtitan   its converters, by linear
    transformers `modules_to_not_convert`
    modelopt     ModelOpt's `quant_cfg`: the recipe of fprop, by linear
    ignore       the `ignore` of compressed-tensors and vLLM
    rl           what NeMo-RL, verl, prime-rl and miles leave out

Where a library has one linear of several operators (`Target.fused`), all experts of a layer among them, or lacks a set
of recipes, a plan with prices is solved anew in the time that it takes; of one without, an operator gets the cheapest
set that the library has and that lowers no GEMM's precision. Operators in modules that a library does not convert
(`Conv1D`, experts in one tensor: the plan's `modules`) stay in 16 bits.

Names: a model whose operators are those of LLaMA's blocks (`layers.N.self_attn.q_proj`) is called as Hugging Face,
torchtitan or Megatron call it; any other keeps its own names, and has none in the latter two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gnmr.doctor.export.job import Job, adapted, difference, mixes, read_of
from gnmr.doctor.export.names import IGNORE, MODELOPT, RL, TRANSFORMERS
from gnmr.doctor.export.pytorch import TORCHAO, TORCHTITAN
from gnmr.doctor.export.te import MEGATRON, TE, TE_DEBUG
from gnmr.doctor.plan import PinPlan
from gnmr.errors import one_of


@dataclass(frozen=True)
class Export:
    """A plan for another library."""

    files: dict[str, str]
    """Texts by their usual names."""
    plan: PinPlan
    """What the library then runs: the plan, or the nearest that it has words for."""
    notes: tuple[str, ...]
    """What the files' first lines say: what could not be said as the plan says it, and what it costs."""


def export(plan: PinPlan, target: str, pp: int = 1, layers: int | None = None) -> Export:
    """Return the plan in the words of one of `TARGETS`.

    Args:
        plan: the plan.
        target: one of `TARGETS`.
        pp: pipeline stages of equal length (megatron).
        layers: blocks of the model, where the plan's `targets` or `exclude` may have left out the last of them.

    Raises UserError for operators, or a low recipe, that the target has no words for, and ValueError for other
    numbers of stages or blocks than the plan's.
    """
    one_of(TARGETS, to=target)
    one = TARGETS[target]
    made = adapted(plan, one, layers)
    job = Job(made, one, pp, layers)
    bodies = one.write(job)
    notes = (*difference(plan, made, one), *job.notes, one.limits)
    counts = Counter(recipe for mix in mixes(made).values() for recipe in read_of(mix, one).values())
    shares = ", ".join(f"{number} on {name}" for name, number in counts.most_common())
    lines = (f"{one.library}, by gnmr export: of {counts.total()} GEMMs {shares}", *notes)
    head = "".join(f"# {line}\n" for line in lines)
    return Export({name: head + body for name, body in bodies.items()}, made, notes)


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
"""By the word of `to=`."""
