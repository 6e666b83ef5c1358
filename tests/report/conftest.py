"""Run folders written by hand with known numbers, after gnmr/records/schema.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gnmr.lab import config
from gnmr.lab.records.find import find_runs
from gnmr.lab.report.comparisons import Comparison, compare
from gnmr.lab.report.runs import load
from gnmr.records.schema import UnitRows
from gnmr.records.units import UnitStream


@dataclass
class FakeRun:
    """What a written run folder shall say. The defaults are a done run of three steps and two units."""

    arm: str = "int4_int8"
    seed: int = 0
    val_ppl: float = 40.0
    steps: int = 3
    planned: int | None = None
    status: str = "done"
    """done, failed, interrupted or running."""
    reason: str | None = None
    scale: str = "cpu"
    experiment: str = "stress"
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat config keys beside the arm's own."""
    header: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    units: int = 2
    loss: np.ndarray | None = None
    val_loss: dict[int, float] | None = None
    gnmr: np.ndarray | None = None
    """(steps, units); null: all 1. The norms, and what every column of the signal holds."""
    columns: tuple[str, ...] = ("gnmr", "delta_gnmr")
    events: list[dict[str, Any]] = field(default_factory=list)
    unit_rows: bool = True
    """Whether there is a file of per-unit rows."""
    extra_bytes: int = 100
    """Saved bytes that an active unit adds."""


PATHS = {
    "int4": ("int4", None),
    "int4_int8": ("int4", "int8"),
    "int8": ("int8", None),
    "int8_bf16": ("int8", "bf16"),
    "bf16": ("bf16", None),
}
SAVED_BYTES = {"int4": 1000, "int4_int8": 1200, "int8": 2000, "int8_bf16": 2400, "bf16": 4000}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def unit_names(number: int) -> list[str]:
    return [
        f"layers.{place // 7}.{'self_attn' if place % 7 < 4 else 'mlp'}.{PROJECTIONS[place % 7]}"
        for place in range(number)
    ]


def build_config(run: FakeRun) -> config.Config:
    low, recovery = PATHS[run.arm]
    flat = {
        "precision.name": run.arm,
        "precision.low": low,
        "precision.recovery": recovery,
        "training.steps": run.planned or run.steps,
        "training.seed": run.seed,
        "experiment_name": run.experiment,
        "scale_name": run.scale,
        **run.settings,
    }
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, last = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return config.load(tree)


def write(root: Path, run: FakeRun) -> Path:
    """Writes the folder and returns it."""
    made = build_config(run)
    folder = root / run.experiment / f"{made.arm_name}-{config.config_hash(made)}-s{run.seed}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict(made)))
    units = unit_names(run.units)
    header = {
        "gnmr": "0.1.0",
        "commit": "0123456789abcdef0123",
        "command": f"gnmr train precision.low={run.arm} training.seed={run.seed}",
        "machine": {"cpu": "Test CPU", "cores": 2, "device": "cpu"},
        "data": {"name": made.data.name, "fingerprint": "feedbeefcafe"},
        "units": units,
        "recoverable": made.precision.recovery is not None,
        "arm": made.arm_name,
        "seed": run.seed,
    }
    (folder / "header.json").write_text(json.dumps(header | run.header))
    gnmr = run.gnmr if run.gnmr is not None else np.ones((run.steps, run.units))
    active = _active(gnmr, made) if made.precision.recovery else np.zeros(gnmr.shape, bool)
    loss = run.loss if run.loss is not None else np.linspace(8, math.log(run.val_ppl), run.steps)
    base = SAVED_BYTES[run.arm]
    rows = [
        {
            "step": step + 1,
            "tokens": (step + 1) * made.training.tokens_per_step,
            "loss": _plain(float(loss[step])),
            "lr": 1e-3,
            "grad_norm_pre_clip": 1.0,
            "num_candidates": int(active[step].sum()),
            "num_active": int(active[step].sum()),
            "over": {"gnmr": int((gnmr[step] > 1.5).sum()), "delta_gnmr": int((gnmr[step] > 1.3).sum())},
            "monitored": {},
            "saturation": {},
            "saved_bytes": base + run.extra_bytes * int(active[step].sum()),
            "saved_bytes_predicted": base + run.extra_bytes * int(active[step].sum()),
            "skipped": False,
            "nonfinite_total": 0,
            "nonfinite_streak": 0,
            "nonfinite_unit": None,
            "step_time_s": 0.5,
        }
        for step in range(run.steps)
    ]
    _jsonl(folder / "steps.jsonl", rows)
    val_loss = run.val_loss if run.val_loss is not None else {run.steps: math.log(run.val_ppl)}
    evals = [
        {"step": step, "tokens": step, "val_loss": loss, "val_ppl": math.exp(loss)} for step, loss in val_loss.items()
    ]
    _jsonl(folder / "eval.jsonl", evals)
    _jsonl(folder / "events.jsonl", run.events)
    if run.steps and run.unit_rows:
        numbers = dict.fromkeys(run.columns, gnmr)
        stream = UnitStream(folder)
        for step in range(run.steps):
            columns = {column: values[step] for column, values in numbers.items()}
            observed, lock = np.ones(run.units, bool), active[step].astype(np.int64)
            rows = (observed, gnmr[step], columns, gnmr[step] / 1.5, active[step], lock)
            stream.write(UnitRows(step + 1, units, *rows))
        stream.close()
    if run.status in ("done", "failed", "interrupted"):
        summary = {"status": run.status, "reason": run.reason, "steps": run.steps}
        if evals:
            summary |= {"final_val_loss": evals[-1]["val_loss"], "final_val_ppl": evals[-1]["val_ppl"]}
        (folder / "summary.json").write_text(json.dumps(summary | run.summary))
    if run.status == "done":
        (folder / "DONE").write_text("")
    if run.status == "failed":
        (folder / "FAILED").write_text(f"{run.reason}\n")
    return folder


def _active(gnmr: np.ndarray, made: config.Config) -> np.ndarray:
    """The max_o units with the largest GNMR over alpha, in force one step later."""
    active = np.zeros(gnmr.shape, bool)
    for step in range(len(gnmr) - 1):
        best = np.argsort(-gnmr[step])[: made.controller.max_o]
        active[step + 1, best[gnmr[step, best] > (made.controller.alpha or math.inf)]] = True
    return active


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """write_run(arm="int4", seed=1, ...) -> folder below tmp_path/runs; the arguments are FakeRun's."""
    return lambda **fields: write(tmp_path / "runs", FakeRun(**fields))


@pytest.fixture
def comparisons(tmp_path: Path) -> Callable[[], list[Comparison]]:
    """All that has been written so far."""
    return lambda: compare(load(folder) for folder in find_runs([tmp_path]))
