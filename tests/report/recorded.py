"""Runs in memory with known numbers and any names, and the cells of tables by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.layout import Table
from gnmr.lab.report.recorded_run import Run, UnitMatrices
from gnmr.records.schema import STEP_FIELDS

UNITS = ["layers.0.q_proj", "layers.0.k_proj", "layers.1.<b>mlp</b>"]
HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
PATHS = {
    "int4": ("int4", None),
    "int8": ("int8", None),
    "bf16": ("bf16", None),
    "int4_int8": ("int4", "int8"),
    "int8_bf16": ("int8", "bf16"),
}
SETTINGS = {
    "optim.lr": 1e-3,
    "training.seq_len": 64,
    "training.batch_size": 8,
    "training.accumulation": 1,
    "controller.signal": "gnmr_delta",
    "controller.max_o": 2,
}
HEADER = {
    "commit": "0123456789abcdef",
    "machine": {"cpu": "Test CPU", "device": "cpu"},
    "data": {"name": "text", "fingerprint": "feedbeefcafe"},
}


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
    """The folder is made if there are windows, and holds nothing but faults.jsonl."""
    made = unit_matrices(60, UNITS) if made is None else made
    if windows is not None:
        folder.mkdir(parents=True)
        (folder / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in windows))
    steps = int(made.steps[-1])
    merged = SETTINGS | dict(zip(("precision.low", "precision.recovery"), PATHS[arm], strict=True))
    merged |= {"training.steps": steps} | (settings or {})
    header = HEADER | {"command": command, "units": made.units}
    run = FakeRun(folder, merged, header, "stress", "cpu", arm, seed, status, None)
    run.made = made
    rows = {field: np.zeros(steps) for field in STEP_FIELDS}
    rows |= {"step": np.arange(1.0, steps + 1), "loss": np.linspace(8, np.log(ppl), steps) + seed / 10}
    last = float(np.log(ppl))
    evals = {
        "step": np.array([steps / 2, steps]),
        "val_loss": np.array([6.0, last]),
        "val_ppl": np.array([400, ppl]),
    }
    summary = {"final_val_loss": last, "final_val_ppl": ppl, "promotion_frac": float(made.active_SU.mean())}
    run.__dict__ |= {"steps": rows, "evals": evals, "events": events or [], "summary": summary}
    return run


def sweep(root: Path) -> list[Run]:
    """Two seeds of a static and of a routed arm, whose unit 0 has its highest risk in step 31 and recovers until 41."""
    risk_SU = np.full((60, 3), 0.5)
    risk_SU[30] = 2.5, 0.75, np.inf
    made = unit_matrices(60, UNITS, risk_SU)
    made.active_SU[31:41, 0] = True
    events = [
        (31, UNITS[0], "promote", "delta_gnmr", 2.5),
        (36, UNITS[0], "verdict", "precision", None),
        (41, UNITS[0], "release", "lock", 0.5),
        (50, UNITS[1], "promote", "retry", None),
        (52, None, "verdict", "not_reproducible", None),
    ]
    rows = [dict(zip(("step", "unit", "event", "cause", "risk"), row, strict=True)) for row in events]
    windows = [{"step": 30, "end": 33, "unit": UNITS[0], "kind": "underflow", "magnitude": 16}]
    routed: dict[str, Any] = {"made": made, "events": rows, "windows": windows, "command": f"gnmr train {HOSTILE}"}
    runs: list[Run] = [fake_run(root / f"low{seed}", "int4", seed, ppl=50 + seed) for seed in (0, 1)]
    return runs + [fake_run(root / f"routed{seed}", "int4_int8", seed, ppl=40 + seed, **routed) for seed in (0, 1)]


class Recorded:
    """Collects runs of one experiment, without their folders."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def add(
        self,
        paths: str,
        *losses: float | None,
        promoted: float = 0.01,
        summary: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """One run a seed with these final log perplexities, None where it diverged; settings: keys with __ for dots."""
        given = {key.replace("__", "."): value for key, value in settings.items()}
        merged = {"precision.name": paths} | given
        signal = given.get("controller.signal", "gnmr") if PATHS[paths][1] else None
        arm = [paths, signal, given.get("controller.routing"), given.get("optim.transform.name")]
        for seed, loss in enumerate(losses):
            folder, value = Path(f"no-such-folder/{len(self.runs)}"), 9.0 if loss is None else loss
            run = fake_run(folder, paths, seed, ppl=math.exp(value), settings=merged)
            run.arm = "-".join(filter(None, arm))
            run.summary.update({"promotion_frac": promoted} | (summary or {}))
            if loss is None:
                run.status, run.reason = "failed", "the validation loss after step 3 is nan"
            self.runs.append(run)

    def comparisons(self) -> list[Comparison]:
        return compare(self.runs)


def row(table: Table, name: str) -> dict[str, str]:
    """The cells of a row by column."""
    cells = next(row for row in table.rows if row[0] == name)
    return dict(zip([column.replace("\n", " ") for column in table.columns], cells, strict=True))


def notes(table: Table) -> str:
    return "\n".join([*table.warnings, *table.notes])
