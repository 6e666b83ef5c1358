"""Resolve the paths of a `PathSpec`, and the backend that runs them.

simulated    Operands are rounded to the format's values, and GEMMs run in the tensors' own dtype
             (`kernels/simulated.py`). Runs on any device.
scaled_mm    `torch._scaled_mm` and `F.scaled_mm` on operands of one byte (`kernels/scaled_mm.py`). Needs a GPU of
             compute capability 8.9 or newer (Ada, Hopper, Blackwell); tiles and blocks need Hopper. CPUs have the
             first function too, without a gain in speed, which is useful for tests.
int_mm       `torch._int_mm`, for recipes that multiply integers (`int8.py`).
auto         A hardware backend if device, recipe and widths allow it, else simulated; the printed model says which.
             Warns of the simulation on GPUs, or if the model is not printed (except for sim_ recipes).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations

import torch

from gnmr.conversion import int8
from gnmr.conversion.kernels import scaled_mm
from gnmr.conversion.path_spec import PathSpec
from gnmr.conversion.shared import Widths
from gnmr.errors import warn
from gnmr.formats.number_formats import FORMATS, Format, RangeFormat
from gnmr.formats.recipes import RECIPES, SCALES, ExecutionPath, Recipe
from gnmr.names import GEMMS, OPERANDS

Pair = tuple[ExecutionPath, ExecutionPath | None]
"""The low and the recovery path."""


def resolve(spec: PathSpec) -> Pair:
    """Return the low and the recovery path, both formats or both recipes.

    The recovery recipe applies to the GEMMs in `recovers` only. Warns if the recovery path equals the low path or is
    coarser in any operand or result. Coarser means fewer bits, fewer significant bits, or the same format with a
    coarser scale. Warns also if `recovers` has no effect.
    """
    some = set(spec.recovers) != set(GEMMS)
    low, recovery = named(spec)
    if spec.recovery is None:
        if some:
            warn(f"recovers={spec.recovers}: has no effect without a recovery path")
        return low, None
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        recovery = low.with_gemms(dict.fromkeys(spec.recovers, recovery))
    elif some:
        warn(f"recovers={spec.recovers}: has no effect on formats, which touch wgrad alone")
    if spec.low == spec.recovery:
        warn(f"the recovery path {spec.recovery} is the low path too: recovery changes nothing")
    elif isinstance(recovery, Recipe) and replace(recovery, name=spec.low) == low:
        what = f"recovers={spec.recovers}: {spec.recovery} has these" if some else f"{spec.recovery} has all GEMMs"
        warn(f"{what} as {spec.low} has them: recovery changes nothing")
    elif coarser := _coarser(low, recovery):
        warn(f"the recovery path {spec.recovery} is coarser than the low path {spec.low}{coarser}")
    return low, recovery


def pinned(spec: PathSpec, pins: Mapping[str, str]) -> Pair:
    """Return the low and the recovery path of an operator with these pins, {gemm: recipe}, which apply on both."""
    low, recovery = named(spec)
    static = spec.recovery is None
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        known = recipes_of(spec)
        own = {gemm: known[name] for gemm, name in pins.items()}
        recovered = dict.fromkeys(spec.recovers, recovery) | own
        return low.with_gemms(own), None if static else low.with_gemms(recovered)
    return recovery, None if static else recovery


def named(spec: PathSpec) -> tuple[ExecutionPath, ExecutionPath]:
    """Return the paths that the spec names, unmixed; bf16 if recovery is null."""
    names = spec.low, spec.recovery or "bf16"
    if all(name in FORMATS for name in names):
        low, recovery = (_format(name, spec.group) for name in names)
        return low, recovery
    known = recipes_of(spec)
    return known[names[0]], known[names[1]]


def recipes_of(spec: PathSpec) -> dict[str, Recipe]:
    """Return all recipes that the spec may name: the built-in ones and its own."""
    own = {name: one if isinstance(one, Recipe) else Recipe.of(name, one) for name, one in spec.recipes.items()}
    # `backend`, not the recipe, decides what runs it.
    return RECIPES | {name: replace(one, backend="simulated") for name, one in own.items()}


def _format(name: str, group: int | None) -> Format:
    return FORMATS[name] if group is None or name == "bf16" else RangeFormat.of(name, group)


def _coarser(low: ExecutionPath, recovery: ExecutionPath) -> str:
    """Return the places in which `recovery` is coarser than `low`, as the end of a warning; empty if there are none."""
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

    # In GEMMs that are not recovered, the casts are the low path's own.
    places = [f"{gemm}.{operand}" for gemm in GEMMS for operand in OPERANDS if coarser(gemm, operand)]
    return f" in {', '.join(places)}" if places else ""


def with_backend(
    recipe: Recipe, backend: str, linears: Mapping[str, Widths], device: torch.device, shown: bool = True
) -> Recipe:
    """Return the recipe as `backend` will run it in these linears on `device`. Raises ValueError if it cannot.

    If this machine does not have the GPU, the GPU is assumed to run integers, and to have FP8 if `backend` says so. The
    first trial of integers on a device waits for it. `shown`: see `gnmr.conversion.converting`.
    """
    if backend == "simulated" or not recipe.casts:
        return recipe
    auto, kind, instead = backend == "auto", backend, "auto"
    if auto:
        kind = "int_mm" if recipe.integer else "scaled_mm"
    if kind == "int_mm":
        missing = int8.missing(recipe, linears, device)
        instead = "simulated" if recipe.integer else "auto"
    else:
        elsewhere = device.type == "cuda" and not torch.cuda.is_available()
        here = torch.device("cpu") if elsewhere else device
        # A GPU of another machine is assumed to have FP8 if scaled_mm was requested.
        missing = scaled_mm.missing(recipe, linears, None if elsewhere and not auto else here, auto)
    if missing is None:
        return replace(recipe, backend=kind)
    if not auto:
        raise ValueError(f"backend={backend!r}: {missing}; use backend={instead!r}")
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if (on_gpu or not shown) and not recipe.name.startswith("sim_"):
        warn(f"recipe {recipe.name} is simulated: {missing}")
    return recipe


def as_run(
    linears: Mapping[ExecutionPath, Mapping[str, Widths]],
    unpinned: Pair,
    spec: PathSpec,
    device: torch.device,
    shown: bool,
) -> dict[ExecutionPath, ExecutionPath]:
    """Return each path as it will run in its linears on `device`.

    Only paths of `unpinned`, the operators without pins, warn of a simulation that was not asked for.
    """
    run: dict[ExecutionPath, ExecutionPath] = {}
    for asked, own in linears.items():
        run[asked] = path = asked
        if isinstance(path, Recipe):
            if spec.outlier_threshold is not None and path.integer and path.fprop.input is not None:
                outliers = replace(path.fprop.input, outliers=spec.outlier_threshold)
                path = replace(path, fprop=replace(path.fprop, input=outliers))
            run[asked] = with_backend(path, spec.backend, own, device, shown or asked not in unpinned)
    return run


def routes(
    spec: PathSpec,
    low: ExecutionPath | None,
    recovery: ExecutionPath | None,
    chosen: Mapping[str, Widths],
    device: torch.device,
) -> dict[frozenset[str], Recipe]:
    """Return, for unit=gemm, the recipe of each set of GEMMs in recovery, as a backend runs it.

    A set contains only GEMMs that recovery changes. Without recovery GEMMs are only monitored, and a set contains those
    that bf16 would change. Raises ValueError if no backend runs one of the recipes.
    """
    other = RECIPES["bf16"] if recovery is None else recovery
    assert isinstance(low, Recipe) and isinstance(other, Recipe)
    routed = [gemm for gemm in GEMMS if gemm in spec.recovers and getattr(low, gemm) != getattr(other, gemm)]
    found = {}
    for gemms in chain.from_iterable(combinations(routed, number + 1) for number in range(len(routed))):
        name = f"{spec.recovery or 'bf16'} in {', '.join(gemms)}"
        one = replace(low, name=name, backend="simulated", **{gemm: getattr(other, gemm) for gemm in gemms})
        simulated = recovery is None or (spec.backend == "int_mm" and not one.integer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # low and recovery have warned already
            one = with_backend(one, "simulated" if simulated else spec.backend, chosen, device)
        found[frozenset(gemms)] = other if len(gemms) == len(routed) else one
    return found


def warn_without_effect(spec: PathSpec, low: ExecutionPath, integer: bool) -> None:
    """Warn of settings that these paths do not read."""
    if not integer and spec.weights != "online":
        warn(f"weights={spec.weights!r}: has no effect without a recipe of integers (llm_int8)")
    elif not integer and spec.outlier_threshold is not None:
        warn(f"outlier_threshold={spec.outlier_threshold}: has no effect without a recipe of integers (llm_int8)")
    if not isinstance(low, Recipe) and spec.backend != "auto":
        warn(f"backend={spec.backend!r}: has no effect on formats, which are packed on any machine")
