"""`gnmr replay RUN... detect=SHARE`: signals held against faults whose place and time are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gnmr.cli.replay import main
from gnmr.errors import UserError
from gnmr.records.reader import read_units
from gnmr.records.schema import unit_schema

UNITS, STEPS = ["a", "b", "c", "d"], 60


def write(folder: Path, rows: dict[str, Any]) -> None:
    schema = unit_schema([name for name in rows if name not in ("step", "unit", "norm")])
    rest = {"risk": [0.0] * 4 * STEPS, "active": [False] * 4 * STEPS, "lock": [0] * 4 * STEPS}
    table = pa.table(rows | rest).select(schema.names).cast(schema)
    with pa.ipc.new_stream(str(folder / "units.arrows"), schema) as stream:
        stream.write_table(table)


@pytest.fixture
def recorded(tmp_path: Path):
    """A run folder: norms near 1; b's are 10 in the steps 30 to 34, one of d's is 5 for nothing."""

    def make(name: str = "run", faults: bool = True) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        norm = 1 + 0.01 * np.random.default_rng(0).random((STEPS, 4))
        norm[29:34, 1] = 10.0
        norm[9, 3] = 5.0  # one false alarm
        rows = {
            "step": np.repeat(np.arange(1, STEPS + 1), 4),
            "unit": UNITS * STEPS,
            "norm": norm.flatten(),
        }
        write(folder, rows)
        if faults:
            windows = [("b", 30, 34, "scale_up"), ("c", 50, 52, "noise")]
            lines = [
                json.dumps({"step": start, "end": end, "unit": unit, "kind": kind, "magnitude": 8.0})
                for unit, start, end, kind in windows
            ]
            (folder / "faults.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return make


def test_recall_precision_and_delay_by_hand(recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """240 unit-steps, 10 of them in windows (with a step of grace): two false alarms are 1% of the 230 others."""
    folder, out = recorded(), tmp_path / "found.json"
    assert main([str(folder), "detect=0.01", "signal=grad_norm", f"out={out}"]) == 0
    found = json.loads(out.read_text())["signals"]["grad_norm"]
    # The trigger is the third largest norm outside, a plain 1.01; so much of c's window is over it as chance has it.
    assert [window["kind"] for window in found["windows"]] == ["scale_up", "noise"]
    assert found["delays"][0] == 0 and found["unit_steps_outside"] == 230
    assert found["flagged"] - found["flagged_inside"] == 2
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.slow
def test_several_runs_add_up_and_those_without_faults_are_passed_over(recorded, tmp_path: Path, capsys) -> None:
    out = tmp_path / "found.json"
    runs = [str(recorded("one")), str(recorded("two")), str(recorded("plain", faults=False))]
    assert main([*runs, "detect=0.01", "signal=all", f"out={out}"]) == 0
    captured = capsys.readouterr()
    assert f"{runs[2]}: no faults, passed over" in captured.err
    assert "signal recovery_gap needs gap_low, gap_recovery, which was not recorded" in captured.err
    signals = json.loads(out.read_text())["signals"]
    assert len(signals["grad_norm"]["windows"]) == 4
    assert "random" in signals and "always_low" not in signals


@pytest.mark.slow
def test_the_oracle_and_a_window_of_outlier_channels(recorded, tmp_path: Path, capsys) -> None:
    """Outlier channels are at three of four units; what the paths really differ by sees them, the norms do not."""
    folder, out = recorded("run"), tmp_path / "found.json"
    gap = 1 + 0.01 * np.random.default_rng(1).random((STEPS, 4))
    gap[20:25, :3] = 4.0
    gap[29:34, 1] = 9.0
    table = read_units(folder)
    write(folder, {name: table[name].to_pylist() for name in ("step", "unit", "norm")} | {"true_gap": gap.flatten()})
    with (folder / "faults.jsonl").open("a") as file:
        for unit in ("a", "b", "c"):
            row = {"step": 20, "end": 25, "unit": unit, "kind": "outliers", "magnitude": 32.0}
            print(json.dumps(row), file=file)
    assert main([str(folder), "detect=0.001", "signal=oracle,grad_norm", f"out={out}"]) == 0
    signals = json.loads(out.read_text())["signals"]
    assert list(signals) == ["oracle", "grad_norm"]
    assert signals["oracle"]["delays"][0] == 0 and signals["oracle"]["delays"][2:] == [1, 1, 1]
    assert signals["oracle"]["unit_steps_outside"] == 240 - 10 - 3 * 7
    assert signals["grad_norm"]["delays"][2:] == [None, None, None]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["signal", "recall", "precision", "delay", "noise", "outliers", "scale_up"] in lines


def test_without_any_faults_it_says_so(recorded) -> None:
    with pytest.raises(UserError, match=r"^detect: none of these runs had faults; train with faults\.kind="):
        main([str(recorded(faults=False)), "detect=0.01"])


def test_options_of_several_signals_are_refused(recorded) -> None:
    """They would be dropped without a word."""
    with pytest.raises(UserError, match=r"options\.every=2: of which signal\?"):
        main([str(recorded()), "detect=0.01", "signal=price,recovery_gap", "options.every=2"])
