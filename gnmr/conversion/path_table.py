"""The converted model as a table for display: which operators are on which paths."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnmr.conversion.int8 import Int8Linear
from gnmr.conversion.linear import PathLinear
from gnmr.formats.recipes import described
from gnmr.names import GEMMS

if TYPE_CHECKING:
    from gnmr.conversion.converted import ConvertedModel


def rows(model: ConvertedModel) -> list[tuple[str, str, str, str]]:
    """Return rows (unit, operator, low path, recovery path); layers that differ only by their number share a row.

    Pinned layers are listed under their numbers.
    """
    model.check_converted()
    groups: dict[tuple[str, ...], list[PathLinear]] = {}
    for operator in model.operators:
        shape = f"{operator.kind} {operator.in_features} -> {operator.out_features}"
        row = re.sub(r"\b\d+\b", "*", operator.operator_name), shape, *_paths_of(operator, model)
        groups.setdefault(row, []).append(operator)
    kind = "units" if len(model.units) == len(model.operators) else "operators"
    found = []
    for (pattern, shape, low, recovery), own in groups.items():
        names = [operator.operator_name for operator in own]
        several = f"{_numbered(pattern, names) if own[0].pinned else pattern}  ({len(names)} {kind})"
        found.append((names[0] if len(names) == 1 else several, shape, low, recovery))
    return found


def as_text(model: ConvertedModel) -> str:
    """Return the table with its notes; `str(model)`."""
    table = [("unit", "operator", "low path", "recovery path"), *rows(model)]
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip() for r in table]
    return "\n".join([*lines, *_notes(model)])


def brief(model: ConvertedModel) -> str:
    """Return the same for a narrow terminal: operators listed below their paths."""
    told: dict[str, list[str]] = {}
    for name, _, low, recovery in rows(model):
        told.setdefault(f"low path {low}, recovery path {recovery}:", []).append(f"  {name}")
    lines = [line for paths, names in told.items() for line in (paths, *names)]
    return "\n".join([*lines, *_notes(model)])


def _paths_of(operator: PathLinear, model: ConvertedModel) -> tuple[str, str]:
    low, recovery = described(model.low), operator.recovery
    if operator.pinned == GEMMS:
        low = f"{described(operator.low)} (pinned)"
    elif operator.pinned:
        low += f"; {operator.low.name} (pinned)"
    if recovery is None:
        return low, "none (static)"
    return low, "none (pinned)" if operator.pinned and not operator.routable else described(recovery)


def _notes(model: ConvertedModel) -> list[str]:
    operators, units = model.operators, model.units
    lines = [] if model.cost.work is None else [*model.cost.work.notes]
    if units and len(units) != len(operators):
        lines.append(f"{len(units)} units of {len(operators)} operators: {units[0].name} ... {units[-1].name}")
    if pinned := sum(len(operator.pinned) for operator in operators):
        share = model.cost.pinned_share()
        lines.append(f"pinned: {pinned} of {3 * len(operators)} GEMMs, {share:.1%} of their arithmetic")
    if isinstance(operators[0], Int8Linear):
        (own, codes), weights = model.cost.weight_bytes(), operators[0].weights
        lines.append(f"weights {weights}: {own:,} bytes in their own dtype, {codes:,} of INT8 codes and scales")
        if weights == "instead":
            lines.append("the recovery path and evaluation read codes times scale: W8A16, not the 16-bit weights")
    return lines


def _numbered(pattern: str, names: Sequence[str]) -> str:
    """Return the pattern with numbers for stars, layers.{0,3}.mlp.down_proj, unless other names would match."""
    numbers = [list(dict.fromkeys(at)) for at in zip(*(re.findall(r"\b\d+\b", name) for name in names), strict=True)]
    if math.prod(map(len, numbers)) != len(names):
        return pattern
    for own in numbers:
        pattern = pattern.replace("*", own[0] if len(own) == 1 else f"{{{','.join(own)}}}", 1)
    return pattern
