"""Gradient transforms and SCALE in whole runs: from conf/ to the records, beside the controller, over a stop."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
from everything import differences, everything, in_child
from test_kill_and_resume import in_step

from gnmr.lab.train.transforms import TRANSFORMS
from gnmr.records.reader import read_json, read_jsonl, read_ratios

pytestmark = pytest.mark.slow

SKIPPING = {"name": "skip_step", "options": {"window": 4, "min_values": 3, "sigmas": 0.3}}
"""So few sigmas that a good part of the steps is left out."""


def words_of(tree: dict[str, Any], prefix: str) -> list[str]:
    """A tree of conf/ as words, groups within it left out."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += words_of(value, f"{prefix}.{key}")
        elif key != "defaults":
            found.append(f"{prefix}.{key}={'null' if value is None else value}")
    return found


def transform(name: str, **options: Any) -> list[str]:
    """The words of a transform, some options changed."""
    return words_of({"name": name, "options": options}, "optim.transform")


SCALE = ["optim.name=scale"]
SKIP = words_of(SKIPPING, "optim.transform")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "steps.jsonl")


def norms(folder: Path, step: int) -> dict[str, float]:
    return {row["unit"]: row["norm"] for row in read_ratios(folder).to_pylist() if row["step"] == step}


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory) -> Path:
    """A run without any transform."""
    return train(tmp_path_factory.mktemp("plain") / "run", "training.steps=3", "optim.lr=1e-2")


ARMS = {**{name: transform(name) for name in TRANSFORMS}, "scale": SCALE, "scale_agc": [*SCALE, *transform("agc")]}


@pytest.mark.parametrize("name", ARMS)
def test_three_steps(name, train, tmp_path, plain):
    """Finite, and with its own arm name; the first step's loss and norms, which come before it, are everybody's."""
    folder = train(tmp_path / "run", *ARMS[name], "training.steps=3", "optim.lr=1e-2", "optim.clip_norm=null")
    rows, expected = rows_of(folder), rows_of(plain)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(math.isfinite(row["loss"]) for row in rows)
    assert not any(row["skipped"] for row in rows)
    first = {key: rows[0][key] for key in ("loss", "grad_norm_pre_clip", "over", "saved_bytes")}
    assert first == {key: expected[0][key] for key in first}
    assert norms(folder, 1) == norms(plain, 1)
    tail = name.removeprefix("scale_")
    header = read_json(folder / "header.json")
    assert header["arm"] == "int4_int8-gnmr" + "-scale" * name.startswith("scale") + f"-{tail}" * (tail != "scale")


# ---- steps that a transform leaves out ----


@pytest.mark.parametrize("optimizer", [[], ["optim.name=scale"]], ids=["adamw", "scale"])
def test_a_step_left_out(optimizer, train, tmp_path):
    """Skipped, but not for a number that is not finite: no streak, no unit, no end of the run."""
    words = ["training.max_nonfinite_streak=1", "training.steps=12", *optimizer]
    folder = train(tmp_path / "run", *words, *SKIP)
    rows = rows_of(folder)
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 2 <= len(skipped) <= 9 and skipped[0] >= 3  # not before min_values were seen
    for row in rows:
        assert (row["nonfinite_unit"], row["nonfinite_total"], row["nonfinite_streak"]) == (None, 0, 0)
    assert read_json(folder / "summary.json")["nonfinite_total"] == 0 and (folder / "DONE").exists()


def test_a_step_that_is_not_finite_counts_with_a_transform_too(train, tmp_path, tampered):
    def spoil(parts) -> None:
        calls = iter(range(1, 100))
        weight = parts.model.layers[0].mlp.up_proj.weight
        weight.register_hook(lambda gradient: gradient * (math.nan if next(calls) == 2 else 1.0))

    tampered(spoil)
    rows = rows_of(train(tmp_path / "run", *transform("agc"), "training.steps=4", "optim.clip_norm=0.5"))
    assert [row["skipped"] for row in rows] == [False, True, False, False]
    assert [row["nonfinite_total"] for row in rows] == [0, 1, 1, 1]
    assert rows[1]["nonfinite_unit"] == "layers.0.mlp.up_proj" and all(math.isfinite(row["loss"]) for row in rows)


# ---- over a stop ----

STOPS = {
    "stable_spam": transform("stable_spam", reset_every=4),
    "skip_step": SKIP,
    "scale": [*SCALE, *transform("gradient_stabilizer"), "training.dtype=float32", "optim.clip_norm=0.2"],
}


@pytest.mark.parametrize("name", STOPS)
def test_a_killed_run_continues_to_the_last_bit(name, train, tmp_path):
    """Killed after the checkpoint of step 6, with history in the transform."""
    words, folder, said = STOPS[name], tmp_path / "run", []
    want = everything(train(tmp_path / "whole", *words))
    if name == "skip_step":
        assert any(row["skipped"] for row in want["steps"][6:])

    def doomed() -> None:
        in_step(8)()
        train(folder, *words)

    assert in_child(doomed) == -signal.SIGKILL
    train(folder, *words, say=said.append)
    assert f"continuing after step 6 of {folder}" in said
    assert differences(want, everything(folder)) == []
    assert "transform" in want["state"]["extras"]
