"""Measure with `gnmr.diagnose` what low precision costs a model, and which recipe each GEMM should run on.

The cost is a KL divergence per token. It compares the model with every operator on the recovery path to the same model
with some operators on the low path. On each batch, one forward and backward pass gives two estimates of the KL of every
operator alone (`gnmr.measure.price`). Its labels are drawn by the model itself. The estimates cover the low recipe and
the recipes on which a plan may keep a GEMM. Another forward pass measures the KL of all operators together.

The KL of the operators that are highest by either estimate is then measured, with one forward pass per batch each.
Held-out batches give the KL that remains under the plan and under other choices: plans with only one other recipe, and
the usual guesses at the same cost. Nothing is trained, and the model is restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from gnmr.conversion import ConvertedModel, PathLinear, PathSpec, convert
from gnmr.conversion.adapters import operators_in
from gnmr.conversion.converting import check_widths, operator_shapes
from gnmr.conversion.cost import gemm_time
from gnmr.conversion.reads import is_sharded
from gnmr.formats import Recipe
from gnmr.formats.recipes import RECIPES as RECIPES_OF
from gnmr.formats.recipes import Cast, Gemm
from gnmr.measure.guards import as_it_was, refuse_without_gradients
from gnmr.measure.model_passes import ModelPasses, Progress
from gnmr.measure.unplanned import UnplannedParts, kv_cast_of
from gnmr.names import BESIDE, FORMATS, KV_CAST, RECIPES, Pins
from gnmr.options import nearest, one_of, require, whole_number
from gnmr.patterns import listed, select
from gnmr.plan.diagnosis import Diagnosis
from gnmr.plan.knapsack import budget_of, check_fused
from gnmr.plan.measuring import Doctor
from gnmr.plan.pin_plan import PinPlan, read_plan

Side = Mapping[str, "str | Recipe"]
"""The recipes of one side: {pattern of operators: recipe}."""
CHEAPER = "mxfp8"
"""Recipe besides bf16 on which a plan may keep a GEMM of 4 bits by default."""


def diagnose(
    model: nn.Module,
    run: Callable[[Any], Any],
    batches: Iterable[Any],
    *,
    recipe: str | Recipe | Side = "nvfp4",
    recovery: str | Recipe = "bf16",
    rescue: str | Recipe | Sequence[str | Recipe] | None = None,
    targets: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    budget: float | str = 0.10,
    times: Mapping[str, float] | None = None,
    fused: Sequence[str] = (),
    held_out: Iterable[Any] = (),
    plan: PinPlan | str | PathLike[str] | None = None,
    against: str | Recipe | Side | None = None,
    gate: float | None = None,
    labels: str = "model",
    confirm: int = 20,
    include: Sequence[str] = (),
    kv_cast: str = KV_CAST,
    tokens: int = 1,
    terms: Callable[[Any], int] | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure what every GEMM of the model's linears costs under `recipe`.

    Args:
        model: a model with weights, on its device and in its dtype. In float32, rounding does not hide small KLs. It
            runs in evaluation mode. Weights, gradients, modes and random numbers are restored to the bit, also after an
            error.
        run: runs `model` on a batch. It returns one of the following: the logits (..., V); the logits and the targets
            (...), in which -100 excludes a position; an output of transformers with `logits` and perhaps `loss`, of
            which the positions count that have a gradient of this loss, or without one all of them, padding too; or,
            for a model without logits, the mean loss in nats, one number with a gradient. In the last case no KL is
            measured.
        batches: at least two; more batches give narrower intervals.
        recipe: the low path, where `int8` stands for `sim_int8`, and so on. Several recipes are given as {pattern of
            operators: recipe}: "*" is the recipe of all others, and the last pattern that matches counts. Casts are
            simulated on any hardware.
        recovery: the path of higher precision, against which all errors are measured.
        rescue: recipes on which the plan may keep a GEMM. None: the recovery recipe, and also mxfp8 if recovery is
            bf16, fprop of the low path reads at most 4 bits, and the model's widths allow it.
        targets: patterns of the linears, as in `PathSpec`. None: those of the blocks. Output heads, routers and linears
            that are tied to an embedding stay in 16 bits.
        exclude: patterns of linears to leave out.
        budget: extra GEMM time that the plan may take, as a share of the time of all GEMMs on the low path: 0.1 or
            "+10%". Between two sides, it is the share of the GEMMs' arithmetic that may be in one recipe on both.
        times: relative times of GEMMs by the bits of their widest operand, or by recipe, as `PathSpec.times`.
        fused: kinds of operators that share one recipe because a library runs them as one: qkv, gate_up, experts (each
            projection of all experts), moe (all of their projections).
        held_out: other batches, on which the KL of the plan and of the usual guesses is measured.
        plan: a plan whose pins, recipes and targets are in force; the cost that remains under it is measured.
        against: the recipe or recipes of the trainer, if two sides should agree; `recipe` is then the rollout's. It
            replaces `recovery`, and needs logits.
        gate: KL per token by which two sides may differ. The plan is then the cheapest one expected to keep it.
        labels: labels of the backward pass. "model" draws them from the model's predictions; "data" uses the targets or
            the loss.
        confirm: number of operators, highest by either estimate, whose KL is measured.
        include: parts to measure alone and outside the plan: head, router, kv (`gnmr.measure.unplanned`).
        kv_cast: cast of the cache of keys and values: a number format and the group that shares a scale.
        tokens: price one token in every `tokens`; above 1, there is no estimate by sequence.
        terms: returns the number of terms in the mean loss of a batch, if `run` returns a loss alone. None: it is
            counted in the gradient of the linear that is called last, where positions without a target have none.
        progress: see `Progress`.

    Raises:
        ValueError: an argument is invalid; the message is one line, and the model is restored.
    """
    budget = budget_of(budget)
    whole_number(tokens=tokens)
    whole_number(0, confirm=confirm)
    one_of(("model", "data"), labels=labels)
    fused, include = listed("fused", fused), listed("include", include)
    for kind in include:
        one_of(BESIDE, include=kind)
    cast = kv_cast_of(kv_cast)
    named = _rescues_named(rescue)
    said = ",".join(one if isinstance(one, str) else one.name for one in named)
    options = {"rescue": said, "times": times, "fused": ",".join(fused), "targets": targets, "exclude": exclude or None}
    _check_sides(recipe, recovery, against, gate, plan, options)
    require(times is None or isinstance(times, Mapping), "times", times, "must be {bits or recipe: relative time}")
    _check_model(model)
    low, low_parts = _side(recipe, "recipe")
    high, high_parts = _side(recovery, "recovery") if against is None else _side(against, "against")
    sides = against is not None or bool(low_parts)
    pins: Pins = {}
    if plan is not None:
        spec, pins = _spec_under(plan, model)
    else:
        both = low_parts or high_parts or (low, high) != ("bf16", "bf16")
        require(both, "recipe", "bf16", "both sides are in 16 bits; there is nothing to compare")
        own = {one.name: one for one in named if isinstance(one, Recipe)}
        spec = _spec(low, high, sides, targets=targets, exclude=exclude, recipes=own, times=dict(times or {}))
    # ModelPasses that are compared, and passes in which products are counted, must run the same kernels.
    eager = torch.compiler.set_stance("force_eager")
    with as_it_was(model), eager, _converted(model, spec, sides, include, cast) as (converted, beside):
        apart = _divided(converted, low_parts, high_parts)
        check_fused([operator.operator_name for operator in converted.operators], fused)
        rescues = {} if sides or pins else _rescues(converted, named, spec.times)
        tell = progress or (lambda _done, _total: None)
        passes = ModelPasses(
            converted, model, run, beside, tell, tokens=tokens, labels=labels, terms=terms, rescues=rescues, apart=apart
        )
        doctor = Doctor(
            passes=passes,
            spec=spec,
            pins=pins,
            against=against is not None,
            sides=apart,
            gate=gate,
            fused=fused,
            budget=budget,
            asked=rescue is not None,
            confirm=confirm,
        )
        return doctor.diagnosis(batches, list(held_out))


@contextmanager
def _converted(
    model: nn.Module, spec: PathSpec, sides: bool, include: Sequence[str], kv_cast: Cast
) -> Iterator[tuple[ConvertedModel, UnplannedParts]]:
    """Convert the model, perhaps for two `sides`, and the parts to `include`; restore both afterwards."""
    with ExitStack() as stack:
        with warnings.catch_warnings():
            if sides:  # two sides may be alike, and either may be the coarser
                warnings.simplefilter("ignore")
            converted = convert(model, spec)
        stack.callback(converted.restore)
        assert isinstance(converted.low, Recipe)
        beside = UnplannedParts(model, include, converted.low, kv_cast)
        stack.callback(beside.restore)
        yield converted, beside


def _check_sides(
    recipe: object,
    recovery: object,
    against: object,
    gate: object,
    plan: PinPlan | str | PathLike[str] | None,
    options: Mapping[str, object],
) -> None:
    """Raise ValueError if options are incompatible; `options` are those of a choice among recipes."""
    several = isinstance(recipe, Mapping)
    if plan is not None:
        for key, given in {"against": against, "gate": gate, "recipe": recipe if several else None, **options}.items():
            require(given in (None, ""), key, given, "cannot be asked for under plan=; leave one of them out")
        require(recovery == "bf16", "recovery", recovery, "the plan says which; leave one of them out")
    if against is not None:
        require(recovery == "bf16", "recovery", recovery, "cannot be combined with against=; leave one of them out")
    require(not isinstance(recovery, Mapping), "recovery", recovery, "must be one recipe; several are for against=")
    if several or against is not None:
        for key in ("rescue", "times"):
            right = "cannot be asked for if operators have recipes of their own, or of two sides; leave it out"
            require(not options[key], key, options[key], right)
    if gate is not None:
        number = isinstance(gate, int | float) and not isinstance(gate, bool)
        sound = number and 0 < gate < np.inf  # type: ignore[operator]
        require(sound, "gate", gate, "must be nats of KL per token, a number above 0")
        require(against is not None, "gate", gate, "is between two sides; give against=RECIPE, the trainer's")


def _side(given: str | Recipe | Side, key: str) -> tuple[str | Recipe, dict[str, Recipe]]:
    """Return (recipe of all operators, {pattern: recipe of some}), and check that each is known."""
    if not isinstance(given, Mapping):
        return _known(given, key), {}
    require("*" in given, key, list(given), 'has no "*", which says the recipe of all other operators')
    parts = {}
    for pattern, one in given.items():
        require(isinstance(pattern, str), key, pattern, "must be a pattern of operators' names")
        named = _known(one, key)
        recipe = RECIPES_OF[named] if isinstance(named, str) else named
        whole = pattern == "*" or not (recipe.integer or recipe.history)
        require(whole, f"{key}.{pattern}", recipe.name, "can be the recipe of all operators alone")
        parts[pattern] = recipe
    return given["*"], {pattern: recipe for pattern, recipe in parts.items() if pattern != "*"}


def _rescues_named(given: str | Recipe | Sequence[str | Recipe] | None) -> list[str | Recipe]:
    """Return the recipes that `rescue` names, and check that each is known."""
    several = [given] if isinstance(given, str | Recipe) else given
    if several is None:
        return []
    require(isinstance(several, Sequence) and several, "rescue", several, "must be one recipe or several")
    return [_known(one, "rescue") for one in several]


def _rescues(converted: ConvertedModel, named: Sequence[str | Recipe], times: Mapping[str, float]) -> dict[str, Recipe]:
    """Return, by name and fastest first, the recipes on which a plan may keep a GEMM.

    These are the recipes that were asked for, or the default recipes that this model can have.
    """
    low, recovery = converted.low, converted.recovery
    assert isinstance(low, Recipe) and isinstance(recovery, Recipe)
    found = {} if named else {recovery.name: recovery}
    few_bits = any(cast is not None and cast.format.bits <= 4 for cast in (low.fprop.input, low.fprop.weight))
    for one in named or [CHEAPER] * (few_bits and not recovery.casts):
        recipe = RECIPES_OF[one] if isinstance(one, str) else one
        why = ""
        if recipe.integer or recipe.history:
            why = "can be the recipe of all operators alone"
        elif gemm_time(recipe, "fprop", times) <= gemm_time(low, "fprop", times):
            why = f"takes no more time in fprop than {low.name}, so it needs no budget; name a slower recipe"
        try:
            for operator in converted.operators:
                check_widths(operator.operator_name, operator, Recipe(recipe.name, fprop=recipe.fprop))
        except ValueError as error:
            why = f"{error}"
        require(not (why and named), "rescue", recipe.name, why)
        if not why:
            found[recipe.name] = recipe
    return dict(sorted(found.items(), key=lambda pair: gemm_time(pair[1], "fprop", times)))


def _known(given: object, key: str) -> str | Recipe:
    """Return a recipe, or the checked name of one."""
    require(isinstance(given, str | Recipe), key, given, "must be the name of a recipe, or a Recipe")
    return recipe_named(given, key=key) if isinstance(given, str) else given  # type: ignore[return-value]


def _divided(
    converted: ConvertedModel, low: Mapping[str, Recipe], high: Mapping[str, Recipe]
) -> dict[str, tuple[str, str]]:
    """Give operators that match a pattern their recipes; return {operator: (low recipe, recovery recipe)} of those."""
    names = [operator.operator_name for operator in converted.operators]
    touched: dict[str, PathLinear] = {}
    for key, parts in (("low", low), ("recovery", high)):
        for pattern, recipe in parts.items():
            chosen = select(names, [pattern])[0]
            require(chosen, "recipe" if key == "low" else "against", pattern, "no operator has such a name")
            for operator in converted.operators:
                if operator.operator_name in chosen:
                    check_widths(operator.operator_name, operator, recipe)
                    setattr(operator, key, recipe)
                    touched[operator.operator_name] = operator
    return {name: (one.low.name, "" if one.recovery is None else one.recovery.name) for name, one in touched.items()}


def recipe_named(name: str, others: Iterable[str] = (), key: str = "recipe") -> str:
    """Return `name`, or the recipe that casts everything to the format `name`. Raises ValueError if it is unknown."""
    known = (*RECIPES, *others)
    if name not in known and f"sim_{name}" in RECIPES:
        return f"sim_{name}"
    if name not in known:
        what = "is a format without a recipe of its own" if name in FORMATS else "is not a recipe"
        raise ValueError(f"{key}={name}: {what}{nearest(name, known)}")
    return name


def _check_model(model: nn.Module) -> None:
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    right = "has no linear operator, so no GEMM that a recipe would cast (others: gnmr.conversion.adapters.register)"
    require(operators_in(model), "model", type(model).__name__, right)
    refuse_without_gradients(model)
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    right = "has sharded parameters (DTensor); diagnose it in one process, before it is sharded"
    require(not sharded, "model", type(model).__name__, right)


def _spec(recipe: str | Recipe, recovery: str | Recipe, sides: bool, **more: Any) -> PathSpec:
    """Return the paths of a diagnosis, perhaps of two `sides`; `more` holds other fields of the spec."""
    require(sides or recipe != recovery, "recipe", recipe, "is the recovery path too: there is nothing to diagnose")
    if recipe == recovery == "bf16":  # these would be two formats, next to which no operator can have a recipe
        recipe = Recipe("16 bits", fprop=Gemm(), dgrad=Gemm(), wgrad=Gemm())
    return PathSpec.of(recipe, recovery, backend="simulated", **more)


def _spec_under(given: PinPlan | str | PathLike[str], model: nn.Module) -> tuple[PathSpec, Pins]:
    """Return the paths of a diagnosis under a plan, and its pins. Raises UserError if the plan is of another model."""
    plan, where = (given, "plan") if isinstance(given, PinPlan) else (read_plan(given), f"plan={given}")
    require(plan.low not in FORMATS, "plan", plan.low, "its low path is a format; recipes alone can be diagnosed")
    spec = PathSpec(backend="simulated", **(plan.paths() | {"recovery": plan.recovery or "bf16"}))
    plan.refuse_other(where, operator_shapes(model, spec))
    return spec, spec.pinned
