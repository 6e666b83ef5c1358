"""The standard error of MMLU, whose items lie in subjects of any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("peft")

from lm_eval.api.metrics import mean_stderr, pooled_sample_stderr

from gnmr.lab.evaluation.scoring import pooled_stderr, score
from gnmr.lab.evaluation.subjects import load_subject

pytestmark = pytest.mark.xdist_group("evaluation")  # lm-eval is imported once


def parts(*subjects: list[float]) -> list[tuple[int, dict[str, Any]]]:
    """Subjects with these scores of their items, as lm-eval's results give them."""
    return [
        (len(own), {"value": sum(own) / len(own), "stderr": mean_stderr(own) if len(own) > 1 else None})
        for own in subjects
    ]


def test_subjects_with_several_items_are_pooled_as_lm_eval_does() -> None:
    found = parts([1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    expected = pooled_sample_stderr([row["stderr"] for _, row in found], [items for items, _ in found])
    assert pooled_stderr(found) == pytest.approx(expected)


def test_a_subject_with_one_item_leaves_a_number() -> None:
    """Squares 2 / 3 and 3 / 4 in five degrees of freedom, of eight items."""
    found = parts([1.0, 0.0, 1.0], [1.0], [0.0, 1.0, 1.0, 1.0])
    assert pooled_stderr(found) == pytest.approx(math.sqrt((2 / 3 + 3 / 4) / 5 / 8))


def test_subjects_of_one_item_each_have_the_spread_over_all() -> None:
    assert pooled_stderr(parts([1.0], [0.0], [0.0])) == pytest.approx(mean_stderr([1.0, 0.0, 0.0]))
    assert pooled_stderr(parts([1.0])) is None


def test_mmlu_with_one_item_a_subject_has_a_standard_error(checkpoint: Path, task_data: Path) -> None:
    found = score(load_subject(str(checkpoint), device="cpu"), ["mmlu"], limit=1, data=task_data)["mmlu"]
    values = [row["acc"]["value"] for row in found["subjects"].values()]
    assert [row["acc"]["stderr"] for row in found["subjects"].values()] == [None] * len(values)
    assert found["metrics"]["acc"]["stderr"] == pytest.approx(mean_stderr(values))
