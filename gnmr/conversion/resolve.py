"""Resolve the paths of a `PathSpec`, and the backend that runs them.

simulated    Operands are rounded to the format's values, and GEMMs run in the tensors' own dtype
             (`gemms.py`). Runs on any device.
scaled_mm    PyTorch's products of operands of one byte (`scaled_mm.py`). Needs a GPU of compute capability 8.9
             or newer (Ada, Hopper, Blackwell); tiles and blocks need Hopper. CPUs multiply whole tensors so too,
             without a gain in speed, which is useful for tests.
int_mm       PyTorch's product of INT8 operands, for recipes that multiply integers (`int8.py`).
auto         A hardware backend if device, recipe and widths allow it, else simulated; the printed model says which.
             Warns of the simulation on GPUs, or if the model is not printed (except for sim_ recipes).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations
from typing import TypeAlias

import torch

from gnmr.conversion import int8, scaled_mm
from gnmr.conversion.path_spec import PathSpec
from gnmr.conversion.shared import Widths
from gnmr.errors import warn
from gnmr.formats.number_formats import FORMATS, Format, RangeFormat
from gnmr.formats.recipes import RECIPES, SCALES, Cast, ExecutionPath, Recipe
from gnmr.names import GEMMS, OPERANDS

PathPair: TypeAlias = tuple[ExecutionPath, ExecutionPath | None]
"""The low and the recovery path."""


def resolve(spec: PathSpec) -> PathPair:
    """Return the low and the recovery path, both formats or both recipes.

    The recovery recipe applies to the GEMMs in `recovers` only. Warns if the recovery path equals the low path or is
    coarser in any operand or result. Coarser means fewer bits, fewer significant bits, or the same format with a
    coarser scale. Warns also if `recovers` has no effect.
    """
    some_gemms = set(spec.recovers) != set(GEMMS)
    low, recovery = paths_by_name(spec)
    if spec.recovery is None:
        if some_gemms:
            warn(f"recovers={spec.recovers}: has no effect without a recovery path")
        return low, None
    # GEMMs that recovery does not take over keep the low recipe's casts.
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        recovery = low.with_gemms(dict.fromkeys(spec.recovers, recovery))
    elif some_gemms:
        warn(f"recovers={spec.recovers}: has no effect on formats, which touch wgrad alone")
    if spec.low == spec.recovery:
        warn(f"the recovery path {spec.recovery} is the low path too: recovery changes nothing")
    elif isinstance(recovery, Recipe) and replace(recovery, name=spec.low) == low:
        same = f"{spec.recovery} has all GEMMs"
        if some_gemms:
            same = f"recovers={spec.recovers}: {spec.recovery} has these"
        warn(f"{same} as {spec.low} has them: recovery changes nothing")
    elif coarser := _where_coarser(low, recovery):
        warn(f"the recovery path {spec.recovery} is coarser than the low path {spec.low}{coarser}")
    return low, recovery


def pinned_paths(spec: PathSpec, pins: Mapping[str, str]) -> PathPair:
    """Return the low and the recovery path of an operator with these pins, {gemm: recipe}, which apply on both."""
    low, recovery = paths_by_name(spec)
    if isinstance(low, Recipe) and isinstance(recovery, Recipe):
        recipes = recipes_of(spec)
        pinned = {gemm: recipes[name] for gemm, name in pins.items()}
        recovered = dict.fromkeys(spec.recovers, recovery) | pinned
        return low.with_gemms(pinned), None if spec.recovery is None else low.with_gemms(recovered)
    # Under formats a pin is the whole operator, which is then on recovery on both paths.
    return recovery, None if spec.recovery is None else recovery


def paths_by_name(spec: PathSpec) -> tuple[ExecutionPath, ExecutionPath]:
    """Return the low and the recovery path that the spec names.

    Returns: both formats or both recipes, unmixed and with all GEMMs; bf16 if recovery is null.
    """
    low, recovery = spec.low, spec.recovery or "bf16"
    if low in FORMATS and recovery in FORMATS:
        return _format(low, spec.group), _format(recovery, spec.group)
    recipes = recipes_of(spec)
    return recipes[low], recipes[recovery]


def recipes_of(spec: PathSpec) -> dict[str, Recipe]:
    """Return all recipes that the spec may name, the built-in ones and those of the user.

    Returns: {name: recipe}. Those of the user have the backend simulated, because `PathSpec.backend` decides.
    """
    recipes = {}
    for name, recipe in spec.recipes.items():
        if not isinstance(recipe, Recipe):
            recipe = Recipe.of(name, recipe)
        recipes[name] = replace(recipe, backend="simulated")  # `PathSpec.backend`, not the recipe, decides
    return RECIPES | recipes


def _format(name: str, group: int | None) -> Format:
    return FORMATS[name] if group is None or name == "bf16" else RangeFormat.of(name, group)


def _where_coarser(low: ExecutionPath, recovery: ExecutionPath) -> str:
    """Return the places in which `recovery` is coarser than `low`, as the end of a warning; empty if there are none."""
    if isinstance(low, Format) and isinstance(recovery, Format):
        if recovery.bits < low.bits:
            return f" ({recovery.bits} bits, {low.bits})"
        if recovery.significant_bits < low.significant_bits:
            return f" ({recovery.significant_bits} significant bits, {low.significant_bits})"
        return ""
    # In GEMMs that are not recovered, the casts are the low path's own.
    places = [
        f"{gemm}.{operand}"
        for gemm in GEMMS
        for operand in OPERANDS
        if _is_coarser(getattr(getattr(low, gemm), operand), getattr(getattr(recovery, gemm), operand))
    ]
    return f" in {', '.join(places)}" if places else ""


def _is_coarser(low: Cast | None, recovery: Cast | None) -> bool:
    # An operand that is not cast is finer than any cast.
    if low is None or recovery is None:
        return recovery is not None
    if recovery.format == low.format:
        return SCALES.index(recovery.scale) < SCALES.index(low.scale)
    fewer_bits = recovery.format.bits < low.format.bits
    return fewer_bits or recovery.format.significant_bits < low.format.significant_bits


def with_backend(
    recipe: Recipe, backend: str, operators: Mapping[str, Widths], device: torch.device, shown: bool = True
) -> Recipe:
    """Return the recipe as `backend` will run it.

    If this machine does not have the GPU, the GPU is assumed to run integers, and to have FP8 if `backend` says so. The
    first trial of integers on a device waits for it.

    Args:
        recipe: a recipe.
        backend: auto, simulated, scaled_mm or int_mm.
        operators: the operators that will run it, by name.
        device: where they will run it.
        shown: whether the caller prints the model; if not, falling back to simulation warns on CPUs too.

    Raises:
        ValueError: if the requested backend cannot run the recipe.
    """
    if backend == "simulated" or not recipe.casts:
        return recipe
    auto, hardware, alternative = backend == "auto", backend, "auto"
    if auto:
        hardware = "int_mm" if recipe.integer else "scaled_mm"
    if hardware == "int_mm":
        missing = int8.missing(recipe, operators, device)
        alternative = "simulated" if recipe.integer else "auto"
    else:
        # A GPU of another machine is assumed to have FP8 if scaled_mm was requested.
        trial_device: torch.device | None = device
        if device.type == "cuda" and not torch.cuda.is_available():
            trial_device = torch.device("cpu") if auto else None
        missing = scaled_mm.missing(recipe, operators, trial_device, auto)
    # `missing` says what hardware, recipe or widths lack for this backend.
    if missing is None:
        return replace(recipe, backend=hardware)
    if not auto:
        raise ValueError(f"backend={backend!r}: {missing}; use backend={alternative!r}")
    # sim_ recipes have no hardware, so their simulation is no surprise.
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if (on_gpu or not shown) and not recipe.name.startswith("sim_"):
        warn(f"recipe {recipe.name} is simulated: {missing}")
    return recipe


def runnable_paths(
    by_path: Mapping[ExecutionPath, Mapping[str, Widths]],
    unpinned: PathPair,
    spec: PathSpec,
    device: torch.device,
    shown: bool,
) -> dict[ExecutionPath, ExecutionPath]:
    """Return each path as it will run in its operators on `device`.

    Args:
        by_path: the operators that have each path.
        unpinned: the paths of operators without pins; only these warn of a simulation that was not asked for.
        spec: the settings.
        device: where the operators will run.
        shown: see `with_backend`.
    """
    runnable: dict[ExecutionPath, ExecutionPath] = {}
    for path, operators in by_path.items():
        runnable[path] = path
        if isinstance(path, Recipe):
            recipe = path
            if spec.outlier_threshold is not None and path.integer and path.fprop.input is not None:
                # LLM.int8(): columns with outliers stay in 16 bits.
                outliers = replace(path.fprop.input, outliers=spec.outlier_threshold)
                recipe = replace(path, fprop=replace(path.fprop, input=outliers))
            runnable[path] = with_backend(recipe, spec.backend, operators, device, shown or path not in unpinned)
    return runnable


def routed_recipes(
    spec: PathSpec,
    low: ExecutionPath | None,
    recovery: ExecutionPath | None,
    operators: Mapping[str, Widths],
    device: torch.device,
) -> dict[frozenset[str], Recipe]:
    """Return the recipe of each set of GEMMs in recovery, as a backend runs it; none unless unit=gemm.

    A set contains only GEMMs that recovery changes. Without recovery GEMMs are only monitored, and a set contains those
    that bf16 would change. Raises ValueError if no backend runs one of the recipes.
    """
    if spec.unit != "gemm":
        return {}
    high = RECIPES["bf16"] if recovery is None else recovery
    assert isinstance(low, Recipe) and isinstance(high, Recipe)
    # A set of k routed GEMMs has 2^k - 1 mixtures, at most 7.
    routed = [gemm for gemm in GEMMS if gemm in spec.recovers and getattr(low, gemm) != getattr(high, gemm)]
    recipes = {}
    for gemms in chain.from_iterable(combinations(routed, number + 1) for number in range(len(routed))):
        name = f"{spec.recovery or 'bf16'} in {', '.join(gemms)}"
        mixture = replace(low, name=name, backend="simulated", **{gemm: getattr(high, gemm) for gemm in gemms})
        # Only watched GEMMs never run a mixture. Integer kernels do not mix with other casts.
        simulated = recovery is None or (spec.backend == "int_mm" and not mixture.integer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # low and recovery have warned already
            mixture = with_backend(mixture, "simulated" if simulated else spec.backend, operators, device)
        recipes[frozenset(gemms)] = high if len(gemms) == len(routed) else mixture
    return recipes


def warn_without_effect(spec: PathSpec, low: ExecutionPath, integer: bool) -> None:
    """Warn of settings that these paths do not read."""
    if not integer and spec.weights != "online":
        warn(f"weights={spec.weights!r}: has no effect without a recipe of integers (llm_int8)")
    elif not integer and spec.outlier_threshold is not None:
        warn(f"outlier_threshold={spec.outlier_threshold}: has no effect without a recipe of integers (llm_int8)")
    if not isinstance(low, Recipe) and spec.backend != "auto":
        warn(f"backend={spec.backend!r}: has no effect on formats, which are packed on any machine")
