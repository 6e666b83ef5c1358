"""Choice of the linears that get two paths: one rule for `attach`, `diagnose` and `audit`.

Every linear has a role, which its name, its widths and its place in the model decide:

    head       an output head: tied to an embedding, called lm_head, or outside of the blocks with as many outputs as an
               embedding has rows
    router     chooses experts: called router, or a gate that is narrow or a sibling of experts; and all linears of a
               module that is called router or has Router in its class, or that is a gate next to experts
    adapter    a part of one of peft's adapters, next to its base_layer, or the original of a module that peft trains
    outside    any other linear that is not in a numbered block, in a model that has such blocks
    ""         a linear of a block, and any other linear of a model without blocks

The default targets are the linears of the blocks, and outside of the blocks those that are called `*_proj`. In a model
without blocks they are those that are called `*_proj`, or all linears if there are none. Heads, routers and adapters
are never among them. Recipes skip heads and routers, whatever pattern names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.conversion.unit_names import block_of, operator_names
from gnmr.patterns import ends_of, exact, matches

KEPT = ("head", "router")
"""Roles that recipes leave in 16 bits, from the list of DeepSeek-V3 (2412.19437, section 3.3.1).

That list names embedding, output head, MoE gates, normalization and attention operators.
"""
_HEADS = ("lm_head", "lm_heads")
USUAL = "*_proj"
"""Pattern of the linears outside of blocks that are default targets."""


def roles_of(model: nn.Module, linears: Mapping[str, Any]) -> dict[str, str]:
    """Return the role of each of these linears of `model`, by the names of its modules."""
    modules = dict(model.named_modules())
    tied = tied_to_embeddings(model, linears)
    tables = [module.weight for module in modules.values() if isinstance(module, nn.Embedding)]
    vocabularies = {weight.shape[0] for weight in tables if weight.shape[0] > weight.shape[1]}
    short = dict(zip(linears, operator_names(list(linears)), strict=True))
    inside = {name: block_of(one) is not None for name, one in short.items()}
    blocks = any(inside.values())
    found = {}
    for name, linear in linears.items():
        outputs, inputs = widths(linear)
        parts, parent = short[name].split("."), modules.get(name.rpartition(".")[0])
        if _is_adapter(name, modules):
            role = "adapter"
        elif name in tied or role_by_name(short[name]) == "head" or (not inside[name] and outputs in vocabularies):
            role = "head"
        elif (
            role_by_name(short[name]) == "router"
            or _is_gate(parts, outputs, inputs, parent)
            or _in_router(name, linear, modules)
        ):
            role = "router"
        else:
            role = "outside" if blocks and not inside[name] else ""
        found[name] = role
    return found


def role_by_name(name: str) -> str:
    """Return head or router if the name of an operator alone says so, else nothing.

    >>> role_by_name("lm_head"), role_by_name("layers.0.mlp.router.layer"), role_by_name("layers.0.mlp.gate")
    ('head', 'router', '')
    """
    parts = name.split(".")
    if set(parts) & {*_HEADS} or (block_of(name) is None and parts[-1] in ("output", "embed_out")):
        return "head"
    return "router" if "router" in parts else ""


def tied_to_embeddings(model: nn.Module, linears: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each of these linears that shares its weight with an embedding, the embedding's name."""
    embeddings = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    found: dict[str, str] = {}
    for name, linear in linears.items():
        if isinstance(weight := getattr(linear, "weight", None), Tensor):
            plain: Tensor = getattr(weight, "_data", weight)  # wrappers of torchao
            if first := next((key for key, table in embeddings.items() if same_memory(table, plain)), ""):
                found[name] = first
    return found


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if both are one tensor, or two parameters in the same memory."""
    if a is b:
        return True
    if a.is_meta or b.is_meta or type(a) not in (torch.Tensor, nn.Parameter) or a.numel() == 0:
        return False
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()


def widths(linear: Any) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    if isinstance(getattr(linear, "out_features", None), int):
        return linear.out_features, linear.in_features
    outputs, inputs = linear.weight.shape
    return outputs, inputs


class Matching:
    """Names of linears, matched by unit or module name: peft's `q_proj` and `q_proj.base_layer` are one linear."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.called = dict(zip(self.names, operator_names(self.names), strict=True))
        self._ends: dict[str, dict[str, None]] = {}  # a list may name each of thousands of experts
        for both in self.called.items():
            for end in (end for name in both for end in ends_of(name)):
                self._ends.setdefault(end, {})[both[0]] = None

    def of(self, pattern: str) -> list[str]:
        """Return the names that match the pattern."""
        if exact(pattern):
            return list(self._ends.get(pattern, ()))
        return [name for name, short in self.called.items() if matches(name, pattern) or matches(short, pattern)]

    def of_all(self, key: str, patterns: Sequence[str]) -> set[str]:
        """Return the names that match any pattern. Raises ValueError, which names `key`, if a pattern matches none."""
        found = {pattern: self.of(pattern) for pattern in patterns}
        if empty := [pattern for pattern, own in found.items() if not own]:
            raise ValueError(
                f"{key} {empty}: no linear has such a name; this model has {kinds(self.names)} (other layers "
                "can be declared: gnmr.conversion.adapters.register)"
            )
        return {name for own in found.values() for name in own}


def targeted(
    roles: Mapping[str, str],
    targets: Sequence[str] | None,
    exclude: Sequence[str],
    *,
    recipes: bool,
    others: Sequence[str] = (),
) -> dict[str, bool]:
    """Return the names in `roles` that the targets choose and `exclude` does not.

    The value of each name says whether a pattern without * and ? names it.

    Args:
        roles: role by name.
        targets: patterns; None: the default (see the module).
        exclude: patterns of names to leave out.
        recipes: whether heads and routers are skipped, whatever pattern names them.
        others: classes of other modules with matrices, for messages.

    Raises:
        ValueError: if a pattern matches no linear, or only skipped ones, or if no linear is left.
    """
    names = Matching(roles)
    out = names.of_all("exclude", exclude)
    if targets is None:
        chosen = dict.fromkeys(_default(names, roles), False)
    else:
        names.of_all("targets", targets)
        chosen, kept = {}, []
        for pattern in targets:
            own = [name for name in names.of(pattern) if not (recipes and roles[name] in KEPT)]
            kept += [] if own else [pattern]
            adapters = all(roles[name] == "adapter" for name in own)  # else * means the adapted linears
            for name in own:
                if adapters or roles[name] != "adapter":
                    chosen[name] = chosen.get(name, False) or exact(pattern)
        if kept:
            heads = kinds(names.of_all("targets", kept))
            raise ValueError(f"targets {kept}: recipes keep {heads} in 16 bits (output head and gates); name others")
    if not (chosen := {name: chosen[name] for name in roles if name in chosen and name not in out}):
        key = f"exclude {list(exclude)}" if exclude else "targets"
        there = f", as {', '.join(others)} of this model" if others else ""
        raise ValueError(
            f"{key}: no linear is left to convert; this model has {kinds(roles)}, of which output heads, routers and "
            f"adapters stay in 16 bits (other layers can be declared{there}: gnmr.conversion.adapters.register)"
        )
    return chosen


def _default(names: Matching, roles: Mapping[str, str]) -> list[str]:
    some = [name for name, role in roles.items() if role in ("", "outside")]
    blocks = "outside" in roles.values() or any(block_of(names.called[name]) is not None for name in some)
    usual = {*names.of(USUAL)}
    found = [name for name in some if name in usual or (blocks and roles[name] == "")]
    return found or some


def others_in(model: nn.Module, linears: Mapping[str, Any]) -> list[str]:
    """Return the classes of modules with matrices that are neither linears nor embeddings."""
    known = {linear.module for linear in linears.values()}
    found = {
        type(module).__name__
        for module in model.modules()
        if module not in known and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    return sorted(name for name in found if "Embedding" not in name)


def kinds(names: Iterable[str]) -> str:
    """Return the last parts of the names, for a message."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"


def _is_gate(parts: Sequence[str], outputs: int, inputs: int, parent: nn.Module | None) -> bool:
    """Return whether the linear is the gate of a mixture or of its shared expert; the gate of an MLP is wide."""
    narrow = 2 * outputs <= inputs
    if "gate" in parts[-2:]:
        return narrow or (parts[-1] == "gate" and hasattr(parent, "experts"))
    return narrow and parts[-1] == "shared_expert_gate"


def _in_router(name: str, linear: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the linear is, or lies in, a module with Router in its class or a gate next to experts."""
    for around in (name, *_around(name)):
        module = linear if around == name else modules.get(around)
        parent, _, leaf = around.rpartition(".")
        gate = leaf == "gate" and around != name and hasattr(modules.get(parent), "experts")
        if gate or ("Router" in type(module).__name__ and not hasattr(module, "experts") and "." in around):
            return True
    return False


def _is_adapter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether peft holds the linear beside another that runs.

    It lies in a module that has a base_layer, but not in that base_layer; or in a module that `modules_to_save` copies,
    but not in the active copy.
    """
    for around in _around(name):
        if f"{around}.base_layer" in modules and not f"{name}.".startswith(f"{around}.base_layer."):
            return True
        if f"{around}.modules_to_save" in modules:
            active = getattr(modules[around], "active_adapters", None) or ["default"]
            if not any(f"{name}.".startswith(f"{around}.modules_to_save.{adapter}.") for adapter in active):
                return True
    return False


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
