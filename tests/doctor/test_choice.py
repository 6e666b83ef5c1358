"""Which GEMMs to pin: by hand, against an exhaustive search, and the guesses at the same cost."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gnmr.doctor.knapsack import GUESSES, Choice, arithmetic, by_score, choose, guess
from gnmr.names import GEMMS

SHAPES = {f"layers.{i}.{name}": (4, 8 if name == "up" else 4) for i in range(4) for name in ("up", "o")}
COSTS = arithmetic(SHAPES)
"""Of 8 operators; 144 a block, 576 in all."""
PRICES = {item: 0.001 * (i % 7) for i, item in enumerate(COSTS)}


def cost(choice: Choice) -> float:
    return sum(COSTS[name, gemm] for name, gemms in choice.pins.items() for gemm in gemms)


def operators(choice: Choice) -> list[str]:
    assert all(gemms == list(GEMMS) for gemms in choice.pins.values())
    return list(choice.pins)


def test_the_highest_price_per_cost_comes_first_and_what_does_not_fit_is_passed_over() -> None:
    costs = {
        ("a", "fprop"): 10.0,
        ("a", "dgrad"): 10.0,
        ("b", "fprop"): 40.0,
        ("c", "fprop"): 5.0,
        ("d", "wgrad"): 35.0,
    }
    prices = {("a", "fprop"): 3.0, ("b", "fprop"): 8.0, ("c", "fprop"): 0.5, ("a", "dgrad"): 0.0, ("d", "wgrad"): -1.0}
    assert choose(prices, costs, 0.1) == Choice({"a": ["fprop"]}, 0.1, 10.5, 7.5)
    assert choose(prices, costs, 0.15).pins == {"a": ["fprop"], "c": ["fprop"]}, "b does not fit, c does"
    assert choose(prices, costs, 0.5) == Choice({"a": ["fprop"], "b": ["fprop"]}, 0.5, 10.5, -0.5)
    assert choose(prices, costs, 1.0).pins == {"a": ["fprop"], "b": ["fprop"], "c": ["fprop"]}, "the rest saves nothing"
    assert choose(prices, costs, None).pins == choose(prices, costs, 1.0).pins
    assert choose(prices, costs, 0.01) == Choice({}, 0.0, 10.5, 10.5)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_choice_where_all_cost_the_same(seed: int) -> None:
    draw = random.Random(seed)
    costs = {(name, gemm): 1.0 for name in "abc" for gemm in GEMMS}
    prices = {item: draw.random() for item in costs}
    for room in (1, 3, 5):
        best = min(
            math.fsum(prices.values()) - sum(prices[i] for i in own) for own in itertools.combinations(costs, room)
        )
        found = choose(prices, costs, room / 9)
        assert found.after == pytest.approx(best) and sum(map(len, found.pins.values())) == room


def test_guesses_take_whole_blocks_in_their_order() -> None:
    def of(kind: str, share: float, **more: int) -> list[str]:
        return operators(guess(kind, PRICES, COSTS, share, **more))

    assert of("last", 0.25) == ["layers.3.up", "layers.3.o"]
    assert of("first", 0.25) == ["layers.0.up", "layers.0.o"]
    assert of("first_last", 0.5) == ["layers.0.up", "layers.0.o", "layers.3.up", "layers.3.o"]
    assert of("first", 0.35) == ["layers.0.up", "layers.0.o", "layers.1.o"], "of the next block what still fits"
    seeds = {tuple(of("random", 0.5, seed=seed)) for seed in range(8)}
    assert len(seeds) > 4 and of("random", 0.5, seed=3) == of("random", 0.5, seed=3)
    assert guess("last", PRICES, COSTS, 1 / 12, gemms=["fprop"]).pins == {
        "layers.3.up": ["fprop"],
        "layers.3.o": ["fprop"],
    }


def test_all_choices_fill_the_same_budget() -> None:
    """To within the smallest operator; the expected cost is by the same prices."""
    for share in (0.1, 0.25, 0.4, 0.9):
        scores = {name: math.nan if name.endswith("1.o") else len(name) + i for i, name in enumerate(SHAPES)}
        found = [guess(kind, PRICES, COSTS, share) for kind in GUESSES]
        found += [by_score(scores, PRICES, COSTS, share), choose(PRICES, COSTS, share)]
        for one in found:
            assert one.share == cost(one) / 576 <= share
            assert one.share > share - 48 / 576 or one.after == 0
            assert one.before == pytest.approx(sum(PRICES.values()))
            assert one.after == pytest.approx(
                sum(price for (name, gemm), price in PRICES.items() if gemm not in one.pins.get(name, ()))
            )
        assert found[-1].after == min(one.after for one in found)


def test_a_score_orders_operators() -> None:
    scores = dict(zip(SHAPES, (1, 5, math.nan, 2, 7, math.inf, 0), strict=False))  # of the last one none
    order = [operators(by_score(scores, PRICES, COSTS, share)) for share in (1 / 12, 0.25)]
    assert order == [["layers.2.o"], ["layers.2.up", "layers.2.o"]]
    assert set(operators(by_score(scores, PRICES, COSTS, 0.9))) >= set(SHAPES) - {"layers.1.up", "layers.3.o"}
