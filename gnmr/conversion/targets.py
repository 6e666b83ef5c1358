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
from gnmr.patterns import NameIndex, exact

KEPT = ("head", "router")
"""Roles that recipes leave in 16 bits, from the list of DeepSeek-V3 (2412.19437, section 3.3.1).

That list names embedding, output head, MoE gates, normalization and attention operators.
"""
_HEADS = {"lm_head", "lm_heads"}
_DEFAULT_OUTSIDE = "*_proj"
"""Pattern of the linears outside of blocks that are default targets."""


def roles_of(model: nn.Module, linears: Mapping[str, Any]) -> dict[str, str]:
    """Return the role of each linear; see the module for the roles.

    Args:
        model: the model, perhaps wrapped or with peft's adapters.
        linears: modules or operators with a weight, by the names of modules of `model`.
    """
    modules = dict(model.named_modules())
    tied = tied_to_embeddings(model, linears)
    tables_VD = [module.weight for module in modules.values() if isinstance(module, nn.Embedding)]
    # A table with more columns than rows is no vocabulary (positions of a short context).
    vocabularies = {table.shape[0] for table in tables_VD if table.shape[0] > table.shape[1]}
    # Names without wrappers, so that a wrapped model has the same roles.
    operators = dict(zip(linears, operator_names(list(linears)), strict=True))
    in_block = {name: block_of(operator) is not None for name, operator in operators.items()}
    has_blocks = any(in_block.values())
    roles = {}
    for name, linear in linears.items():
        operator, (outputs, inputs) = operators[name], _shape_OI(linear)
        by_name = role_by_name(operator)
        # peft first: a copied head that does not run is no head.
        if _is_adapter(name, modules):
            role = "adapter"
        elif name in tied or by_name == "head" or (not in_block[name] and outputs in vocabularies):
            role = "head"
        elif (
            by_name == "router"
            or _is_gate(operator, outputs, inputs, modules.get(name.rpartition(".")[0]))
            or _in_router(name, linear, modules)
        ):
            role = "router"
        else:
            role = "outside" if has_blocks and not in_block[name] else ""
        roles[name] = role
    return roles


def role_by_name(name: str) -> str:
    """Return what an operator is, if its dotted name alone says so.

    >>> role_by_name("lm_head"), role_by_name("layers.0.mlp.router.layer"), role_by_name("layers.0.mlp.gate")
    ('head', 'router', '')

    Returns: head, router or an empty string.
    """
    words = name.split(".")
    if _HEADS.intersection(words) or (words[-1] in ("output", "embed_out") and block_of(name) is None):
        return "head"
    return "router" if "router" in words else ""


def tied_to_embeddings(model: nn.Module, linears: Mapping[str, Any]) -> dict[str, str]:
    """Find the linears that share their weight with an embedding.

    Args:
        model: holds the embeddings.
        linears: modules by name; those without a tensor `weight` are passed over.

    Returns:
        {name of a linear: name of its embedding}.
    """
    tables = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tied: dict[str, str] = {}
    for name, linear in linears.items():
        if isinstance(weight := getattr(linear, "weight", None), Tensor):
            # Tied weights may be one parameter, or two parameters in one memory.
            plain: Tensor = getattr(weight, "_data", weight)  # wrappers of torchao
            embedding = next((embedding for embedding, table in tables.items() if _same_memory(table, plain)), None)
            if embedding is not None:
                tied[name] = embedding
    return tied


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if both are one tensor, or two parameters in the same memory."""
    if a is b:
        return True
    if a.is_meta or b.is_meta or type(a) not in (torch.Tensor, nn.Parameter) or a.numel() == 0:
        return False
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()


def _shape_OI(linear: Any) -> tuple[int, int]:
    if isinstance(getattr(linear, "out_features", None), int):
        return linear.out_features, linear.in_features
    outputs, inputs = linear.weight.shape
    return outputs, inputs


def _matching_any(index: NameIndex, key: str, patterns: Sequence[str]) -> set[str]:
    """Return the names that match any pattern. Raises ValueError, which names `key`, if a pattern matches none."""
    names_by_pattern = {pattern: index.matching(pattern) for pattern in patterns}
    if unmatched := [pattern for pattern, names in names_by_pattern.items() if not names]:
        raise ValueError(
            f"{key} {unmatched}: no linear has such a name; this model has {last_parts(index.names)} (other layers "
            "can be declared: gnmr.conversion.adapters.register)"
        )
    return {name for names in names_by_pattern.values() for name in names}


def targeted(
    roles: Mapping[str, str],
    targets: Sequence[str] | None,
    exclude: Sequence[str],
    *,
    recipes: bool,
    other_classes: Sequence[str] = (),
) -> dict[str, bool]:
    """Return the names in `roles` that the targets choose and `exclude` does not.

    Args:
        roles: role by name.
        targets: patterns; None: the default (see the module).
        exclude: patterns of names to leave out.
        recipes: whether heads and routers are skipped, whatever pattern names them.
        other_classes: classes of other modules with matrices, for messages.

    Returns:
        For each chosen name, whether a pattern without * and ? names it.

    Raises:
        ValueError: if a pattern matches no linear, or only skipped ones, or if no linear is left.
    """
    # Patterns match units or modules: peft's `q_proj` and `q_proj.base_layer` are one linear.
    operators = dict(zip(roles, operator_names(list(roles)), strict=True))
    index = NameIndex(roles, operators)
    excluded = _matching_any(index, "exclude", exclude)
    chosen: dict[str, bool] = {}
    if targets is None:
        chosen = dict.fromkeys(_default(index, roles, operators), False)
    else:
        _matching_any(index, "targets", targets)
        skipped_patterns = []
        for pattern in targets:
            matching = [name for name in index.matching(pattern) if not (recipes and roles[name] in KEPT)]
            # A pattern that names only heads and routers is a mistake; one that names others too is not.
            if not matching:
                skipped_patterns.append(pattern)
            only_adapters = all(roles[name] == "adapter" for name in matching)  # else * means the adapted linears
            for name in matching:
                if only_adapters or roles[name] != "adapter":
                    chosen[name] = chosen.get(name, False) or exact(pattern)
        if skipped_patterns:
            heads = last_parts(_matching_any(index, "targets", skipped_patterns))
            raise ValueError(
                f"targets {skipped_patterns}: recipes keep {heads} in 16 bits (output head and gates); name others"
            )
    chosen = {name: chosen[name] for name in roles if name in chosen and name not in excluded}
    if not chosen:
        key = f"exclude {list(exclude)}" if exclude else "targets"
        examples = f", as {', '.join(other_classes)} of this model" if other_classes else ""
        raise ValueError(
            f"{key}: no linear is left to convert; this model has {last_parts(roles)}, of which output heads, routers "
            f"and adapters stay in 16 bits (other layers can be declared{examples}: gnmr.conversion.adapters.register)"
        )
    return chosen


def _default(index: NameIndex, roles: Mapping[str, str], operators: Mapping[str, str]) -> list[str]:
    candidates = [name for name, role in roles.items() if role in ("", "outside")]
    has_blocks = "outside" in roles.values() or any(block_of(operators[name]) is not None for name in candidates)
    # Linears of the blocks, and *_proj elsewhere; without blocks and *_proj, all.
    by_pattern = {*index.matching(_DEFAULT_OUTSIDE)}
    chosen = [name for name in candidates if name in by_pattern or (has_blocks and roles[name] == "")]
    return chosen or candidates


def other_matrix_classes(model: nn.Module, linears: Mapping[str, Any]) -> list[str]:
    """Return the classes of modules with matrices that are neither linears nor embeddings."""
    linear_modules = {linear.module for linear in linears.values()}
    names = {
        type(module).__name__
        for module in model.modules()
        if module not in linear_modules and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    return sorted(name for name in names if "Embedding" not in name)


def last_parts(names: Iterable[str]) -> str:
    """Return the last parts of the names, for a message."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"


def _is_gate(operator: str, outputs: int, inputs: int, parent: nn.Module | None) -> bool:
    """Return whether the linear is the gate of a mixture or of its shared expert; the gate of an MLP is wide."""
    words, narrow = operator.split("."), 2 * outputs <= inputs
    if "gate" in words[-2:]:
        return narrow or (words[-1] == "gate" and hasattr(parent, "experts"))
    return narrow and words[-1] == "shared_expert_gate"


def _in_router(name: str, linear: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the linear is, or lies in, a module with Router in its class or a gate next to experts."""
    for path in (name, *_enclosing(name)):
        module = linear if path == name else modules.get(path)
        parent, _, leaf = path.rpartition(".")
        # A gate that is an MLP is a router as a whole if experts are its siblings.
        if leaf == "gate" and path != name and hasattr(modules.get(parent), "experts"):
            return True
        if "Router" in type(module).__name__ and not hasattr(module, "experts") and "." in path:
            return True
    return False


def _is_adapter(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether peft holds the linear beside another that runs.

    It lies in a module that has a base_layer, but not in that base_layer; or in a module that `modules_to_save` copies,
    but not in the active copy.
    """
    for path in _enclosing(name):
        if f"{path}.base_layer" in modules and not f"{name}.".startswith(f"{path}.base_layer."):
            return True
        if f"{path}.modules_to_save" in modules:
            # Of `modules_to_save`, the active copy runs in place of the original.
            active = getattr(modules[path], "active_adapters", None) or ["default"]
            if not any(f"{name}.".startswith(f"{path}.modules_to_save.{adapter}.") for adapter in active):
                return True
    return False


def _enclosing(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the outermost first."""
    words = name.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))
