"""Convert linear operators, chosen by name patterns, in place into operators with two paths (a `ConvertedModel`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from gnmr.conversion.adapters import LinearOperator, WeightOwner, contain, operators_in
from gnmr.conversion.converted import ConvertedModel
from gnmr.conversion.int8 import MOST_INPUTS, PER_ROW, Int8Linear
from gnmr.conversion.linear import PathLinear, exchange_class, hides_class
from gnmr.conversion.path_spec import PathSpec
from gnmr.conversion.reads import SHARDED, is_sharded
from gnmr.conversion.resolve import Pair, as_run, named, pinned, recipes_of, resolve, routes, warn_without_effect
from gnmr.conversion.shared import SharedState, Widths
from gnmr.conversion.targets import kinds, others_in, roles_of, targeted
from gnmr.conversion.unit_names import check_unit, grouped, operator_names
from gnmr.errors import warn
from gnmr.formats.cast_stats import AmaxHistory
from gnmr.formats.recipes import ExecutionPath, Gemm, Recipe
from gnmr.formats.rounding import Rounding
from gnmr.names import GEMMS
from gnmr.patterns import by_end, exact, select

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALIKE = ("torchtitan.models.common.linear.Linear",)
"""Full names of subclasses of `nn.Linear` that compute as it does, and so can be given two paths too."""
_FAST_PATHS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
"""Classes with a fast path in evaluation, and an attribute, used there alone, whose value switches it off."""
_WITH_PATHS: dict[tuple[type, type], type[PathLinear]] = {}
"""The class made of each such subclass and a kind of `PathLinear`."""

Pins = tuple[tuple[str, str], ...]
"""(gemm, recipe) of the pinned GEMMs of one operator."""


def convert(
    model: nn.Module,
    spec: PathSpec,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    store: bool = True,
    shown: bool = True,
    kept: bool = False,
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
        kept: whether the targets may also name linears that recipes leave in 16 bits.

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
    chosen, left_out = _chosen(model, spec, kept)
    names = operator_names(list(chosen))
    pins = _pins(names, spec)
    members: dict[Pins, dict[str, LinearOperator]] = {(): chosen}  # low and recovery have to run in all of them
    for (name, one), own in zip(chosen.items(), pins.values(), strict=True):
        if own:
            members.setdefault(own, {})[name] = one
    asked = {own: pinned(spec, dict(own)) if own else (low, recovery) for own in members}
    linears: dict[ExecutionPath, dict[str, LinearOperator]] = {}
    for own, pair in asked.items():
        for path in (path for path in pair if path is not None):
            linears.setdefault(path, {}).update(members[own])
    kind = Int8Linear if any(isinstance(path, Recipe) and path.integer for path in linears) else PathLinear
    here = _check(model, spec, chosen, linears, kind)
    warn_without_effect(spec, low, kind is Int8Linear)
    run = as_run(linears, (low, recovery), spec, device or here, shown)
    paths = {own: (run[ours], None if theirs is None else run[theirs]) for own, (ours, theirs) in asked.items()}
    mixed = _mixed(spec, paths, members, device or here)
    shared = _shared_state(spec, list(run.values()), operators=len(chosen), seed=seed, here=here)
    operators = []
    for index, (name, one) in enumerate(zip(names, chosen.values(), strict=True)):
        operators.append(_exchanged(one, kind, name, index, paths[pins[name]], shared))
        operators[-1].pinned = tuple(gemm for gemm, _ in pins[name])
        _route(operators[-1], mixed[pins[name]])
    converted = ConvertedModel(
        operators,
        grouped(operators, spec.unit, [gemm for gemm in GEMMS if frozenset([gemm]) in mixed[()]]),
        *paths[()],
        shared,
        tuple(spec.recovers),
        times=spec.times,
        recipes={name: recipe for name, recipe in recipes_of(spec).items() if name in spec.recipes},
        left_out=dict(zip(operator_names(list(left_out)), left_out.values(), strict=True)),
        around=_without_fast_path(model, operators),
    )
    if left_out:
        warn(left_out_line(converted.left_out))
    if store:
        converted.store(spec.weights)
    return converted


def operator_shapes(model: nn.Module, spec: PathSpec) -> dict[str, tuple[int, int]]:
    """Return each operator's (inputs, outputs), by its name. Raises ValueError if a pattern matches no linear."""
    chosen, _ = _chosen(model, spec)
    shapes = [(one.in_features, one.out_features) for one in chosen.values()]
    return dict(zip(operator_names(list(chosen)), shapes, strict=True))


def left_out_line(left_out: Mapping[str, str]) -> str:
    """Return one line that names these operators and why they stay in 16 bits; operators of one kind appear once."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, why in left_out.items():
        alike.setdefault((re.sub(r"\b\d+\b", "*", name), why), []).append(name)
    told = (f"{own[0] if len(own) == 1 else f'{pattern} ({len(own)})'} {why}" for (pattern, why), own in alike.items())
    return f"left in 16 bits: {'; '.join(told)}"


def _chosen(model: nn.Module, spec: PathSpec, kept: bool = False) -> tuple[dict[str, LinearOperator], dict[str, str]]:
    """Return the operators that get two paths, and the reason for each operator that is left out.

    A reason is given only for operators that no target names exactly. Recipes skip heads and routers, unless `kept`.
    Raises ValueError if a pattern matches no linear, or if none is left.
    """
    linears = operators_in(model)
    paths = [path for path in named(spec) if isinstance(path, Recipe)]
    roles, others = roles_of(model, linears), others_in(model, linears)
    asked = targeted(roles, spec.targets, spec.exclude, recipes=bool(paths) and not kept, others=others)
    if len(paths) == 2:
        paths[1] = paths[0].with_gemms(dict.fromkeys(spec.recovers, paths[1]))
    chosen, left_out = {}, {}
    for name, exactly in asked.items():
        why = None if exactly else _unfit(linears[name], paths)
        if why is None:
            chosen[name] = linears[name]
        else:
            left_out[name] = why
    return chosen or {name: linears[name] for name in asked}, left_out if chosen else {}


def _unfit(found: LinearOperator, paths: Sequence[Recipe]) -> str | None:
    """Return why an operator's class or widths do not permit these paths, or None if they do."""
    plain = found.forward is None and not isinstance(found.module, PathLinear)
    if plain and _class_of(type(found.module), PathLinear) is None:
        return f"is a {found.class_name}"
    return next((why for recipe in paths if (why := cut_by(found, recipe)) is not None), None)


def _pins(names: Sequence[str], spec: PathSpec) -> dict[str, Pins]:
    """Return the pins of each operator, by operator name.

    Raises ValueError if a pattern matches no operator, or if two patterns pin a GEMM on different recipes.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    ends = by_end(names)  # plan.json may have a pin for each of thousands of experts
    for pattern, recipes in spec.pinned.items():
        chosen = ends.get(pattern, []) if exact(pattern) else select(names, [pattern])[0]
        if not chosen:
            raise ValueError(f"pins {pattern!r}: no operator has such a name; there are {kinds(names)}, as {names[0]}")
        for name, (gemm, recipe) in product(chosen, recipes.items()):
            if (other := found[name].setdefault(gemm, recipe)) != recipe:
                raise ValueError(f"pins.{pattern}.{gemm}={recipe}: another pattern pins {gemm} of {name} on {other}")
    return {name: tuple((gemm, own[gemm]) for gemm in GEMMS if gemm in own) for name, own in found.items()}


def _shared_state(
    spec: PathSpec, paths: Sequence[ExecutionPath], *, operators: int, seed: int, here: torch.device
) -> SharedState:
    """Return the state that the `operators` operators on the device `here` share; `paths` are all paths they have."""
    recipes = [path for path in paths if isinstance(path, Recipe)]
    rounding = None
    if spec.rounding == "stochastic" or any(recipe.stochastic for recipe in recipes):
        rounding = Rounding(seed, torch.device("cpu") if here.type == "meta" else here)
    amax = AmaxHistory(operators, max(recipe.history for recipe in recipes), here) if recipes else None
    return SharedState(quantize_forward=spec.site == "forward", rounding=rounding, amax=amax, device=here)


def _exchanged(
    found: LinearOperator, kind: type[PathLinear], name: str, index: int, paths: Pair, shared: SharedState
) -> PathLinear:
    """Return the same module, or an operator contained in it, with two paths and on the low one."""
    module = found.module
    if found.forward is not None:
        module = contain(found, issubclass(kind, Int8Linear))
    else:
        made = _class_of(type(module), kind)
        assert made is not None
        exchange_class(module, made)
    assert isinstance(module, PathLinear)
    module.low, module.recovery = paths
    module.operator_name, module.index, module.pinned = name, index, ()
    module.gemms, module.mixed, module.shared = (), {}, shared
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
    inside, changed = {operator.module for operator in operators}, list[tuple[nn.Module, str, Any]]()
    for module in model.modules():
        for kind, name, off in _FAST_PATHS:
            if isinstance(module, kind) and name in vars(module) and not inside.isdisjoint(module.modules()):
                changed.append((module, name, getattr(module, name)))
                setattr(module, name, off)
    return changed


def _mixed(
    spec: PathSpec,
    paths: Mapping[Pins, Pair],
    members: Mapping[Pins, Mapping[str, LinearOperator]],
    device: torch.device,
) -> dict[Pins, dict[frozenset[str], Recipe]]:
    """Return the recipes of `resolve.routes` by pins; none unless unit=gemm.

    Raises ValueError if the paths do not differ in any GEMM.
    """
    if spec.unit != "gemm":
        return {own: {} for own in paths}
    found = {own: routes(spec, *both, members[own], device) for own, both in paths.items()}
    if not found[()]:
        raise ValueError(f"unit='gemm': {spec.low} and {spec.recovery} are alike in {', '.join(spec.recovers)}")
    return found


def _route(operator: PathLinear, routes: dict[frozenset[str], Recipe]) -> None:
    """Route the operator's GEMMs individually; `wgrad` of a frozen weight never runs."""
    runs = {"fprop", "dgrad", *(["wgrad"] if operator.weight.requires_grad else [])}
    operator.mixed = {gemms: recipe for gemms, recipe in routes.items() if gemms <= runs}
    operator.gemms = tuple(gemm for gemm in GEMMS if frozenset([gemm]) in operator.mixed)


def _class_of(cls: type[nn.Module], kind: type[PathLinear]) -> type[PathLinear] | None:
    """Return the class that a linear of class `cls` gets if `nn.Linear` becomes `kind`; None: it can have no paths."""
    if cls is nn.Linear:
        return kind
    if issubclass(cls, PathLinear):  # a class made for this purpose
        return cls if issubclass(cls, kind) and "plain_class" in vars(cls) else None
    if f"{cls.__module__}.{cls.__qualname__}" not in _ALIKE:
        return None
    if (cls, kind) not in _WITH_PATHS:
        _WITH_PATHS[cls, kind] = type(kind.__name__, (kind, cls), {"plain_class": cls})
    return _WITH_PATHS[cls, kind]


def _check(
    model: nn.Module,
    spec: PathSpec,
    chosen: Mapping[str, LinearOperator],
    linears: Mapping[ExecutionPath, Mapping[str, LinearOperator]],
    kind: type[PathLinear],
) -> torch.device:
    """Return the device of the `chosen` operators. Raises ValueError if they cannot get these paths and units.

    `linears` are the operators that have each path.
    """
    for name, one in chosen.items():
        _check_linear(name, one, model, kind)
    for path, own in linears.items():
        if isinstance(path, Recipe):
            for name, one in own.items():
                check_widths(name, one, path)
    check_unit(operator_names(list(chosen)), spec.unit)
    if kind is Int8Linear:
        _check_weights(spec.weights, linears, chosen)
    here, *others = {one.weight.device: None for one in chosen.values()}
    if others:
        raise ValueError(f"targets: linears on several devices ({', '.join(map(str, [here, *others]))}); use one")
    return here


def _check_linear(name: str, found: LinearOperator, model: nn.Module, kind: type[PathLinear]) -> None:
    """Raise ValueError if the operator cannot be given two paths, whatever the paths are."""
    module, contained = found.module, found.forward is not None
    if isinstance(module, WeightOwner) or (isinstance(module, PathLinear) and module.converted):
        raise ValueError(f"{name} has two paths already (attached twice?): detach the first controller before")
    made = type(module) if contained else _class_of(type(module), kind)
    if made is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}: only a plain nn.Linear can be given two paths; name other "
            "targets, or declare it (gnmr.conversion.adapters.register)"
        )
    exchanged = contained or made is not type(module)
    hidden = exchanged and hides_class(module)
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
    weight = found.weight
    shape, whole = tuple(weight.shape), (found.out_features, found.in_features)
    if shape != whole and not contained:
        raise ValueError(f"{name} is sharded, its weight is {shape} in place of {whole}: shard no unit (FSDP, ZeRO-3)")
    if is_sharded(weight):
        if not _gathered(model, found.path):
            raise ValueError(f"{name} has sharded parameters: its weight {SHARDED}")
    elif weight.dtype not in _DTYPES or type(weight) not in (nn.Parameter, Tensor, FakeTensor):
        raise ValueError(
            f"{name} has a weight of {weight.dtype} in a {type(weight).__name__}: two paths need plain weights in "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}; name other targets"
        )


def tensor_parallel(model: nn.Module) -> str | None:
    """Return the first parameter that is sharded other than by FSDP2, which gathers plain tensors, or None."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and not _gathered(model, name.rpartition(".")[0]):
            return name
    return None


def _gathered(model: nn.Module, name: str) -> bool:
    """Return whether FSDP2 gathers plain tensors from this module's parameters before they are read."""
    from torch.distributed.fsdp import FSDPModule  # available, because there is a DTensor

    parts = name.split(".")
    return any(isinstance(model.get_submodule(".".join(parts[:i])), FSDPModule) for i in range(len(parts) + 1))


def check_widths(name: str, one: Widths, recipe: Recipe) -> None:
    """Raise ValueError if the operator's widths do not fit the recipe."""
    if (why := cut_by(one, recipe)) is not None:
        raise ValueError(f"{name} {why}; use another recipe or width, or exclude it")


def cut_by(one: Widths, recipe: Recipe) -> str | None:
    """Return which width of the operator does not fit the recipe, or None if all fit.

    A width does not fit if it would cut an MX or NVFP4 group of elements with one scale. Tiles and blocks may be cut,
    as in DeepSeek-V3's own checkpoints.
    """
    for kind, width, divisor in zip(
        ("inputs", "outputs"), (one.in_features, one.out_features), recipe.divisors(), strict=True
    ):
        if width % divisor:
            return f"has {width} {kind}: the recipe {recipe.name} needs a multiple of {divisor}"
    return None


def _check_weights(weights: str, paths: Iterable[ExecutionPath], linears: Mapping[str, LinearOperator]) -> None:
    """Raise ValueError if the codes of these linears cannot be kept as requested, or if their sums would overflow."""
    for name, linear in linears.items():
        if linear.in_features > MOST_INPUTS:
            raise ValueError(
                f"{name} has {linear.in_features} inputs: int32 sums of INT8 products hold {MOST_INPUTS:,}"
            )
        if weights != "online" and linear.forward is not None:
            raise ValueError(
                f"weights={weights!r}: {name} is part of a {linear.class_name}, and only an nn.Linear can keep codes "
                "in its weight's place; use weights='online' or other targets"
            )
        if weights != "online" and linear.weight.requires_grad:
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
