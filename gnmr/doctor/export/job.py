"""What a target can say of a plan: the nearest plan that it has words for, in the library's names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import yaml

from gnmr.doctor.knapsack import choose, times_of
from gnmr.doctor.lists import called
from gnmr.doctor.plan import PinPlan
from gnmr.errors import UserError
from gnmr.names import GEMMS, Words
from gnmr.precision.recipes import RECIPES

Mix = tuple[str, ...]
"""The recipes of an operator's fprop, dgrad and wgrad."""


@dataclass(frozen=True)
class Target:
    """What a library can say, and how it is written."""

    library: str
    """With the version whose source was read."""
    limits: str
    write: Callable[[Job], dict[str, str]]
    can: Callable[[Words, Words, tuple[int, int]], bool]
    """Whether it runs an operator of these casts beside the low recipe's, and of (inputs, outputs)."""
    layout: str = ""
    """Whose names it has: one of `gnmr.doctor.lists.LAYOUTS`."""
    fused: tuple[str, ...] = ()
    """Operators that it has in one linear, or in one format: kinds of `gnmr.doctor.knapsack.FUSED`."""
    gemms: tuple[str, ...] = GEMMS
    """Those that it speaks of."""
    formats: bool = True
    """Whether it names recipes, and not only what is left out."""


class Job:
    """A plan that a target can say, by the library's names."""

    def __init__(self, plan: PinPlan, target: Target, pp: int = 1) -> None:
        self.plan, self.pp, self.recipes = plan, pp, _recipes(plan)
        named = _names(plan, target)
        self.labels = {named[name]: self.label(mix) for name, mix in mixes(plan).items()}
        """What each linear runs, by the library's name of it."""
        every = dict.fromkeys([(plan.low,) * len(GEMMS), *mixes(plan).values()])
        self.casts = {
            self.label(mix): {g: self.recipes[n][g] for g, n in zip(GEMMS, mix, strict=True)} for mix in every
        }
        """Of each label, the low recipe's first."""
        self.low = next(iter(self.casts))
        low = [self.casts[self.low][gemm] for gemm in target.gemms]
        others = {label for label, own in self.casts.items() if [own[gemm] for gemm in target.gemms] != low}
        self.kept = [name for name, label in self.labels.items() if label in others]
        """Linears that the target is not to have on the low recipe."""
        self.notes: list[str] = []

    def label(self, mix: Mix) -> str:
        """A name for these recipes, one for each set of casts."""
        mix = tuple(name if self.recipes[name][gemm] else "bf16" for gemm, name in zip(GEMMS, mix, strict=True))
        parts = [mix[0]] if len(set(mix)) == 1 else [f"{g}_{name}" for g, name in zip(GEMMS, mix, strict=True)]
        return "_".join(parts).replace("-", "_")


def mixes(plan: PinPlan) -> dict[str, Mix]:
    """Return the recipes of every operator's GEMMs, by its name."""
    return {name: tuple(plan.pins.get(name, {}).get(gemm, plan.low) for gemm in GEMMS) for name in plan.operators}


def hugging_face(names: Iterable[str]) -> dict[str, str]:
    """Each operator's name in Hugging Face's layout, where all are of LLaMA's blocks; else its own.

    >>> hugging_face(["layers.0.mlp.up_proj"]), hugging_face(["layers.0.mlp.up_proj", "encoder.up_proj"])
    ({'layers.0.mlp.up_proj': 'model.layers.0.mlp.up_proj'}, {'layers.0.mlp.up_proj': 'layers.0.mlp.up_proj', \
'encoder.up_proj': 'encoder.up_proj'})
    """
    names = list(names)
    llama = all(_LLAMA.fullmatch(name) for name in names)
    return {name: f"model.{name.removeprefix('model.')}" if llama else name for name in names}


_LLAMA = re.compile(r"(?:model\.)?layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:experts\.\d+\.)?(?:gate|up|down))_proj")


def _names(plan: PinPlan, target: Target) -> dict[str, str]:
    """Return what the library calls each operator. Raises UserError for one that its models do not have."""
    named = hugging_face(plan.operators)
    if not target.layout:
        return named
    for name in plan.operators:
        if not _LLAMA.fullmatch(name) or (".experts." in name and target.layout == "torchtitan"):
            raise UserError(f"export: {target.library} has no linear such as {name}")
    return {name: called(theirs, target.layout) for name, theirs in named.items()}


def _recipes(plan: PinPlan) -> dict[str, Words]:
    """The casts of the recipes that a plan names, and of bf16. Raises UserError for a format."""
    if plan.low not in (*RECIPES, *plan.recipes):
        raise UserError(f"export: low={plan.low} is a format of saved activations, for which no library has a word")
    return {one.name: one.words() for one in (*plan.named_recipes(), RECIPES["bf16"])}


def read_of(mix: Mix, target: Target) -> Mix:
    """The recipes of those GEMMs that a target speaks of."""
    return tuple(name for gemm, name in zip(GEMMS, mix, strict=True) if gemm in target.gemms)


def _times(plan: PinPlan) -> dict[str, dict[str, float]]:
    """Relative time by GEMM and recipe."""
    found = times_of({"": (1, 1)}, (*plan.named_recipes(), RECIPES["bf16"]), plan.times)
    return {gemm: dict(own) for (_, gemm), own in found.items()}


def adapted(plan: PinPlan, target: Target) -> PinPlan:
    """Return the plan that the target can say. Raises UserError where it has not even the low recipe."""
    named, recipes, times = _names(plan, target), _recipes(plan), _times(plan)
    made = _priced(plan).regrouped(target.fused) if target.fused else plan
    low = (plan.low,) * len(GEMMS)

    def can(mix: Mix, shape: tuple[int, int]) -> bool:
        casts = {gemm: recipes[name][gemm] for gemm, name in zip(GEMMS, mix, strict=True) if gemm in target.gemms}
        return target.can(casts, recipes[plan.low], shape)

    @cache
    def able(shapes: frozenset[tuple[int, int]]) -> list[Mix]:
        each = [list(recipes) if gemm in target.gemms else [plan.low] for gemm in GEMMS]
        return [mix for mix in product(*each) if all(can(mix, shape) for shape in shapes)]

    @cache
    def cheapest(wanted: frozenset[Mix], shapes: frozenset[tuple[int, int]]) -> Mix:
        """In which no GEMM is in lower precision than in any of the wanted ones."""

        def serves(i: int, name: str) -> bool:
            own = times[GEMMS[i]]
            return not recipes[name][GEMMS[i]] or all(name == mix[i] or own[name] > own[mix[i]] for mix in wanted)

        every = [mix for mix in able(shapes) if all(serves(i, name) for i, name in enumerate(mix))]
        return min(
            every, key=lambda mix: (sum(times[g][n] for g, n in zip(GEMMS, mix, strict=True)), mix not in wanted)
        )

    shapes, groups = dict[str, frozenset[tuple[int, int]]](), dict[str, list[str]]()
    for name in plan.operators:
        groups.setdefault(named[name], []).append(name)
    for linear, names in groups.items():
        shapes[linear] = frozenset(plan.operators[name] for name in names)
    if target.formats and not any(low in able(own) for own in set(shapes.values())):
        raise UserError(f"export: {target.library} has nothing like low={plan.low} for these operators")
    own = {name: _only(mix, plan.low, target) for name, mix in mixes(made).items()}
    found = {linear: cheapest(frozenset(map(own.get, names)), shapes[linear]) for linear, names in groups.items()}
    if any(own[name] != found[named[name]] for name in own) and made.prices:
        found |= _solved(_priced(plan), target, groups, {linear: able(of) for linear, of in shapes.items()}, found)
    pins = {}
    for name, old in mixes(made).items():
        new = [one if g in target.gemms else kept for g, one, kept in zip(GEMMS, found[named[name]], old, strict=True)]
        pins[name] = {gemm: one for gemm, one in zip(GEMMS, new, strict=True) if one != plan.low}
    pins = {name: own for name, own in pins.items() if own}
    return made if pins == made.pins else replace(made, pins=pins)


def _only(mix: Mix, low: str, target: Target) -> Mix:
    """The recipes with the low one where the target does not speak of a GEMM."""
    return tuple(name if gemm in target.gemms else low for gemm, name in zip(GEMMS, mix, strict=True))


def _solved(
    plan: PinPlan,
    target: Target,
    groups: Mapping[str, Sequence[str]],
    able: Mapping[str, Sequence[Mix]],
    cheapest: Mapping[str, Mix],
) -> dict[str, Mix]:
    """Return the sets of recipes that leave the fewest nats in the time that the plan takes, of linears that may be on
    the low one; none where the plan has pins without prices."""
    each, low = _times(plan), (plan.low,) * len(GEMMS)
    if any(gemm not in plan.prices.get(name, {}) for name, own in plan.pins.items() for gemm in own):
        return {}

    def nats(linear: str, mix: Mix) -> float:
        return sum(_price(plan, name, _only(mix, plan.low, target), target) for name in groups[linear])

    def time(linear: str, mix: Mix) -> float:
        area = sum(plan.operators[name][0] * plan.operators[name][1] for name in groups[linear])
        return area * sum(each[g][n] for g, n in zip(GEMMS, mix, strict=True) if g in target.gemms)

    free = [linear for linear in groups if low in able[linear]]
    fixed = sum(time(linear, cheapest[linear]) - time(linear, low) for linear in groups if linear not in free)
    whole, rest = (sum(time(linear, low) for linear in linears) for linears in (groups, free))
    room = _spent(plan, target)[0] * whole - fixed
    if room <= 0:
        return dict.fromkeys(free, low)
    options = {(linear, ""): {json.dumps(mix): mix for mix in able[linear]} for linear in free}
    prices = {item: {word: nats(item[0], mix) for word, mix in own.items()} for item, own in options.items()}
    times = {item: {word: time(item[0], mix) for word, mix in own.items()} for item, own in options.items()}
    chosen = choose(prices, times, json.dumps(low), room / rest).pins
    return {linear: options[linear, ""][chosen[linear][""]] if linear in chosen else low for linear in free}


def _priced(plan: PinPlan) -> PinPlan:
    """The plan with the price of the recovery recipe, which is 0."""
    free = {name: 0.0 for name, words in _recipes(plan).items() if name == plan.recovery or not any(words.values())}
    prices = {name: {gemm: free | own for gemm, own in by_gemm.items()} for name, by_gemm in plan.prices.items()}
    return replace(plan, prices=prices)


def _price(plan: PinPlan, name: str, mix: Mix, target: Target) -> float:
    """Nats of an operator on these recipes; infinite for one that was not measured."""
    own = plan.prices.get(name, {})
    return sum(own[g].get(n, math.inf) for g, n in zip(GEMMS, mix, strict=True) if g in target.gemms and g in own)


def _spent(plan: PinPlan, target: Target) -> tuple[float, float]:
    """(extra time of the GEMMs that the target speaks of, nats left by the plan's prices)."""
    now = low = nats = 0.0
    times, plan = _times(plan), _priced(plan)
    for name, mix in mixes(plan).items():
        area = plan.operators[name][0] * plan.operators[name][1]
        read = [(gemm, recipe) for gemm, recipe in zip(GEMMS, mix, strict=True) if gemm in target.gemms]
        now += area * sum(times[gemm][recipe] for gemm, recipe in read)
        low += area * sum(times[gemm][plan.low] for gemm, _ in read)
        nats += _price(plan, name, mix, target)
    return now / low - 1, nats


def difference(plan: PinPlan, made: PinPlan, target: Target) -> tuple[str, ...]:
    """Return what is not as the plan says it, and what that costs."""
    ours, theirs = mixes(plan), mixes(made)
    pairs = [
        pair for name in ours for pair in zip(read_of(ours[name], target), read_of(theirs[name], target), strict=True)
    ]
    others = sum(a != b for a, b in pairs)
    lines = []
    if left := sum(gemm not in target.gemms for pins in plan.pins.values() for gemm in pins):
        lines.append(f"NOT in it: {left} pins of other GEMMs than {' and '.join(target.gemms)}")
    if not others:
        return (*lines, "as the plan says: every GEMM that it speaks of is on the plan's recipe")
    (extra, nats), (planned, before) = _spent(made, target), _spent(plan, target)
    line = f"NOT as the plan says: {others} of {len(pairs)} GEMMs are on another recipe; "
    line += f"extra GEMM time {extra:.1%}, of the plan {planned:.1%}"
    if plan.prices:
        line += f"; nats left by price {nats:.3g}, of the plan {before:.3g}"
    return (*lines, line)


def each(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Every GEMM on the low recipe or in 16 bits."""
    return all(own in ({}, low[gemm]) for gemm, own in casts.items())


def whole(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """All on the low recipe, or all in 16 bits."""
    return not any(casts.values()) or all(own == low[gemm] for gemm, own in casts.items())


ONE_LINEAR = "q, k and v are one linear for it, gate and up too, and all experts: they have one recipe"
UNWRAPPED = r"""
def unwrapped(name):
    # Below what wraps the model or its blocks: DDP, FSDP, compile, checkpointing, peft.
    name = re.sub(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)
    return re.sub(r"^(?:module\.|base_model\.model\.)+", "", name).removesuffix(".base_layer")
"""


def filled(template: str, **parts: str) -> str:
    """The template with its [NAME] replaced."""
    for name, text in parts.items():
        template = template.replace(f"[{name}]", text)
    return template


def as_yaml(tree: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(tree), sort_keys=False, default_flow_style=False)
    return text


def as_python(tree: Mapping[str, Any] | Sequence[str], indent: int = 0) -> str:
    """Python, an entry a line."""
    ends, inner = ("{}" if isinstance(tree, Mapping) else "[]"), "    " * (indent + 1)
    items = (
        [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items()]
        if isinstance(tree, Mapping)
        else [json.dumps(item) for item in tree]
    )
    return f"{ends[0]}\n" + "".join(f"{inner}{item},\n" for item in items) + "    " * indent + ends[1]
