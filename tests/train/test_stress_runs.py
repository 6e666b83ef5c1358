"""Disturbances of known place and time in whole runs: what they touch, what they do not, and that a stop hides none."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import differences, everything, in_child
from test_kill_and_resume import in_step

from gnmr.records.reader import read_json, read_jsonl, read_ratios

pytestmark = pytest.mark.slow

UP = "layers.0.mlp.up_proj"
OUTLIERS = ["model.outlier_channels.number=2", "model.outlier_channels.gain=16.0"]


def stress(kind: str, *windows: tuple[int, int], targets: str = "up_proj", **more: float) -> list[str]:
    """Words for a fault in the `windows` (first step, number of steps)."""
    words = [
        f"faults.kind={kind}",
        f"faults.targets={targets.split(',')}",
        f"faults.windows={list(map(list, windows))}",
    ]
    return [*words, *(f"stress.{key}={value}" for key, value in more.items())]


def faults_of(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "faults.jsonl")


def steps_of(folder: Path, *fields: str) -> list[tuple[Any, ...]]:
    return [tuple(row[field] for field in fields) for row in read_jsonl(folder / "steps.jsonl")]


def by_unit(folder: Path, name: str) -> list[dict[str, float]]:
    """A column of ratios.parquet: a mapping from unit for each step, in order."""
    rows = read_ratios(folder).to_pylist()
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


def test_drawn_windows_are_recorded_and_are_those_that_strike(train, tmp_path):
    """Each unit's mse, which nothing but a fault makes so large, stands out in exactly the recorded unit-steps."""
    quiet = ["controller.signal=always_low", "records.evidence=[mse]", "optim.lr=1e-9"]
    words = ["faults.kind=scale_up", "faults.magnitude=6", "faults.rate=100", "faults.duration=2"]
    plain, struck = train(tmp_path / "plain", *quiet), train(tmp_path / "struck", *quiet, *words)
    windows = faults_of(struck)
    told = {(row["unit"], t) for row in windows for t in range(row["step"], row["end"] + 1)}
    found = {
        (unit, t)
        for t, (now, before) in enumerate(zip(by_unit(struck, "mse"), by_unit(plain, "mse"), strict=True), start=1)
        for unit in now
        if now[unit] > 3 * before[unit]
    }
    assert found == told and 3 < len(told) < 50
    other = faults_of(train(tmp_path / "other", *quiet, *words, "faults.seed=1"))
    assert other != windows and faults_of(train(tmp_path / "again", *quiet, *words, "training.steps=8")) == windows


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


def test_units_that_are_in_recovery_in_time_are_not_hit(train, tmp_path):
    """The cap keeps q and k on the recovery path from step 2 on; v, which reads the same tensor, stays low."""
    words = ["controller.signal=always_high", "controller.max_o=2", "training.dtype=float32"]
    plain = train(tmp_path / "plain", *words)
    assert all(active == (t > 1) for t in range(1, 9) for active in [_on(plain, t, "q_proj"), _on(plain, t, "k_proj")])
    spared = train(tmp_path / "spared", *words, *stress("scale_up", (2, 7), targets="q_proj,k_proj", magnitude=6))
    assert differences(everything_but_faults(plain), everything_but_faults(spared)) == []
    struck = train(tmp_path / "struck", *words, *stress("scale_up", (2, 7), targets="q_proj,v_proj", magnitude=6))
    norms = [by_unit(folder, "norm")[1] for folder in (plain, struck)]
    assert {unit for unit in norms[0] if norms[0][unit] != norms[1][unit]} == {"layers.0.self_attn.v_proj"}


def _on(folder: Path, step: int, unit: str) -> bool:
    return next(on for name, on in by_unit(folder, "active")[step - 1].items() if name.endswith(unit))


def test_a_nan_is_skipped_told_and_recovered(train, tmp_path):
    """The step is lost once: its unit is promoted, and on the recovery path the fault of the next steps spares it."""
    folder = train(tmp_path / "run", *stress("nan", (3, 4)), "controller.alpha=99", "controller.beta=null")
    rows = steps_of(folder, "skipped", "nonfinite_unit", "nonfinite_total", "num_active")
    assert rows[:3] == [(False, None, 0, 0), (False, None, 0, 0), (True, UP, 1, 0)]
    assert rows[3][0] is False and rows[3][3] == 1
    causes = [(e["step"], e["unit"], e["event"], e["cause"]) for e in read_jsonl(folder / "events.jsonl")]
    verdict = (3, UP, "verdict", "precision")
    first = [(3, UP, "promote", "nonfinite"), verdict, (5, UP, "release", "lock")]  # kept in step 5 by its lock
    assert causes[:3] == first
    assert [t for t, (skipped, *_) in enumerate(rows, start=1) if skipped] == [3, 6]
    assert [t for t, norms in enumerate(by_unit(folder, "norm"), start=1) if not math.isfinite(norms[UP])] == [3, 6]
    assert (folder / "DONE").exists() and read_json(folder / "summary.json")["nonfinite_total"] == 2


def test_evaluation_is_not_hit(train, tmp_path):
    words = ["training.steps=2", "training.eval_every=1", "optim.lr=1e-30", "precision.site=forward"]
    losses = [
        [row["val_loss"] for row in read_jsonl(train(tmp_path / name, *words, *more) / "eval.jsonl")]
        for name, more in (("plain", []), ("struck", stress("scale_up", (1, 2), targets="*", magnitude=1000)))
    ]
    assert losses[0] == losses[1]


# ---- outlier channels that come and go ----


def test_a_window_of_outlier_channels_changes_the_activations_and_not_the_function(train, tmp_path):
    """On the 16-bit path, for a power of two: the first loss inside it is that of the run without, to the last bit."""
    words = [
        "precision.low=bf16",
        "precision.recovery=null",
        "training.eval_every=1",
        "training.steps=6",
        "optim.lr=1e-2",
    ]
    words += ["records.evidence=[input_std]"]
    plain, window = train(tmp_path / "plain", *words), train(tmp_path / "w", *words, *OUTLIERS, *_window(3, 4))
    losses = [steps_of(folder, "loss") for folder in (plain, window)]
    assert losses[0][:3] == losses[1][:3] and losses[0][3] != losses[1][3]
    stds = [by_unit(folder, "input_std") for folder in (plain, window)]
    grown = [max(b[unit] / a[unit] for unit in a) > 2 for a, b in zip(*stds, strict=True)]
    assert grown == [False, False, True, True, False, False]
    norms = [by_unit(folder, "norm") for folder in (plain, window)]
    assert norms[0][:2] == norms[1][:2] and norms[0][2] != norms[1][2]


def test_the_window_of_outlier_channels_is_recorded_for_every_unit(train, tmp_path):
    words = [*OUTLIERS, *_window(3, 6), *stress("noise", (2, 1), (5, 1))]
    rows = faults_of(train(tmp_path / "run", *words))
    outliers = [row for row in rows if row["kind"] == "outliers"]
    assert [(row["step"], row["end"], row["magnitude"]) for row in outliers] == [(3, 6, 16.0)] * 7
    assert len({row["unit"] for row in outliers}) == 7
    assert [row["step"] for row in rows] == [2, *[3] * 7, 5]


def test_units_that_touch_no_outlier_channel_are_not_at_risk(train, tmp_path):
    """What gpt's down_proj reads comes out of a GELU, which no factor can cross."""
    rows = faults_of(train(tmp_path / "gpt", "model.name=gpt", *OUTLIERS, *_window(3, 6)))
    assert {row["unit"].rpartition(".")[2] for row in rows} == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}
    none = train(tmp_path / "none", *_window(3, 6))
    assert faults_of(none) == [], "a window of no channels"


def test_the_true_gap_sees_the_fault(train, tmp_path):
    """Both paths are run with the fault armed, and it is struck no differently for that."""
    fault = stress("scale_up", (4, 2), magnitude=6)
    words = ["controller.signal=always_low", "optim.lr=1e-9", *fault]
    watched = train(tmp_path / "watched", *words, "records.evidence=[true_gap]")
    gaps = [row[UP] for row in by_unit(watched, "true_gap")]
    assert min(gaps[3:5]) > 3 * max(*gaps[:3], *gaps[5:])
    plain = train(tmp_path / "plain", *words)
    assert steps_of(plain, "loss", "grad_norm_pre_clip") == steps_of(watched, "loss", "grad_norm_pre_clip")


def test_a_window_that_closes_leaves_no_outliers_behind(train, tmp_path):
    """Open to the end of a run that learns nothing, or closed before it: then the weights are those of the start."""
    words = ["optim.lr=1e-30", "training.steps=4", *OUTLIERS]
    open_, closed, never = (
        everything(train(tmp_path / name, *words, *more))["state"]["model"]
        for name, more in (("o", _window(2, 4)), ("c", _window(2, 3)), ("n", ["model.outlier_channels.number=0"]))
    )
    assert differences(never, closed) == [] and differences(never, open_) != []


def test_a_window_is_not_the_outliers_of_a_whole_run(train, tmp_path):
    """Its first step opens what model.outlier_channels without a window has from the start: the same channels."""
    words = [*OUTLIERS, "training.steps=2", "training.dtype=float32", "records.evidence=[input_std]"]
    always, window = train(tmp_path / "always", *words), train(tmp_path / "window", *words, *_window(1, 2))
    assert by_unit(always, "input_std")[0] == pytest.approx(by_unit(window, "input_std")[0], rel=1e-6)


def _window(first: int, last: int) -> list[str]:
    return [f"model.outlier_channels.window=[{first},{last}]"]


# ---- stopped for real and continued; checkpoints after the steps 3 and 6 ----

STOPS: dict[str, tuple[int, list[str]]] = {
    # name: the step that is not taken, the words
    "between_two_windows": (7, stress("noise", (2, 2), (8, 1), targets="up_proj,v_proj", magnitude=3)),
    "random_bits": (5, [*stress("bit_flip", (2, 6), targets="*", share=0.2), "precision.rounding=stochastic"]),
    "drawn": (5, ["faults.kind=scale_down", "faults.magnitude=30", "faults.rate=150", "faults.duration=3"]),
    "skipped_steps": (6, [*stress("inf", (4, 4)), "controller.signal=always_low"]),
    "stale_scale": (5, stress("stale_scale", (4, 4), targets="*", history=3)),
    "stale_scale_forward": (8, [*stress("stale_scale", (5, 4), history=6), "precision.site=forward"]),
    "channels_open": (5, [*OUTLIERS, *_window(2, 6)]),
    "channels_closed_again": (8, [*OUTLIERS, *_window(2, 6)]),
    "channels_to_open": (5, [*OUTLIERS, *_window(4, 8)]),
    "both": (5, [*OUTLIERS, *_window(3, 6), *stress("stale_scale", (4, 3), targets="*")]),
}


@pytest.fixture(scope="module")
def calm(train, tmp_path_factory) -> Callable[..., list[tuple[Any, ...]]]:
    """Gradient norms of a run that nothing disturbs, trained once for each set of words."""
    return cache(lambda *words: steps_of(train(tmp_path_factory.mktemp("calm") / "run", *words), "grad_norm_pre_clip"))


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_in_the_midst_of_it(name, train, tmp_path, calm):
    """To the last bit what a run leaves that was never stopped, and not what one leaves without the disturbance."""
    number, words = STOPS[name]
    whole, folder = train(tmp_path / "whole", *words), tmp_path / "run"

    def doomed() -> None:
        in_step(number)()
        train(folder, *words)

    assert in_child(doomed) == -signal.SIGKILL
    said: list[str] = []
    train(folder, *words, say=said.append)
    assert f"continuing after step {(number - 1) // 3 * 3} of {folder}" in said
    assert differences(everything(whole), everything(folder)) == []
    assert faults_of(whole) == faults_of(folder)
    undisturbed = calm(*(word for word in words if not word.startswith(("stress", "model.outlier"))))
    assert steps_of(whole, "grad_norm_pre_clip") != undisturbed


def test_the_history_of_stale_scale_is_what_a_checkpoint_holds(train, tmp_path):
    """Of the steps before: the largest input of each, newest first; step 8's is row 0."""
    words = [*stress("stale_scale", (8, 1), history=4), "controller.signal=always_low"]
    state: Callable[[Path], torch.Tensor] = lambda folder: everything(folder)["state"]["extras"]["stress_0"]["history"]
    history = state(train(tmp_path / "run", *words))
    assert history.shape == (1, 5) and history.dtype == torch.float64 and (history > 0).all()
    shorter = state(train(tmp_path / "shorter", *words, "training.steps=8", "faults.history=2"))
    assert torch.equal(shorter[0], history[0, :3])
