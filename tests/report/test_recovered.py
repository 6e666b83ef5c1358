"""What forks got back, as lines, words and a picture."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gnmr.lab.report.recovered import Recovered, by_name, draw, recovered, shown

NEVER = {0: 3.0, 1: 3.2, 2: 2.9}
ALWAYS = {0: 2.9, 1: 3.1, 2: 2.8}
NAMES = {"never": "never", "random": "at random", "price": "price", "everything": "everything"}


@pytest.fixture
def found(write_run, comparisons):
    """`recovered` of forks in which price gets so much of the gap back, over so many orders."""

    def make(price: float, orders: int, high: dict[int, float] = ALWAYS) -> Recovered | None:
        between = {
            "random": {order: loss - 0.01 - 0.001 * order for order, loss in NEVER.items()},
            "price": {order: loss - price * 0.1 + 0.001 * order for order, loss in NEVER.items()},
        }
        for name, losses in {"never": NEVER, **between, "everything": high}.items():
            for order in range(orders):
                arm = {"never": "int4", "everything": "int8"}.get(name, "int4_int8")
                settings = {"base": "a", "fork.order": order, "training.steps": 2, "controller.name": name}
                more = {} if name not in between else {"controller.signal": name}
                run = {"arm": arm, "seed": order, "steps": 2, "val_loss": {0: 4.0, 2: losses[order]}}
                write_run(**run, settings=settings | more, header={"base": {"step": 600, "sha256": "abcdef0123"}})
        (comparison,) = comparisons()
        return recovered(by_name(comparison.arms, NAMES), control="at random")

    return make


def test_each_arm_is_a_share_of_the_gap_and_tested_against_random(found):
    got = found(price=0.8, orders=3)
    assert [line.name for line in got.lines] == [*NAMES.values()]
    assert [round(line.closed, 2) for line in got.lines] == [0.0, 0.11, 0.79, 1.0]
    assert got.gap == pytest.approx(0.1) and got.cost.startswith("0.100 nats a token, perplexity 20.")
    assert got.lines[0].interval is None and got.lines[2].interval[0] > 0.7
    assert "is shown (p = " in got.verdict and "price is better (p = " in got.verdict
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown(got))
    lines = console.export_text().splitlines()
    assert len(lines) == 5 and lines[3].startswith("price") and "79%  ██" in lines[3].replace("   ", "  ")


def test_a_share_that_rounds_to_nothing_has_no_sign(found):
    got = found(price=0.8, orders=3)
    lines = tuple(replace(line, closed=-0.001, interval=(-0.004, 0.06)) for line in got.lines)
    console = Console(file=io.StringIO(), width=100)
    console.print(shown(replace(got, lines=lines)))
    assert "0% to 6%" in console.file.getvalue() and "-0%" not in console.file.getvalue()


@pytest.mark.parametrize(
    ("orders", "told"), [(1, "One order of the data: what is chance"), (2, "2 orders of the data")]
)
def test_with_few_orders_nothing_is_shown(orders, told, found):
    got = found(price=0.8, orders=orders)
    assert got.verdict.startswith(told) and "better" not in got.verdict


def test_without_the_positive_control_no_arm_is_spoken_of(found):
    got = found(price=0.8, orders=3, high={0: 2.7, 1: 3.3, 2: 2.85})
    assert got.verdict.startswith("Recovering everything is not shown to be better than never recovering (p = ")
    assert "price" not in got.verdict


def test_where_recovery_makes_it_worse_there_is_no_gap(found):
    assert found(price=0.8, orders=3, high={order: loss + 0.1 for order, loss in NEVER.items()}) is None


def test_the_picture_has_a_line_an_arm(found, tmp_path):
    draw(found(price=0.8, orders=3), tmp_path / "demo.svg", "title", "commit 0")
    text = (tmp_path / "demo.svg").read_text()
    assert text.startswith("<?xml") and all(f"<!-- {name} -->" in text for name in ("price", "title"))
