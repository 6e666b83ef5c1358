"""Detection figures of injected faults and the lead of spikes, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from html_runs import fake_run, ratios

from gnmr.errors import UserError
from gnmr.report.arms import compare
from gnmr.report.faults import (
    Window,
    detect,
    detection_table,
    lead_lag,
    read_windows,
    run_detection,
    run_lead_lags,
    spikes,
    windows_table,
)
from gnmr.report.runs import Ratios

WINDOWS = [Window("a", 3, 5), Window("b", 7, 7)]


def flagged(*places: tuple[str, int], steps: int = 10, risk: float = 1.5) -> Ratios:
    """Units a and b over ten steps, risk 0.5 but for these (unit, step)."""
    risk_SU = np.full((steps, 2), 0.5)
    for unit, step in places:
        risk_SU[step - 1, "ab".index(unit)] = risk
    return ratios(steps, ["a", "b"], risk_SU)


def test_figures_by_hand() -> None:
    """a is flagged in its window and in the step of grace, once after it; b once before its window, never in it."""
    made = flagged(("a", 4), ("a", 6), ("a", 9), ("b", 2))
    made.risk_SU[0, 1] = math.nan  # not observed: no unit-step
    found = detect(made, WINDOWS)
    assert found.delays == (1, None)
    assert (found.detected, found.recall, found.delay) == (1, 0.5, 1.0)
    assert (found.flagged, found.flagged_inside, found.precision) == (4, 2, 0.5)
    assert found.unit_steps_outside == 20 - 4 - 2 - 1
    assert found.false_alarms == pytest.approx(1000 * 2 / 13)


def test_without_grace_the_step_after_the_window_is_a_false_alarm() -> None:
    found = detect(flagged(("a", 6)), WINDOWS, grace=0)
    assert (found.delays, found.precision, found.recall) == ((None, None), 0.0, 0.0)
    assert found.false_alarms == pytest.approx(1000 / 16)
    assert detect(flagged(("a", 6)), WINDOWS).delays == (3, None)


def test_over_means_over_the_trigger_and_inf_is_over() -> None:
    assert detect(flagged(("a", 3), risk=1.0), WINDOWS).flagged == 0
    assert detect(flagged(("a", 3), risk=2.0), WINDOWS, trigger=2.0).flagged == 0
    assert detect(flagged(("a", 3), risk=math.inf), WINDOWS, trigger=100.0).delays == (0, None)


def test_nothing_flagged_has_no_precision_and_no_delay() -> None:
    found = detect(flagged(), WINDOWS)
    assert (found.precision, found.delay, found.recall, found.false_alarms) == (None, None, 0.0, 0.0)
    assert detect(flagged(("a", 3)), []).recall is None


def test_a_window_that_has_not_begun_is_left_out_and_an_unseen_unit_is_missed() -> None:
    found = detect(flagged(("a", 10)), [Window("a", 11, 20), Window("c", 2, 3), Window("a", 10, 30)])
    assert [window.start for window in found.windows] == [2, 10]
    assert found.delays == (None, 0)


def test_steps_that_are_recorded_now_and_then() -> None:
    """Recorded are 5, 10, 15: the flag at 10 is the first that can be seen of a window from 7."""
    risk_SU = np.array([[0.5], [1.5], [1.5]])
    found = detect(ratios(3, ["a"], risk_SU, every=5), [Window("a", 7, 12)])
    assert (found.delays, found.flagged_inside, found.precision) == ((3,), 1, 0.5)


def test_a_window_on_the_recovery_path_is_covered() -> None:
    made = flagged()
    made.active_SU[2:5, 0] = True
    made.active_SU[6, 1] = False
    assert detect(made, WINDOWS).covered == (True, False)


def test_windows_of_a_run_folder(tmp_path: Path) -> None:
    assert read_windows(tmp_path) == []
    (tmp_path / "faults.jsonl").write_text(
        '{"step": 3, "end": 5, "unit": "a", "kind": "underflow", "magnitude": 16}\n'
        '{"step": 7, "end": 7, "unit": "b", "kind": "nan", "magnitude": null}\n'
    )
    assert read_windows(tmp_path) == [Window("a", 3, 5, "underflow", 16.0), Window("b", 7, 7, "nan", None)]
    (tmp_path / "faults.jsonl").write_text('{"step": 3, "unit": "a"}\n')
    with pytest.raises(UserError, match=r"faults\.jsonl, line 1: not a fault window") as error:
        read_windows(tmp_path)
    assert "\n" not in str(error.value)


def test_a_run_is_judged_by_its_own_trigger(tmp_path: Path) -> None:
    windows = [{"step": 3, "end": 5, "unit": "a", "kind": "nan", "magnitude": None}]
    made = flagged(("a", 3))
    assert run_detection(fake_run(tmp_path / "none", made=made)) is None
    found = run_detection(fake_run(tmp_path / "plain", made=made, windows=windows))
    assert found is not None and found.detected == 1
    strict = fake_run(tmp_path / "strict", made=made, windows=windows, settings={"controller.trigger": 1.6})
    found = run_detection(strict)
    assert found is not None and found.detected == 0


def test_tables(tmp_path: Path) -> None:
    windows = [
        {"step": 3, "end": 5, "unit": "a", "kind": "underflow", "magnitude": 16},
        {"step": 7, "end": 7, "unit": "b", "kind": "nan", "magnitude": None},
    ]
    sets = {"int4_int8": flagged(("a", 4), ("b", 2)), "int4": flagged()}
    sets["int4_int8"].active_SU[6, 1] = True
    runs = [fake_run(tmp_path / arm, arm=arm, made=made, windows=windows) for arm, made in sets.items()]
    (comparison,) = compare(runs)
    found = {run.folder: detection for run in runs if (detection := run_detection(run))}
    table = detection_table(comparison, found)
    assert table.rows == [
        ["int4", "1", "2", "0.0 ± - %", "-", "-", "0.00 ± -", "0"],
        ["int4_int8", "1", "2", "50.0 ± - %", "50.0 ± - %", "1.0 ± -", "71.43 ± -", "1"],
    ]
    table = windows_table(comparison, found)
    assert table.columns == ["unit", "steps", "kind", "magnitude", "seed", "int4", "int4_int8"]
    assert table.rows == [
        ["a", "3-5", "underflow", "16", "0", "missed", "after 1"],
        ["b", "7-7", "nan", "-", "0", "missed", "covered"],
    ]
    assert detection_table(comparison, {}).rows == windows_table(comparison, {}).rows == []


def impulse(place: int, length: int = 40) -> np.ndarray:
    values = np.zeros(length)
    values[place] = 1.0
    return values


@pytest.mark.parametrize("a, b, lag", [(10, 13, 3), (13, 10, -3), (10, 10, 0)])
def test_lead_lag_of_impulses(a: int, b: int, lag: int) -> None:
    found = lead_lag(impulse(a), impulse(b), 5)
    assert found is not None
    assert found[0] == lag
    assert found[1] == pytest.approx(1.0)


def test_lead_lag_leaves_out_what_is_not_finite() -> None:
    a, b = impulse(10) + impulse(20), impulse(13) + impulse(23)
    a[2], b[30] = math.nan, math.inf
    found = lead_lag(a, b, 5)
    assert found == (3, pytest.approx(1.0))


def test_lead_lag_of_nothing_that_varies() -> None:
    assert lead_lag(np.ones(20), impulse(3, 20), 5) is None
    assert lead_lag(np.zeros(2), np.zeros(2), 5) is None
    with pytest.raises(ValueError, match="series of 3 and 4 steps"):
        lead_lag(np.zeros(3), np.zeros(4), 1)


def test_spikes_stand_above_the_median_before_them() -> None:
    values = np.array([2.0, 2, 1, 2, 3, 6, 2, math.inf, 0.5])
    found = spikes(values)
    assert np.isnan(found[:5]).all(), "fewer than five values before them"
    assert found[5] == pytest.approx(math.log(6 / 2))
    assert found[6] == 0.0
    assert math.isnan(found[7])
    assert found[8] == 0.0, "a fall is no spike"
    assert spikes(np.zeros(0)).shape == (0,)


def test_lead_of_norms_before_the_loss(tmp_path: Path) -> None:
    made = ratios(60, ["a", "b"])
    made.columns["update_norm"] = np.ones((60, 2), np.float32)
    made.columns["update_norm"][38] = 5.0
    run = fake_run(tmp_path / "run", made=made)
    run.steps["loss"] = 2 + impulse(40, 60)
    run.steps["grad_norm_pre_clip"] = 1 + 3 * impulse(37, 60)
    found = run_lead_lags(run, made)
    assert {name: lag for name, (lag, _) in found.items()} == {"gradient norm": 3, "update norm": 2}
