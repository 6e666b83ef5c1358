"""Find the nearest plan that a target can express, in the library's names."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gnmr.conversion.cost import gemm_time
from gnmr.conversion.targets import role_by_name
from gnmr.errors import UserError, first_few, plural
from gnmr.formats.recipes import RECIPES
from gnmr.names import GEMMS, Words
from gnmr.plan.checkpoint_names import holder_of
from gnmr.plan.knapsack import FUSED, Item, choose, fused_name
from gnmr.plan.lists import called
from gnmr.plan.pin_plan import PinPlan

Mix = tuple[str, ...]
"""The recipes of an operator's fprop, dgrad and wgrad."""
_MLP = r"mlp\.(?:(?:gate|up|down)|experts\.\d+\.(?:gate|up|gate_up|down))"
_LLAMA = re.compile(rf"(?:model\.)?layers\.\d+\.(?:self_attn\.[qkvo]|{_MLP})_proj")
_GATE = re.compile(r"(?:model\.)?layers\.\d+\.mlp\.gate")
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..+")


@dataclass(frozen=True)
class Target:
    """The abilities of a library, and the function that writes its files."""

    library: str
    """Name, with the version whose source was read."""
    limits: str
    write: Callable[[Job], dict[str, str]]
    """Returns texts by file name."""
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
        if not kind or "*" in self.modules:
            return True
        return bool(self.experts) if kind == "experts" else kind in self.modules

    def configured(self, mix: Mix) -> dict[str, str]:
        """Return the recipe of each GEMM that it can configure."""
        return {gemm: recipe for gemm, recipe in zip(GEMMS, mix, strict=True) if gemm in self.gemms}


# ---- the plan's operators, and the model's other linears ----


def mixes(plan: PinPlan) -> dict[str, Mix]:
    """Return the recipes of every operator's GEMMs, by its name."""
    return {name: tuple(plan.pins.get(name, {}).get(gemm, plan.low) for gemm in GEMMS) for name in plan.operators}


def _all_llama(names: Iterable[str]) -> bool:
    return all(_LLAMA.fullmatch(name) for name in names)


def _unreached(plan: PinPlan, name: str) -> bool:
    """Return True if an operator is in the plan without having run, so that its recipe costs neither nats nor time."""
    return plan.work.get(name) == 0 and name not in plan.prices


def _kind(plan: PinPlan, name: str, target: Target) -> str:
    """Return the class of the module that holds an operator: "" for nn.Linear, "experts" for experts in one tensor."""
    expert, module = _EXPERT.fullmatch(name), plan.module_of(name)
    if expert and (target.layout or expert[1] == module or any(path.endswith("experts") for path in plan.modules)):
        return "experts"
    return plan.modules[module] if module else ""


def others_of(plan: PinPlan) -> list[str]:
    """Return the linears of the model that are not operators of the plan: heads, routers, and what was left out.

    Raises UserError if the plan does not list them, because a list of names to leave out would then lack some.
    """
    if plan.unconverted is None:
        remedy = "have `gnmr diagnose` write it anew"
        raise UserError(f"export: the plan does not list the model's other linears (unconverted); {remedy}")
    return plan.unconverted


def _named(plan: PinPlan, names: Iterable[str], target: Target) -> dict[str, str]:
    """Return the library's name of each operator. Raises UserError if its models lack an operator of the plan."""
    llama, named = _all_llama(plan.operators), {}
    if target.layout and not llama:
        foreign = next(name for name in plan.operators if not _LLAMA.fullmatch(name))
        raise UserError(f"export: {target.library} has no linear such as {foreign}")
    for name in names:
        prefix = "model." if llama and name.startswith("layers.") else ""
        fused = target.fused_name(plan, name)
        if target.layout:
            named[name] = called(prefix + name, target.layout)
        else:  # all experts have the name of the module, or of one of its tensors
            named[name] = prefix + (fused.replace(".*", "") if "*" in fused else name)
    return named


def _recipes(plan: PinPlan) -> dict[str, Words]:
    """Return the casts of the recipes that a plan names, and of bf16. Raises UserError if low is a format."""
    if plan.low not in (*RECIPES, *plan.recipes):
        raise UserError(f"export: low={plan.low} is a format of saved activations, for which no library has a word")
    return {recipe.name: recipe.words() for recipe in (*plan.named_recipes(), RECIPES["bf16"])}


# ---- the nearest plan ----


def adapted(plan: PinPlan, target: Target) -> PinPlan:
    """Return the nearest plan that the target can express; the plan itself if that is one.

    A linear of the library may stand for several operators, and may not have every set of recipes. If the plan has
    prices, the sets of all linears are chosen anew within the plan's time. Otherwise each gets its cheapest set in
    which no GEMM has lower precision than in the plan.

    Args:
        plan: the plan.
        target: the library.

    Raises:
        UserError: the target lacks the low recipe, or an operator of the plan; or the plan does not list the linears
            that are not its operators.
    """
    _named(plan, (), target)  # refuses models that the library does not have
    recipes, low = _recipes(plan), (plan.low,) * len(GEMMS)
    sixteen = tuple("bf16" if gemm in target.gemms else plan.low for gemm in GEMMS)
    by_name = {recipe.name: recipe for recipe in (*plan.named_recipes(), RECIPES["bf16"])}
    times, times_by_bits = (
        {gemm: {name: gemm_time(x, gemm, given, by_name) for name, x in by_name.items()} for gemm in GEMMS}
        for given in (plan.times, None)
    )

    @cache
    def able(shapes: frozenset[tuple[int, int]]) -> list[Mix]:
        """Return the sets of recipes that the target has for operators of these shapes."""
        choices = [list(recipes) if gemm in target.gemms else [plan.low] for gemm in GEMMS]
        casts = {
            mix: {gemm: recipes[name][gemm] for gemm, name in target.configured(mix).items()}
            for mix in product(*choices)
        }
        return [mix for mix in casts if all(target.can(casts[mix], recipes[plan.low], shape) for shape in shapes)]

    @cache
    def cheapest(wanted: frozenset[Mix], shapes: frozenset[tuple[int, int]]) -> Mix:
        """Return the cheapest set in which no GEMM has lower precision than in any wanted set."""

        # A recipe may take the place of a wanted one if it is exact or has more bits, which the times of a user's
        # hardware do not say.
        def serves(gemm: str, name: str, wanted_name: str) -> bool:
            more_bits = times_by_bits[gemm][name] > times_by_bits[gemm][wanted_name]
            return name == wanted_name or not recipes[name][gemm] or more_bits

        def time(mix: Mix) -> float:
            return sum(times[gemm][name] for gemm, name in target.configured(mix).items())

        serving = [mix for mix in able(shapes) if all(all(map(serves, GEMMS, mix, other)) for other in wanted)]
        return min(serving, key=lambda mix: (time(mix), mix not in wanted))

    # The operators of each linear of the library. One with a part in 16 bits, or of another class, stays in 16 bits.
    linears: dict[str, list[str]] = {}
    for name in plan.operators:
        linears.setdefault(target.fused_name(plan, name), []).append(name)
    in_16_bits = {target.fused_name(plan, name) for name in others_of(plan)}
    in_16_bits |= {linear for linear, names in linears.items() if not target.converts(plan, names[0])}
    shapes = {linear: frozenset(plan.operators[name] for name in names) for linear, names in linears.items()}
    options = {linear: [sixteen] if linear in in_16_bits else able(shapes[linear]) for linear in linears}
    if target.formats and not any(low in mixes_of for mixes_of in options.values()):
        lack = f"has nothing like low={plan.low} for these operators ({_of_widths(plan)})"
        raise UserError(f"export: {target.library} {lack}: {target.limits}")
    if not any(target.converts(plan, name) for name in plan.operators):
        raise UserError(f"export: {target.library} converts none of these operators")

    # Each linear's cheapest set that serves all of its operators.
    wanted = {
        name: tuple(target.configured(mix).get(gemm, plan.low) for gemm in GEMMS) for name, mix in mixes(plan).items()
    }
    chosen = {
        linear: sixteen if linear in in_16_bits else cheapest(frozenset(wanted[x] for x in names), shapes[linear])
        for linear, names in linears.items()
    }
    if plan.prices and any(wanted[name] != chosen[linear] for linear, names in linears.items() for name in names):
        chosen |= _solved(plan, target, linears, options, chosen)

    # Pins of GEMMs that the library cannot configure stay in the plan: its time and its nats count them.
    pins = {}
    for linear, names in linears.items():
        for name in names:
            recipe_of = plan.pins.get(name, {}) | target.configured(chosen[linear])
            pins[name] = {gemm: recipe_of[gemm] for gemm in GEMMS if recipe_of.get(gemm, plan.low) != plan.low}
    pins = {name: pins[name] for name in plan.operators if pins[name]}
    if pins == plan.pins:
        return plan
    # What is expected to be left scales with the nats by price.
    choice, expected = plan.choice(pins=pins), plan.expected
    if expected is not None:
        share_left = choice.after / choice.before if choice.before > 0 else math.inf
        expected = (expected[0], expected[0] * share_left) if math.isfinite(share_left) else None
    kinds = {*target.fused, *plan.fused}
    if any("*" in linear for linear in linears):
        kinds.add(target.experts)
    fused = [kind for kind in FUSED if kind in kinds]
    return replace(
        plan,
        pins=pins,
        fused=fused,
        extra=choice.extra,
        extra_of_all=plan.share_of_all(choice),
        expected=expected,
    )


def _solved(
    plan: PinPlan,
    target: Target,
    linears: Mapping[str, Sequence[str]],
    options: Mapping[str, Sequence[Mix]],
    cheapest: Mapping[str, Mix],
) -> dict[str, Mix]:
    """Return the sets of recipes that leave the fewest nats in the plan's time, for linears that may be low.

    The result is empty if the plan has pins without prices.
    """
    low, prices, times = (plan.low,) * len(GEMMS), plan.nats(), plan.gemm_times()
    pinned = [(name, gemm) for name, pins in plan.pins.items() if not _unreached(plan, name) for gemm in pins]
    if any(item not in prices for item in pinned):
        return {}

    def total(values: Mapping[Item, Mapping[str, float]], mix: Mix, names: Iterable[str]) -> float:
        items = [((name, gemm), recipe) for gemm, recipe in target.configured(mix).items() for name in names]
        return sum(values[item][recipe] for item, recipe in items if item in values)

    # The room is the plan's extra time, less that of the linears that cannot be low.
    free = [linear for linear in linears if low in options[linear]]
    room = sum(total(times, mix, [name]) - total(times, low, [name]) for name, mix in mixes(plan).items())
    room -= sum(
        total(times, cheapest[linear], names) - total(times, low, names)
        for linear, names in linears.items()
        if linear not in free
    )
    if room <= 0:
        return dict.fromkeys(free, low)

    # The knapsack's items are the linears, and its recipes whole sets.
    words = {mix: json.dumps(mix) for mixes_of in options.values() for mix in mixes_of}
    nats_of, times_of = (
        {(linear, ""): {words[mix]: total(values, mix, linears[linear]) for mix in options[linear]} for linear in free}
        for values in (prices, times)
    )
    budget = room / sum(time_of[words[low]] for time_of in times_of.values())
    pins = choose(nats_of, times_of, words[low], budget).pins
    return {linear: tuple(json.loads(pins[linear][""])) if linear in pins else low for linear in free}


def difference(plan: PinPlan, nearest: PinPlan, target: Target) -> tuple[str, ...]:
    """Return what the nearest plan does otherwise, and what that costs, as lines."""
    nearest_mixes, lines = mixes(nearest), []
    pairs = [(target.configured(mix), target.configured(nearest_mixes[x])) for x, mix in mixes(plan).items()]
    num_other = sum(planned[gemm] != actual[gemm] for planned, actual in pairs for gemm in planned)
    if num_lost := sum(gemm not in target.gemms for pins in plan.pins.values() for gemm in pins):
        lines.append(f"NOT in it: {num_lost} pins of other GEMMs than {' and '.join(target.gemms)}")
    actual, planned = plan.choice(target.gemms, nearest.pins), plan.choice()
    extra = f"extra GEMM time {actual.extra:.1%} ({plan.share_of_all(actual):.1%} of all GEMMs)"
    if not num_other:
        return (*lines, f"as the plan says: every GEMM that it speaks of is on the plan's recipe; {extra}")
    line = f"NOT as the plan says: {num_other} of {len(pairs) * len(target.gemms)} GEMMs are on another recipe; "
    line += f"{extra}, of the plan {planned.extra:.1%}"
    if plan.prices:
        line += f"; nats left by price {actual.after:.3g}, of the plan {planned.after:.3g}"
    return (*lines, line, *_too_narrow(plan, nearest, target))


def _too_narrow(plan: PinPlan, nearest: PinPlan, target: Target) -> Iterator[str]:
    """Yield a line on the linears whose widths keep them off the low recipe, if there are any."""
    casts, times, mix_of = _recipes(plan)[plan.low], plan.gemm_times(), mixes(nearest)
    low_casts = {gemm: casts[gemm] for gemm in target.gemms}
    unfit = {
        name: shape
        for name, shape in plan.operators.items()
        if target.converts(plan, name) and not target.can(low_casts, casts, shape)
    }
    actual = {(name, gemm): recipe for name in unfit for gemm, recipe in target.configured(mix_of[name]).items()}
    if not actual:
        return
    recipes = " and ".join(recipe for recipe, _ in Counter(actual.values()).most_common())
    line = f"NOT on {plan.low}: {plural(len(unfit), 'linear')} whose widths it does not take here ("
    line += first_few([f"{name} {inputs} -> {outputs}" for name, (inputs, outputs) in unfit.items()], 2)
    line += f"); of the plan's recipes they run on {recipes}"
    if low_time := sum(times[item][plan.low] for item in actual if item in times):
        actual_time = sum(times[item][recipe] for item, recipe in actual.items() if item in times)
        line += f", at {actual_time / low_time:.2g} times their GEMM time on {plan.low}"
    yield line


def _of_widths(plan: PinPlan) -> str:
    """Return the operators by their widths, the most frequent ones first."""
    widths = Counter(f"{inputs} -> {outputs}" for inputs, outputs in plan.operators.values())
    return first_few([width for width, _ in widths.most_common()], 3)


# ---- the plan in the library's names ----


class Job:
    """A plan that a target can express, by the library's names."""

    def __init__(self, plan: PinPlan, target: Target, pp: int = 1) -> None:
        """Name the linears of a plan as the target does.

        Args:
            plan: a plan that `adapted` returned for this target.
            target: the library.
            pp: pipeline stages.
        """
        self.plan, self.target, self.pp = plan, target, pp
        self._recipes = _recipes(plan)
        unplanned = others_of(plan)
        self._nameless = []
        if target.layout:  # the layouts of other libraries have no name for any other linear
            self._nameless = [name for name in unplanned if not (_LLAMA.fullmatch(name) or _GATE.fullmatch(name))]
        named = _named(plan, plan.operators, target)
        named_others = _named(plan, {*unplanned}.difference(self._nameless), target)
        planned = set(named.values())
        outside_names = dict.fromkeys(named_others[name] for name in unplanned if name in named_others)
        self.outside = [name for name in outside_names if name not in planned]
        """Linears of the model outside the plan, by the library's names; they stay in 16 bits."""
        self._saved = {
            library_name: self._saved_as(x, library_name) for x, library_name in (named | named_others).items()
        }
        self.unloaded = [*dict.fromkeys(map(holder_of, plan.unloaded))]
        """Linears that are in the checkpoint's file alone, by its names; they stay in 16 bits."""
        self.labels = {named[name]: self._label(mix) for name, mix in mixes(plan).items()}
        """Label of the recipes of each linear, by the library's name."""
        self.widths = {named[name]: shape for name, shape in plan.operators.items()}
        """(inputs, outputs) of each linear, by the library's name; of experts, those of each."""
        self.experts = {named[name] for name in plan.operators if "*" in target.fused_name(plan, name)}
        """Linears that contain all experts of a layer."""
        self.casts: dict[str, Words] = {}
        """Casts of each label, the low recipe's first."""
        for mix in ((plan.low,) * len(GEMMS), *mixes(plan).values()):
            self.casts[self._label(mix)] = {g: self._recipes[x][g] for g, x in zip(GEMMS, mix, strict=True)}
        self.low = next(iter(self.casts))
        # Labels that differ only in GEMMs that the target cannot configure are all the low recipe for it.
        low = [self.casts[self.low][gemm] for gemm in target.gemms]
        changed = {label for label, casts in self.casts.items() if [casts[gemm] for gemm in target.gemms] != low}
        self.left_out = [name for name, label in self.labels.items() if label in changed]
        """Linears that the target must not run on the low recipe."""
        self.notes = self._notes()
        """Lines about what the files do not say; a writer adds its own."""

    def _notes(self) -> list[str]:
        plan, target, notes = self.plan, self.target, []
        kinds = Counter(_kind(plan, name, target) for name in plan.operators if not target.converts(plan, name))
        for kind, number in kinds.items():
            notes.append(f"NOT converted by it: {number} operators of {kind}, which stay in 16 bits")
        if unreached := [name for name in plan.operators if _unreached(plan, name)]:
            recipes = f"on the recipe of their group, and on {plan.low} if each expert has its own"
            notes.append(f"NOT measured, as no token reached them: {first_few(unreached, 3)}; they are {recipes}")
        if unnamed := [x for x in self._nameless if not role_by_name(x) and not x.endswith("gate")]:
            notes.append(f"NOT named in it, as {target.library} has no such linears: {first_few(unnamed, 3)}")
        if not target.formats and not target.layout and plan.saved_as and target.gemms != GEMMS:
            notes.append("names are those in memory and, where it has others, the checkpoint's")
        if not target.formats and plan.unloaded:
            which = first_few(self.unloaded, 2)
            notes.append(f"in 16 bits too: linears in the checkpoint's file alone, never measured ({which})")
        return notes

    def _saved_as(self, name: str, library_name: str) -> list[str]:
        """Return the checkpoint's names of an operator that exports call `library_name`."""
        holder, saved_as = holder_of(name), self.plan.saved_as
        one_of_experts = holder != name and not library_name.endswith("experts")  # which engines do not name
        if one_of_experts or holder not in saved_as:
            return [library_name]
        prefix = "model." if library_name.startswith("model.") and not name.startswith("model.") else ""
        return [prefix + saved for saved in saved_as[holder]]

    def _label(self, mix: Mix) -> str:
        """Return a name for these recipes, one for each set of casts."""
        recipes = [name if self._recipes[name][gemm] else "bf16" for gemm, name in zip(GEMMS, mix, strict=True)]
        by_gemm = "_".join(f"{gemm}_{name}" for gemm, name in zip(GEMMS, recipes, strict=True))
        return (recipes[0] if len(set(recipes)) == 1 else by_gemm).replace("-", "__")

    def in_checkpoint(self, names: Iterable[str]) -> list[str]:
        """Return the names that the checkpoint has for these linears: those of engines that load it."""
        return [*dict.fromkeys(saved for name in names for saved in self._saved.get(name, [name])), *self.unloaded]

    def in_both(self, names: Iterable[str]) -> list[str]:
        """Return the names in memory and those in the checkpoint, for a list that readers of either kind go by."""
        spellings = (spelling for name in names for spelling in (name, *self._saved.get(name, ())))
        return [*dict.fromkeys(spellings), *self.unloaded]

    def heads(self) -> list[str]:
        """Return lm_head for a model whose head is not known."""
        head_known = any(role_by_name(name) == "head" for name in self.plan.unconverted or ())
        return [] if head_known else ["lm_head"]


# ---- what the writers share ----


def low_or_16_by_gemm(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if every GEMM is on the low recipe or in 16 bits."""
    return all(operands in ({}, low[gemm]) for gemm, operands in casts.items())


def low_or_16_by_linear(casts: Words, low: Words, shape: tuple[int, int]) -> bool:
    """Return True if all GEMMs are on the low recipe, or all are in 16 bits."""
    return not any(casts.values()) or all(operands == low[gemm] for gemm, operands in casts.items())


ONE_LINEAR = "q, k and v are one linear for it, gate and up too, and all experts of a layer: they have one recipe"


def filled(template: str, **texts: object) -> str:
    """Return the text of a template in the folder `templates`, with these values."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(template).render(texts)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return the tree as YAML, with keys in their order."""
    text: str = yaml.safe_dump(dict(tree), sort_keys=False, default_flow_style=False)
    return text


def as_python(tree: Mapping[str, Any] | Sequence[str], indent: int = 0) -> str:
    """Return the tree as Python source, one entry per line."""
    margin, inner = "    " * indent, "    " * (indent + 1)
    if isinstance(tree, Mapping):
        entries = "".join(f"{inner}{json.dumps(key)}: {json.dumps(value)},\n" for key, value in tree.items())
        return f"{{\n{entries}{margin}}}"
    entries = "".join(f"{inner}{json.dumps(item)},\n" for item in tree)
    return f"[\n{entries}{margin}]"
