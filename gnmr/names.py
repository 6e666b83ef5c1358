"""Names of formats, recipes and GEMMs that config, conversion and reports share.

New number formats and recipes are added here. `gnmr.formats.number_formats` makes the format of a name (`int5`,
`e3m3`), and `gnmr.formats.recipes` the recipe of its words.
"""

from __future__ import annotations

BESIDE = ("head", "router", "kv")
"""Parts that `gnmr diagnose` can measure besides the operators of a plan (`gnmr.measure.unplanned`)."""
KV_CAST = "e4m3/tensor"
"""Default cast of keys and values."""


FORMATS = ("int2", "int3", "int4", "int8", "e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "bf16")
"""int<bits>, or e<exponent bits>m<mantissa bits>; bf16 keeps a tensor as it is."""
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = ("input", "weight", "grad_output", "result")
UNITS = ("gemm", "operator", "expert", "layer", "block")
"""Kinds of units that change path together: one GEMM of an operator, or operators (gnmr/conversion/unit_names.py)."""
SITES = ("saved", "forward")
"""Tensors that a format quantizes: those kept for backward, or also those that the forward pass reads."""
ROUNDINGS = ("nearest", "stochastic")
BACKENDS = ("auto", "simulated", "scaled_mm", "int_mm")
"""Implementations of recipes (gnmr/conversion/resolve.py)."""
TASKS = ("gsm8k", "mmlu", "hellaswag", "wikitext2")
"""Scoring tasks (gnmr/lab/evaluation/scores.py)."""
WEIGHTS = ("online", "instead")
"""How INT8 codes of weights are kept (gnmr/conversion/int8.py)."""
SPIKE_WINDOW = 128
"""Steps whose loss and gradient norm say what is usual, when the next one is checked for a spike."""

Pins = dict[str, dict[str, str]]
"""{operator: {gemm: recipe}}; a GEMM that is missing runs on the low recipe."""
Words = dict[str, dict[str, str]]
"""{gemm: {operand: cast}}; a missing operand is not cast."""


def _alike(forward: str, backward: str, weight: str | None = None) -> Words:
    """Cast operands alike in all GEMMs, and keep results."""
    weight = weight or forward
    return {
        "fprop": {"input": forward, "weight": weight},
        "dgrad": {"weight": weight, "grad_output": backward},
        "wgrad": {"input": forward, "grad_output": backward},
    }


def _nvfp4(
    weight: str = "e2m1/nv2d", hadamard: str = "/hadamard", stochastic: str = "/stochastic", input: str = "e2m1/nv"
) -> Words:
    """Return NVIDIA's recipe, without one of its parts, or with other scales."""
    return {
        "fprop": {"input": input, "weight": weight},
        # Stochastic rounding keeps the gradients' expectation. wgrad's operands are rotated.
        "dgrad": {"weight": weight, "grad_output": f"e2m1/nv{stochastic}"},
        "wgrad": {"input": f"{input}{hadamard}", "grad_output": f"e2m1/nv{hadamard}{stochastic}"},
    }


def _everywhere(cast: str) -> Words:
    """Cast operands and results."""
    return {gemm: {**operands, "result": cast} for gemm, operands in _alike(cast, cast).items()}


RECIPES: dict[str, Words] = {
    # Transformer Engine: gradients need E5M2's range, the other operands E4M3's precision.
    "fp8_hybrid": _alike("e4m3/tensor", "e5m2/tensor"),
    "fp8_delayed": _alike("e4m3/delayed", "e5m2/delayed"),
    "fp8_delayed_1024": _alike("e4m3/delayed/1024", "e5m2/delayed/1024"),
    # DeepSeek-V3 (2412.19437). With blocks for grad_output too, training diverged in its appendix B.2.
    "deepseek_v3": _alike("e4m3/tile", "e4m3/tile", weight="e4m3/block"),
    "deepseek_v3_blocks": _alike("e4m3/tile", "e4m3/block", weight="e4m3/block"),
    # Microscaling: 32 elements share a power of two, rounded up, or down as in OCP's specification.
    "mxfp8": _alike("e4m3/mx", "e4m3/mx"),
    "mxfp4": _alike("e2m1/mx", "e2m1/mx"),
    "mxfp8_floor": _alike("e4m3/mx_floor", "e4m3/mx_floor"),
    "mxfp4_floor": _alike("e2m1/mx_floor", "e2m1/mx_floor"),
    # NVIDIA (2509.25149), and the same without one of its parts.
    "nvfp4": _nvfp4(),
    "nvfp4_no_sr": _nvfp4(stochastic=""),
    "nvfp4_no_rht": _nvfp4(hadamard=""),
    "nvfp4_1d": _nvfp4(weight="e2m1/nv"),
    # Other scales of Transformer Engine, which it does not combine with the rotation.
    "nvfp4_4over6": _nvfp4("e2m1/nv2d_4over6", hadamard="", input="e2m1/nv_4over6"),
    "nvfp4_row_scaled": _nvfp4(hadamard="", input="e2m1/nv_row"),
    # The paper's quantization-simulated operators (E.2): results are cast too.
    **{f"sim_{name}": _everywhere(f"{name}/row") for name in ("e2m1", "e2m3", "e3m2", "e4m3", "int4", "int8")},
    # What a model in FP32 loses in GEMMs of BF16, which its own BF16 weights would hide.
    "sim_bf16": _everywhere("bf16/none"),
    # LLM.int8() for fine-tuning (5.3, E.3): only fprop can multiply the codes themselves.
    "llm_int8": {"fprop": {"input": "int8/row/codes", "weight": "int8/row/codes"}},
    "llm_int8_dgrad": {
        "fprop": {"input": "int8/row/codes", "weight": "int8/row/codes"},
        "dgrad": {"weight": "int8/row"},
    },
    "bf16": {},
}
"""The casts of each recipe (gnmr/formats/recipes.py teaches them)."""
