"""Runs in memory with known numbers and any names, for the tests of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.lab.report.runs import Run, UnitMatrices
from gnmr.records.schema import STEP_FIELDS

UNITS = ["layers.0.q_proj", "layers.0.k_proj", "layers.1.<b>mlp</b>"]
PATHS = {"int4": ("int4", None), "int4_int8": ("int4", "int8"), "int8": ("int8", None), "bf16": ("bf16", None)}


class FakeRun(Run):
    """A run whose per-unit rows are in memory."""

    made: UnitMatrices

    def units(self) -> UnitMatrices:
        return self.made


def unit_matrices(steps: int, units: list[str], risk_SU: np.ndarray | None = None, every: int = 1) -> UnitMatrices:
    """Steps every, 2 every ...; norm of unit u in row s is (u + 1) + s / 1000, gnmr half the risk, nothing active."""
    shape = (steps, len(units))
    norm_SU = (1 + np.arange(len(units)) + np.arange(steps)[:, None] / 1000).astype(np.float32)
    risk_SU = np.full(shape, 0.5, np.float32) if risk_SU is None else risk_SU.astype(np.float32)
    columns = {"gnmr": risk_SU / 2, "delta_gnmr": risk_SU / 4}
    return UnitMatrices(np.arange(1, steps + 1) * every, units, norm_SU, columns, risk_SU, np.zeros(shape, bool))


def fake_run(
    folder: Path,
    arm: str = "int4_int8",
    seed: int = 0,
    made: UnitMatrices | None = None,
    ppl: float = 40.0,
    status: str = "done",
    events: list[dict[str, Any]] | None = None,
    windows: list[dict[str, Any]] | None = None,
    command: str = "gnmr train",
    settings: dict[str, Any] | None = None,
) -> FakeRun:
    """The folder is made and holds nothing but faults.jsonl, where there are windows."""
    made = unit_matrices(60, UNITS) if made is None else made
    low, recovery = PATHS[arm]
    steps = int(made.steps[-1])
    folder.mkdir(parents=True)
    if windows is not None:
        (folder / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in windows))
    run = FakeRun(
        folder=folder,
        settings={
            "precision.low": low,
            "precision.recovery": recovery,
            "controller.max_o": 2,
            "training.steps": steps,
            "training.seq_len": 64,
            "training.batch_size": 8,
            "training.accumulation": 1,
            **(settings or {}),
        },
        header={
            "commit": "0123456789abcdef",
            "command": command,
            "machine": {"cpu": "Test CPU", "device": "cpu"},
            "data": {"name": "text", "fingerprint": "feedbeefcafe"},
            "units": made.units,
        },
        experiment="stress",
        scale="cpu",
        arm=arm,
        hash=arm,
        seed=seed,
        status=status,
        reason=None,
    )
    run.made = made
    rows = {field: np.zeros(steps) for field in STEP_FIELDS}
    rows |= {"step": np.arange(1.0, steps + 1), "loss": np.linspace(8, np.log(ppl), steps) + seed / 10}
    evals = {
        "step": np.array([steps / 2, steps]),
        "val_loss": np.array([6.0, np.log(ppl)]),
        "val_ppl": np.array([400, ppl]),
    }
    summary = {
        "final_val_loss": float(np.log(ppl)),
        "final_val_ppl": ppl,
        "promotion_frac": float(made.active_SU.mean()),
        "wall_time_s": 5.0,
    }
    run.__dict__ |= {"steps": rows, "evals": evals, "events": events or [], "summary": summary}
    return run
