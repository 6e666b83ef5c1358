"""Detection figures of injected faults, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from recorded import fake_run, unit_matrices

from gnmr.errors import UserError
from gnmr.lab.report.comparisons import compare
from gnmr.lab.report.detection import Detection, detect, fault_table
from gnmr.lab.report.recorded_run import UnitMatrices
from gnmr.records.reader import FaultWindow, read_windows

WINDOWS = [FaultWindow("a", 3, 5), FaultWindow("b", 7, 7)]


def flagged(*places: tuple[str, int], steps: int = 10, risk: float = 1.5) -> UnitMatrices:
    """Units a and b over ten steps, risk 0.5 but for these (unit, step)."""
    risk_SU = np.full((steps, 2), 0.5)
    for unit, step in places:
        risk_SU[step - 1, "ab".index(unit)] = risk
    return unit_matrices(steps, ["a", "b"], risk_SU)


def test_figures_by_hand() -> None:
    """a is flagged in its window and in the step of grace, once after it; b once before its window, never in it."""
    made = flagged(("a", 4), ("a", 6), ("a", 9), ("b", 2))
    made.risk_SU[0, 1] = math.nan  # not observed: no unit-step
    observed_outside = 20 - 4 - 2 - 1
    false_alarms = pytest.approx(1000 * 2 / observed_outside)
    assert detect(made, WINDOWS) == Detection(2, 1 / 2, precision=2 / 4, delay=1.0, false_alarms=false_alarms)


def test_over_means_over_the_trigger_and_inf_is_over() -> None:
    assert detect(flagged(("a", 3), risk=1.0), WINDOWS).precision is None
    assert detect(flagged(("a", 3), risk=2.0), WINDOWS, trigger=2.0).precision is None
    assert detect(flagged(("a", 3), risk=math.inf), WINDOWS, trigger=100.0)[1:4] == (0.5, 1.0, 0.0)


def test_a_window_that_has_not_begun_is_left_out_and_an_unseen_unit_is_missed() -> None:
    windows = [FaultWindow("a", 11, 20), FaultWindow("c", 2, 3), FaultWindow("a", 10, 30)]
    assert detect(flagged(("a", 10)), windows)[:4] == (2, 0.5, 1.0, 0.0)


def test_steps_that_are_recorded_now_and_then() -> None:
    """Recorded are 5, 10, 15: the flag at 10 is the first that can be seen of a window from 7."""
    risk_SU = np.array([[0.5], [1.5], [1.5]])
    units = unit_matrices(3, ["a"], risk_SU, every=5)
    assert detect(units, [FaultWindow("a", 7, 12)])[:4] == (1, 1.0, 0.5, 3.0)


def test_windows_of_a_run_folder(tmp_path: Path) -> None:
    assert read_windows(tmp_path) == []
    (tmp_path / "faults.jsonl").write_text(
        '{"step": 3, "end": 5, "unit": "a", "kind": "underflow", "magnitude": 16}\n'
        '{"step": 7, "end": 7, "unit": "b", "kind": "nan", "magnitude": null}\n'
    )
    assert read_windows(tmp_path) == [FaultWindow("a", 3, 5, "underflow", 16.0), FaultWindow("b", 7, 7, "nan", None)]
    (tmp_path / "faults.jsonl").write_text('{"step": 3, "unit": "a"}\n')
    with pytest.raises(UserError, match=r"faults\.jsonl, line 1: not a fault window") as error:
        read_windows(tmp_path)
    assert "\n" not in str(error.value)


def test_the_table_judges_a_run_by_its_own_trigger(tmp_path: Path) -> None:
    """Nothing flagged has no precision and no delay."""
    windows = [
        {"step": 3, "end": 5, "unit": "a", "kind": "underflow", "magnitude": 16},
        {"step": 7, "end": 7, "unit": "b", "kind": "nan", "magnitude": None},
    ]
    made, found = flagged(("a", 4), ("b", 2)), {}
    for factor in (1.0, 1.6):
        run = fake_run(tmp_path / str(factor), made=made, windows=windows, settings={"controller.trigger": factor})
        (found[factor],) = (row[2:] for row in fault_table(compare([run])[0]).rows)
    assert found == {
        1.0: ["2", "50.0%", "50.0%", "1.0", "71.43"],
        1.6: ["2", "0.0%", "-", "-", "0.00"],
    }
    assert fault_table(compare([fake_run(tmp_path / "none", made=made)])[0]).rows == []


def test_arms_under_faults_are_named_by_their_faults(tmp_path: Path) -> None:
    kinds = {"none": 0.0, "noise": 0.5, "nan": 0.25}
    runs = []
    for kind, rate in kinds.items():
        settings = {"faults.kind": kind, "faults.rate": rate}
        runs.append(fake_run(tmp_path / kind, arm="int4", made=flagged(), settings=settings))
    runs.append(fake_run(tmp_path / "int8", arm="int8", made=flagged()))
    (comparison,) = compare(runs)
    assert {arm.label for arm in comparison.arms} == {
        *(f"int4 kind={kind} rate={rate}" for kind, rate in kinds.items()),
        "int8",
    }
