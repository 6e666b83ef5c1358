"""What of a model changes its path together: the recoverable units, by the operators' names.

    gemm        one GEMM of an operator                            layers.3.mlp.experts.5.up_proj:fprop
    operator    each operator by itself                            layers.3.mlp.experts.5.up_proj
    expert      all of one expert; other operators by themselves   layers.3.mlp.experts.5
    layer       an attention, or an MLP with all its experts       layers.3.mlp
    block       all of a transformer block                         layers.3

A block is found by the first number in a name; what lies outside of any block (a converted head) is a unit by itself.
Mixed precision within a block can be inconsistent, so the paper's recipes (5.2) move whole blocks. A unit holds its
converted operators only. The paper says only that a unit is a block; here what is routed is what is
watched, so norms are not over a block's norms or a gate, which stay in 16 bits.

With unit=gemm, under recipes, the units are the GEMMs that `recovers` names and in which the two paths differ; `wgrad`
of a frozen weight is none. The units of an operator share its parameters. What is measured of an operator's own GEMM
goes to that GEMM's unit and is 0 for the others; what is measured of the operator (norms, `input_std`) goes to each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnmr.names import GEMMS
from gnmr.precision.linear import PathLinear
from gnmr.precision.recipes import ExecutionPath

_NAMES = {
    "gemm": r".*",
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
_WRAPPERS = re.compile(
    r"^(?:(?:module|_orig_mod|_checkpoint_wrapped_module)\.)+|(?<=\.)(?:_orig_mod|_checkpoint_wrapped_module)\."
)
"""What DistributedDataParallel, torch.compile and checkpoint_wrapper put into names."""


@dataclass(frozen=True, eq=False)
class PathUnit:
    """Operators that are on one path at all times, or one GEMM of an operator."""

    name: str
    operators: tuple[PathLinear, ...]
    gemm: str | None = None
    """The only one that is routed; None: the operators as a whole."""

    @property
    def routable(self) -> bool:
        """Whether one of its operators is; of a GEMM whether it is not pinned."""
        return any(
            operator.routable and (self.gemm is None or self.gemm in operator.gemms) for operator in self.operators
        )

    def switch(self, recovering: bool) -> None:
        """Puts all of them on the recovery (True) or low-cost path."""
        for operator in self.operators:
            operator.switch(recovering, self.gemm)

    def path_of(self, operator: PathLinear) -> ExecutionPath:
        """The format or recipe of one of its operators while this unit alone is on the recovery path."""
        return operator.path_of(frozenset(GEMMS if self.gemm is None else {self.gemm} & {*operator.gemms}))


def module_of(unit: str) -> str:
    """The name of the module that a unit is or is part of.

    >>> module_of("layers.3.mlp.up_proj:fprop"), module_of("layers.3.mlp")
    ('layers.3.mlp.up_proj', 'layers.3.mlp')
    """
    module, _, gemm = unit.rpartition(":")
    return module if gemm in GEMMS else unit


def unit_of(name: str, unit: str) -> str:
    """Return the unit of that kind to which the operator of this name belongs; of gemm the operator."""
    found = re.match(_NAMES[unit], name)
    return name if found is None else found[0]


def unwrapped(name: str) -> str:
    """The name without what wrappers of modules add to it.

    >>> unwrapped("module.layers.3._checkpoint_wrapped_module.attention.wo")
    'layers.3.attention.wo'
    """
    return _WRAPPERS.sub("", name)


def operator_names(names: Sequence[str]) -> list[str]:
    """The operators' names without what wrappers add to them (peft, DistributedDataParallel, torch.compile, activation
    checkpointing): units are called alike before and after.

    >>> operator_names(["base_model.model.model.layers.3.self_attn.q_proj.base_layer", "lm_head"])
    ['model.layers.3.self_attn.q_proj', 'lm_head']
    >>> operator_names(["module._orig_mod.layers.3.self_attn.q_proj"])
    ['layers.3.self_attn.q_proj']
    """
    short = [unwrapped(name).removeprefix("base_model.model.").removesuffix(".base_layer") for name in names]
    return short if len(set(short)) == len(short) else list(names)


def check_unit(names: Sequence[str], unit: str) -> None:
    """ValueError for a kind of unit that none of these names belongs to."""
    if not any(re.match(_NAMES[unit], name) for name in names):
        raise ValueError(f"unit={unit!r}: {_LACKING[unit]}; they are {', '.join(names[:2])} ...")


def grouped(operators: Sequence[PathLinear], unit: str, routed: Sequence[str] = ()) -> list[PathUnit]:
    """The units, in the order of their first operators; `routed`: of unit=gemm the GEMMs, of which a pinned one is
    watched alone."""
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
    return [PathUnit(name, tuple(own)) for name, own in members.items()]
