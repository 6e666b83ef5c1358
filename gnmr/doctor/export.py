"""A plan's pins in the words of other libraries.

    torchao              `module_filter_fn`, a Python file: what is converted, by exact name
    torchtitan_float8    `filter_fqns`: what is left out; a name is meant where an entry is any part of it. The linears
                         of q, k and v are one for it, as they are in torchtitan 0.3
    torchtitan_nvfp4     `fqns`: what is converted, by the same rule
    megatron             YAML of `--te-precision-config-file`: matchers with globs, the first one that fits
    te_debug             YAML of Transformer Engine's debug features, each GEMM by itself; names by regular expressions
    ignore               JSON list for `modules_to_not_convert` and `ignore`, by exact name

Of all of them but te_debug a pin is a whole operator: an operator with any pinned GEMM is kept in 16 bits, which costs
more than the plan does; an `Export` says so. Written after the libraries' sources: pytorch/ao (float8),
pytorch/torchtitan (components/quantization), NVIDIA/Megatron-LM (core/quantization), NVIDIA/TransformerEngine
(debug/features), huggingface/transformers (quantizers).

Names: a model whose operators are those of LLaMA's blocks (`layers.N.self_attn.q_proj`, `layers.N.mlp.down_proj`) is
called as Hugging Face, torchtitan or Megatron call it; any other keeps its own names, and has none in the latter two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from gnmr.doctor.plan import PinPlan
from gnmr.errors import UserError
from gnmr.names import GEMMS


@dataclass(frozen=True)
class Export:
    """A plan for another library."""

    file: str
    """Its usual name."""
    text: str
    kept: tuple[str, ...]
    """Operators of the plan of which the library then keeps every GEMM in 16 bits, in te_debug any."""
    notes: tuple[str, ...] = ()
    """What could not be said as the plan says it."""


_LLAMA = re.compile(r"(?:model\.)?layers\.(\d+)\.(self_attn|mlp)\.((?:experts\.\d+\.)?(?:q|k|v|o|gate|up|down)_proj)")
_TITAN = {
    # Of older versions, and of 0.3, where the three have one config (wqkv) or two (wq, wkv) in one module.
    "self_attn.q_proj": ("attention.wq", "attention.qkv_linear."),
    "self_attn.k_proj": ("attention.wk", "attention.qkv_linear."),
    "self_attn.v_proj": ("attention.wv", "attention.qkv_linear."),
    "self_attn.o_proj": ("attention.wo",),
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.up_proj": ("feed_forward.w3",),
    "mlp.down_proj": ("feed_forward.w2",),
}
_TITAN_HEADS = ("output", "lm_head")
"""What torchtitan's versions call the output head, which every recipe of ours leaves in 16 bits."""
_MEGATRON = {f"self_attn.{x}_proj": ("self_attention.linear_qkv",) for x in "qkv"}
_MEGATRON["self_attn.o_proj"] = ("self_attention.linear_proj",)
for _name, _fc in (("gate_proj", "fc1"), ("up_proj", "fc1"), ("down_proj", "fc2")):
    _MEGATRON[f"mlp.{_name}"] = (f"mlp.linear_{_fc}",)
    _MEGATRON[f"mlp.experts.N.{_name}"] = (f"mlp.experts.linear_{_fc}",)


def export(plan: PinPlan, target: str) -> Export:
    """The plan for one of `TARGETS`. UserError for operators, or a set of them, that the target has no words for."""
    if target not in TARGETS:
        raise UserError(f"export={target}: must be one of {', '.join(TARGETS)}")
    return TARGETS[target](plan)


def torchao(plan: PinPlan) -> Export:
    """A Python file with `module_filter_fn(module, fqn)`."""
    named, kept = hugging_face(plan.operators), _pinned(plan)
    low = [named[name] for name in plan.operators if name not in kept]
    text = f'''"""Which linears torchao converts: {_summary(plan, kept)}.

    convert_to_float8_training(model, module_filter_fn=module_filter_fn)
"""

import re

CONVERTED = frozenset({json.dumps(low, indent=4)})


def module_filter_fn(module, fqn):
    """Whether the linear of this name is converted, below whatever wraps it (peft, DDP, FSDP, compile)."""
    name = re.sub(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\\.", "", fqn)
    name = re.sub(r"^(?:module\\.|base_model\\.model\\.)+", "", name).removesuffix(".base_layer")
    return fqn in CONVERTED or name in CONVERTED
'''
    return Export("module_filter.py", text, kept, _coarser(plan, kept))


def ignore(plan: PinPlan) -> Export:
    """A JSON list of the names that are not converted, and the output head."""
    named, kept = hugging_face(plan.operators), _pinned(plan)
    text = json.dumps([*(named[name] for name in kept), "lm_head"], indent=2) + "\n"
    return Export("modules_to_not_convert.json", text, kept, _coarser(plan, kept))


def torchtitan_float8(plan: PinPlan) -> Export:
    """`filter_fqns`, which is Python and TOML alike."""
    named = _called(plan, "torchtitan", _TITAN)
    kept, notes = _together(plan, named, "torchtitan has q, k and v in one linear")
    others = [name for own in plan.operators if own not in kept for name in named[own]]
    parts = [*_TITAN_HEADS, *_parts([named[name] for name in kept], others, "filter_fqns")]
    how = "left out of the conversion: Float8LinearConverter.Config(filter_fqns=filter_fqns), or under\n"
    head = f"# torchtitan, {_summary(plan, kept)}: {how}# [quantize.linear.float8] in TOML.\n"
    text = head + _listed("filter_fqns", parts)
    return Export("torchtitan_float8.toml", text, kept, notes)


def torchtitan_nvfp4(plan: PinPlan) -> Export:
    """`fqns`, which is Python and TOML alike. UserError where nothing is left to convert: an empty list means all."""
    named = _called(plan, "torchtitan", _TITAN)
    kept, notes = _together(plan, named, "torchtitan has q, k and v in one linear")
    low = [name for name in plan.operators if name not in kept]
    if not low:
        raise UserError("export=torchtitan_nvfp4: every operator is kept in 16 bits, and an empty fqns converts all")
    parts = _parts([named[name] for name in low], [name for own in kept for name in named[own]], "fqns")
    how = "converted: NVFP4LinearConverter.Config(fqns=fqns)."
    text = f"# torchtitan, {_summary(plan, kept)}: {how}\n{_listed('fqns', parts)}"
    return Export("torchtitan_nvfp4.toml", text, kept, notes)


def megatron(plan: PinPlan) -> Export:
    """YAML with a matcher for each linear that is kept, and the flags that say the same where there are any."""
    named = _called(plan, "Megatron", _MEGATRON)
    kept, notes = _together(plan, named, "Megatron has q, k and v, gate and up, and all experts in one linear each")
    sixteen = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    matchers = {
        own.replace(".", "_"): {"type": "glob", "enabled": True, "pattern": f"*decoder.{own}", "config": "bf16"}
        for (own,) in dict.fromkeys(named[name] for name in kept)
    }
    flags = first_last(plan, kept)
    head = f"# Megatron-LM, --te-precision-config-file: {_summary(plan, kept)}.\n"
    if flags is not None:
        head += (
            f"# The same without this file: --first-last-layers-bf16 --num-layers-at-start-in-bf16 {flags[0]} "
            f"--num-layers-at-end-in-bf16 {flags[1]}\n"
        )
    text = head + yaml.safe_dump({"configs": {"bf16": sixteen}, "matchers": matchers}, sort_keys=False)
    return Export("te_precision.yaml", text, kept, notes)


def te_debug(plan: PinPlan) -> Export:
    """YAML of DisableQuantizationGEMM and DisableQuantizationLayer, a section for each set of GEMMs."""
    named, sections = hugging_face(plan.operators), {}
    for gemms in dict.fromkeys(tuple(own) for own in plan.pins.values()):
        names = [named[name] for name in plan.operators if tuple(plan.pins.get(name, ())) == gemms]
        whole = gemms == GEMMS
        feature = {"enabled": True} if whole else {"enabled": True, "gemms": list(gemms)}
        sections["gnmr_" + ("layer" if whole else "_".join(gemms))] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": f"^(?:{'|'.join(map(re.escape, names))})$"},
            "transformer_engine": {f"DisableQuantization{'Layer' if whole else 'GEMM'}": feature},
        }
    kept = _pinned(plan)
    text = f"# Transformer Engine, debug features: {_summary(plan, kept)}.\n" + yaml.safe_dump(
        sections, sort_keys=False
    )
    return Export("te_debug.yaml", text, kept, _recovery(plan))


TARGETS: dict[str, Callable[[PinPlan], Export]] = {
    one.__name__: one for one in (torchao, torchtitan_float8, torchtitan_nvfp4, megatron, te_debug, ignore)
}


def hugging_face(names: Iterable[str]) -> dict[str, str]:
    """Each operator's name in Hugging Face's layout, where all are of LLaMA's blocks; else its own.

    >>> hugging_face(["layers.0.mlp.up_proj"]), hugging_face(["layers.0.mlp.up_proj", "encoder.up_proj"])
    ({'layers.0.mlp.up_proj': 'model.layers.0.mlp.up_proj'}, {'layers.0.mlp.up_proj': 'layers.0.mlp.up_proj', \
'encoder.up_proj': 'encoder.up_proj'})
    """
    names = list(names)
    llama = all(_LLAMA.fullmatch(name) for name in names)
    return {name: f"model.{name.removeprefix('model.')}" if llama else name for name in names}


def first_last(plan: PinPlan, kept: Sequence[str]) -> tuple[int, int] | None:
    """(k, m) where `kept` are all operators of the first k and the last m blocks of a LLaMA; None for any other set."""
    blocks: dict[int, list[bool]] = {}
    for name in plan.operators:
        if (found := _LLAMA.fullmatch(name)) is None:
            return None
        blocks.setdefault(int(found[1]), []).append(name in kept)
    order = [all(blocks[number]) for number in sorted(blocks)]
    if not kept or any(any(own) != all(own) for own in blocks.values()):
        return None
    first = order.index(False) if False in order else len(order)
    last = order[::-1].index(False) if False in order else 0
    return (first, last) if first + last == sum(order) else None


def _pinned(plan: PinPlan) -> tuple[str, ...]:
    """Operators with any pinned GEMM, in the plan's order."""
    return tuple(name for name in plan.operators if plan.pins.get(name))


def _together(plan: PinPlan, named: Mapping[str, Sequence[str]], what: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(operators with any pinned GEMM, and those that have the last of their names in common with one; what to note of
    it). `what`: why they have."""
    wanted = _pinned(plan)
    shared = {named[name][-1] for name in wanted}
    kept = tuple(name for name in plan.operators if named[name][-1] in shared)
    more = len(kept) - len(wanted)
    return kept, _coarser(plan, kept) + ((f"{what}: {more} operators more are kept",) if more else ())


def _summary(plan: PinPlan, kept: Sequence[str]) -> str:
    return f"{len(kept)} of {len(plan.operators)} operators in 16 bits, by gnmr"


def _coarser(plan: PinPlan, kept: Sequence[str]) -> tuple[str, ...]:
    """Notes on what these operators cost in 16 bits as a whole, where that is more than the plan."""
    area = {name: a * b for name, (a, b) in plan.operators.items()}
    every = len(GEMMS) * sum(area.values())
    now = len(GEMMS) * sum(area[name] for name in kept)
    planned = sum(len(gemms) * area[name] for name, gemms in plan.pins.items())
    shares = f"{now / every:.1%} of the GEMMs' arithmetic, the plan's pins are {planned / every:.1%}"
    note = f"operators are kept whole: {shares}"
    return (note,) * (now > planned) + _recovery(plan)


def _recovery(plan: PinPlan) -> tuple[str, ...]:
    other = plan.recovery not in (None, "bf16") and bool(plan.pins)
    return (f"the plan's pins are on {plan.recovery}; here they are in 16 bits",) if other else ()


def _called(plan: PinPlan, library: str, names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return what each operator is called in a library's versions: its name, or that of the module that has it and
    others. Raises UserError for an operator that the library's models do not have."""
    named = {}
    for name in plan.operators:
        found = _LLAMA.fullmatch(name)
        if found is None or (own := names.get(re.sub(r"\d+", "N", f"{found[2]}.{found[3]}"))) is None:
            raise UserError(f"export: {library}'s models have no linear such as {name}")
        named[name] = tuple(f"layers.{found[1]}.{one}" for one in own)
    return named


def _parts(wanted: Sequence[Sequence[str]], others: Sequence[str], what: str) -> list[str]:
    """Texts of which one is part of each wanted name, and none of any other.

    Of whole blocks and attentions that is `layers.1.`, whose dot keeps it from `layers.10.`; else the names. UserError
    where a name is part of another one that is not wanted.
    """
    found: dict[str, None] = {}
    for names in wanted:
        if any(part in names[0] for part in found):
            continue
        block, inside = re.match(r"(layers\.\d+\.)(\w+\.)", names[0]).groups()  # type: ignore[union-attr]
        whole = next((one for one in (block, block + inside) if not any(one in name for name in others)), None)
        found |= dict.fromkeys([whole] if whole else names)
    if wrong := [(part, name) for part in found for name in others if part in name]:
        raise UserError(f"export: {what}={wrong[0][0]} would mean {wrong[0][1]} too: a name is meant by any part of it")
    return list(found)


def _listed(name: str, items: Iterable[str]) -> str:
    return f"{name} = [\n" + "".join(f"    {json.dumps(item)},\n" for item in items) + "]\n"
