"""Choose the recipe of every GEMM under a time budget, and make the choices of simple rules at the same cost.

An item is (operator, GEMM). On each recipe it costs nats per token and time; without a pin it runs on the low recipe.

A budget is extra time of the GEMMs that a plan may move: the time that the pins add, as a share of the time of these
GEMMs on the low recipe. The GEMMs that a plan may move are those of the kinds that have prices, which is `fprop` of
every operator. `time_of_all` is the time of all GEMMs of the model, in a forward and a backward pass.

`choose` is a multiple-choice knapsack. It picks one recipe for each item, or for each group that a library runs as one,
and minimizes the sum of the prices under the budget. `front` is the greedy solution on the lower convex hull of each
item's (time, price). At the time of each of its steps no choice is better. Between two steps no choice is below the
line that joins them, which is the linear relaxation of the knapsack (Sinha and Zoltners, 1979). If the greedy choice is
further than `GAP` from that line, SciPy's `milp` (HiGHS) solves the knapsack exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from gnmr.names import GEMMS, Pins
from gnmr.options import one_of, require, share_of

if TYPE_CHECKING:
    from gnmr.formats.recipes import Recipe

Shapes = Mapping[str, tuple[int, int]]
"""(inputs, outputs) of each operator, by its name."""
Item = tuple[str, str]
"""(operator, GEMM)"""
Prices = Mapping[Item, Mapping[str, float]]
"""Nats per token of an item on each recipe that it may have; an item without prices stays on the low recipe."""
Times = Mapping[Item, Mapping[str, float]]
"""Time of every item on each recipe, in any unit."""

GUESSES = ("last", "first", "first_last", "random")
"""Whole blocks from the end, from the beginning, or from both ends in turn; or operators at random."""
FUSED = ("qkv", "gate_up", "experts", "moe")
"""Operators that a library may run as one: projections of one input in an attention (q, k and v; or those to the latent
dimensions of MLA); gate and up of an MLP; one projection of all experts; all projections of all experts.
"""
_PARTS = {
    "qkv": (
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("wq", "wk", "wv"),
        ("q", "k", "v"),
        ("q_a_proj", "kv_a_proj_with_mqa", "kv_proj"),  # DeepSeek-V2 and V3; V4 has the last
        ("in_proj_qkv", "in_proj_z"),  # the linear attention of Qwen3.5
        ("in_proj_b", "in_proj_a"),
        ("key_proj", "value_proj"),  # Qwen4, whose query is apart
    ),
    "gate_up": (("gate_proj", "up_proj"), ("w1", "w3")),
}
"""Linears that vLLM (`packed_modules_mapping`) and SGLang build as one, by their names in memory."""
GAP = 1e-4
"""Allowed excess of a choice over the smallest possible sum, as a share of the cost of everything on the low recipe."""
_SECONDS = 5
"""Time limit of the solver, after which its best choice so far counts."""


@dataclass(frozen=True)
class Choice:
    """The pins of a choice, with their cost in time and their savings."""

    pins: Pins
    """Pins in the order of the times."""
    extra: float
    """Extra time of the pins, as a share of the time of the GEMMs that a plan may move on the low recipe."""
    before: float
    """Nats per token of all items on the low recipe."""
    after: float
    """Nats per token with the pins."""


def times_of(
    shapes: Shapes,
    recipes: Iterable[Recipe],
    times: Mapping[str, float] | None = None,
    work: Mapping[str, float] | None = None,
) -> Times:
    """Return the time of every GEMM on each recipe: its multiplications times the recipe's time (`gemm_time`).

    Args:
        shapes: (inputs, outputs) of each operator.
        recipes: recipes to time; the first is the low one.
        times: relative times, as `PathSpec.times`.
        work: multiplications by operator; an operator without an entry counts inputs times outputs.
    """
    from gnmr.conversion.cost import gemm_time

    recipe_of = {recipe.name: recipe for recipe in recipes}
    # Many operators have the same shape, so each shape is timed once.
    time_of = {
        shape: {
            gemm: {name: gemm_time(recipe, gemm, times, recipe_of, shape) for name, recipe in recipe_of.items()}
            for gemm in GEMMS
        }
        for shape in {*shapes.values()}
    }
    # Inputs times outputs are the multiplications of one row; `work` has those of all rows.
    areas = {name: a * b for name, (a, b) in shapes.items()} | dict(work or {})
    return {
        (name, gemm): {recipe: areas[name] * time for recipe, time in time_of[shape][gemm].items()}
        for name, shape in shapes.items()
        for gemm in GEMMS
    }


def time_of_all(times: Times, low: str, rest: float, relative: Mapping[str, float] | None = None) -> float:
    """Return the time of all GEMMs of a model in a forward and a backward pass.

    Args:
        times: time of every GEMM of every operator, which counts on the low recipe.
        low: name of the low recipe.
        rest: multiplications of a forward pass outside of the operators. They stay in 16 bits, and so do the two GEMMs
            that each of them has in the backward pass.
        relative: relative times, as `PathSpec.times`.
    """
    from gnmr.conversion.cost import TIMES

    sixteen = {**TIMES, **(relative or {})}["16"]
    return math.fsum(time[low] for time in times.values()) + len(GEMMS) * rest * sixteen


def time_to_move(prices: Prices, times: Times, low: str) -> float:
    """Return the time of the GEMMs that a plan may move, on the low recipe."""
    kinds = {gemm for _, gemm in prices} or {"fprop"}
    return math.fsum(time[low] for (_, gemm), time in times.items() if gemm in kinds)


def groups_of(operators: Iterable[str], fused: Iterable[str]) -> list[list[str]]:
    """Return the groups of operators that run as one if a library fuses these kinds (`FUSED`), without groups of one.

    >>> groups_of(["0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "1.q_proj"], ["qkv"])
    [['0.q_proj', '0.k_proj', '0.v_proj']]
    """
    fused, groups = list(fused), dict[str, list[str]]()
    for name in operators:
        groups.setdefault(fused_name(name, fused), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def fused_name(name: str, fused: Collection[str]) -> str:
    """Return the common name of the operators that run as one with this operator; its own name if there are none.

    >>> fused_name("0.experts.3.up_proj", ["experts"]), fused_name("0.experts.3.up_proj", ["moe"])
    ('0.experts.*.up_proj', '0.experts.*')
    """
    # All experts of a layer have one name, and with moe so do all of their projections.
    if "moe" in fused or "experts" in fused:
        from gnmr.conversion.unit_names import of_any_expert

        name = of_any_expert(name)
        if "moe" in fused and (start := name.find(".*.")) > 0:
            name = name[: start + 2]
    # The parts of a linear that libraries fuse: q, k and v, or gate and up.
    before, dot, leaf = name.rpartition(".")
    for kind, groups in _PARTS.items():
        for leaves in groups if kind in fused else ():
            if leaf in leaves:
                return f"{before}{dot}{'+'.join(leaves)}"
    return name


def check_fused(operators: Iterable[str], fused: Iterable[str]) -> None:
    """Raise ValueError if a kind is unknown, or if none of these operators is of that kind."""
    operators = list(operators)
    for kind in fused:
        one_of(FUSED, fused=kind)
        some = bool(groups_of(operators, [kind]))
        require(some, "fused", kind, f"this model has no such operators; they are {', '.join(operators[:3])} ...")


def choose(
    prices: Prices,
    times: Times,
    low: str,
    budget: float | None,
    *,
    enough: float | None = None,
    groups: Iterable[Sequence[str]] = (),
) -> Choice:
    """Choose the recipes that leave the fewest nats under a budget of extra time (None: unlimited).

    Args:
        prices: nats of the low recipe and of the recipes that an item may be pinned to.
        times: time of every item on the same recipes.
        low: name of the low recipe.
        budget: share of the time that the GEMMs which a plan may move take on the low recipe.
        enough: nats that may be left. The result is the cheapest choice that leaves at most this, if the budget allows.
        groups: operators that share the recipe of each of their GEMMs.

    Raises ValueError if the budget is not above 0.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    room = math.inf if budget is None else _room(budget, prices, times, low)
    bundles = _bundles(prices, times, low, groups)
    before = math.fsum(bundle.low for bundle in bundles)
    # The greedy choice, and the nats that no choice can go below: often they are so close that this is enough.
    quick, bound = _greedy(bundles, room, enough)
    greedy = _choice(bundles, quick, prices, times, low)
    # If the greedy choice cannot reach `enough` within the budget, the fewest nats are the goal again.
    most_left = None if enough is None or greedy.after > enough else enough
    options = [(at, option) for at, bundle in enumerate(bundles) for option in bundle.options]
    if not options or (before <= most_left if most_left is not None else greedy.after - bound <= GAP * before):
        return greedy
    # 0-1 program: x_o = 1 if option o is taken, at most one option of each bundle; none means the low recipe.
    seconds, saved = (np.array([getattr(option, field) for _, option in options]) for field in ("time", "saved"))
    longest, unit = seconds.max() if seconds.max() > 0 else 1.0, saved.max()
    # The solver's tolerances are absolute, so times and savings are scaled to a largest value of 1.
    seconds, room = seconds / longest, room / longest
    one_each = csr_array((np.ones(len(options)), ([at for at, _ in options], range(len(options)))))
    rules = [LinearConstraint(one_each, ub=1)]
    if room < seconds.sum():
        rules.append(LinearConstraint(seconds[None], ub=room))
    goal = -saved / unit
    if most_left is not None:
        rules.append(LinearConstraint(saved[None] / unit, lb=(before - most_left) / unit))
        goal = seconds
    limits = {"time_limit": _SECONDS, "mip_rel_gap": GAP}
    solution = milp(goal, integrality=np.ones(len(options)), bounds=Bounds(0, 1), constraints=rules, options=limits)
    if solution.x is None:
        return greedy
    # The solver returns floats, which are integers up to its tolerance.
    taken = {at: option for (at, option), x in zip(options, solution.x, strict=True) if x > 0.5}
    exact = _choice(bundles, taken, prices, times, low)
    # After its time limit the solver may return less than the greedy choice has.
    return min((exact, greedy), key=lambda choice: choice.after if most_left is None else choice.extra)


def as_choice(chosen: Mapping[Item, str], prices: Prices, times: Times, low: str) -> Choice:
    """Return the choice that has these recipes, and the low one everywhere else."""
    pins: Pins = {}
    for name, gemm in times:
        if (recipe := chosen.get((name, gemm))) is not None:
            pins.setdefault(name, {})[gemm] = recipe
    more = math.fsum(times[item][recipe] - times[item][low] for item, recipe in chosen.items())
    after = math.fsum(nats[chosen.get(item, low)] for item, nats in prices.items())
    before = math.fsum(nats[low] for nats in prices.values())
    return Choice(pins, more / (time_to_move(prices, times, low) or 1.0), before, after)


def front(prices: Prices, times: Times, low: str, groups: Iterable[Sequence[str]] = ()) -> list[tuple[float, float]]:
    """Return (extra time, nats left) after each step of the greedy choice, from no pin to all that save nats."""
    bundles = _bundles(prices, times, low, groups)
    time_of_low, spent = time_to_move(prices, times, low), 0.0
    steps = _steps(bundles)
    # Add from the end, because an infinite price has no difference to the sum.
    least = math.fsum(min((o.price for o in bundle.options), default=bundle.low) for bundle in bundles)
    remaining, points = least, [0.0] * (len(steps) + 1)
    for at in range(len(steps), -1, -1):
        points[at] = remaining
        remaining += steps[at - 1].more if at else 0.0
    curve = [(0.0, points[0])]
    for step, after in zip(steps, points[1:], strict=True):
        spent += step.time
        curve.append((spent / time_of_low, after))
    return curve


def guessed(kind: str, names: Iterable[str], seed: int = 0) -> list[str]:
    """Return operators in the order of one of `GUESSES`; `names` are in the model's order."""
    from gnmr.conversion.unit_names import unit_of

    one_of(GUESSES, guess=kind)
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(unit_of(name, "block"), []).append(name)
    order = list(blocks.values())
    if kind == "last":
        order.reverse()
    elif kind == "first_last":
        # First, last, second, last but one, and so on.
        order = [order[-1 - i // 2] if i % 2 else order[i // 2] for i in range(len(order))]
    operators = [name for block in order for name in block]
    if kind == "random":
        random.Random(seed).shuffle(operators)
    return operators


def by_score(scores: Mapping[str, float], names: Iterable[str]) -> list[str]:
    """Return operators in descending order of a score (mse, gradient norm); those without one, or with NaN, come last.

    >>> by_score({"a": 1.0, "b": 2.0, "c": math.nan}, ["c", "a", "b"])
    ['b', 'a', 'c']
    """
    known_scores = {name: value for name, value in scores.items() if not math.isnan(value)}
    return sorted(names, key=lambda name: -known_scores.get(name, -math.inf))


def pin_in_order(
    names: Iterable[str], prices: Prices, times: Times, low: str, rescue: str, budget: float | str
) -> Choice:
    """Pin fprop of operators to `rescue` in this order, within the budget of extra time.

    An operator that exceeds the budget is skipped, so that all orders use the same budget.
    """
    room, spent = _room(budget, prices, times, low), 0.0
    chosen: dict[Item, str] = {}
    for name in names:
        time = times[name, "fprop"]
        if rescue in time and spent + time[rescue] - time[low] <= room:
            chosen[name, "fprop"] = rescue
            spent += time[rescue] - time[low]
    return as_choice(chosen, prices, times, low)


def budget_of(budget: float | str) -> float:
    """Return a budget of extra GEMM time as a share: 0.1 for "+10%", "10%" and 0.1.

    Raises:
        ValueError: it is not above 0. A word without a percent sign and a whole number are also refused above 1,
            because 10 would rather mean 10% than ten times the time.
    """
    value: Any = share_of(budget)
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    require(sound, "budget", budget, "must be extra GEMM time, a share above 0 (+10%, or 0.1)")
    unambiguous = isinstance(budget, float) or (isinstance(budget, str) and budget.endswith("%"))
    if not unambiguous and value > 1:
        right = f"is a share of the GEMM time, so it would be +{100 * value:g}%; write {value:g}% or {100 * value:g}%"
        require(False, "budget", budget, right)
    return float(value) if isinstance(budget, str) else value


class _Option(NamedTuple):
    """A recipe of a bundle other than the low one."""

    recipe: str
    time: float
    """Extra time over the low recipe."""
    price: float
    saved: float
    """Nats saved compared with the low recipe."""


class _Bundle(NamedTuple):
    """Items that share one recipe."""

    items: list[Item]
    low: float
    """Nats on the low recipe."""
    options: list[_Option]
    """Options that save nats and that no other option beats in both time and price; the fastest first."""


class _Step(NamedTuple):
    """A step from one point of a bundle's convex hull to the next."""

    bundle: int
    at: int
    """Index of the step in its bundle."""
    option: _Option
    time: float
    more: float
    """Nats that it saves compared with the step before."""
    steepness: float
    """`more` per `time`."""


def _bundles(prices: Prices, times: Times, low: str, groups: Iterable[Sequence[str]]) -> list[_Bundle]:
    # The items of a group with the same GEMM are a bundle, which has one recipe.
    group_of = {name: at for at, group in enumerate(groups) for name in group}
    together: dict[object, list[Item]] = {}
    for name, gemm in times:
        if (name, gemm) in prices:
            together.setdefault((group_of.get(name, name), gemm), []).append((name, gemm))
    finite = [value for nats in prices.values() for value in nats.values() if math.isfinite(value)]
    # Replaces Inf: larger than the sum of everything else, and small enough for a solver.
    beyond = 10 * math.fsum(map(abs, finite)) + 1e-9
    bundles = []
    for items in together.values():
        # The recipes that every item of the bundle may have.
        common = [name for name in prices[items[0]] if all(name in prices[i] and name in times[i] for i in items)]
        price = {
            name: math.fsum(prices[i][name] if math.isfinite(prices[i][name]) else beyond for i in items)
            for name in common
        }
        time = {name: math.fsum(times[i][name] - times[i][low] for i in items) for name in common}
        options: list[_Option] = []
        # By time, so that each option has to cost fewer nats than all faster ones.
        for name in sorted(common, key=lambda recipe: (time[recipe], price[recipe])):
            if name != low and price[name] < min([price[low], *(option.price for option in options)]):
                options.append(_Option(name, time[name], price[name], price[low] - price[name]))
        bundles.append(_Bundle(items, price[low], options))
    return bundles


def _steps(bundles: Sequence[_Bundle]) -> list[_Step]:
    """Return the steps along all convex hulls, by descending nats per time. Steps of one bundle keep their order."""
    steps = []
    for at, bundle in enumerate(bundles):
        hull = [_Option("", 0.0, bundle.low, 0.0)]
        for option in bundle.options:
            # A point is not on the hull if the step from it is at least as steep as the step to it.
            while len(hull) > 1 and _steepness(hull[-1], option) >= _steepness(hull[-2], hull[-1]):
                hull.pop()
            hull.append(option)
        for number, (old, new) in enumerate(pairwise(hull)):
            steps.append(_Step(at, number, new, new.time - old.time, old.price - new.price, _steepness(old, new)))
    return sorted(steps, key=lambda step: -step.steepness)


def _steepness(old: _Option, new: _Option) -> float:
    """Return the nats saved per time from one option to the other."""
    return (old.price - new.price) / time if (time := new.time - old.time) > 0 else math.inf


def _greedy(bundles: Sequence[_Bundle], room: float, enough: float | None) -> tuple[dict[int, _Option], float]:
    """Take the steps in order while more than `enough` nats are left, and bound the nats of any choice.

    A step is taken if it fits the room and the earlier steps of its bundle were taken.
    """
    taken: dict[int, _Option] = {}
    number = dict.fromkeys(range(len(bundles)), 0)
    spent, remaining, bound = 0.0, math.fsum(bundle.low for bundle in bundles), None
    for step in _steps(bundles):
        if enough is not None and remaining <= enough:
            break
        if number[step.bundle] == step.at and spent + step.time <= room:
            taken[step.bundle] = step.option
            number[step.bundle] += 1
            spent, remaining = spent + step.time, remaining - step.more
        elif bound is None:
            # Linear relaxation: the first step that does not fit is taken in part. No choice leaves less.
            bound = remaining - step.steepness * (room - spent)
    return taken, remaining if bound is None else bound


def _choice(bundles: Sequence[_Bundle], taken: Mapping[int, _Option], prices: Prices, times: Times, low: str) -> Choice:
    chosen = {item: option.recipe for at, option in taken.items() for item in bundles[at].items}
    return as_choice(chosen, prices, times, low)


def _room(budget: float | str, prices: Prices, times: Times, low: str) -> float:
    """Return the time that a budget allows beyond the low recipe, with a tolerance for rounding."""
    return budget_of(budget) * time_to_move(prices, times, low) * (1 + 1e-9)
