"""Which recipe each GEMM runs on: against an exhaustive search, bounds, and the usual rules at the same cost."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gnmr.names import GEMMS
from gnmr.plan.knapsack import (
    GUESSES,
    Choice,
    Prices,
    Times,
    as_choice,
    by_score,
    check_fused,
    choose,
    front,
    groups_of,
    guessed,
    pin_in_order,
)

SHAPES = {f"layers.{i}.{name}": 32.0 if name == "up" else 16.0 for i in range(4) for name in ("up", "o")}
TIMES = {
    (name, gemm): {"low": area, "mid": 2 * area, "high": 4 * area} for name, area in SHAPES.items() for gemm in GEMMS
}
"""Of 8 operators: 48 a block on low in each GEMM, 192 in all."""
PRICES = {item: {"low": 0.001 * (i % 7), "mid": 0.0002 * (i % 5), "high": 0.0} for i, item in enumerate(TIMES)}


def problem(seed: int, items: int = 6) -> tuple[Prices, Times]:
    draw = random.Random(seed)
    names = [(f"layers.{i}.o", "fprop") for i in range(items)]
    area = {name: draw.choice([1, 2, 3]) for name in names}
    times = {name: {"low": area[name], "mid": 2 * area[name], "high": 4 * area[name]} for name in names}
    return {n: {"low": draw.random(), "mid": 0.3 * draw.random(), "high": 0.02 * draw.random()} for n in names}, times


def best_of_all(prices: Prices, times: Times, budget: float, groups: list[list[str]] | None = None) -> float:
    whole, least = sum(own["low"] for own in times.values()), math.inf
    for recipes in itertools.product(("low", "mid", "high"), repeat=len(prices)):
        chosen = dict(zip(prices, recipes, strict=True))
        if any(len({chosen[name, "fprop"] for name in group}) > 1 for group in groups or []):
            continue
        if sum(times[i][r] - times[i]["low"] for i, r in chosen.items()) <= budget * whole * (1 + 1e-9):
            least = min(least, math.fsum(prices[i][r] for i, r in chosen.items()))
    return least


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    prices, times = problem(seed)
    groups = [["layers.0.o", "layers.3.o"], ["layers.1.o", "layers.2.o"]]
    for budget in (0.1, 0.33, 0.8, 1.5):
        found = choose(prices, times, "low", budget)
        assert found.after == pytest.approx(best_of_all(prices, times, budget), rel=1e-9) and found.extra <= budget
        assert found.before == pytest.approx(math.fsum(own["low"] for own in prices.values()))
        together = choose(prices, times, "low", budget, groups=groups)
        assert together.after == pytest.approx(best_of_all(prices, times, budget, groups), rel=1e-9)
        for a, b in groups:
            assert together.pins.get(a) == together.pins.get(b)


def test_a_recipe_that_takes_no_more_time_is_chosen_under_enough_nats_too() -> None:
    item = ("layers.0.o", "fprop")
    prices, times = {item: {"low": 0.5, "same": 0.1}}, {item: {"low": 1.0, "same": 1.0}}
    for enough in (None, 0.2):
        found = choose(prices, times, "low", None, enough=enough)
        assert (found.pins, found.extra) == ({item[0]: {"fprop": "same"}}, 0)


@pytest.mark.parametrize("seed", range(2))
def test_the_greedy_front_bounds_it_from_both_sides(seed: int) -> None:
    """At a point of the front no choice is better; between two of them none is better than the line that joins them."""
    prices, times = problem(seed, 20)
    points = front(prices, times, "low")
    assert points[0] == (0.0, pytest.approx(math.fsum(own["low"] for own in prices.values())))
    assert points[-1][1] == pytest.approx(math.fsum(min(own.values()) for own in prices.values()))
    assert points == sorted(points) and [b for _, b in points] == sorted((b for _, b in points), reverse=True)
    for (extra, left), (more, less) in itertools.pairwise(points):
        if extra > 0:
            assert choose(prices, times, "low", extra).after == pytest.approx(left)
        middle = choose(prices, times, "low", (extra + more) / 2).after
        assert (left + less) / 2 - 1e-9 <= middle <= left + 1e-9


def test_enough_takes_the_cheapest_choice_that_leaves_no_more() -> None:
    prices, times = problem(3)
    for enough in (0.2, 0.9, 1.5):
        found = choose(prices, times, "low", None, enough=enough)
        assert found.after <= enough * (1 + 1e-9)
        assert found.extra == 0 or choose(prices, times, "low", found.extra * 0.999).after > enough
    assert choose(prices, times, "low", None, enough=100.0).pins == {}


@pytest.mark.parametrize("seed", range(4))
def test_if_the_budget_does_not_allow_enough_it_is_the_best_of_what_it_allows(seed: int) -> None:
    prices, times = problem(seed)
    for budget in (0.1, 0.33, 0.8, 1.5):
        assert choose(prices, times, "low", budget, enough=1e-9) == choose(prices, times, "low", budget)


def test_what_saves_nothing_is_never_pinned_and_infinity_comes_first() -> None:
    prices = {
        ("a", "fprop"): {"low": 0.5, "mid": 0.5, "high": 0.7},
        ("b", "fprop"): {"low": math.inf, "mid": 0.4, "high": 0.0},
        ("c", "fprop"): {"low": 2.0, "mid": math.inf, "high": 0.0},
    }
    times = {(name, gemm): {"low": 1.0, "mid": 2.0, "high": 4.0} for name in "abc" for gemm in GEMMS}
    assert choose(prices, times, "low", 1 / 3).pins == {"b": {"fprop": "mid"}}
    assert choose(prices, times, "low", 4 / 3) == Choice(
        {"b": {"fprop": "mid"}, "c": {"fprop": "high"}}, pytest.approx(4 / 3), math.inf, pytest.approx(0.9)
    )
    assert choose(prices, times, "low", None).pins == {"b": {"fprop": "high"}, "c": {"fprop": "high"}}
    assert choose(prices, times, "low", 0.01).pins == {} and choose({}, times, "low", 1.0).after == 0
    assert front(prices, times, "low")[-1] == (pytest.approx(6 / 3), pytest.approx(0.5))
    with pytest.raises(ValueError, match="budget=0: must be extra GEMM time"):
        choose(prices, times, "low", 0)


def test_groups_are_what_libraries_fuse() -> None:
    names = [f"layers.0.self_attn.{x}_proj" for x in "qkvo"]
    names += [f"layers.0.mlp.experts.{i}.{x}_proj" for i in range(2) for x in ("gate", "up", "down")]
    assert groups_of(names, ["qkv"]) == [names[:3]]
    assert groups_of(names, ["gate_up"]) == [names[4:6], names[7:9]]
    assert groups_of(names, ["experts"]) == [[names[4], names[7]], [names[5], names[8]], [names[6], names[9]]]
    assert groups_of(names, ["gate_up", "experts"]) == [[names[4], names[5], names[7], names[8]], [names[6], names[9]]]
    assert groups_of(names, ["gate_up", "moe"]) == [names[4:]]
    check_fused(names, ["qkv", "experts", "moe"])
    with pytest.raises(ValueError, match="fused=experts: this model has no such operators"):
        check_fused(names[:4], ["qkv", "experts"])
    with pytest.raises(ValueError, match="fused=qvk"):
        check_fused(names, ["qvk"])


def pinned(order: list[str], share: float, rescue: str = "high") -> Choice:
    return pin_in_order(order, PRICES, TIMES, "low", rescue, share)


def test_guesses_take_whole_blocks_in_their_order() -> None:
    def of(kind: str, share: float, seed: int = 0) -> list[str]:
        return list(pinned(guessed(kind, SHAPES, seed), share).pins)

    assert of("last", 0.25) == ["layers.3.up", "layers.3.o"]
    assert of("first", 0.25) == ["layers.0.up", "layers.0.o"]
    assert of("first_last", 0.5) == ["layers.0.up", "layers.0.o", "layers.3.up", "layers.3.o"]
    assert of("first", 0.35) == ["layers.0.up", "layers.0.o", "layers.1.o"], "of the next block what still fits"
    seeds = {tuple(of("random", 0.5, seed)) for seed in range(8)}
    assert len(seeds) > 4 and of("random", 0.5, 3) == of("random", 0.5, 3)
    last = pinned(guessed("last", SHAPES), 1 / 12, "mid")
    assert last.pins == {"layers.3.up": {"fprop": "mid"}, "layers.3.o": {"fprop": "mid"}}


def test_all_choices_fill_the_same_budget() -> None:
    """To within the smallest operator; the nats that are left are by the same prices."""
    scores = {name: math.nan if name.endswith("1.o") else len(name) + i for i, name in enumerate(SHAPES)}
    orders = [guessed(kind, SHAPES) for kind in GUESSES] + [by_score(scores, SHAPES)]
    for share in (0.1, 0.25, 0.4, 0.9):
        best = choose(PRICES, TIMES, "low", share)
        for one in [*(pinned(order, share) for order in orders), best]:
            chosen = {(n, g): r for n, own in one.pins.items() for g, r in own.items()}
            assert one == as_choice(chosen, PRICES, TIMES, "low")
            assert share - 3 * 16 / 576 < one.extra + 1e-9 <= share * (1 + 1e-9) + 1e-9
            assert one.after >= best.after - 1e-12


def test_a_score_orders_operators() -> None:
    scores = dict(zip(SHAPES, (1, 5, math.nan, 2, 7, math.inf, 0), strict=False))  # of the last one none
    assert [name[7:] for name in by_score(scores, SHAPES)] == [
        "2.o",
        "2.up",
        "0.o",
        "1.o",
        "0.up",
        "3.up",
        "1.up",
        "3.o",
    ]
