"""benchmarks/measured.py: plans by estimate and by measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no checkout: benchmarks/ is not in the wheel", allow_module_level=True)

sys.path.insert(0, str(BENCHMARKS))
measured = import_module("measured")


def test_the_difference_of_the_arms_is_paired_by_draw() -> None:
    left = {"estimated": (0.30, 0.50, 0.40), "measured": (0.29, 0.52, 0.38)}
    rows = [
        {"recipe": "nvfp4", "budget": 0.1, "draw": draw, "arm": arm, "kl": kl, "cpu_seconds": 5.0, "sequences": 9}
        for arm, kls in left.items()
        for draw, kl in enumerate(kls)
    ]
    (line,) = measured.table(pd.DataFrame(rows)).to_dict("records")
    differences = [-0.01, 0.02, -0.02]
    assert line["measured - estimated"] == pytest.approx(sum(differences) / 3)
    assert line["±"] == pytest.approx(stats.sem(differences) * 4.303, rel=1e-3)  # Student's t of two degrees of freedom
    assert (line["estimated"], line["measured"], line["draws"]) == (pytest.approx(0.4), pytest.approx(1.19 / 3), 3)


@pytest.mark.slow
def test_both_arms_make_plans_of_a_run(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("training.steps=20", "training.dtype=float32", "model.num_layers=2", "model.intermediate_size=64")
    run, out = train(tmp_path / "a", *words), tmp_path / "rows.jsonl"
    monkeypatch.setattr(measured, "POOL", 6)
    monkeypatch.setattr(measured, "HELD_OUT", 4)
    monkeypatch.setattr(sys, "argv", ["measured.py", "rows", str(out), str(run), "--recipes", "nvfp4", "--draws", "2"])
    measured.main()
    text = out.read_text()
    rows = pd.DataFrame([json.loads(line) for line in text.splitlines()])
    assert len(rows) == 2 * 2 * len(measured.BUDGETS) and (rows.extra <= rows.budget).all()
    assert rows.groupby(["draw", "arm"]).kl.apply(lambda kl: kl.iloc[1] <= kl.iloc[0]).all()  # more time, less KL
    assert set(rows[rows.arm == "measured"].sequences) == {1} and (rows[rows.arm == "estimated"].sequences > 1).all()
    measured.main()  # has all of it already
    assert out.read_text() == text
