"""Which operators of a model change their path together: the recoverable units, by the operators' names.

    operator    each operator by itself                            layers.3.mlp.experts.5.up_proj
    expert      all of one expert; other operators by themselves   layers.3.mlp.experts.5
    layer       an attention, or an MLP with all its experts       layers.3.mlp
    block       all of a transformer block                         layers.3

A block is found by the first number in a name, so that `model.layers.3` of another library's model is one too; what
lies outside of any block (a converted head) is a unit by itself. Mixed precision within a block can be inconsistent,
so the paper's recipes (5.2) move whole blocks.

A unit holds its converted operators only: its norms are over their parameters, and not over a block's norms or a gate,
which stay in 16 bits. **Choice**: the paper says only that a unit is a block; here what is routed is what is watched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnmr.paths.linear import PathLinear

_NAMES = {
    "operator": r".*",
    "expert": r"(?:.*?\.)??experts\.\d+(?=\.)",
    "layer": r"(?:.*?\.)??\d+\.[^.]+(?=\.|$)",
    "block": r"(?:.*?\.)??\d+(?=\.|$)",
}
"""The beginning of an operator's name that names its unit."""
_LACKING = {
    "expert": "no operator is part of an expert (experts.5.up_proj)",
    "layer": "no operator lies in a numbered block (layers.3.mlp.up_proj)",
    "block": "no operator lies in a numbered block (layers.3.mlp.up_proj)",
}
_WRAPPERS = r"^(?:(?:module|_orig_mod)\.)+|(?<=\.)_orig_mod\."
"""What DistributedDataParallel and torch.compile put into names."""


@dataclass(frozen=True, eq=False)
class PathUnit:
    """Operators that are on one path at all times."""

    name: str
    operators: tuple[PathLinear, ...]

    @property
    def routable(self) -> bool:
        """Whether one of its operators is."""
        return any(operator.routable for operator in self.operators)

    def switch(self, recovering: bool) -> None:
        """Puts all of them on the recovery (True) or low-cost path."""
        for operator in self.operators:
            operator.switch(recovering)


def unit_of(name: str, unit: str) -> str:
    """The unit of that kind to which the operator of this name belongs.

    >>> unit_of("model.layers.3.mlp.experts.5.up_proj", "block")
    'model.layers.3'
    >>> unit_of("layers.3.mlp.experts.5.up_proj", "layer"), unit_of("layers.3.mlp.experts.5.up_proj", "expert")
    ('layers.3.mlp', 'layers.3.mlp.experts.5')
    >>> unit_of("lm_head", "block")
    'lm_head'
    """
    found = re.match(_NAMES[unit], name)
    return name if found is None else found[0]


def operator_names(names: Sequence[str]) -> list[str]:
    """The operators' names without what wrappers add to them (peft, DistributedDataParallel, torch.compile): units are
    called alike before and after.

    >>> operator_names(["base_model.model.model.layers.3.self_attn.q_proj.base_layer", "lm_head"])
    ['model.layers.3.self_attn.q_proj', 'lm_head']
    >>> operator_names(["module._orig_mod.layers.3.self_attn.q_proj"])
    ['layers.3.self_attn.q_proj']
    """
    short = [
        re.sub(_WRAPPERS, "", name).removeprefix("base_model.model.").removesuffix(".base_layer") for name in names
    ]
    return short if len(set(short)) == len(short) else list(names)


def check_unit(names: Sequence[str], unit: str) -> None:
    """ValueError for a kind of unit that none of these names belongs to."""
    if not any(re.match(_NAMES[unit], name) for name in names):
        raise ValueError(f"unit={unit!r}: {_LACKING[unit]}; they are {', '.join(names[:2])} ...")


def grouped(operators: Sequence[PathLinear], unit: str) -> list[PathUnit]:
    """The units, in the order of their first operators."""
    members: dict[str, list[PathLinear]] = {}
    for operator in operators:
        members.setdefault(unit_of(operator.operator_name, unit), []).append(operator)
    return [PathUnit(name, tuple(own)) for name, own in members.items()]
