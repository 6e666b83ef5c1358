"""Convert linear operators, chosen by name patterns, in place into operators with two paths (a `ConvertedModel`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gnmr.conversion.adapters import LinearOperator, WeightOwner, contain, operators_in
from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.int8 import MOST_INPUTS, PER_ROW, Int8Linear
from gnmr.conversion.linear import PathLinear, exchange_class, hides_class
from gnmr.conversion.path_spec import PathSpec
from gnmr.conversion.reads import SHARDED, is_sharded
from gnmr.conversion.resolve import (
    PathPair,
    paths_by_name,
    pinned_paths,
    recipes_of,
    resolve,
    routed_recipes,
    runnable_paths,
    warn_without_effect,
)
from gnmr.conversion.shared import SharedState, Widths
from gnmr.conversion.targets import last_parts, other_matrix_classes, roles_of, targeted
from gnmr.conversion.unit_names import check_unit, grouped, operator_names
from gnmr.errors import warn
from gnmr.formats.cast_stats import AmaxHistory
from gnmr.formats.recipes import ExecutionPath, Gemm, Recipe
from gnmr.formats.rounding import Rounding
from gnmr.names import GEMMS
from gnmr.patterns import NameIndex

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPUTES_AS_LINEAR = ("torchtitan.models.common.linear.Linear",)
"""Full names of subclasses of `nn.Linear` that compute as it does, and so can be given two paths too."""
_FAST_PATHS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
"""Classes with a fast path in evaluation, and an attribute, used there alone, whose value switches it off."""
_CLASSES_WITH_PATHS: dict[tuple[type, type], type[PathLinear]] = {}
"""The class made of each such subclass and a kind of `PathLinear`."""

PinnedGemms: TypeAlias = tuple[tuple[str, str], ...]
"""(gemm, recipe) of the pinned GEMMs of one operator."""
Operators: TypeAlias = Mapping[str, LinearOperator]
"""Operators by the names of `operators_in`."""


def convert(
    model: nn.Module,
    spec: PathSpec,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    store: bool = True,
    shown: bool = True,
    include_heads: bool = False,
) -> ConvertedModel:
    """Turn every linear operator whose name matches into a `PathLinear` on its low-cost path, in place.

    An operator is an `nn.Linear`, or what `gnmr.conversion.adapters` finds in modules of other kinds.

    Modules, parameters, hooks and names stay the same objects, so an optimizer made before stays valid
    (`weights=instead` replaces frozen parameters). peft may wrap the modules before or after; its prefixes and suffixes
    are left out of the units' names.

    Args:
        model: the model to convert.
        spec: the paths, the targets and the kind of unit.
        seed: seed of stochastic rounding.
        device: where the model will run, which decides on backends; None: where its weights are. A model on the meta
            device can be planned but not trained; convert it again when it has weights.
        store: False leaves the storage of `weights` to `ConvertedModel.store`, which may drop the 16-bit weights.
        shown: whether the caller prints the model; if not, falling back to simulation warns on CPUs too.
        include_heads: whether the targets may also name heads and routers, which recipes leave in 16 bits.

    Returns:
        The converted operators, their units and their shared state.

    Raises:
        ValueError: before anything is changed, for any of these reasons.
            - A pattern or pin matches no linear (recipes leave some in 16 bits).
            - The tiles of a recipe do not divide the widths of a linear.
            - A linear cannot be given two paths (see `_check_linear`), or the linears are on several devices.
            - The model does not have the requested kind of unit.
            - A backend cannot run the recipe here, or codes would be kept of trainable weights.

    Warns of paths that make little sense, of settings without effect, and if backend=auto falls back to simulation
    (`gnmr.conversion.resolve`).
    """
    low, recovery = resolve(spec)
    operators, left_out = _chosen(model, spec, include_heads)
    # Units and pins use names without the parts of wrappers.
    names = operator_names(list(operators))
    pins = _pins(names, spec)

    # Operators with the same pins have the same two paths. The paths without pins have to run in all operators.
    members: dict[PinnedGemms, dict[str, LinearOperator]] = {(): operators}
    for (name, operator), pinned_gemms in zip(operators.items(), pins.values(), strict=True):
        if pinned_gemms:
            members.setdefault(pinned_gemms, {})[name] = operator
    spec_paths = {gemms: pinned_paths(spec, dict(gemms)) if gemms else (low, recovery) for gemms in members}
    by_path: dict[ExecutionPath, dict[str, LinearOperator]] = {}
    for gemms, pair in spec_paths.items():
        for path in pair:
            if path is not None:
                by_path.setdefault(path, {}).update(members[gemms])

    # Check everything before anything is changed.
    integer = any(isinstance(path, Recipe) and path.integer for path in by_path)
    linear_class = Int8Linear if integer else PathLinear
    weights_device = _check(model, spec, operators, by_path, linear_class)
    warn_without_effect(spec, low, integer)
    device = device or weights_device
    runnable = runnable_paths(by_path, (low, recovery), spec, device, shown)
    paths = {
        gemms: (runnable[pair[0]], None if pair[1] is None else runnable[pair[1]]) for gemms, pair in spec_paths.items()
    }
    mixed = {gemms: routed_recipes(spec, *pair, members[gemms], device) for gemms, pair in paths.items()}
    if spec.unit == "gemm" and not mixed[()]:
        raise ValueError(f"unit='gemm': {spec.low} and {spec.recovery} are alike in {', '.join(spec.recovers)}")

    shared = _shared_state(spec, list(runnable.values()), len(operators), seed, weights_device)
    converted_operators = []
    for index, (name, operator) in enumerate(zip(names, operators.values(), strict=True)):
        converted = _exchanged(operator, linear_class, name, index, paths[pins[name]], shared)
        converted.pinned = tuple(gemm for gemm, _ in pins[name])
        # wgrad of a frozen weight never runs, so it is not routed.
        gemms_that_run = set(GEMMS) if converted.weight.requires_grad else {"fprop", "dgrad"}
        converted.mixed = {gemms: recipe for gemms, recipe in mixed[pins[name]].items() if gemms <= gemms_that_run}
        converted.gemms = tuple(gemm for gemm in GEMMS if frozenset([gemm]) in converted.mixed)
        converted_operators.append(converted)
    converted_model = ConvertedModel(
        converted_operators,
        grouped(converted_operators, spec.unit, [gemm for gemm in GEMMS if frozenset([gemm]) in mixed[()]]),
        *paths[()],
        shared,
        tuple(spec.recovers),
        times=spec.times,
        recipes={name: recipe for name, recipe in recipes_of(spec).items() if name in spec.recipes},
        left_out=dict(zip(operator_names(list(left_out)), left_out.values(), strict=True)),
        around=_without_fast_path(model, converted_operators),
    )
    if left_out:
        warn(left_out_line(converted_model.left_out))
    if store:
        converted_model.store(spec.weights)
    return converted_model


def operator_shapes(model: nn.Module, spec: PathSpec) -> dict[str, tuple[int, int]]:
    """Return each operator that `convert` would choose, without changing the model.

    Returns: {name: (inputs, outputs)} in module order, without the parts of wrappers in names.

    Raises:
        ValueError: a pattern matches no linear, or none is left.
    """
    operators, _ = _chosen(model, spec)
    shapes = [(operator.in_features, operator.out_features) for operator in operators.values()]
    return dict(zip(operator_names(list(operators)), shapes, strict=True))


def left_out_line(left_out: Mapping[str, str]) -> str:
    """Return one line that names these operators and why they stay in 16 bits; operators of one kind appear once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in left_out.items():
        alike.setdefault((re.sub(r"\b\d+\b", "*", name), reason), []).append(name)
    clauses = []
    for (pattern, reason), names in alike.items():
        label = names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
        clauses.append(f"{label} {reason}")
    return f"left in 16 bits: {'; '.join(clauses)}"


# ---- which operators ----


def _chosen(
    model: nn.Module, spec: PathSpec, include_heads: bool = False
) -> tuple[dict[str, LinearOperator], dict[str, str]]:
    """Return the operators that get two paths, and the reason for each operator that is left out.

    A reason is given only for operators that no target names exactly. Raises ValueError if a pattern matches no linear,
    or if none is left.
    """
    linears = operators_in(model)
    recipes = [path for path in paths_by_name(spec) if isinstance(path, Recipe)]
    roles, other_classes = roles_of(model, linears), other_matrix_classes(model, linears)
    skip_heads = bool(recipes) and not include_heads
    named_exactly = targeted(roles, spec.targets, spec.exclude, recipes=skip_heads, other_classes=other_classes)
    # The recovery recipe has to fit only in the GEMMs that it takes over.
    if len(recipes) == 2:
        recipes[1] = recipes[0].with_gemms(dict.fromkeys(spec.recovers, recipes[1]))
    chosen, left_out = {}, {}
    for name, exactly in named_exactly.items():
        reason = None if exactly else _unfit(linears[name], recipes)
        if reason is None:
            chosen[name] = linears[name]
        else:
            left_out[name] = reason
    if not chosen:  # the checks then say what does not fit
        return {name: linears[name] for name in named_exactly}, {}
    return chosen, left_out


def _unfit(operator: LinearOperator, recipes: Sequence[Recipe]) -> str | None:
    """Return why an operator's class or widths do not permit these recipes, or None if they do."""
    plain = operator.forward is None and not isinstance(operator.module, PathLinear)
    if plain and _class_with_paths(type(operator.module), PathLinear) is None:
        return f"is a {operator.class_name}"
    return next((reason for recipe in recipes if (reason := unfit_width(operator, recipe)) is not None), None)


def _pins(names: Sequence[str], spec: PathSpec) -> dict[str, PinnedGemms]:
    """Return the pins of each operator, by operator name.

    Raises ValueError if a pattern matches no operator, or if two patterns pin a GEMM on different recipes.
    """
    pins: dict[str, dict[str, str]] = {name: {} for name in names}
    index = NameIndex(names)
    for pattern, recipe_by_gemm in spec.pinned.items():
        matching = index.matching(pattern)
        if not matching:
            raise ValueError(
                f"pins {pattern!r}: no operator has such a name; there are {last_parts(names)}, as {names[0]}"
            )
        for name in matching:
            for gemm, recipe in recipe_by_gemm.items():
                if (first := pins[name].setdefault(gemm, recipe)) != recipe:
                    raise ValueError(
                        f"pins.{pattern}.{gemm}={recipe}: another pattern pins {gemm} of {name} on {first}"
                    )
    return {name: tuple((gemm, by_gemm[gemm]) for gemm in GEMMS if gemm in by_gemm) for name, by_gemm in pins.items()}


# ---- how they are changed ----


def _shared_state(
    spec: PathSpec, paths: Sequence[ExecutionPath], num_operators: int, seed: int, device: torch.device
) -> SharedState:
    """Return the state that the operators on `device` share; `paths` are all paths that they have."""
    recipes = [path for path in paths if isinstance(path, Recipe)]
    # Random numbers of stochastic rounding come from a generator on the device that casts.
    rounding = None
    if spec.rounding == "stochastic" or any(recipe.stochastic for recipe in recipes):
        rounding = Rounding(seed, torch.device("cpu") if device.type == "meta" else device)
    amax = AmaxHistory(num_operators, max(recipe.history for recipe in recipes), device) if recipes else None
    return SharedState(quantize_forward=spec.site == "forward", rounding=rounding, amax=amax, device=device)


def _exchanged(
    operator: LinearOperator,
    linear_class: type[PathLinear],
    name: str,
    index: int,
    paths: PathPair,
    shared: SharedState,
) -> PathLinear:
    """Return the same module, or an operator contained in it, with two paths and on the low one."""
    module = operator.module
    if operator.forward is not None:
        module = contain(operator, issubclass(linear_class, Int8Linear))
    else:
        class_with_paths = _class_with_paths(type(module), linear_class)
        assert class_with_paths is not None
        exchange_class(module, class_with_paths)
    assert isinstance(module, PathLinear)
    module.low, module.recovery = paths
    module.operator_name, module.index, module.pinned = name, index, ()
    module.gemms, module.mixed, module.shared = (), {}, shared
    # Every operator begins on the low path.
    module.put(frozenset())
    module.fault = module.read = module._node = None
    module.in_graphs = module.tally = None
    if isinstance(module, Int8Linear):
        module.store("online")
    return module


def _without_fast_path(model: nn.Module, operators: Iterable[PathLinear]) -> list[tuple[nn.Module, str, Any]]:
    """Have PyTorch's encoders call the operators in evaluation too, where a kernel would read all weights of a layer.

    Returns the changed attributes with their former values: (module, name, value).
    """
    converted, changed = {operator.module for operator in operators}, list[tuple[nn.Module, str, Any]]()
    for module in model.modules():
        for encoder_class, name, off in _FAST_PATHS:
            if (
                isinstance(module, encoder_class)
                and name in vars(module)
                and not converted.isdisjoint(module.modules())
            ):
                changed.append((module, name, getattr(module, name)))
                setattr(module, name, off)
    return changed


def _class_with_paths(cls: type[nn.Module], linear_class: type[PathLinear]) -> type[PathLinear] | None:
    """Return the class that a linear of class `cls` gets; None: it can have no paths.

    An `nn.Linear` becomes `linear_class`.
    """
    if cls is nn.Linear:
        return linear_class
    if issubclass(cls, PathLinear):  # a class made for this purpose
        return cls if issubclass(cls, linear_class) and "plain_class" in vars(cls) else None
    if f"{cls.__module__}.{cls.__qualname__}" not in _COMPUTES_AS_LINEAR:
        return None
    if (cls, linear_class) not in _CLASSES_WITH_PATHS:
        attributes = {"plain_class": cls}
        _CLASSES_WITH_PATHS[cls, linear_class] = type(linear_class.__name__, (linear_class, cls), attributes)
    return _CLASSES_WITH_PATHS[cls, linear_class]


# ---- what is refused ----


def _check(
    model: nn.Module,
    spec: PathSpec,
    operators: Operators,
    by_path: Mapping[ExecutionPath, Operators],
    linear_class: type[PathLinear],
) -> torch.device:
    """Return the device of the operators. Raises ValueError if they cannot get these paths and units.

    `by_path` has the operators that get each path.
    """
    for name, operator in operators.items():
        _check_linear(name, operator, model, linear_class)
    for path, members in by_path.items():
        if isinstance(path, Recipe):
            for name, operator in members.items():
                check_widths(name, operator, path)
    check_unit(operator_names(list(operators)), spec.unit)
    if linear_class is Int8Linear:
        _check_weights(spec.weights, by_path, operators)
    of_weights = list(dict.fromkeys(operator.weight.device for operator in operators.values()))
    # A weight on the meta device (offloaded) comes to the device of the others when its operator runs.
    device, *other_devices = [device for device in of_weights if device.type != "meta"] or of_weights
    if other_devices:
        devices = ", ".join(map(str, [device, *other_devices]))
        raise ValueError(f"targets: linears on several devices ({devices}); use one")
    return device


def _check_linear(name: str, operator: LinearOperator, model: nn.Module, linear_class: type[PathLinear]) -> None:
    """Raise ValueError if the operator cannot be given two paths, whatever the paths are."""
    module, contained = operator.module, operator.forward is not None
    # A second conversion would lose the first one's class to restore.
    if isinstance(module, WeightOwner) or (isinstance(module, PathLinear) and module.converted):
        raise ValueError(f"{name} has two paths already (attached twice?): detach the first controller before")
    class_with_paths = type(module) if contained else _class_with_paths(type(module), linear_class)
    if class_with_paths is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}: only a plain nn.Linear can be given two paths; name other "
            "targets, or declare it (gnmr.conversion.adapters.register)"
        )
    # A forward on the instance wins over the class, so an exchanged class would never run.
    hidden = (contained or class_with_paths is not type(module)) and hides_class(module)
    if hidden and not contained and type(module) is not nn.Linear:
        raise ValueError(
            f"{name}: its forward was wrapped as it was (torchtitan's Module.parallelize), so paths would never be in "
            "force; convert before, or have gnmr.attachment.torchtitan's converter build the model"
        )
    if hidden:
        raise ValueError(
            f"{name}: its forward was replaced on the module itself (a patch or a wrapper), so its paths would never "
            "be in force; attach before that, undo it, or exclude this linear"
        )
    # FSDP1 and ZeRO-3 leave an empty or flat shard in the parameter's place.
    weight, shape_OI = operator.weight, (operator.out_features, operator.in_features)
    if tuple(weight.shape) != shape_OI and not contained:
        raise ValueError(
            f"{name} is sharded, its weight is {tuple(weight.shape)} in place of {shape_OI}: shard no unit (FSDP, "
            "ZeRO-3)"
        )
    if is_sharded(weight):
        if not _gathered(model, operator.path):
            raise ValueError(f"{name} has sharded parameters: its weight {SHARDED}")
    # A subclass (quantized, offloaded) may compute something else than a dense product.
    elif weight.dtype not in _DTYPES or type(weight) not in (nn.Parameter, Tensor):
        raise ValueError(
            f"{name} has a weight of {weight.dtype} in a {type(weight).__name__}: two paths need plain weights in "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}; name other targets"
        )


def tensor_parallel(model: nn.Module) -> str | None:
    """Return a parameter that is sharded other than by FSDP2, which gathers plain tensors.

    Returns: the dotted name of the first one, or None.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and not _gathered(model, name.rpartition(".")[0]):
            return name
    return None


def _gathered(model: nn.Module, name: str) -> bool:
    """Return whether FSDP2 gathers plain tensors from this module's parameters before they are read."""
    from torch.distributed.fsdp import FSDPModule  # available, because there is a DTensor

    words = name.split(".")
    return any(isinstance(model.get_submodule(".".join(words[:i])), FSDPModule) for i in range(len(words) + 1))


def check_widths(name: str, operator: Widths, recipe: Recipe) -> None:
    """Check that a recipe cuts none of its groups in an operator (`unfit_width`).

    Args:
        name: the operator's name, for the message.
        operator: has `in_features` and `out_features`.
        recipe: the recipe.

    Raises:
        ValueError: a width does not fit.
    """
    if (reason := unfit_width(operator, recipe)) is not None:
        raise ValueError(f"{name} {reason}; use another recipe or width, or exclude it")


def unfit_width(operator: Widths, recipe: Recipe) -> str | None:
    """Return which width of the operator does not fit the recipe, or None if all fit.

    A width does not fit if it would cut an MX or NVFP4 group of elements with one scale. Tiles and blocks may be cut,
    as in DeepSeek-V3's own checkpoints.
    """
    inputs_divisor, outputs_divisor = recipe.divisors()
    if operator.in_features % inputs_divisor:
        return f"has {operator.in_features} inputs: the recipe {recipe.name} needs a multiple of {inputs_divisor}"
    if operator.out_features % outputs_divisor:
        return f"has {operator.out_features} outputs: the recipe {recipe.name} needs a multiple of {outputs_divisor}"
    return None


def _check_weights(weights: str, paths: Iterable[ExecutionPath], operators: Operators) -> None:
    """Raise ValueError if the codes of these linears cannot be kept as requested, or if their sums would overflow."""
    for name, operator in operators.items():
        if operator.in_features > MOST_INPUTS:
            raise ValueError(
                f"{name} has {operator.in_features} inputs: int32 sums of INT8 products hold {MOST_INPUTS:,}"
            )
        if weights != "online" and operator.forward is not None:
            raise ValueError(
                f"weights={weights!r}: {name} is part of a {operator.class_name}, and only an nn.Linear can keep codes "
                "in its weight's place; use weights='online' or other targets"
            )
        if weights != "online" and operator.weight.requires_grad:
            raise ValueError(
                f"weights={weights!r}: {name} is trainable, and its codes are not; freeze it "
                "(requires_grad_(False)) or use weights='online'"
            )
    for path in paths:
        if weights == "instead" and isinstance(path, Recipe) and not _reads_codes(path):
            raise ValueError(
                f"weights='instead': the recipe {path.name} casts a weight of which only INT8 codes are left; use bf16 "
                "or llm_int8, or weights='online'"
            )


def _reads_codes(recipe: Recipe) -> bool:
    """Return whether the recipe casts only the weight in INT8 and the input that meets it in fprop."""
    fprop = Gemm() if recipe.integer else recipe.fprop
    dgrad = replace(recipe.dgrad, weight=None) if recipe.dgrad.weight == PER_ROW else recipe.dgrad
    return not replace(recipe, fprop=fprop, dgrad=dgrad).casts
