"""The sentence and the figures say what the tests of the arms have shown, and no more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from html_runs import UNITS, fake_run, ratios

from gnmr.lab.report.binning import binned
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.headline import Headline, headline
from gnmr.lab.report.risk import costs, thresholds
from gnmr.lab.report.style import looks, telling_apart

Told = Callable[..., Headline]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """told(int4=[50, 51], ...): the headline of arms with these perplexities, a seed each."""

    def make(**arms: list[float]) -> Headline:
        made = ratios(60, UNITS)
        made.active_SU[:18, 0] = True
        runs = [
            fake_run(tmp_path / f"{arm}{seed}", arm, seed, ppl=ppl, made=made if arm == "int4_int8" else None)
            for arm, values in arms.items()
            for seed, ppl in enumerate(values)
        ]
        (comparison,) = compare(runs)
        return headline(comparison)

    return make


def test_what_was_shown(told: Told) -> None:
    found = told(int4=[50, 51.2, 52], int4_int8=[45, 46, 46.8], int8=[40, 41.1, 41.6], bf16=[39, 40, 40.5])
    assert found.sentence.startswith("Low precision cost +28.2 % of perplexity (int4 against bf16, n = 3).")
    assert "Of the way from int4 to int8, int4_int8 got back 48 % at 10.0 % of unit-steps." in found.sentence
    assert found.sentence.endswith("It is shown to be better than int4; no random arm at that spend.")
    assert [figure.value for figure in found.figures] == ["+28.2 %", "48 %", "10.0 %"]
    assert "of the way from int4 to int8, 95 % interval" in found.figures[1].detail


def test_a_gap_that_is_not_shown_is_not_shared(told: Told) -> None:
    found = told(int4=[50, 40, 52], int4_int8=[45, 46, 47], int8=[41, 49, 44])
    assert "That low precision cost anything is not shown" in found.sentence
    assert "nothing is said of arms between" in found.sentence
    assert found.figures[1].value == "-" and "not shown to be better" in found.figures[1].detail


def test_one_seed_is_too_few(told: Told) -> None:
    found = told(int4=[50], int4_int8=[45], int8=[40])
    assert "n = 1: too few for a test" in found.sentence and found.sentence.endswith("Too few seeds for a test.")
    assert found.figures[1].value == "47 %"


def test_nothing_beside_it(told: Told) -> None:
    found = told(int4_int8=[45])
    assert found.sentence == (
        "int4_int8 ended at perplexity 45.00, with 10.0 % of unit-steps on the recovery path. Without a 16-bit arm "
        "beside it what low precision cost is not known."
    )
    assert [(figure.label, figure.value) for figure in found.figures] == [
        ("validation loss", f"{np.log(45):.4f}"),
        ("spend", "10.0 %"),
    ]


def test_divergence_is_told_as_such(told: Told) -> None:
    found = told(int4=[np.inf, 50, 51], bf16=[39, 40, 41])
    assert found.sentence.startswith("In low precision 1 of 3 runs diverged")


def test_names_from_what_differs() -> None:
    assert telling_apart(["a-low lr=1 x=2", "a-high lr=1 x=3"]) == ["low x=2", "high x=3"]
    assert telling_apart(["bf16", "int4_int8 max_o=1", "int4_int8 max_o=2"])[1] == "max_o=1"
    assert telling_apart(["p-low", "p-gap-ranked", "bf16"]) == ["low", "gap-ranked", "bf16"]
    assert telling_apart(["a", "a b"]) == ["a", "a b"], "one would be empty"
    assert telling_apart(["alone here"]) == ["alone here"]
    assert (
        telling_apart(["low-1e-3", "low-1e-4"]) == ["3", "4"] or telling_apart(["x y=1e-3", "x y=1e-4"])[0] == "y=1e-3"
    )


def test_sixteen_bits_are_grey_and_take_no_colour() -> None:
    found = looks(["bf16", "int4"], {"bf16"})
    assert found["bf16"]["color"] == "#8A8A8A" and found["int4"] == looks(["int4"])["int4"]


# Linear RGB as it is seen without one kind of cone (Machado, Oliveira and Fernandes 2009), at full severity.
SEEN = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1095, 0.8727]]  # of sRGB, white at 1


def lab(colour: str, seen: list[list[float]]) -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(seen) @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
def test_arms_of_one_line_style_stay_apart_for_the_colour_blind(seen: str) -> None:
    """20 in CIELAB: green and pink, orange and vermilion are 18 apart without M cones, green and sky 16 without S."""
    arms = looks([f"arm {place}" for place in range(21)])
    assert len({(one["color"], one["ls"]) for one in arms.values()}) == 21
    first = [*arms.values()][:7]
    for one, other in combinations(first, 2):
        if one["ls"] == other["ls"]:
            apart = lab(one["color"], SEEN[seen]) - lab(other["color"], SEEN[seen])
            assert np.linalg.norm(apart) > 20, (one, other)


def test_a_short_last_bin_is_no_cliff() -> None:
    steps = np.arange(1, 42)
    centres, mean = binned(steps, np.r_[np.ones(40), 5.0], 10, "mean")
    assert len(centres) == 4 and mean[-1] == pytest.approx((10 + 5) / 11)
    assert len(binned(np.arange(1, 46), np.ones(45), 10, "mean")[0]) == 5, "half full"
    assert len(binned(steps, np.ones(41), 10, "max")[0]) == 5


def test_units_are_ordered_by_their_price_else_their_risk() -> None:
    made = ratios(3, ["a", "b"], np.array([[1, 2], [np.inf, 2], [np.nan, 2]], float))
    assert costs(made)[0] == "risk"
    np.testing.assert_allclose(costs(made)[1], [1.5, 2.0])
    made.columns["price"] = np.array([[np.nan, np.nan], [3e-3, 1e-3], [np.nan, np.nan]], np.float32)
    name, values = costs(made)
    assert name == "price"
    np.testing.assert_allclose(values, [3e-3, 1e-3], rtol=1e-6)


def test_thresholds_of_two_stages(tmp_path: Path) -> None:
    settings = {
        "controller.alpha": 2.0,
        "controller.alpha_init": 4.0,
        "controller.init_frac": 0.1,
        "controller.trigger": 1.5,
    }
    run = fake_run(tmp_path / "run", settings=settings)
    (comparison,) = compare([run])
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(1, 6.0), (7, 3.0)]}
    run.header["calibrated"] = {"after_step": 100, "trigger": 2.5}
    assert thresholds(comparison.arms[0], run) == {"gnmr": [(101, 5.0)]}, "its own trigger, from the step behind"
    for damaged in ({"after_step": 100}, {"after_step": "1", "trigger": 2.0}, {"after_step": 1, "trigger": -1.0}, 7):
        run.header["calibrated"] = damaged
        assert thresholds(comparison.arms[0], run) == {"gnmr": [(1, 6.0), (7, 3.0)]}
