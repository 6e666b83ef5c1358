"""Which GEMMs to pin under a budget: those of the highest price per cost, and the usual guesses at the same cost.

An item is (operator, GEMM). Prices are nats a token, costs the time of a GEMM in any unit (by default its arithmetic,
inputs times outputs, a token); a budget is a share of the costs of all items. Every choice fills its budget in one way:
items in an order, each taken if it still fits; so choices differ by their order alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gnmr.doctor.plan import Shapes, budget_share
from gnmr.errors import one_of
from gnmr.names import GEMMS
from gnmr.precision.units import unit_of

Item = tuple[str, str]
"""(operator, GEMM)"""

GUESSES = ("last", "first", "first_last", "random")
"""Whole blocks from the end, from the beginning, from both in turn; operators at random."""


@dataclass(frozen=True)
class Choice:
    """The pins of a choice, and what they cost and save."""

    pins: dict[str, list[str]]
    """GEMMs by operator, in the order of the costs."""
    share: float
    """Of all costs, what the pins cost."""
    before: float
    """Nats a token that all items cost on the low path, by their prices."""
    after: float
    """Nats a token of those that are not pinned."""


def arithmetic(shapes: Shapes) -> dict[Item, float]:
    """Return the cost of every GEMM of these operators: inputs times outputs."""
    return {(name, gemm): float(a * b) for name, (a, b) in shapes.items() for gemm in GEMMS}


def in_order(prices: Mapping[Item, float], costs: Mapping[Item, float]) -> list[Item]:
    """Items by price per cost, the highest first; equal ones in the order of `costs`. What has no price, or none above
    0, is left out: it would cost and save nothing."""
    worth = [item for item in costs if prices.get(item, 0.0) > 0]
    return sorted(worth, key=lambda item: prices[item] / costs[item], reverse=True)


def choose(
    prices: Mapping[Item, float], costs: Mapping[Item, float], budget: float | None, enough: float | None = None
) -> Choice:
    """Pin `in_order` under the budget (None: without bounds), until no more than `enough` nats are left.

    Raises ValueError for a budget that is no share.
    """
    return fill([[item] for item in in_order(prices, costs)], prices, costs, budget, enough)


def guess(
    kind: str,
    prices: Mapping[Item, float],
    costs: Mapping[Item, float],
    budget: float,
    *,
    gemms: Sequence[str] = GEMMS,
    seed: int = 0,
) -> Choice:
    """Make one of `GUESSES` at the same cost: whole operators, or `gemms` of them, in the order of the guess.

    `costs` is in the order of the model's operators. A last block that does not fit as a whole gives those of its
    operators that do, so that budgets are equal.
    """
    one_of(GUESSES, guess=kind)
    blocks: dict[str, dict[str, None]] = {}
    for name, _ in costs:
        blocks.setdefault(unit_of(name, "block"), {})[name] = None
    order = list(blocks.values())
    if kind == "last":
        order.reverse()
    elif kind == "first_last":
        order = [order[-1 - i // 2] if i % 2 else order[i // 2] for i in range(len(order))]
    names = [name for block in order for name in block]
    if kind == "random":
        random.Random(seed).shuffle(names)
    return _in_order(names, prices, costs, budget, gemms)


def by_score(
    scores: Mapping[str, float],
    prices: Mapping[Item, float],
    costs: Mapping[Item, float],
    budget: float,
    *,
    gemms: Sequence[str] = GEMMS,
) -> Choice:
    """Choose operators by any score of theirs (mse, gradient norm), the highest first, at the same cost; see `guess`.

    Operators without a score, or with NaN, come last.
    """
    known = {name: value for name, value in scores.items() if not math.isnan(value)}
    names = sorted(dict.fromkeys(name for name, _ in costs), key=lambda name: -known.get(name, -math.inf))
    return _in_order(names, prices, costs, budget, gemms)


def fill(
    groups: Iterable[Sequence[Item]],
    prices: Mapping[Item, float],
    costs: Mapping[Item, float],
    budget: float | None,
    enough: float | None = None,
) -> Choice:
    """Take the groups of items, each as a whole, in their order, if the budget still holds it, while more than `enough`
    nats are left."""
    budget_share(budget)
    everything = sum(costs.values())
    room = math.inf if budget is None else budget * everything * (1 + 1e-9)  # a share that is met to the last digit
    taken: set[Item] = set()
    spent, before = 0.0, math.fsum(prices.values())
    left = before
    for group in groups:
        if enough is not None and left <= enough:
            break
        more = sum(costs[item] for item in group)
        if spent + more <= room:
            taken.update(group)
            spent += more
            left -= sum(prices.get(item, 0.0) for item in group)
    pins: dict[str, list[str]] = {}
    for name, gemm in costs:
        if (name, gemm) in taken:
            pins.setdefault(name, []).append(gemm)
    left = math.fsum(price for item, price in prices.items() if item not in taken)
    return Choice(pins, spent / everything, before, left)


def _in_order(
    names: Iterable[str],
    prices: Mapping[Item, float],
    costs: Mapping[Item, float],
    budget: float,
    gemms: Sequence[str],
) -> Choice:
    groups = ([(name, gemm) for gemm in GEMMS if gemm in gemms and (name, gemm) in costs] for name in names)
    return fill(filter(None, groups), prices, costs, budget)
