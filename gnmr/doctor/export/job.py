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

from gnmr.doctor.knapsack import choose, groups_of, times_of
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
        named, others = _names(plan.operators, target), _names(outside(plan), target)
        ours = set(named.values())
        self.outside = [name for name in dict.fromkeys(others.values()) if name not in ours]
        """Linears of the model that are not the plan's, by the library's names: they stay in 16 bits."""
        self.labels = {named[name]: self.label(mix) for name, mix in mixes(plan).items()}
        """What each linear runs, by the library's name of it."""
        every = dict.fromkeys([(plan.low,) * len(GEMMS), *mixes(plan).values()])
        self.casts = {
            self.label(mix): {g: self.recipes[n][g] for g, n in zip(GEMMS, mix, strict=True)} for mix in every
        }
        """Of each label, the low recipe's first."""
        self.low = next(iter(self.casts))
        low = [self.casts[self.low][gemm] for gemm in target.gemms]
        changed = {label for label, own in self.casts.items() if [own[gemm] for gemm in target.gemms] != low}
        self.kept = [name for name, label in self.labels.items() if label in changed]
        """Linears that the target is not to have on the low recipe."""
        self.notes: list[str] = []
        if not (target.formats or _all_llama(plan.operators)):
            self.notes.append("NOT in it: linears that are not the plan's, which stay in 16 bits: name them too")

    def label(self, mix: Mix) -> str:
        """A name for these recipes, one for each set of casts."""
        mix = tuple(name if self.recipes[name][gemm] else "bf16" for gemm, name in zip(GEMMS, mix, strict=True))
        parts = [mix[0]] if len(set(mix)) == 1 else [f"{g}_{name}" for g, name in zip(GEMMS, mix, strict=True)]
        return "_".join(parts).replace("-", "__")


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
    llama = _all_llama(names)
    return {name: f"model.{name.removeprefix('model.')}" if llama else name for name in names}


_LLAMA = re.compile(r"(?:model\.)?layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:experts\.\d+\.)?(?:gate|up|down))_proj")


def _all_llama(names: Iterable[str]) -> bool:
    return all(_LLAMA.fullmatch(name) for name in names)


def outside(plan: PinPlan) -> list[str]:
    """Return the linears of LLaMA's blocks, up to the plan's last one, that are none of its operators: excluded, not
    among its targets, or of widths that its recipes do not have. Empty for other models, whose linears nobody knows.

    A block of which the plan has no MLP is taken to have whatever MLPs other blocks have.

    >>> names = [f"layers.0.{x}_proj" for x in ("self_attn.k", "self_attn.o", "mlp.up")]
    >>> outside(PinPlan(operators=dict.fromkeys(names, (8, 8)), low="nvfp4", recovery=None))
    ['layers.0.self_attn.q_proj', 'layers.0.self_attn.v_proj', 'layers.0.mlp.gate_proj', 'layers.0.mlp.down_proj']
    """
    if not _all_llama(plan.operators):
        return []
    before = "model." * next(iter(plan.operators)).startswith("model.")
    parts = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:self_attn|(mlp\.(?:experts\.\d+\.)?))?.*")
    found = [one for name in plan.operators if (one := parts.fullmatch(name))]
    mlps: dict[int, dict[str, None]] = {}
    for one in found:
        if one[2]:
            mlps.setdefault(int(one[1]), {})[one[2]] = None
    usual = dict.fromkeys(mlp for own in mlps.values() for mlp in own) or {"mlp.": None}
    every = []
    for block in range(1 + max(int(one[1]) for one in found)):
        own = mlps.get(block, usual)
        if any("experts" in mlp for mlp in own):
            own |= dict.fromkeys(mlp for mlp in usual if "experts" in mlp)
        every += [f"{before}layers.{block}.self_attn.{x}_proj" for x in "qkvo"]
        every += [f"{before}layers.{block}.{mlp}{x}_proj" for mlp in own for x in ("gate", "up", "down")]
    return [name for name in every if name not in plan.operators]


def _names(operators: Iterable[str], target: Target) -> dict[str, str]:
    """Return what the library calls each operator. Raises UserError for one that its models do not have."""
    operators = list(operators)
    named = hugging_face(operators)
    if not target.layout:
        return named
    for name in operators:
        if not _LLAMA.fullmatch(name) or (".experts." in name and target.layout == "torchtitan"):
            raise UserError(f"export: {target.library} has no linear such as {name}")
    return {name: called(theirs, target.layout) for name, theirs in named.items()}


def _recipes(plan: PinPlan) -> dict[str, Words]:
    """The casts of the recipes that a plan names, and of bf16. Raises UserError for a format."""
    if plan.low not in (*RECIPES, *plan.recipes):
        raise UserError(f"export: low={plan.low} is a format of saved activations, for which no library has a word")
    return {one.name: one.words() for one in (*plan.named_recipes(), RECIPES["bf16"])}


def read_of(mix: Mix, target: Target) -> dict[str, str]:
    """The recipe of each GEMM that a target speaks of."""
    return {gemm: name for gemm, name in zip(GEMMS, mix, strict=True) if gemm in target.gemms}


def adapted(plan: PinPlan, target: Target) -> PinPlan:
    """Return the plan that the target can say. Raises UserError where it has not even the low recipe."""
    named, recipes, worth = _names(plan.operators, target), _recipes(plan), _Worth(plan, target)
    others = set(outside(plan))
    fused = groups_of([*plan.operators, *others], target.fused) if others else []
    kept = {named[name] for group in fused if others & {*group} for name in group if name in named}
    sixteen = tuple("bf16" if gemm in target.gemms else plan.low for gemm in GEMMS)
    made = worth.plan.regrouped(target.fused) if target.fused else plan
    low = (plan.low,) * len(GEMMS)

    @cache
    def able(shapes: frozenset[tuple[int, int]]) -> list[Mix]:
        """The sets of recipes that the target has for operators of these shapes."""
        each = [list(recipes) if gemm in target.gemms else [plan.low] for gemm in GEMMS]
        casts = {mix: {g: recipes[name][g] for g, name in read_of(mix, target).items()} for mix in product(*each)}
        return [mix for mix in casts if all(target.can(casts[mix], recipes[plan.low], shape) for shape in shapes)]

    @cache
    def cheapest(wanted: frozenset[Mix], shapes: frozenset[tuple[int, int]]) -> Mix:
        """The one in which no GEMM is in lower precision than in any of the wanted ones."""

        def serves(gemm: str, name: str, other: str) -> bool:
            return name == other or not recipes[name][gemm] or worth.times[gemm][name] > worth.times[gemm][other]

        every = [mix for mix in able(shapes) if all(all(map(serves, GEMMS, mix, other)) for other in wanted)]
        return min(every, key=lambda mix: (worth.time(mix), mix not in wanted))

    groups: dict[str, list[str]] = {}
    for name in plan.operators:
        groups.setdefault(named[name], []).append(name)
    options = {linear: able(frozenset(plan.operators[name] for name in names)) for linear, names in groups.items()}
    options |= {linear: [sixteen] for linear in kept}  # a part of it stays in 16 bits
    if target.formats and not any(low in own for own in options.values()):
        raise UserError(f"export: {target.library} has nothing like low={plan.low} for these operators")
    own = {name: tuple(read_of(mix, target).get(gemm, plan.low) for gemm in GEMMS) for name, mix in mixes(made).items()}
    found = {
        linear: cheapest(frozenset(own[name] for name in names), frozenset(plan.operators[name] for name in names))
        for linear, names in groups.items()
        if linear not in kept
    } | dict.fromkeys(kept, sixteen)
    if made.prices and any(own[name] != found[named[name]] for name in own):
        found |= _solved(worth, groups, options, found)
    pins = {}
    for name, old in mixes(made).items():
        new = dict(zip(GEMMS, old, strict=True)) | read_of(found[named[name]], target)
        pins[name] = {gemm: recipe for gemm, recipe in new.items() if recipe != plan.low}
    pins = {name: own for name, own in pins.items() if own}
    return made if pins == made.pins else replace(made, pins=pins)


class _Worth:
    """Time and nats of the GEMMs that a target speaks of."""

    def __init__(self, plan: PinPlan, target: Target) -> None:
        recipes = _recipes(plan)
        free = {name: 0.0 for name, words in recipes.items() if name == plan.recovery or not any(words.values())}
        prices = {name: {gemm: free | own for gemm, own in by_gemm.items()} for name, by_gemm in plan.prices.items()}
        self.plan, self.target = replace(plan, prices=prices), target
        """With the prices of recipes that cost nothing."""
        self.times: dict[str, dict[str, float]] = {}
        for (_, gemm), own in times_of({"": (1, 1)}, (*plan.named_recipes(), RECIPES["bf16"]), plan.times).items():
            self.times[gemm] = dict(own)

    def time(self, mix: Mix, names: Iterable[str] | None = None) -> float:
        """Of an operator on these recipes: a token and weight; with `names` a token of these operators."""
        area = 1 if names is None else sum(map(self.plan.area, names))
        return area * sum(self.times[gemm][recipe] for gemm, recipe in read_of(mix, self.target).items())

    def nats(self, mix: Mix, names: Iterable[str]) -> float:
        """Of these operators on these recipes; infinite for recipes that were not measured."""
        read, prices = read_of(mix, self.target), self.plan.prices
        known = [(prices.get(name, {}).get(gemm), recipe) for name in names for gemm, recipe in read.items()]
        return sum(own.get(recipe, math.inf) for own, recipe in known if own)

    def of(self, plan: PinPlan) -> tuple[float, float]:
        """(extra time, nats left) of a plan of the same model."""
        low, every = (plan.low,) * len(GEMMS), mixes(plan).items()
        now = sum(self.time(mix, [name]) for name, mix in every)
        return now / self.time(low, plan.operators) - 1, sum(self.nats(mix, [name]) for name, mix in every)


def _solved(
    worth: _Worth,
    groups: Mapping[str, Sequence[str]],
    able: Mapping[str, Sequence[Mix]],
    cheapest: Mapping[str, Mix],
) -> dict[str, Mix]:
    """Return the sets of recipes that leave the fewest nats in the time that the plan takes, of linears that may be on
    the low one; none where the plan has pins without prices."""
    plan, low = worth.plan, (worth.plan.low,) * len(GEMMS)
    if any(gemm not in plan.prices.get(name, {}) for name, own in plan.pins.items() for gemm in own):
        return {}
    free = [linear for linear in groups if low in able[linear]]
    fixed = sum(
        worth.time(cheapest[one], own) - worth.time(low, own) for one, own in groups.items() if low not in able[one]
    )
    room = worth.of(plan)[0] * worth.time(low, plan.operators) - fixed
    if room <= 0:
        return dict.fromkeys(free, low)
    words = {mix: json.dumps(mix) for own in able.values() for mix in own}
    prices = {(one, ""): {words[mix]: worth.nats(mix, groups[one]) for mix in able[one]} for one in free}
    times = {(one, ""): {words[mix]: worth.time(mix, groups[one]) for mix in able[one]} for one in free}
    share = room / sum(own[words[low]] for own in times.values())
    pins = choose(prices, times, words[low], share).pins
    return {one: tuple(json.loads(pins[one][""])) if one in pins else low for one in free}


def difference(plan: PinPlan, made: PinPlan, target: Target) -> tuple[str, ...]:
    """Return what is not as the plan says it, and what that costs."""
    theirs = mixes(made)
    pairs = [(read_of(mix, target), read_of(theirs[name], target)) for name, mix in mixes(plan).items()]
    others = sum(ours[gemm] != now[gemm] for ours, now in pairs for gemm in ours)
    lines = []
    if left := sum(gemm not in target.gemms for pins in plan.pins.values() for gemm in pins):
        lines.append(f"NOT in it: {left} pins of other GEMMs than {' and '.join(target.gemms)}")
    if not others:
        return (*lines, "as the plan says: every GEMM that it speaks of is on the plan's recipe")
    worth = _Worth(plan, target)
    (extra, nats), (planned, before) = worth.of(made), worth.of(plan)
    line = f"NOT as the plan says: {others} of {len(pairs) * len(target.gemms)} GEMMs are on another recipe; "
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
