"""What a risk is held against in pictures: the trigger, or what a ranking's own choices amount to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from html_runs import UNITS, fake_run, ratios

from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.risk import limit

RANKED = {"controller.routing": "ranked", "controller.trigger": 5.0}


def limit_of(folder: Path, risk_SU: np.ndarray, active: int, settings: dict[str, object]) -> tuple[float, str]:
    """The limit of a run of that risk, in which so many unit-steps were on the recovery path."""
    made = ratios(len(risk_SU), UNITS, risk_SU)
    made.active_SU.ravel()[:active] = True
    run = fake_run(folder / "run", made=made, settings=settings)
    (comparison,) = compare([run])
    (arm,) = comparison.arms
    return limit(arm, run, made)


def test_over_thresholds_it_is_the_trigger(tmp_path: Path) -> None:
    assert limit_of(tmp_path, np.full((10, 3), 0.5), 3, {"controller.trigger": 5.0}) == (5.0, "trigger")


def test_as_many_unit_steps_are_over_a_rankings_as_it_recovered(tmp_path: Path) -> None:
    risk_SU = np.random.default_rng(0).lognormal(size=(100, 3)).astype(np.float32)
    found, name = limit_of(tmp_path, risk_SU, 60, RANKED)
    assert name == "typical cut of the ranking"
    assert (risk_SU > found).sum() == pytest.approx(60, abs=1)


@pytest.mark.parametrize(
    "risk", [0.0, 1.0, np.nan, np.inf], ids=["nobody is at risk", "all alike", "not observed", "not finite"]
)
def test_risks_that_say_nothing_are_held_against_1(tmp_path: Path, risk: float) -> None:
    assert limit_of(tmp_path, np.full((10, 3), risk), 6, RANKED)[0] == 1.0
