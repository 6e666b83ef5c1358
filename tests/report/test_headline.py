"""The sentence and the figures say what the tests of the arms have shown, and no more."""

from __future__ import annotations

import numpy as np
from recorded import Recorded

from gnmr.lab.report.arms import distinct_parts
from gnmr.lab.report.headline import Headline, headline


def told(**arms: list[float]) -> Headline:
    """The headline of arms with these perplexities, a seed each; an infinite one is that of a diverged run."""
    runs = Recorded()
    for arm, values in arms.items():
        runs.add(arm, *(float(np.log(one)) if np.isfinite(one) else None for one in values), promoted=0.1)
    (comparison,) = runs.comparisons()
    return headline(comparison)


def test_what_was_shown() -> None:
    found = told(int4=[50, 51.2, 52], int4_int8=[45, 46, 46.8], int8=[40, 41.1, 41.6], bf16=[39, 40, 40.5])
    assert found.sentence.startswith("Low precision raised the perplexity by 28.2% (int4 against bf16, n = 3).")
    assert (
        "Of the loss gap between int4 and int8, int4_int8-gnmr recovered 48% with 10.0% of the unit-steps."
        in found.sentence
    )
    assert "int4_int8-gnmr is significantly better than int4 (p = " in found.sentence
    assert found.sentence.endswith("); no random arm has the same budget.")
    assert [figure.value for figure in found.figures] == ["+28.2%", "48%", "10.0%"]
    assert "of the gap between int4 and int8, 95% interval" in found.figures[1].detail


def test_a_gap_that_is_not_shown_is_not_shared() -> None:
    found = told(int4=[50, 40, 52], int4_int8=[45, 46, 47], int8=[41, 49, 44])
    assert "Low precision did not change the perplexity significantly" in found.sentence
    assert "the arms between them are not judged" in found.sentence
    assert [figure.label for figure in found.figures] == ["cost of low precision", "unit-steps spent"]


def test_a_cost_that_the_table_does_not_show_is_not_told() -> None:
    """Against bf16 p is 0.03 by itself, and 0.06 as one of the table's two tests."""
    found = told(int4=[50, 51, 52], int4_int8=[50.1, 50.9, 52.1], bf16=[49, 49.6, 51.2])
    assert "Low precision did not change the perplexity significantly" in found.sentence


def test_one_seed_is_too_few() -> None:
    found = told(int4=[50], int4_int8=[45], int8=[40])
    assert "n = 1; a test needs 3 seeds)." in found.sentence and found.sentence.endswith("A test needs 3 seeds.")
    assert found.figures[1].value == "47%"


def test_arms_without_a_common_seed() -> None:
    runs = Recorded()
    for arm, ppl, without in (("int4", 50.0, 0), ("int4_int8", 45.0, 1), ("int8", 40.0, 2)):
        runs.add(arm, *[float(np.log(ppl + seed)) for seed in range(3)])
        del runs.runs[-3 + without]
    (comparison,) = runs.comparisons()
    sentence = headline(comparison).sentence
    assert sentence.endswith("int4, int8 and int4_int8-gnmr have no seed in common."), sentence


def test_nothing_beside_it() -> None:
    found = told(int4_int8=[45])
    assert found.sentence == (
        "int4_int8-gnmr ended at perplexity 45.00, with 10.0% of the unit-steps on the recovery path. Without a 16-bit "
        "arm the cost of low precision is not known."
    )
    assert [(figure.label, figure.value) for figure in found.figures] == [
        ("validation loss", f"{np.log(45):.4f}"),
        ("unit-steps spent", "10.0%"),
    ]


def test_the_arm_that_is_missing_is_named() -> None:
    assert "Without a static low-precision arm the cost" in told(int4_int8=[45], bf16=[44]).sentence
    runs = Recorded()
    runs.add("int4", 3.7)
    runs.add("bf16", 3.6, 3.7)
    del runs.runs[1]  # seed 0 of the 16-bit arm
    (comparison,) = runs.comparisons()
    assert "Without losses of the static arms for one seed the cost" in headline(comparison).sentence
    runs = Recorded()
    runs.add("int4", 3.7)
    runs.add("bf16", 3.6, model__hidden_size=48)
    (comparison,) = runs.comparisons()
    assert "Without a 16-bit arm of the model and optimizer of int4 the cost" in headline(comparison).sentence


def test_divergence_is_told_as_such() -> None:
    found = told(int4=[np.inf, 50, 51], bf16=[39, 40, 41])
    assert found.sentence.startswith("In low precision 1 of 3 runs diverged")


def test_names_from_what_differs() -> None:
    assert distinct_parts(["a-low lr=1 x=2", "a-high lr=1 x=3"]) == ["low x=2", "high x=3"]
    assert distinct_parts(["bf16", "int4_int8 max_o=1", "int4_int8 max_o=2"])[1] == "max_o=1"
    assert distinct_parts(["p-low", "p-gap-ranked", "bf16"]) == ["low", "gap-ranked", "bf16"]
    assert distinct_parts(["a", "a b"]) == ["a", "a b"], "one would be empty"
    assert distinct_parts(["alone here"]) == ["alone here"]
