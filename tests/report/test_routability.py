"""Routability by hand, and of recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from report_reading import row

from gnmr.lab.report.routability import routability, routability_table

NAN, INF = np.nan, np.inf


def of(*rows: list[float], k: int = 1) -> tuple[float, float] | None:
    return routability(np.array(rows), k)


def test_by_hand() -> None:
    assert of([8, 1, 1], [1, 8, 1]) == pytest.approx((0.8, 0.45))  # one unit has 0.8 and 0.1 of it
    assert of([8, 1, 1], [1, 8, 1], k=2) == pytest.approx((0.9, 0.9))
    assert of([8, 1, 1], [80, 10, 10]) == pytest.approx((0.8, 0.8))  # what lasts: shares, whatever the total
    assert of([1, 0, 0], [0, 1, 0], [0, 0, 1]) == pytest.approx((1.0, 1 / 3))


def test_odd_values() -> None:
    assert of([8, 1, 1], [NAN, 8, 2]) == pytest.approx((0.8, 0.45))
    assert of([8, 1, 1], [INF, 1, 1], [0, 0, 0], [1, 8, 1]) == pytest.approx((0.8, 0.45))
    assert of([0, 0], [NAN, NAN]) is None
    assert of([5, -3, 0]) == (1.0, 1.0)


def test_the_table_takes_prices_before_risks(write_run: Callable[..., Path], comparisons: Callable) -> None:
    passing = np.array([[8.0, 1.0, 1.0], [1.0, 8.0, 1.0]] * 3)
    one = {"steps": 6, "units": 3, "gnmr": passing, "settings": {"controller.max_o": 1}}
    write_run(**one)
    write_run(**one | {"seed": 1, "gnmr": passing[::-1]})
    priced = {"controller.max_o": 1, "controller.signal": "price"}
    write_run(**one | {"columns": ("price",), "gnmr": np.array([[8.0, 1.0, 1.0]] * 6), "settings": priced})
    table = routability_table(comparisons()[0])
    ours, theirs = row(table, "int4_int8-gnmr"), row(table, "int4_int8-price")
    assert (ours["of"], ours["k"]) == ("risk", "1") and (theirs["of"], theirs["k"]) == ("price", "1")
    assert [ours[name] for name in ("in each step's k", "in the best fixed k", "routability")] == [
        "0.800",
        "0.450",
        "0.350",
    ]
    assert theirs["routability"] == "0.000"


def test_no_row_where_nothing_is_chosen(write_run: Callable[..., Path], comparisons: Callable) -> None:
    """max_o is no limit and nothing was promoted, or nothing was recorded."""
    write_run(settings={"controller.max_o": 2})
    write_run(seed=1, settings={"controller.max_o": 1}, ratios=False)
    assert routability_table(comparisons()[0]).rows == []
