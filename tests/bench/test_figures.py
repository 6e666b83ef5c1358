"""Figures, their spread and how they are shown."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from gnmr.lab.bench.figures import Figure, median, record, show, writer


def test_median_and_quartiles():
    figure = median("step", np.array([4.0, 1.0, 2.0, 3.0, 100.0]), "s", target=3.0)
    assert (figure.value, figure.low, figure.high, figure.n) == (3.0, 2.0, 4.0, 5)
    assert figure.spread == "quartiles" and figure.met is True


def test_interval_of_the_median_narrows_with_n_and_is_the_same_each_time():
    draws = np.random.default_rng(0).normal(1.0, 0.1, 1000)
    few, many = (median("ratio", draws[:n], "x", interval=True) for n in (20, 1000))
    assert few.low <= few.value <= few.high and many.low <= many.value <= many.high
    assert many.high - many.low < 0.5 * (few.high - few.low)
    assert abs(many.value - 1.0) < 0.02
    assert median("ratio", draws, "x", interval=True) == many


@pytest.mark.parametrize(("value", "target", "met"), [(1.0, 1.0, True), (1.01, 1.0, False), (5.0, None, None)])
def test_met(value, target, met):
    assert Figure("a", value, "x", target=target).met is met


def test_what_is_not_finite_is_written_as_a_word(tmp_path):
    figures = [median("correlation", np.array([np.nan, 1.0]), "", target=1.0), Figure("ratio", float("inf"), "x")]
    writer(tmp_path / "figures.json")(record({"bench": figures}, "gnmr bench", {}))
    tree = json.loads((tmp_path / "figures.json").read_text(), parse_constant=pytest.fail)
    assert [(figure["value"], figure["met"]) for figure in tree["figures"]] == [("nan", False), ("inf", None)]


def test_the_table_says_what_was_met():
    text = io.StringIO()
    figures = [
        Figure("share", 0.0131, "%", 0.012, 0.015, "quartiles", 40, 0.02, "sum of parts"),
        Figure("ratio", 1.3, "x", 1.2, 1.4, "95 % bootstrap interval of the median", 15, 1.25),
        Figure("memory", 2345.6, "MiB"),
    ]
    show("bench", figures, Console(file=text, width=100))
    share, ratio, memory, note = (
        line
        for line in text.getvalue().splitlines()
        if line.split()[:1] != [] and (line.split()[0].rstrip(":") in ("share", "ratio", "memory"))
    )
    assert share.split() == ["share", "1.31%", "2.00%", "met", "1.20", "..", "1.50%", "40"]
    assert ratio.split() == ["ratio", "1.300x", "1.250x", "not", "met", "1.200", "..", "1.400x", "15"]
    assert memory.split() == ["memory", "2,346", "MiB", "1"]
    assert note.strip() == "share: sum of parts"
