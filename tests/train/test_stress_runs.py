"""Disturbances of known place and time in whole runs: what they touch, what they do not, and that a stop hides none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from everything import differences, everything

from gnmr.records.reader import read_jsonl, read_units

pytestmark = pytest.mark.slow

UP = "layers.0.mlp.up_proj"


def stress(kind: str, *windows: tuple[int, int], targets: str = "up_proj", **more: float) -> list[str]:
    """Words for a fault in the `windows` (first step, number of steps)."""
    words = [
        f"faults.kind={kind}",
        f"faults.targets={targets.split(',')}",
        f"faults.windows={list(map(list, windows))}",
    ]
    return [*words, *(f"faults.{key}={value}" for key, value in more.items())]


def faults_of(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "faults.jsonl")


def steps_of(folder: Path, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(row[field] for field in fields) for row in read_jsonl(folder / "steps.jsonl")]


def by_unit(folder: Path, name: str) -> list[dict[str, float]]:
    """A column of units.arrows: a mapping from unit for each step, in order."""
    rows = read_units(folder).to_pylist()
    return [{row["unit"]: row[name] for row in rows if row["step"] == t} for t in range(1, rows[-1]["step"] + 1)]


def everything_but_faults(folder: Path) -> dict[str, Any]:
    found = everything(folder)
    found["state"].pop("extras", None)
    return {**found, "files": [name for name in found["files"] if name != "faults.jsonl"]}


# ---- faults: records and reach ----


def test_the_windows_are_recorded(train, tmp_path):
    words = stress("scale_up", (4, 3), (8, 1), targets="up_proj,q_proj", magnitude=50)
    rows = faults_of(train(tmp_path / "run", *words))
    common = {"kind": "scale_up", "magnitude": 50.0}
    assert rows == [
        {"step": first, "end": last, "unit": unit, **common}
        for first, last in ((4, 6), (8, 8))
        for unit in ("layers.0.self_attn.q_proj", UP)
    ]
    assert not (train(tmp_path / "plain") / "faults.jsonl").exists()


@pytest.mark.parametrize("site", ["saved", "forward"])
def test_a_run_is_as_without_until_the_first_window(site, train, tmp_path):
    """A fault on what is saved shows in the hit unit's gradient alone at first; the loss shows it a step later."""
    common = [f"precision.site={site}", "training.dtype=float32", "controller.signal=always_low"]
    plain = train(tmp_path / "plain", *common)
    struck = train(tmp_path / "struck", *common, *stress("scale_up", (4, 2), magnitude=6))
    losses = [steps_of(folder, "loss") for folder in (plain, struck)]
    grad_norms = [steps_of(folder, "grad_norm_pre_clip", "saved_bytes") for folder in (plain, struck)]
    first = 5 if site == "saved" else 4
    same = [a == b for a, b in zip(*losses, strict=True)]
    assert same == [t < first for t in range(1, 9)]
    assert [a == b for a, b in zip(*grad_norms, strict=True)] == [t < 4 for t in range(1, 9)]
    norms = [by_unit(folder, "norm") for folder in (plain, struck)]
    assert norms[0][:3] == norms[1][:3]
    changed = {unit for unit in norms[0][3] if norms[0][3][unit] != norms[1][3][unit]}
    assert changed == {UP} if site == "saved" else changed > {UP}


@pytest.mark.parametrize(
    ("kind", "rounding"), [("scale_up", "stochastic"), ("stale_scale", "nearest"), ("nan", "nearest")]
)
def test_nothing_on_the_recovery_path_is_hit(kind, rounding, train, tmp_path):
    """Every unit under warm-up throughout: to the last bit the run without faults."""
    high = ["controller.signal=always_high", "controller.warmup_frac=1.0", f"precision.rounding={rounding}"]
    high += ["training.steps=4", "training.accumulation=2"]
    plain = everything_but_faults(train(tmp_path / "plain", *high))
    struck = train(tmp_path / "struck", *high, *stress(kind, (1, 4), targets="*"))
    assert len(faults_of(struck)) == 7
    assert differences(plain, everything_but_faults(struck)) == []
