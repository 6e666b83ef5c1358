"""What a target can say of a plan: the nearest plan that it has words for, in the library's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import yaml

from gnmr.doctor.knapsack import times_of
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

    @cache
    def can(mix: Mix, shape: tuple[int, int]) -> bool:
        casts = {gemm: recipes[name][gemm] for gemm, name in zip(GEMMS, mix, strict=True) if gemm in target.gemms}
        return target.can(casts, recipes[plan.low], shape)

    def serves(gemm: str, name: str, wanted: str) -> bool:
        slower = not recipes[name][gemm] or times[gemm][name] > times[gemm][wanted]
        return gemm not in target.gemms or name == wanted or slower

    @cache
    def cheapest(wanted: frozenset[Mix], shapes: frozenset[tuple[int, int]]) -> Mix:
        each = [[n for n in recipes if all(serves(g, n, mix[i]) for mix in wanted)] for i, g in enumerate(GEMMS)]
        able = [mix for mix in product(*each) if all(can(mix, shape) for shape in shapes)]
        return min(able, key=lambda mix: (sum(times[g][n] for g, n in zip(GEMMS, mix, strict=True)), mix not in wanted))

    if target.formats and not any(can((plan.low,) * len(GEMMS), shape) for shape in set(plan.operators.values())):
        raise UserError(f"export: {target.library} has nothing like low={plan.low} for these operators")
    own, groups = mixes(made), dict[str, list[str]]()
    for name in plan.operators:
        groups.setdefault(named[name], []).append(name)
    pins = {}
    for names in groups.values():
        mix = cheapest(frozenset(own[name] for name in names), frozenset(plan.operators[name] for name in names))
        for name in names:
            new = [one if gemm in target.gemms else old for gemm, one, old in zip(GEMMS, mix, own[name], strict=True)]
            pins[name] = {gemm: one for gemm, one in zip(GEMMS, new, strict=True) if one != plan.low}
    pins = {name: pins[name] for name in plan.operators if pins[name]}
    return made if pins == made.pins else replace(made, pins=pins)


def _priced(plan: PinPlan) -> PinPlan:
    """The plan with the price of the recovery recipe, which is 0."""
    if plan.recovery is None:
        return plan
    prices = {
        name: {gemm: {plan.recovery: 0.0} | own for gemm, own in by_gemm.items()}
        for name, by_gemm in plan.prices.items()
    }
    return replace(plan, prices=prices)


def _spent(plan: PinPlan, target: Target) -> tuple[float, float | None]:
    """(extra time of the GEMMs that the target speaks of, nats left by the plan's prices: None without any)."""
    now = low = nats = 0.0
    times = _times(plan)
    for name, mix in mixes(plan).items():
        inputs, outputs = plan.operators[name]
        for gemm, recipe in zip(GEMMS, mix, strict=True):
            if gemm in target.gemms:
                now += inputs * outputs * times[gemm][recipe]
                low += inputs * outputs * times[gemm][plan.low]
                nats += plan.prices.get(name, {}).get(gemm, {}).get(recipe, 0.0)
    return now / low - 1, nats if plan.prices else None


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
    if nats is not None:
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
