"""Exchanging linear operators by name pattern, in place: what becomes of them is the `ConvertedModel`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from gnmr.names import GEMMS, by_end, select
from gnmr.precision.adapters import Found, contain, operators_in
from gnmr.precision.cast_stats import AmaxHistory
from gnmr.precision.contained import Owner
from gnmr.precision.converted import ConvertedModel
from gnmr.precision.int8 import MOST_INPUTS, PER_ROW, Int8Linear
from gnmr.precision.linear import PathLinear
from gnmr.precision.reads import SHARDED, is_sharded
from gnmr.precision.recipes import KEPT, ExecutionPath, Gemm, Recipe
from gnmr.precision.resolve import Pair, as_run, named, pinned, recipes_of, resolve, routes, warn_without_effect
from gnmr.precision.rounding import Rounding
from gnmr.precision.shared import SharedState, Widths
from gnmr.precision.spec import PathSpec
from gnmr.precision.units import check_unit, grouped, operator_names, unwrapped

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALIKE = ("torchtitan.models.common.linear.Linear",)
"""Subclasses of `nn.Linear` that compute as it does, by full name: they can be given two paths too."""
_WITH_PATHS: dict[tuple[type, type], type[PathLinear]] = {}
"""What was made of such a class and a kind of `PathLinear`."""

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

    An operator is an `nn.Linear`, or what `gnmr.precision.adapters` finds in modules of other kinds.

    Modules, parameters, hooks and names stay the same objects, so an optimizer made before stays valid
    (`weights=instead` replaces frozen parameters). peft may wrap the modules before or after; its prefixes and suffixes
    are left out of the units' names.

    Args:
        seed: of what stochastic rounding draws.
        device: where the model will run, which decides on backends; None: where its weights are. (A model on the meta
            device can be planned, not trained: convert it again when it has weights.)
        store: False leaves what `weights` asks for to `ConvertedModel.store`, which may drop the 16-bit weights.
        shown: whether the caller prints the model; if not, falling back to simulation is warned of on CPUs too.
        kept: whether the targets may name what recipes leave in 16 bits, too.

    Raises ValueError, before anything is changed, for a pattern or pin that matches no linear (recipes leave some in 16
    bits), a linear whose widths the tiles of a recipe do not divide or that cannot be given two paths (see
    `_check_linear`), linears on several devices, a kind of unit that the model does not have, a backend that cannot run
    the recipe here, and codes that would be kept of trainable weights. Warns of paths that make little sense, of
    settings without effect, and where backend=auto falls back to simulation (`gnmr.precision.resolve`).
    """
    low, recovery = resolve(spec)
    chosen = _chosen(model, spec, low, kept)
    names = operator_names(list(chosen))
    pins = _pins(names, spec)
    with_pins: dict[Pins, dict[str, Found]] = {(): chosen}  # low and recovery have to run in all of them
    for name, own in zip(chosen, pins.values(), strict=True):
        if own:
            with_pins.setdefault(own, {})[name] = chosen[name]
    pairs = {own: pinned(spec, dict(own)) if own else (low, recovery) for own in with_pins}
    linears: dict[ExecutionPath | None, dict[str, Found]] = {}
    for own, pair in pairs.items():
        for path in pair:
            linears.setdefault(path, {}).update(with_pins[own])
    integer = any(isinstance(path, Recipe) and path.integer for path in linears)
    kind = Int8Linear if integer else PathLinear
    for name, one in chosen.items():
        _check_linear(name, one, model, kind)
    for path, own_linears in linears.items():
        if isinstance(path, Recipe):
            for name, one in own_linears.items():
                check_widths(name, one, path)
    check_unit(names, spec.unit)
    if integer:
        _check_weights(spec.weights, linears, chosen)
    warn_without_effect(spec, low, integer)
    here, *others = {one.weight.device: None for one in chosen.values()}
    if others:
        raise ValueError(f"targets: linears on several devices ({', '.join(map(str, [here, *others]))}); use one")
    run = as_run(linears, spec, device or here, shown)
    paths: dict[Pins, Pair] = {}
    for own, (ours, theirs) in pairs.items():
        in_force = run[ours]
        assert in_force is not None
        paths[own] = in_force, run[theirs]
    mixed: dict[Pins, dict[frozenset[str], Recipe]] = {own: {} for own in paths}
    if spec.unit == "gemm":
        mixed = {own: routes(spec, *both, with_pins[own], device or here) for own, both in paths.items()}
        if not mixed[()]:
            raise ValueError(f"unit='gemm': {spec.low} and {spec.recovery} are alike in {', '.join(spec.recovers)}")
    routed = [gemm for gemm in GEMMS if frozenset([gemm]) in mixed[()]]
    shared = _shared_state(spec, list(run.values()), operators=len(chosen), seed=seed, here=here)
    operators = []
    for index, (name, one) in enumerate(zip(names, chosen.values(), strict=True)):
        operators.append(_exchanged(one, kind, name, index, paths[pins[name]], shared))
        operators[-1].pinned = tuple(gemm for gemm, _ in pins[name])
        _route(operators[-1], mixed[pins[name]])
    units = grouped(operators, spec.unit, routed)
    named_too = {name: recipe for name, recipe in recipes_of(spec).items() if name in spec.recipes}
    converted = ConvertedModel(
        operators, units, *paths[()], shared, tuple(spec.recovers), times=spec.times, recipes=named_too
    )
    if store:
        converted.store(spec.weights)
    return converted


def operator_shapes(model: nn.Module, spec: PathSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each operator that `convert` would give two paths, by its operator's name. ValueError for
    patterns that name none."""
    chosen = _chosen(model, spec, named(spec)[0])
    shapes = [(one.in_features, one.out_features) for one in chosen.values()]
    return dict(zip(operator_names(list(chosen)), shapes, strict=True))


def _chosen(model: nn.Module, spec: PathSpec, low: ExecutionPath, kept: bool = False) -> dict[str, Found]:
    """The linears that the targets name, those that recipes leave in 16 bits only if `kept`. ValueError for patterns
    that name none."""
    linears = operators_in(model)
    names, empty = _select(linears, spec.targets)
    if empty:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in linears})
        raise ValueError(
            f"targets {empty}: no linear has such a name; this model has {', '.join(kinds) or 'none'} (layers "
            "of your own can be declared: gnmr.precision.adapters.register)"
        )
    if isinstance(low, Recipe) and not kept:
        names, empty = _select(_without_kept(model, linears), spec.targets)
        if empty:
            heads = sorted({name.rpartition(".")[2] for name in _select(linears, empty)[0]})
            raise ValueError(
                f"targets {empty}: recipes keep {', '.join(heads)} in 16 bits (output head and gates); name others"
            )
    return {name: linears[name] for name in names}


def _select(linears: Iterable[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """As `gnmr.names.select`, of names without what wrappers add to them."""
    names = list(linears)
    short = [unwrapped(name) for name in names]
    if len(set(short)) < len(short):
        return select(names, patterns)
    found, empty = select(short, patterns)
    own = dict(zip(short, names, strict=True))
    return [own[name] for name in found], empty


def _pins(names: Sequence[str], spec: PathSpec) -> dict[str, Pins]:
    """The pins of each operator, by its name. Raises ValueError for a pattern that names no operator, and for two that
    pin a GEMM on different recipes."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    ends = by_end(names)  # plan.json has a pin for each of thousands of experts
    for pattern, recipes in spec.pinned.items():
        chosen = select(names, [pattern])[0] if set(pattern) & set("*?[") else ends.get(pattern, [])
        if not chosen:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(f"pins {pattern!r}: no operator has such a name; there are {kinds}, as {names[0]}")
        for name, (gemm, recipe) in product(chosen, recipes.items()):
            if (other := found[name].setdefault(gemm, recipe)) != recipe:
                raise ValueError(f"pins.{pattern}.{gemm}={recipe}: another pattern pins {gemm} of {name} on {other}")
    return {name: tuple((gemm, own[gemm]) for gemm in GEMMS if gemm in own) for name, own in found.items()}


def _shared_state(
    spec: PathSpec, paths: Sequence[ExecutionPath | None], *, operators: int, seed: int, here: torch.device
) -> SharedState:
    """Return what the operators, so many on the device `here`, have in common. `paths`: all that one of them has."""
    recipes = [path for path in paths if isinstance(path, Recipe)]
    rounding = None
    if spec.rounding == "stochastic" or any(recipe.stochastic for recipe in recipes):
        rounding = Rounding(seed, torch.device("cpu") if here.type == "meta" else here)
    amax = AmaxHistory(operators, max(recipe.history for recipe in recipes), here) if recipes else None
    return SharedState(quantize_forward=spec.site == "forward", rounding=rounding, amax=amax, device=here)


def _exchanged(
    found: Found, kind: type[PathLinear], name: str, index: int, paths: Pair, shared: SharedState
) -> PathLinear:
    """The same module, or an operator contained in it, with two paths and on the low one."""
    module = found.module
    if found.forward is not None:
        module = contain(found, issubclass(kind, Int8Linear))
    else:
        made = _class_of(type(module), kind)
        assert made is not None
        module.__class__ = made
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


def _route(operator: PathLinear, routes: dict[frozenset[str], Recipe]) -> None:
    """Has the operator's GEMMs routed one by one; `wgrad` of a frozen weight never runs."""
    runs = {"fprop", "dgrad", *(["wgrad"] if operator.weight.requires_grad else [])}
    operator.mixed = {gemms: recipe for gemms, recipe in routes.items() if gemms <= runs}
    operator.gemms = tuple(gemm for gemm in GEMMS if frozenset([gemm]) in operator.mixed)


def _without_kept(model: nn.Module, linears: dict[str, Found]) -> dict[str, Found]:
    """The linears without those that every recipe leaves in 16 bits: by name, and output heads tied to an embedding."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: one
        for (name, one), short in zip(linears.items(), operator_names(list(linears)), strict=True)
        if short.rpartition(".")[2] not in KEPT and id(one.weight) not in embeddings
    }


def _class_of(cls: type[nn.Module], kind: type[PathLinear]) -> type[PathLinear] | None:
    """What a linear of class `cls` becomes, where a plain one becomes a `kind`; None: it can have no paths."""
    if cls is nn.Linear:
        return kind
    if issubclass(cls, PathLinear):  # made for it
        return cls if issubclass(cls, kind) and "plain_class" in vars(cls) else None
    if f"{cls.__module__}.{cls.__qualname__}" not in _ALIKE:
        return None
    if (cls, kind) not in _WITH_PATHS:
        _WITH_PATHS[cls, kind] = type(kind.__name__, (kind, cls), {"plain_class": cls})
    return _WITH_PATHS[cls, kind]


def _check_linear(name: str, found: Found, model: nn.Module, kind: type[PathLinear]) -> None:
    """ValueError for an operator that cannot be given two paths, whatever they are."""
    module, contained = found.module, found.forward is not None
    if isinstance(module, Owner) or (isinstance(module, PathLinear) and module.converted):
        raise ValueError(f"{name} has two paths already (attached twice?): detach the first controller before")
    made = type(module) if contained else _class_of(type(module), kind)
    if made is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}: only a plain nn.Linear can be given two paths; name other "
            "targets, or declare it (gnmr.precision.adapters.register)"
        )
    exchanged = contained or made is not type(module)
    if exchanged and type(module) is not nn.Linear and "forward" in vars(module):
        raise ValueError(
            f"{name}: its forward was wrapped as it was (torchtitan's Module.parallelize), so paths would never be in "
            "force; convert before, or have gnmr.integrations.torchtitan's converter build the model"
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
    """The first parameter that is sharded by anything but FSDP2, which makes plain tensors of them."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and not _gathered(model, name.rpartition(".")[0]):
            return name
    return None


def _gathered(model: nn.Module, name: str) -> bool:
    """Whether FSDP2 makes plain tensors of the parameters there before they are read."""
    from torch.distributed.fsdp import FSDPModule  # there is a DTensor, so there is torch.distributed

    parts = name.split(".")
    return any(isinstance(model.get_submodule(".".join(parts[:i])), FSDPModule) for i in range(len(parts) + 1))


def check_widths(name: str, found: Widths, recipe: Recipe) -> None:
    """ValueError if a group of elements with one scale would be cut by the operator's widths."""
    widths = {"inputs": found.in_features, "outputs": found.out_features}
    for (kind, width), divisor in zip(widths.items(), recipe.divisors(), strict=True):
        if width % divisor:
            raise ValueError(
                f"{name} has {width} {kind}: the recipe {recipe.name} needs a multiple of {divisor}, the size of its "
                "tiles; use another recipe or width, or leave it out of the targets"
            )


def _check_weights(weights: str, paths: Iterable[ExecutionPath | None], linears: dict[str, Found]) -> None:
    """ValueError where these linears' codes cannot be kept so, or their sums would not fit."""
    for name, linear in linears.items():
        if linear.in_features > MOST_INPUTS:
            raise ValueError(
                f"{name} has {linear.in_features} inputs: int32 sums of INT8 products hold {MOST_INPUTS:,}"
            )
        if weights != "online" and linear.forward is not None:
            raise ValueError(
                f"weights={weights!r}: {name} is part of a {linear.kind}, and only an nn.Linear can keep codes in its "
                "weight's place; use weights='online' or other targets"
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
    """Whether all that it casts is the weight in INT8, or what meets that in fprop."""
    fprop = Gemm() if recipe.integer else recipe.fprop
    dgrad = replace(recipe.dgrad, weight=None) if recipe.dgrad.weight == PER_ROW else recipe.dgrad
    return not replace(recipe, fprop=fprop, dgrad=dgrad).casts
