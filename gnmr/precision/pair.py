"""The two paths that a `PathSpec` names, and warnings where they make little sense."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from gnmr.errors import users_level
from gnmr.names import GEMMS, OPERANDS
from gnmr.precision.formats import FORMATS, Format, RangeFormat
from gnmr.precision.recipes import RECIPES, SCALES, ExecutionPath, Recipe
from gnmr.precision.spec import PathSpec


def resolve(spec: PathSpec) -> tuple[ExecutionPath, ExecutionPath | None]:
    """The low and the recovery path, both formats or both recipes; of the recovery recipe only the GEMMs `recovers`.

    Warns of a recovery path that is the low path itself, or coarser in any operand or result: fewer bits, fewer
    significant ones, or the same format under a coarser scale (`gnmr.precision.recipes.SCALES`); and of `recovers` where it
    has no effect.
    """
    some = set(spec.recovers) != set(GEMMS)
    low, recovery = named(spec)
    if spec.recovery is None:
        if some:
            _warn(f"recovers={spec.recovers}: has no effect without a recovery path")
        return low, None
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        recovery = low.with_recovered(recovery, spec.recovers)
    elif some:
        _warn(f"recovers={spec.recovers}: has no effect on formats, which touch wgrad alone")
    if spec.low == spec.recovery:
        _warn(f"the recovery path {spec.recovery} is the low path too: recovery changes nothing")
    elif isinstance(recovery, Recipe) and replace(recovery, name=spec.low) == low:
        what = f"recovers={spec.recovers}: {spec.recovery} has these" if some else f"{spec.recovery} has all GEMMs"
        _warn(f"{what} as {spec.low} has them: recovery changes nothing")
    elif coarser := _coarser(low, recovery):
        _warn(f"the recovery path {spec.recovery} is coarser than the low path {spec.low}{coarser}")
    return low, recovery


def pinned(spec: PathSpec, gemms: Sequence[str]) -> tuple[ExecutionPath, ExecutionPath | None]:
    """The low and the recovery path of an operator whose `gemms` are pinned; bf16 where the spec has no recovery."""
    low, recovery = named(spec)
    static = spec.recovery is None
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        more = [gemm for gemm in GEMMS if gemm in (*gemms, *spec.recovers)]
        return low.with_recovered(recovery, gemms), None if static else low.with_recovered(recovery, more)
    return recovery, None if static else recovery


def named(spec: PathSpec) -> tuple[ExecutionPath, ExecutionPath]:
    """The paths that the spec names, whole; bf16 for a recovery of null."""
    names = spec.low, spec.recovery or "bf16"
    if all(name in FORMATS for name in names):
        low, recovery = (_format(name, spec.group) for name in names)
        return low, recovery
    own = {name: one if isinstance(one, Recipe) else Recipe.of(name, one) for name, one in spec.recipes.items()}
    # What runs a recipe is for `backend` to say.
    ours, theirs = (replace((RECIPES | own)[name], backend="simulated") for name in names)
    return ours, theirs


def _format(name: str, group: int | None) -> Format:
    return FORMATS[name] if group is None or name == "bf16" else RangeFormat.of(name, group)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=users_level())


def _coarser(low: ExecutionPath, recovery: ExecutionPath) -> str:
    """Where `recovery` is coarser than `low`, as the end of a warning; empty: nowhere."""
    if isinstance(low, Format) and isinstance(recovery, Format):
        if recovery.bits < low.bits:
            return f" ({recovery.bits} bits, {low.bits})"
        ours, theirs = recovery.significant_bits, low.significant_bits
        return f" ({ours} significant bits, {theirs})" if ours < theirs else ""

    def coarser(gemm: str, operand: str) -> bool:
        before, after = (getattr(getattr(path, gemm), operand) for path in (low, recovery))
        if before is None or after is None:
            return after is not None
        ours, theirs = after.format, before.format
        if ours == theirs:
            return SCALES.index(after.scale) < SCALES.index(before.scale)
        return ours.bits < theirs.bits or ours.significant_bits < theirs.significant_bits

    # Of GEMMs that are not recovered the casts are the low path's own.
    places = [f"{gemm}.{operand}" for gemm in GEMMS for operand in OPERANDS if coarser(gemm, operand)]
    return f" in {', '.join(places)}" if places else ""
