"""The recoverable units: operators of a model that change their path together, found by name.

    gemm        one GEMM of an operator                            layers.3.mlp.experts.5.up_proj:fprop
    operator    each operator separately                           layers.3.mlp.experts.5.up_proj
    expert      all of one expert; other operators separately      layers.3.mlp.experts.5
    layer       an attention, or an MLP with all its experts       layers.3.mlp
    block       all of a transformer block                         layers.3

A block is found by a number in a name. If a name has a part `block` or `blocks`, it is the number after it
(`block.3.layer.0` of T5, `layers.0.blocks.1` of Swin). Otherwise it is the first number after `layer`, `layers` or `h`,
or else the first number. An operator outside of any block, such as a converted head, is a unit alone.

Within a block a layer is a module, or what follows a number (T5). The linears that a block holds directly, and BERT's
`intermediate` and `output`, are its MLP. `layers.3.mlp` is thus the fc1 and fc2 of OPT, and the linear1 and linear2 of
nn.TransformerEncoderLayer. Attention projections among them (`layers.3.q_proj`) are `layers.3.attention`.

Mixed precision within a block can be inconsistent, so the paper's recipes (5.2) move whole blocks. The paper says only
that a unit is a block. Here a unit holds only its converted operators, so that the routed operators are the monitored
ones. Norms therefore exclude a block's normalization layers and a gate, which stay in 16 bits.

With unit=gemm, under recipes, the units are the GEMMs that `recovers` names and in which the two paths differ. `wgrad`
of a frozen weight is not a unit. The units of an operator share its parameters. A measurement of one GEMM goes to that
GEMM's unit and is 0 for the others. A measurement of the operator (norms, `input_std`) goes to each of its units.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gnmr.conversion.linear import PathLinear
from gnmr.formats.recipes import ExecutionPath
from gnmr.names import GEMMS

_EXPERT = re.compile(r"(?:.*?[._])??experts\.(?:\w+_)?(\d+)(?=\.|$)")
"""Start of an expert operator's name, up to the expert's number."""
_OF_ATTENTION = re.compile(
    r"w?(?:[qkvo]|qkv|kqv)|(?:[qkvo]|qkv|kqv|out|in)_?proj|c_attn|query|key|value|query_key_value"
)
_OF_MLP = ("intermediate", "output")
"""BERT's modules next to its `attention`."""
_LACKING = {
    "expert": "no operator is part of an expert (experts.5.up_proj)",
    "layer": "no operator lies in a numbered block (layers.3.mlp.up_proj)",
    "block": "no operator lies in a numbered block (layers.3.mlp.up_proj)",
}
_INSIDE = "_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"^(?:(?:module|{_INSIDE})\.)+|(?<=\.)(?:{_INSIDE})\.")
"""Parts that DistributedDataParallel, torch.compile, checkpoint_wrapper and FSDP add to names."""
_BASE_LAYERS = re.compile(r"(?:\.base_layer|\.modules_to_save\.[^.]+)+(?=\.|$)")
"""Parts that peft adds: after the name of a linear or of a module that it trains, or before the name of an expert."""


@dataclass(frozen=True, eq=False)
class PathUnit:
    """Operators that are on one path at all times, or one GEMM of an operator."""

    name: str
    operators: tuple[PathLinear, ...]
    gemm: str | None = None
    """The routed GEMM; None: the operators as a whole."""

    @property
    def routable(self) -> bool:
        """Whether one of its operators can be routed; for a GEMM, whether it is not pinned."""
        return any(
            operator.routable and (self.gemm is None or self.gemm in operator.gemms) for operator in self.operators
        )

    def switch(self, recovering: bool) -> None:
        """Put all operators of the unit, or its one GEMM, on one path for later forward passes.

        Args:
            recovering: the recovery path (True) or the low-cost path.
        """
        for operator in self.operators:
            operator.switch(recovering, self.gemm)

    def path_of(self, operator: PathLinear) -> ExecutionPath:
        """Return the path of an operator of the unit if this unit alone is on the recovery path.

        Returns: a format or a recipe, a mixture for a unit of one GEMM.
        """
        return operator.path_of(frozenset(GEMMS if self.gemm is None else {self.gemm} & {*operator.gemms}))


def module_of(unit: str) -> str:
    """Return the module that a unit is or is part of.

    >>> module_of("layers.3.mlp.up_proj:fprop"), module_of("layers.3.mlp")
    ('layers.3.mlp.up_proj', 'layers.3.mlp')

    Returns: the dotted name, without the GEMM.
    """
    module, _, gemm = unit.rpartition(":")
    return module if gemm in GEMMS else unit


def unit_of(name: str, unit: str) -> str:
    """Return the unit to which an operator belongs.

    Args:
        name: the operator's name, without the parts of wrappers (`operator_names`).
        unit: the kind of unit, gemm, operator, expert, layer or block; for gemm the operator is returned.

    >>> unit_of("layers.3.mlp.experts.5.up", "expert"), unit_of("lm_head", "block")
    ('layers.3.mlp.experts.5', 'lm_head')
    """
    return _unit_of(name, unit) or name


def _unit_of(name: str, unit: str) -> str | None:
    """Return the same, or None if the operator is part of no such unit and therefore a unit alone."""
    if unit == "expert":
        # The name up to the expert's number.
        match = _EXPERT.match(name)
        return None if match is None else match[0]
    if unit == "layer":
        return layer_of(name)
    if unit == "block":
        # nn.Sequential(nn.Linear, ...): a numbered linear is a block.
        stands_for_block = name.rpartition(".")[2].isdigit()
        return block_of(name) or (name if stands_for_block else None)
    return name


def of_any_expert(name: str) -> str:
    """Return the name of an operator with * for the number of its expert.

    >>> of_any_expert("layers.0.mlp.experts.5.up_proj"), of_any_expert("layers.0.mlp.gate_proj")
    ('layers.0.mlp.experts.*.up_proj', 'layers.0.mlp.gate_proj')

    Returns: a pattern; the name itself if it is part of no expert.
    """
    match = _EXPERT.match(name)
    return name if match is None else f"{name[: match.start(1)]}*{name[match.end(1) :]}"


def block_of(name: str) -> str | None:
    """Return the block that an operator is a part of; None: it is outside of any.

    >>> block_of("decoder.block.3.layer.0.SelfAttention.q"), block_of("swin.layers.0.blocks.1.output.dense")
    ('decoder.block.3', 'swin.layers.0.blocks.1')
    >>> block_of("encoder.layers.encoder_layer_3.mlp.0"), block_of("lm_heads.0")
    ('encoder.layers.encoder_layer_3', None)
    """
    words = name.split(".")
    for numbered in (r"\d+", r"\w+_\d+"):
        indices = [i for i, word in enumerate(words[:-1]) if re.fullmatch(numbered, word)]
        # A number after "block" is a block's, else one after "layer", else one after a word, else the first.
        for containers in (("block", "blocks"), ("layer", "layers", "h")):
            in_container = [i for i in indices if i and words[i - 1] in containers]
            indices = in_container[:1] or indices
        after_word = [i for i in indices if i and not words[i - 1].isdigit()]
        if indices:
            return ".".join(words[: (after_word or indices)[0] + 1])
    return None


def layer_of(name: str) -> str | None:
    """Return the attention, MLP or other layer that an operator is a part of; None: it is outside of any block.

    >>> layer_of("decoder.block.3.layer.0.SelfAttention.q"), layer_of("layers.3.fc1"), layer_of("layers.3.mlp.gate")
    ('decoder.block.3.layer.0', 'layers.3.mlp', 'layers.3.mlp')
    """
    if (block := block_of(name)) is None:
        return None
    child, *inner = name.removeprefix(f"{block}.").split(".")
    # A linear that the block holds directly.
    if not inner and not child.isdigit():
        return f"{block}.{'attention' if _OF_ATTENTION.fullmatch(child) else 'mlp'}"
    # T5 numbers the layers within a block.
    if child in ("layer", "layers") and inner and inner[0].isdigit():
        child = f"{child}.{inner[0]}"
    return f"{block}.{'mlp' if child in _OF_MLP else child}"


def unwrapped(name: str) -> str:
    """Return a dotted name without what wrappers of modules add to it.

    >>> unwrapped("module.layers.3._checkpoint_wrapped_module.attention.wo")
    'layers.3.attention.wo'

    Returns: the name without parts of DDP, FSDP, torch.compile and checkpoint_wrapper; those of peft stay.
    """
    return _WRAPPERS.sub("", name)


def operator_names(names: Sequence[str]) -> list[str]:
    """Return the operators' names without the parts that wrappers add, so that units keep their names.

    The wrappers are peft, DistributedDataParallel, torch.compile and activation checkpointing.

    >>> operator_names(["base_model.model.model.layers.3.self_attn.q_proj.base_layer", "lm_head"])
    ['model.layers.3.self_attn.q_proj', 'lm_head']
    >>> operator_names(["module._orig_mod.layers.3.self_attn.q_proj"])
    ['layers.3.self_attn.q_proj']
    >>> operator_names(["experts.base_layer.base_layer.0.up", "experts.base_layer.lora_A", "experts.lora_A"])
    ['experts.0.up', 'experts.base_layer.lora_A', 'experts.lora_A']
    >>> operator_names(["module._orig_mod.layers.3.self_attn.q_proj", "layers.3.mlp.modules_to_save.default.up_proj"])
    ['layers.3.self_attn.q_proj', 'layers.3.mlp.up_proj']

    Returns: as many names, in the same order. Operators that would get one name keep their parts, as adapters of two
    nested wrappers do.
    """
    # peft's own prefix first, then the parts within names.
    short = [_BASE_LAYERS.sub("", unwrapped(name).removeprefix("base_model.model.")) for name in names]
    uses = Counter(short)
    return [short_name if uses[short_name] == 1 else name for short_name, name in zip(short, names, strict=True)]


def check_unit(names: Sequence[str], unit: str) -> None:
    """Raise ValueError if none of these names belongs to a unit of this kind."""
    # Single operators outside of such units are fine, but a model without any is a mistake.
    if all(_unit_of(name, unit) is None for name in names):
        raise ValueError(f"unit={unit!r}: {_LACKING[unit]}; they are {', '.join(names[:2])} ...")


def grouped(operators: Sequence[PathLinear], unit: str, routed: Sequence[str] = ()) -> list[PathUnit]:
    """Return the units, in the order of their first operators.

    Args:
        operators: all converted operators.
        unit: the kind of unit.
        routed: for unit=gemm, the GEMMs that are units; a pinned one is only monitored.
    """
    # A pinned GEMM is a unit too: its measurements are recorded, although it is never routed.
    if unit == "gemm":
        return [
            PathUnit(f"{operator.operator_name}:{gemm}", (operator,), gemm)
            for operator in operators
            for gemm in routed
            if gemm in operator.gemms or gemm in operator.pinned
        ]
    members: dict[str, list[PathLinear]] = {}
    for operator in operators:
        members.setdefault(unit_of(operator.operator_name, unit), []).append(operator)
    return [PathUnit(name, tuple(unit_operators)) for name, unit_operators in members.items()]
