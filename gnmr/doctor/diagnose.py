"""`gnmr.diagnose`: what low precision costs a model as it is, GEMM by GEMM, and on which recipe each GEMM should run.

What is measured is the KL divergence a token between the model with every operator on the recovery path and the same
model with some on the low path. Of each batch one forward and backward pass, on labels that the model draws itself,
gives two estimates of the KL of every operator alone (`gnmr.measure.price`), on the low recipe and on those that a
plan may keep it on, and one forward pass the KL of all. The highest of either estimate are then measured, one forward
pass a batch each. Other batches give the KL that is left by the plan, by plans with one recipe besides the low one, and
by the usual guesses at the same cost. Nothing is trained, and the model is afterwards what it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from gnmr.doctor.beside import Beside, kv_cast_of
from gnmr.doctor.diagnosis import Diagnosis
from gnmr.doctor.guards import as_it_was, refuse_meta
from gnmr.doctor.knapsack import check_budget, check_fused
from gnmr.doctor.measuring import Doctor, Progress
from gnmr.doctor.plan import PinPlan, read_plan
from gnmr.errors import nearest, one_of, require, whole
from gnmr.names import BESIDE, FORMATS, KV_CAST, RECIPES, listed, select
from gnmr.precision import ConvertedModel, PathLinear, PathSpec, Recipe, convert
from gnmr.precision.adapters import operators_in
from gnmr.precision.conversion import check_widths, operator_shapes
from gnmr.precision.cost import gemm_time
from gnmr.precision.recipes import RECIPES as RECIPES_OF
from gnmr.precision.recipes import Gemm

Side = Mapping[str, "str | Recipe"]
"""The recipes of one side: {pattern of operators: recipe}."""
CHEAPER = "mxfp8"
"""What a plan may keep a GEMM of 4 bits on besides bf16, if nothing else is said."""


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
    budget: float = 0.10,
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
        model: with its weights, on its device and in its dtype; in float32 small KLs are not hidden by rounding. It
            runs in evaluation mode, and is afterwards as it was to the bit: weights, gradients, modes, random numbers;
            after an error too.
        run: runs `model` on a batch. It returns the logits (..., V); or these and the targets (...), in which -100
            leaves a position out; or an output of transformers, which has `logits` and perhaps `loss`, and of which
            every position counts, padding too; or the mean loss in nats alone, one number with a gradient, for models
            without logits: then no KL is measured.
        batches: two at least; the more, the narrower the intervals.
        recipe: the low path; `int8` stands for `sim_int8`, and so on; or several, {pattern of operators: recipe}, of
            which "*" is that of all others and the last that matches counts. Numbers are simulated, whatever runs here.
        recovery: the path of higher precision, which all errors are against.
        rescue: recipes that the plan may keep a GEMM on. None: the recovery recipe; if that is bf16 and fprop of the
            low path reads 4 bits or fewer, mxfp8 too, as far as the model's widths allow it.
        targets, exclude: patterns of the linears, as in `PathSpec`; targets=None: those of the blocks. Output heads,
            routers and linears tied to an embedding stay in 16 bits.
        budget: extra GEMM time that the plan may take, as a share of the time of all GEMMs on the low path; between two
            sides the share of the GEMMs' arithmetic that may be in one recipe on both.
        times: relative times of GEMMs by the bits of their widest operand, or by recipe, as `PathSpec.times`.
        fused: kinds of operators that have one recipe together, because a library runs them as one: qkv, gate_up,
            experts (each projection of all experts), moe (all of their projections).
        held_out: other batches, on which the KL of the plan and of the usual guesses is measured.
        plan: pins in force, with the plan's own recipes and targets: what is measured is what they leave.
        against: the recipe or recipes of the other side, if two should agree: `recipe` is the rollout's, this the
            trainer's. It takes the place of `recovery`, and needs logits.
        gate: KL a token that two sides may differ by. The plan is then the cheapest that is expected to keep it.
        labels: of the backward pass: "model" draws them from its own predictions; "data" takes the targets or the loss.
        confirm: measure the KL of the N highest of either estimate.
        include: what else is measured, each alone and off the plan: head, router, kv (`gnmr.doctor.beside`).
        kv_cast: of the cache of keys and values, a number format and what shares a scale.
        tokens: price every Nth token; with more than 1 there is no estimate by sequence.
        terms: of a batch, how many terms the mean loss has that `run` gives; None: as many as tokens. A model that says
            one thing of a whole text has one a text.
        progress: see `Progress`.

    Raises:
        ValueError: in one line, for what makes no sense; the model is then as it was.
    """
    check_budget(budget)
    whole(tokens=tokens)
    whole(0, confirm=confirm)
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
    both = low_parts or high_parts or (low, high) != ("bf16", "bf16")
    require(both or plan, "recipe", "bf16", "both sides are in 16 bits; there is nothing to compare")
    sides = against is not None or bool(low_parts)
    where = "plan" if isinstance(plan, PinPlan) else f"plan={plan}"
    if plan is not None:
        plan = plan if isinstance(plan, PinPlan) else read_plan(plan)
        spec = _spec_under(plan, where, model)
    else:
        own = {one.name: one for one in named if isinstance(one, Recipe)}
        spec = _spec(low, high, sides, targets=targets, exclude=exclude, recipes=own, times=dict(times or {}))
    with as_it_was(model):
        with warnings.catch_warnings():
            if sides:  # they may be alike, and either may be the coarser
                warnings.simplefilter("ignore")
            converted = convert(model, spec)
        beside = None
        try:
            apart = _divided(converted, low_parts, high_parts)
            check_fused([operator.operator_name for operator in converted.operators], fused)
            pins = plan.pins if plan is not None else {}
            rescues = {} if sides or pins else _rescues(converted, named, spec.times)
            if include:
                assert isinstance(converted.low, Recipe)
                beside = Beside(model, include, converted.low, cast)
            doctor = Doctor(
                converted,
                model,
                spec,
                run,
                tokens=tokens,
                labels=labels,
                terms=terms,
                gate=gate,
                against=against is not None,
                sides=apart,
                beside=beside,
                pins=pins,
                rescues=rescues,
                asked=rescue is not None,
                fused=fused,
            )
            return doctor.diagnosis(batches, list(held_out), budget, confirm, progress or (lambda _done, _total: None))
        finally:
            if beside is not None:
                beside.restore()
            converted.restore()


def _check_sides(
    recipe: object,
    recovery: object,
    against: object,
    gate: object,
    plan: PinPlan | str | PathLike[str] | None,
    options: Mapping[str, object],
) -> None:
    """ValueError for options that do not go together; `options`: those of a choice among recipes."""
    several = isinstance(recipe, Mapping)
    if plan is not None:
        for key, given in {"against": against, "gate": gate, "recipe": recipe if several else None, **options}.items():
            require(given in (None, ""), key, given, "cannot be asked for under plan=; leave one of them out")
        require(recovery == "bf16", "recovery", recovery, "the plan says which; leave one of them out")
    if against is not None:
        require(recovery == "bf16", "recovery", recovery, "against= stands in its place; leave one of them out")
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
    """(the recipe of all operators, {pattern: recipe of some}), each of which is known."""
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
    """Return what `rescue` names, each of which is known."""
    several = [given] if isinstance(given, str | Recipe) else given
    if several is None:
        return []
    require(isinstance(several, Sequence) and several, "rescue", several, "must be one recipe or several")
    return [_known(one, "rescue") for one in several]


def _rescues(converted: ConvertedModel, named: Sequence[str | Recipe], times: Mapping[str, float]) -> dict[str, Recipe]:
    """Return the recipes, by name, that a plan may keep a GEMM on, the fastest first: those that were asked for, or
    what this model can have of the default."""
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
    """A recipe, or the name of one."""
    require(isinstance(given, str | Recipe), key, given, "must be the name of a recipe, or a Recipe")
    return recipe_named(given, key=key) if isinstance(given, str) else given  # type: ignore[return-value]


def _divided(
    converted: ConvertedModel, low: Mapping[str, Recipe], high: Mapping[str, Recipe]
) -> dict[str, tuple[str, str]]:
    """Give some operators recipes of their own; returns {operator: (its low path, its recovery path)} of those."""
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
    """The recipe of a name: itself, or of a format the recipe that casts everything to it. ValueError for neither."""
    known = (*RECIPES, *others)
    if name not in known and f"sim_{name}" in RECIPES:
        return f"sim_{name}"
    if name not in known:
        what = "is a format without a recipe of its own" if name in FORMATS else "is no recipe"
        raise ValueError(f"{key}={name}: {what}{nearest(name, known)}")
    return name


def _check_model(model: nn.Module) -> None:
    require(isinstance(model, nn.Module), "model", type(model).__name__, "must be an nn.Module")
    right = "has no linear operator, so no GEMM that a recipe would cast (others: gnmr.precision.adapters.register)"
    require(operators_in(model), "model", type(model).__name__, right)
    refuse_meta(model)
    require(not torch.is_inference_mode_enabled(), "model", type(model).__name__, "has no gradients in inference mode")


def _spec(recipe: str | Recipe, recovery: str | Recipe, sides: bool, **more: Any) -> PathSpec:
    """The paths of a diagnosis, of two `sides` perhaps; `more`: other fields of the spec."""
    require(sides or recipe != recovery, "recipe", recipe, "is the recovery path too: there is nothing to diagnose")
    if recipe == recovery == "bf16":  # two formats otherwise, beside which no operator can have a recipe
        recipe = Recipe("16 bits", fprop=Gemm(), dgrad=Gemm(), wgrad=Gemm())
    return PathSpec.of(recipe, recovery, backend="simulated", **more)


def _spec_under(plan: PinPlan, where: str, model: nn.Module) -> PathSpec:
    """The paths of a diagnosis under a plan, which `where` names. UserError for a plan of another model."""
    require(plan.low not in FORMATS, "plan", plan.low, "its low path is a format; recipes alone can be diagnosed")
    spec = PathSpec(backend="simulated", **(plan.paths() | {"recovery": plan.recovery or "bf16"}))
    plan.refuse_other(where, operator_shapes(model, spec))
    return spec
