"""Run folders written by hand with known numbers, after gnmr/records/schema.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf
from recorded import PATHS, UNITS

from gnmr.lab import config
from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.recorded_run import load
from gnmr.records.find import find_runs
from gnmr.records.schema import UnitRows
from gnmr.records.unit_stream import UnitStream


def build_config(arm: str, steps: int, seed: int, experiment: str, settings: dict[str, Any]) -> config.Config:
    low, recovery = PATHS[arm]
    flat = {
        "precision.name": arm,
        "precision.low": low,
        "precision.recovery": recovery,
        "training.steps": steps,
        "training.seed": seed,
        "experiment_name": experiment,
        "scale_name": "cpu",
        **settings,
    }
    tree = OmegaConf.create()
    for key, value in flat.items():
        OmegaConf.update(tree, key, value)
    return config.load(tree)


def write(
    root: Path,
    arm: str = "int4_int8",
    seed: int = 0,
    val_ppl: float = 40.0,
    steps: int = 3,
    planned: int | None = None,
    status: str = "done",
    reason: str | None = None,
    experiment: str = "stress",
    settings: dict[str, Any] | None = None,
    header: dict[str, Any] | None = None,
    units: int = 2,
    val_loss: dict[int, float] | None = None,
    gnmr: np.ndarray | None = None,
) -> Path:
    """Write a run folder and return it: by default a done run of three steps and two units.

    `gnmr` (steps, units) are the norms too, and every column of the signal; all 1 by default.
    """
    made = build_config(arm, planned or steps, seed, experiment, settings or {})
    folder = root / experiment / f"{made.arm_name}-{config.config_hash(made)}-s{seed}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict(made)))
    names = UNITS[:units]
    told = {
        "commit": "0123456789abcdef0123",
        "command": f"gnmr train precision.low={arm} training.seed={seed}",
        "machine": {"cpu": "Test CPU", "cores": 2, "device": "cpu"},
        "data": {"name": made.data.name, "fingerprint": "feedbeefcafe"},
        "units": names,
        "arm": made.arm_name,
        "seed": seed,
    }
    (folder / "header.json").write_text(json.dumps(told | (header or {})))
    gnmr = np.ones((steps, units)) if gnmr is None else gnmr
    active_SU = np.zeros(gnmr.shape, bool)
    for step in range(1, steps if made.precision.recovery else 0):  # the max_o largest over alpha, one step later
        best = np.argsort(-gnmr[step - 1])[: made.controller.max_o]
        active_SU[step, best[gnmr[step - 1, best] > (made.controller.alpha or math.inf)]] = True
    loss = np.linspace(8, math.log(val_ppl), steps)
    fields = {"tokens": 8, "over": {}, "saved_bytes": None, "saturation": {}}
    fields |= {"step_time_s": 0.5, "nonfinite_total": 0}
    rows = [
        fields | {"step": step, "loss": loss[step - 1], "num_active": int(active_SU[step - 1].sum())}
        for step in range(1, steps + 1)
    ]
    _jsonl(folder / "steps.jsonl", rows)
    evals = [
        {"step": step, "tokens": step, "val_loss": loss, "val_ppl": math.exp(loss)}
        for step, loss in (val_loss or {steps: math.log(val_ppl)}).items()
    ]
    _jsonl(folder / "eval.jsonl", evals)
    stream = UnitStream(folder)
    for step, (norm, active) in enumerate(zip(gnmr, active_SU, strict=True), 1):
        columns = dict.fromkeys(("gnmr", "delta_gnmr"), norm)
        row = (np.ones(units, bool), norm, columns, norm / 1.5, active, active.astype(np.int64))
        stream.write(UnitRows(step, names, *row))
    stream.close()
    if status != "running":
        final = {f"final_{key}": evals[-1][key] for key in ("val_loss", "val_ppl")}
        (folder / "summary.json").write_text(json.dumps({"status": status, "reason": reason, "steps": steps, **final}))
    if status in ("done", "failed"):
        (folder / status.upper()).write_text(f"{reason}\n")
    return folder


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """write_run(arm="int4", seed=1, ...) -> folder below tmp_path/runs; the arguments are those of `write`."""
    return lambda **fields: write(tmp_path / "runs", **fields)


@pytest.fixture
def comparisons(tmp_path: Path) -> Callable[[], list[Comparison]]:
    """All that has been written so far."""
    return lambda: compare(load(folder) for folder in find_runs([tmp_path]))
