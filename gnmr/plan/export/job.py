"""Find the nearest plan that a target can express, in the library's names."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import yaml

from gnmr.conversion.cost import gemm_time
from gnmr.conversion.targets import role_by_name
from gnmr.errors import UserError, first_few
from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS, Words
from gnmr.options import require
from gnmr.plan.checkpoint_names import holder_of
from gnmr.plan.knapsack import FUSED, Item, choose, fused_name
from gnmr.plan.lists import called
from gnmr.plan.pin_plan import PinPlan

Mix = tuple[str, ...]
"""The recipes of an operator's fprop, dgrad and wgrad."""


@dataclass(frozen=True)
class Target:
    """The abilities of a library, and the function that writes its files."""

    library: str
    """Name, with the version whose source was read."""
    limits: str
    write: Callable[[Job], dict[str, str]]
    can: Callable[[Words, Words, tuple[int, int]], bool]
    """Returns True if it runs an operator with (casts, casts of the low recipe, (inputs, outputs))."""
    layout: str = ""
    """Layout of its names, one of `gnmr.plan.lists.LAYOUTS`."""
    fused: tuple[str, ...] = ()
    """Kinds of operators (`gnmr.plan.knapsack.FUSED`) that share one linear or one format."""
    experts: str = ""
    """The kind to which experts in one tensor belong; "": it does not convert them."""
    modules: tuple[str, ...] = ()
    """Classes besides `nn.Linear` and experts that it converts; "*": any."""
    gemms: tuple[str, ...] = GEMMS
    """GEMMs that it can configure."""
    formats: bool = True
    """True if it names recipes, False if it only names linears to leave out."""

    def fused_name(self, plan: PinPlan, name: str) -> str:
        """Return the name of an operator's linear in the library, except for its layout of names."""
        contained = self.experts and _kind(plan, name, self) == "experts"
        return fused_name(name, (*self.fused, self.experts) if contained else self.fused)

    def converts(self, plan: PinPlan, name: str) -> bool:
        """Return True if it can run an operator in low precision."""
        kind = _kind(plan, name, self)
        return not kind or "*" in self.modules or (bool(self.experts) if kind == "experts" else kind in self.modules)


class Job:
    """A plan that a target can express, by the library's names."""

    def __init__(self, plan: PinPlan, target: Target, pp: int = 1, layers: int | None = None) -> None:
        self.plan, self.pp, self.layers, self.recipes = plan, pp, layers, _recipes(plan)
        known, llama = layers or not (plan.targets or plan.exclude), _all_llama(plan.operators)
        known = known or plan.unconverted is not None
        require(llama or not layers, "layers", layers, "is for a plan whose operators are those of LLaMA's blocks")
        require(
            known or pp == 1, "pp", pp, "a plan of some linears does not say how many blocks the model has: add layers="
        )
        apart = outside(plan, layers)
        nameless = [name for name in apart if target.layout and not _in_layout(name)]
        named, others = _names(plan, plan.operators, target), _names(plan, {*apart}.difference(nameless), target)
        ours = set(named.values())
        self.outside = [
            one for one in dict.fromkeys(others[name] for name in apart if name in others) if one not in ours
        ]
        """Linears of the model outside the plan, by the library's names; they stay in 16 bits."""
        self._saved = {own: _saved_as(plan, name, own) for name, own in (named | others).items()}
        self.unloaded = [*dict.fromkeys(map(holder_of, plan.unloaded))]
        """Linears that are in the checkpoint's file alone, by its names; they stay in 16 bits."""
        self.labels = {named[name]: self.label(mix) for name, mix in mixes(plan).items()}
        """Label of the recipes of each linear, by the library's name."""
        self.widths = {named[name]: shape for name, shape in plan.operators.items()}
        """(inputs, outputs) of each linear, by the library's name; of experts, those of each."""
        self.experts = {named[name] for name in plan.operators if "*" in target.fused_name(plan, name)}
        """Linears that contain all experts of a layer."""
        every = dict.fromkeys([(plan.low,) * len(GEMMS), *mixes(plan).values()])
        self.casts = {
            self.label(mix): {g: self.recipes[n][g] for g, n in zip(GEMMS, mix, strict=True)} for mix in every
        }
        """Casts of each label, the low recipe's first."""
        self.low = next(iter(self.casts))
        low = [self.casts[self.low][gemm] for gemm in target.gemms]
        changed = {label for label, own in self.casts.items() if [own[gemm] for gemm in target.gemms] != low}
        self.kept = [name for name, label in self.labels.items() if label in changed]
        """Linears that the target must not run on the low recipe."""
        self.unlisted = plan.unconverted is None
        """True if the plan does not list the linears that are not its operators."""
        self.notes: list[str] = []
        kinds = Counter(_kind(plan, name, target) for name in plan.operators if not target.converts(plan, name))
        for kind, number in kinds.items():
            self.notes.append(f"NOT converted by it: {number} operators of {kind}, which stay in 16 bits")
        unreached = [name for name in plan.operators if _unreached(plan, name)]
        if unreached:
            on = f"on the recipe of their group, and on {plan.low} if each expert has its own"
            self.notes.append(f"NOT measured, as no token reached them: {first_few(unreached, 3)}; they are {on}")
        if nameless := [name for name in nameless if not role_by_name(name) and not name.endswith("gate")]:
            self.notes.append(f"NOT named in it, as {target.library} has no such linears: {first_few(nameless, 3)}")
        if not target.formats and not target.layout and plan.saved_as and target.gemms != GEMMS:
            self.notes.append("names are those in memory and, where it has others, the checkpoint's")
        if not target.formats and plan.unloaded:
            which = first_few(self.unloaded, 2)
            self.notes.append(f"in 16 bits too: linears in the checkpoint's file alone, never measured ({which})")
        if self.unlisted and not (target.formats or llama):
            which = "which this plan.json does not list: have `gnmr diagnose` write it anew"
            self.notes.append(f"NOT in it: linears that are not the plan's, {which}")
        elif not known and (target.layout or not target.formats):
            self.notes.append("NOT in it: blocks after the plan's last one, if the model has any: export with layers=")

    def in_checkpoint(self, names: Iterable[str]) -> list[str]:
        """Return the names that the checkpoint has for these linears: those of engines that load it."""
        return [*dict.fromkeys(one for name in names for one in self._saved.get(name, [name])), *self.unloaded]

    def in_both(self, names: Iterable[str]) -> list[str]:
        """Return the names in memory and those in the checkpoint, for a list that readers of either kind go by."""
        return [*dict.fromkeys(one for name in names for one in (name, *self._saved.get(name, ()))), *self.unloaded]

    def heads(self) -> list[str]:
        """Return lm_head for a model whose head is not known."""
        known = any(role_by_name(name) == "head" for name in self.plan.unconverted or ())
        return [] if known else ["lm_head"]

    def label(self, mix: Mix) -> str:
        """Return a name for these recipes, one for each set of casts."""
        mix = tuple(name if self.recipes[name][gemm] else "bf16" for gemm, name in zip(GEMMS, mix, strict=True))
        parts = [mix[0]] if len(set(mix)) == 1 else [f"{g}_{name}" for g, name in zip(GEMMS, mix, strict=True)]
        return "_".join(parts).replace("-", "__")


def mixes(plan: PinPlan) -> dict[str, Mix]:
    """Return the recipes of every operator's GEMMs, by its name."""
    return {name: tuple(plan.pins.get(name, {}).get(gemm, plan.low) for gemm in GEMMS) for name in plan.operators}


_MLP = r"mlp\.(?:(?:gate|up|down)|experts\.\d+\.(?:gate|up|gate_up|down))"
_LLAMA = re.compile(rf"(?:model\.)?layers\.\d+\.(?:self_attn\.[qkvo]|{_MLP})_proj")
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..+")


def _all_llama(names: Iterable[str]) -> bool:
    return all(_LLAMA.fullmatch(name) for name in names)


def _in_layout(name: str) -> bool:
    """Return True if the layouts of other libraries have a name for this linear."""
    return bool(_LLAMA.fullmatch(name)) or bool(re.fullmatch(r"(?:model\.)?layers\.\d+\.mlp\.gate", name))


def _unreached(plan: PinPlan, name: str) -> bool:
    """Return True if an operator is in the plan without having run, so that its recipe costs neither nats nor time."""
    return plan.work.get(name) == 0 and name not in plan.prices


def _saved_as(plan: PinPlan, name: str, named: str) -> list[str]:
    """Return the checkpoint's names of an operator whose name in memory is `named` in exports."""
    holder = holder_of(name)
    if holder != name and not named.endswith("experts"):
        return [named]  # one of several experts, which engines do not name
    before = "model." * (named.startswith("model.") and not name.startswith("model."))
    return [before + one for one in plan.saved_as[holder]] if holder in plan.saved_as else [named]


def _kind(plan: PinPlan, name: str, target: Target) -> str:
    """Return the class of the module that holds an operator: "" for nn.Linear, "experts" for experts in one tensor."""
    expert, module = _EXPERT.fullmatch(name), plan.module_of(name)
    if expert and (target.layout or expert[1] == module or any(one.endswith("experts") for one in plan.modules)):
        return "experts"
    return plan.modules[module] if module else ""


def outside(plan: PinPlan, layers: int | None = None) -> list[str]:
    """Return the linears of the model that are not operators of the plan.

    They are excluded, not among its targets, of widths that its recipes do not have, heads or routers. A plan that does
    not list them is assumed to be of LLaMA's blocks, of which there are `layers`; None: up to the plan's last one. A
    block without an MLP in the plan is assumed to have the MLPs of the other blocks. The result is empty for other
    models, whose linears are unknown.

    >>> names = [f"layers.0.{x}_proj" for x in ("self_attn.k", "self_attn.o", "mlp.up")]
    >>> outside(PinPlan(operators=dict.fromkeys(names, (8, 8)), low="nvfp4", recovery=None))
    ['layers.0.self_attn.q_proj', 'layers.0.self_attn.v_proj', 'layers.0.mlp.gate_proj', 'layers.0.mlp.down_proj']
    """
    if not _all_llama(plan.operators):
        return plan.unconverted or []
    found = [name.removeprefix("model.").split(".", 3) for name in plan.operators]
    last = 1 + max(int(number) for _, number, _, _ in found)
    require(layers is None or layers >= last, "layers", layers, f"the plan has {last}")
    if plan.unconverted is not None:
        return plan.unconverted
    before = "model." * next(iter(plan.operators)).startswith("model.")
    mlps: dict[int, dict[str, None]] = {}
    for _, number, part, rest in found:
        if part == "mlp":
            mlps.setdefault(int(number), {})[f"mlp.{rest.rpartition('.')[0]}".rstrip(".") + "."] = None
    usual = dict.fromkeys(mlp for own in mlps.values() for mlp in own) or {"mlp.": None}
    fused = any(name.endswith("gate_up_proj") for name in plan.operators)
    every = []
    for block in range(layers or last):
        own = mlps.get(block, usual)
        every += [f"{before}layers.{block}.self_attn.{x}_proj" for x in "qkvo"]
        if any("experts" in mlp for mlp in own):
            own |= dict.fromkeys(mlp for mlp in usual if "experts" in mlp)
            every.append(f"{before}layers.{block}.mlp.gate")
        for mlp in own:
            parts = ("gate_up", "down") if fused and "experts" in mlp else ("gate", "up", "down")
            every += [f"{before}layers.{block}.{mlp}{x}_proj" for x in parts]
    return [name for name in every if name not in plan.operators]


def _names(plan: PinPlan, names: Iterable[str], target: Target) -> dict[str, str]:
    """Return the library's name of each operator. Raises UserError if its models lack an operator of the plan."""
    llama, named = _all_llama(plan.operators), {}
    if target.layout and not llama:
        other = next(name for name in plan.operators if not _LLAMA.fullmatch(name))
        raise UserError(f"export: {target.library} has no linear such as {other}")
    for name in names:
        before, whole = "model." * (llama and name.startswith("layers.")), target.fused_name(plan, name)
        if target.layout:
            named[name] = called(before + name, target.layout)
        else:  # all experts have the name of the module, or of one of its tensors
            named[name] = before + (whole.replace(".*", "") if "*" in whole else name)
    return named


def _recipes(plan: PinPlan) -> dict[str, Words]:
    """Return the casts of the recipes that a plan names, and of bf16. Raises UserError if low is a format."""
    if plan.low not in (*RECIPES, *plan.recipes):
        raise UserError(f"export: low={plan.low} is a format of saved activations, for which no library has a word")
    return {one.name: one.words() for one in (*plan.named_recipes(), RECIPES["bf16"])}


def read_of(mix: Mix, target: Target) -> dict[str, str]:
    """Return the recipe of each GEMM that a target can configure."""
    return {gemm: name for gemm, name in zip(GEMMS, mix, strict=True) if gemm in target.gemms}


def adapted(plan: PinPlan, target: Target, layers: int | None = None) -> PinPlan:
    """Return the plan that the target can express. Raises UserError if the target lacks the low recipe."""
    _names(plan, (), target)  # refuses models that the library does not have
    recipes, low = _recipes(plan), (plan.low,) * len(GEMMS)
    sixteen = tuple("bf16" if gemm in target.gemms else plan.low for gemm in GEMMS)
    known = {one.name: one for one in (*plan.named_recipes(), RECIPES["bf16"])}
    relative = {gemm: {name: gemm_time(one, gemm, plan.times, known) for name, one in known.items()} for gemm in GEMMS}

    @cache
    def able(shapes: frozenset[tuple[int, int]]) -> list[Mix]:
        """Return the sets of recipes that the target has for operators of these shapes."""
        each = [list(recipes) if gemm in target.gemms else [plan.low] for gemm in GEMMS]
        casts = {mix: {g: recipes[name][g] for g, name in read_of(mix, target).items()} for mix in product(*each)}
        return [mix for mix in casts if all(target.can(casts[mix], recipes[plan.low], shape) for shape in shapes)]

    @cache
    def cheapest(wanted: frozenset[Mix], shapes: frozenset[tuple[int, int]]) -> Mix:
        """Return the cheapest set in which no GEMM has lower precision than in any wanted set."""

        def serves(gemm: str, name: str, other: str) -> bool:
            return name == other or not recipes[name][gemm] or relative[gemm][name] > relative[gemm][other]

        def time(mix: Mix) -> float:
            return sum(relative[gemm][name] for gemm, name in read_of(mix, target).items())

        every = [mix for mix in able(shapes) if all(all(map(serves, GEMMS, mix, other)) for other in wanted)]
        return min(every, key=lambda mix: (time(mix), mix not in wanted))

    linears: dict[str, list[str]] = {}
    for name in plan.operators:
        linears.setdefault(target.fused_name(plan, name), []).append(name)
    kept = {target.fused_name(plan, name) for name in outside(plan, layers)}  # a part of it stays in 16 bits
    kept |= {one for one, names in linears.items() if not target.converts(plan, names[0])}
    shapes = {one: frozenset(plan.operators[name] for name in names) for one, names in linears.items()}
    options = {one: [sixteen] if one in kept else able(shapes[one]) for one in linears}
    if target.formats and not any(low in own for own in options.values()):
        raise UserError(
            f"export: {target.library} has nothing like low={plan.low} for these operators: {target.limits}"
        )
    if not any(target.converts(plan, name) for name in plan.operators):
        raise UserError(f"export: {target.library} converts none of these operators")
    own = {name: tuple(read_of(mix, target).get(gemm, plan.low) for gemm in GEMMS) for name, mix in mixes(plan).items()}
    found = {
        one: sixteen if one in kept else cheapest(frozenset(own[name] for name in names), shapes[one])
        for one, names in linears.items()
    }
    if plan.prices and any(own[name] != found[one] for one, names in linears.items() for name in names):
        found |= _solved(plan, target, linears, options, found)
    pins = {}
    for one, names in linears.items():
        for name in names:
            new = plan.pins.get(name, {}) | read_of(found[one], target)
            pins[name] = {gemm: new[gemm] for gemm in GEMMS if new.get(gemm, plan.low) != plan.low}
    pins = {name: pins[name] for name in plan.operators if pins[name]}
    if pins == plan.pins:
        return plan
    kinds = {*target.fused, *plan.fused} | ({target.experts} if any("*" in one for one in linears) else set())
    choice, expected = plan.choice(pins=pins), plan.expected
    if expected is not None:
        left = choice.after / choice.before if choice.before > 0 else math.inf
        expected = (expected[0], expected[0] * left) if math.isfinite(left) else None
    fused = [kind for kind in FUSED if kind in kinds]
    return replace(plan, pins=pins, fused=fused, extra=choice.extra, expected=expected)


def _solved(
    plan: PinPlan,
    target: Target,
    linears: Mapping[str, Sequence[str]],
    able: Mapping[str, Sequence[Mix]],
    cheapest: Mapping[str, Mix],
) -> dict[str, Mix]:
    """Return the sets of recipes that leave the fewest nats in the plan's time, for linears that may be low.

    The result is empty if the plan has pins without prices.
    """
    low, prices, times = (plan.low,) * len(GEMMS), plan.nats(), plan.gemm_times()
    pinned = [(name, gemm) for name, own in plan.pins.items() if not _unreached(plan, name) for gemm in own]
    if any(item not in prices for item in pinned):
        return {}

    def total(what: Mapping[Item, Mapping[str, float]], mix: Mix, names: Iterable[str]) -> float:
        items = [((name, gemm), recipe) for gemm, recipe in read_of(mix, target).items() for name in names]
        return sum(what[item][recipe] for item, recipe in items if item in what)

    free = [one for one in linears if low in able[one]]
    room = sum(total(times, mix, [name]) - total(times, low, [name]) for name, mix in mixes(plan).items())
    room -= sum(
        total(times, cheapest[one], own) - total(times, low, own) for one, own in linears.items() if one not in free
    )
    if room <= 0:
        return dict.fromkeys(free, low)
    words = {mix: json.dumps(mix) for own in able.values() for mix in own}
    of_prices = {(one, ""): {words[mix]: total(prices, mix, linears[one]) for mix in able[one]} for one in free}
    of_times = {(one, ""): {words[mix]: total(times, mix, linears[one]) for mix in able[one]} for one in free}
    share = room / sum(own[words[low]] for own in of_times.values())
    pins = choose(of_prices, of_times, words[low], share).pins
    return {one: tuple(json.loads(pins[one][""])) if one in pins else low for one in free}


def difference(plan: PinPlan, made: PinPlan, target: Target) -> tuple[str, ...]:
    """Return the differences from the plan, and their cost."""
    theirs = mixes(made)
    pairs = [(read_of(mix, target), read_of(theirs[name], target)) for name, mix in mixes(plan).items()]
    others = sum(ours[gemm] != now[gemm] for ours, now in pairs for gemm in ours)
    lines = []
    if left := sum(gemm not in target.gemms for pins in plan.pins.values() for gemm in pins):
        lines.append(f"NOT in it: {left} pins of other GEMMs than {' and '.join(target.gemms)}")
    now, planned = plan.choice(target.gemms, made.pins), plan.choice()
    extra = f"extra GEMM time {now.extra:.1%}"
    if not others:
        return (*lines, f"as the plan says: every GEMM that it speaks of is on the plan's recipe; {extra}")
    line = f"NOT as the plan says: {others} of {len(pairs) * len(target.gemms)} GEMMs are on another recipe; "
    line += f"{extra}, of the plan {planned.extra:.1%}"
    if plan.prices:
        line += f"; nats left by price {now.after:.3g}, of the plan {planned.after:.3g}"
    return (*lines, line)


def each(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if every GEMM is on the low recipe or in 16 bits."""
    return all(own in ({}, low[gemm]) for gemm, own in casts.items())


def whole(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if all GEMMs are on the low recipe, or all are in 16 bits."""
    return not any(casts.values()) or all(own == low[gemm] for gemm, own in casts.items())


ONE_LINEAR = "q, k and v are one linear for it, gate and up too, and all experts of a layer: they have one recipe"
UNWRAPPED = r"""
def unwrapped(name):
    # Below what wraps the model or its blocks: DDP, FSDP, compile, checkpointing, peft.
    name = re.sub(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)
    name = re.sub(r"^(?:module\.|base_model\.model\.)+", "", name)
    return re.sub(r"\.base_layer(?=\.|$)|\.modules_to_save\.[^.]+(?=\.|$)", "", name)


def placements(names, planned):
    # The ways to find the plan's linears here below one common prefix: (prefix there, prefix here, {there: here}).
    # A base model lacks a prefix of theirs (layers.0 for model.layers.0), and what holds the model adds one.
    parts, found = next(iter(planned), "").split("."), []
    for i in range(len(parts)):
        start = ".".join([*parts[:i], ""]) if i else ""
        if parts[i].isdigit() or not all(name.startswith(start) for name in planned):
            break
        ways = {}
        for name in names:
            for at in [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]:
                if start + name[at:] in planned:
                    ways.setdefault(name[:at], {})[start + name[at:]] = name
        known = [way for _, _, way in found]
        found += [(start, before, way) for before, way in ways.items() if way not in known]
    return sorted(found, key=lambda one: -len(one[2]))
"""


def filled(template: str, **parts: str) -> str:
    """Return the template with each [NAME] replaced."""
    for name, text in parts.items():
        template = template.replace(f"[{name}]", text)
    return template


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return the tree as YAML, with keys in their order."""
    text: str = yaml.safe_dump(dict(tree), sort_keys=False, default_flow_style=False)
    return text


def as_python(tree: Mapping[str, Any] | Sequence[str], indent: int = 0) -> str:
    """Return the tree as Python source, one entry per line."""
    ends, inner = ("{}" if isinstance(tree, Mapping) else "[]"), "    " * (indent + 1)
    items = (
        [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items()]
        if isinstance(tree, Mapping)
        else [json.dumps(item) for item in tree]
    )
    return f"{ends[0]}\n" + "".join(f"{inner}{item},\n" for item in items) + "    " * indent + ends[1]
