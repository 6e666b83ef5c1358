"""The paths that a diagnosis compares, and the recipes on which a plan may keep a GEMM.

Usually a low path is compared with a recovery path. With two sides, a rollout is compared with a trainer, and some
operators may have recipes of their own on either side. Under a plan, its pins are part of the low path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from torch import nn

from gnmr.conversion import ConvertedModel, PathLinear, PathSpec
from gnmr.conversion.converting import check_widths, operator_shapes
from gnmr.conversion.cost import gemm_time
from gnmr.conversion.resolve import paths_by_name
from gnmr.formats import Recipe
from gnmr.formats.recipes import RECIPES as RECIPE_OF
from gnmr.formats.recipes import Gemm
from gnmr.names import FORMATS, RECIPES, Pins
from gnmr.options import nearest, require
from gnmr.patterns import select
from gnmr.plan.gemm_times import read_gemm_times
from gnmr.plan.pin_plan import PinPlan, read_plan

Side = Mapping[str, "str | Recipe"]
"""The recipes of one side: {pattern of operators: recipe}."""
CHEAPER = "mxfp8"
"""Recipe besides bf16 on which a plan may keep a GEMM of 4 bits by default."""


@dataclass(frozen=True, kw_only=True)
class ComparedPaths:
    """What a diagnosis compares."""

    spec: PathSpec
    pins: Pins
    """Pins of the plan in force, by names without `model.`."""
    low: Mapping[str, Recipe]
    """Recipes of some operators on the low path, by pattern."""
    recovery: Mapping[str, Recipe]
    """The same on the recovery path."""
    rescues: Sequence[str | Recipe]
    """Recipes that the user allows a plan to keep a GEMM on; empty for the default."""
    against: bool
    """True if the recovery path is that of a trainer, and the low path that of a rollout."""
    plan: tuple[PinPlan, str] | None
    """The plan in force and its name in messages."""

    def check(self, model: nn.Module) -> None:
        """Raise UserError if the plan is of another model."""
        if self.plan is not None:
            plan, where = self.plan
            plan.refuse_other(where, operator_shapes(model, self.spec))

    @property
    def two_sides(self) -> bool:
        """Return True if no plan of recipes is chosen: the paths are those of two sides."""
        return self.against or bool(self.low)

    def give_recipes(self, converted: ConvertedModel) -> dict[str, tuple[str, str]]:
        """Give operators that match a pattern their recipes; return {operator: (low recipe, recovery recipe)} of those.

        Raises ValueError if a pattern matches no operator, or if a recipe does not allow an operator's widths.
        """
        names = [operator.operator_name for operator in converted.operators]
        changed: dict[str, PathLinear] = {}
        for path, key, recipes in (("low", "recipe", self.low), ("recovery", "against", self.recovery)):
            for pattern, recipe in recipes.items():
                chosen = select(names, [pattern])[0]
                require(chosen, key, pattern, "no operator has such a name")
                for operator in converted.operators:
                    if operator.operator_name in chosen:
                        check_widths(operator.operator_name, operator, recipe)
                        setattr(operator, path, recipe)
                        changed[operator.operator_name] = operator
        return {name: (o.low.name, "" if o.recovery is None else o.recovery.name) for name, o in changed.items()}

    def rescues_of(self, converted: ConvertedModel) -> dict[str, Recipe]:
        """Return, by name and fastest first, the recipes on which a plan may keep a GEMM.

        These are the recipes that the user named, or the default recipes that this model can have. With two sides or
        under a plan there are none. Raises ValueError if a recipe that the user named cannot be one.
        """
        if self.two_sides or self.pins:
            return {}
        low, recovery, times = converted.low, converted.recovery, self.spec.times
        assert isinstance(low, Recipe) and isinstance(recovery, Recipe)
        default = _default_rescues(low, recovery)
        rescues = {} if self.rescues else {recovery.name: recovery}
        for name in self.rescues or default:
            recipe = RECIPE_OF[name] if isinstance(name, str) else name
            why_not = _why_no_rescue(recipe, converted, low, times)
            require(not (why_not and self.rescues), "rescue", recipe.name, why_not)
            if not why_not:
                rescues[recipe.name] = recipe
        return dict(sorted(rescues.items(), key=lambda item: gemm_time(item[1], "fprop", times)))

    def most_measured_alone(self) -> int:
        """Return the number of recipes, at most, on which fprop of an operator is measured alone."""
        low, recovery = paths_by_name(self.spec)
        assert isinstance(low, Recipe) and isinstance(recovery, Recipe)
        if self.two_sides or self.pins:
            return 1
        rescues = [RECIPE_OF[name] if isinstance(name, str) else name for name in self.rescues]
        rescues = rescues or [RECIPE_OF[name] for name in _default_rescues(low, recovery)]
        return 1 + sum(rescue.fprop != recovery.fprop for rescue in rescues)


def _default_rescues(low: Recipe, recovery: Recipe) -> list[str]:
    """Return the recipes besides the recovery recipe on which a plan may keep a GEMM, if the user names none."""
    # Between at most 4 bits and 16 there is room for a recipe of 8 bits.
    few_bits = any(cast is not None and cast.format.bits <= 4 for cast in (low.fprop.input, low.fprop.weight))
    return [CHEAPER] if few_bits and not recovery.casts else []


def compared_paths(
    *,
    recipe: str | Recipe | Side,
    recovery: str | Recipe,
    against: str | Recipe | Side | None,
    plan: PinPlan | str | PathLike[str] | None,
    rescue: str | Recipe | Sequence[str | Recipe] | None,
    gate: float | None,
    targets: Sequence[str] | None,
    exclude: Sequence[str],
    times: Mapping[str, float] | str | PathLike[str] | None,
    fused: Sequence[str],
) -> ComparedPaths:
    """Return the paths that the arguments of `gnmr.diagnose` describe.

    Raises:
        ValueError: a recipe is unknown, or arguments exclude each other.
        UserError: the plan or the file of times cannot be read.
    """
    rescues = _named_rescues(rescue)
    if isinstance(times, str | PathLike):
        times = read_gemm_times(times)
    right = "must be {bits or recipe: relative time}, or a file of measured times"
    require(times is None or isinstance(times, Mapping), "times", times, right)
    by_operator = isinstance(recipe, Mapping)
    # Arguments that exclude each other.
    words = ",".join(name if isinstance(name, str) else name.name for name in rescues)
    choosing = {"rescue": words or None, "times": times or None}
    if plan is not None:
        excluded: dict[str, object] = {
            "against": against,
            "gate": gate,
            "recipe": recipe if by_operator else None,
            **choosing,
        }
        excluded |= {"fused": ",".join(fused) or None, "targets": targets, "exclude": exclude or None}
        for key, value in excluded.items():
            require(value is None, key, value, "cannot be asked for under plan=; leave one of them out")
        require(recovery == "bf16", "recovery", recovery, "the plan says which; leave one of them out")
    if against is not None:
        require(recovery == "bf16", "recovery", recovery, "cannot be combined with against=; leave one of them out")
    require(not isinstance(recovery, Mapping), "recovery", recovery, "must be one recipe; several are for against=")
    if by_operator or against is not None:
        for key, value in choosing.items():
            right = "cannot be asked for if operators have recipes of their own, or of two sides; leave it out"
            require(value is None, key, value, right)
    if gate is not None:
        number = isinstance(gate, int | float) and not isinstance(gate, bool)
        sound = number and 0 < gate < np.inf
        require(sound, "gate", gate, "must be nats of KL per token, a number above 0")
        require(against is not None, "gate", gate, "is between two sides; give against=RECIPE, the trainer's")
    # The recipes of both paths.
    low, low_of = _side(recipe, "recipe")
    high, high_of = _side(recovery, "recovery") if against is None else _side(against, "against")
    # A plan brings its own recipes, pins and targets.
    if plan is not None:
        in_force = (plan, "plan") if isinstance(plan, PinPlan) else (read_plan(plan), f"plan={plan}")
        right = "its low path is a format; recipes alone can be diagnosed"
        require(in_force[0].low not in FORMATS, "plan", in_force[0].low, right)
        spec = PathSpec(backend="simulated", **(in_force[0].paths() | {"recovery": in_force[0].recovery or "bf16"}))
        return ComparedPaths(spec=spec, pins=spec.pinned, low={}, recovery={}, rescues=[], against=False, plan=in_force)
    casts = low_of or high_of or (low, high) != ("bf16", "bf16")
    require(casts, "recipe", "bf16", "both sides are in 16 bits; there is nothing to compare")
    alike = against is None and not low_of and low == high
    require(not alike, "recipe", low, "is the recovery path too: there is nothing to diagnose")
    if low == high == "bf16":  # these would be two formats, next to which no operator can have a recipe
        low = Recipe("16 bits", fprop=Gemm(), dgrad=Gemm(), wgrad=Gemm())
    recipes = {name.name: name for name in rescues if isinstance(name, Recipe)}
    spec = PathSpec.of(
        low, high, backend="simulated", targets=targets, exclude=exclude, recipes=recipes, times=dict(times or {})
    )
    return ComparedPaths(
        spec=spec, pins={}, low=low_of, recovery=high_of, rescues=rescues, against=against is not None, plan=None
    )


def recipe_named(name: str, defined: Iterable[str] = (), key: str = "recipe") -> str:
    """Return `name`, or the recipe that casts everything to the format `name`.

    Args:
        name: a recipe or a format.
        defined: further recipes that the caller has.
        key: the option, for messages.

    Raises:
        ValueError: there is no such recipe.
    """
    known_recipes = (*RECIPES, *defined)
    if name not in known_recipes and f"sim_{name}" in RECIPES:
        return f"sim_{name}"
    if name not in known_recipes:
        problem = "is a format without a recipe of its own" if name in FORMATS else "is not a recipe"
        raise ValueError(f"{key}={name}: {problem}{nearest(name, known_recipes)}")
    return name


def _checked(recipe: object, key: str) -> str | Recipe:
    """Return a recipe, or the checked name of one."""
    require(isinstance(recipe, str | Recipe), key, recipe, "must be the name of a recipe, or a Recipe")
    return recipe_named(recipe, key=key) if isinstance(recipe, str) else recipe  # type: ignore[return-value]


def _side(recipes: str | Recipe | Side, key: str) -> tuple[str | Recipe, dict[str, Recipe]]:
    """Return (recipe of all operators, {pattern: recipe of some}), and check that each is known."""
    if not isinstance(recipes, Mapping):
        return _checked(recipes, key), {}
    require("*" in recipes, key, list(recipes), 'has no "*", which says the recipe of all other operators')
    by_pattern = {}
    for pattern, name in recipes.items():
        require(isinstance(pattern, str), key, pattern, "must be a pattern of operators' names")
        checked = _checked(name, key)
        recipe = RECIPE_OF[checked] if isinstance(checked, str) else checked
        allowed = pattern == "*" or not (recipe.integer or recipe.history)
        require(allowed, f"{key}.{pattern}", recipe.name, "can be the recipe of all operators alone")
        by_pattern[pattern] = recipe
    return recipes["*"], {pattern: recipe for pattern, recipe in by_pattern.items() if pattern != "*"}


def _named_rescues(rescue: str | Recipe | Sequence[str | Recipe] | None) -> list[str | Recipe]:
    """Return the recipes that `rescue` names, and check that each is known."""
    if rescue is None:
        return []
    names = [rescue] if isinstance(rescue, str | Recipe) else rescue
    require(isinstance(names, Sequence) and names, "rescue", names, "must be one recipe or several")
    return [_checked(name, "rescue") for name in names]


def _why_no_rescue(recipe: Recipe, converted: ConvertedModel, low: Recipe, times: Mapping[str, Any]) -> str:
    """Return why a plan cannot keep a GEMM on this recipe; empty if it can."""
    if recipe.integer or recipe.history:
        return "can be the recipe of all operators alone"
    try:
        for operator in converted.operators:
            check_widths(operator.operator_name, operator, Recipe(recipe.name, fprop=recipe.fprop))
    except ValueError as error:
        return f"{error}"
    if gemm_time(recipe, "fprop", times) <= gemm_time(low, "fprop", times):
        return f"takes no more time in fprop than {low.name}, so it needs no budget; name a slower recipe"
    return ""
