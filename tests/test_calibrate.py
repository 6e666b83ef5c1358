"""`gnmr replay FILE calibrate=SHARE`: what it prints spends that share again, and what it cannot do is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from gnmr.control.signals import SIGNALS, Context, build_signal

pytestmark = pytest.mark.slow

STEPS, UNITS, WANTED = 40, 8, 0.1
ROUNDED = 6e-5
"""A replay prints shares to a hundredth of a percent; a unit-step is 0.3%."""
EXAMPLES = Path(__file__).parents[1] / "examples"
RECORDED = ("mse", "gap_low", "gap_recovery")
BLIND = ("random",)


@pytest.fixture(scope="module")
def table() -> dict[str, np.ndarray]:
    """Evidence of two layers of four units each, drawn from a lognormal distribution."""
    draw = np.random.default_rng(0)
    names = [f"layers.{i // 4}.u{i % 4}" for i in range(UNITS)]
    columns = {name: np.exp(draw.normal(size=STEPS * UNITS)) for name in ("norm", *RECORDED)}
    columns["gap_low"] += columns["gap_recovery"]
    return {"step": np.repeat(np.arange(1, STEPS + 1), UNITS), "unit": np.tile(names, STEPS), **columns}


@pytest.fixture
def file(table, tmp_path) -> Path:
    pq.write_table(pa.table(table), tmp_path / "evidence.parquet")
    return tmp_path / "evidence.parquet"


@pytest.fixture
def calibrated(file, gnmr) -> Callable[..., dict[str, tuple[float, list[str]]]]:
    """The lines of a calibration: by signal the share and the overrides."""

    def run(*words: str) -> dict[str, tuple[float, list[str]]]:
        outcome = gnmr("replay", str(file), *words)
        assert outcome.code == 0, outcome.err
        lines = [line.split() for line in outcome.out.splitlines()]
        return {name: (float(share), overrides) for name, share, *overrides in lines}

    return run


@pytest.fixture
def spent(file, gnmr) -> Callable[..., float]:
    """The share of unit-steps on the recovery path that a replay reports."""

    def run(*words: str, source: Path = file) -> float:
        outcome = gnmr("replay", str(source), *words)
        assert outcome.code == 0, outcome.err
        (told,) = (line for line in outcome.out.splitlines() if line.startswith("unit-steps recovered"))
        return float(told.split()[-1].rstrip("%")) / 100

    return run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gnmr_delta", ["alpha=null", "delta=3", "t_lock=2"]),
        ("grad_norm", ["max_o=2"]),
        ("recovery_gap", ["max_o=8"]),
        ("random", ["max_o=1", "t_lock=3"]),
        ("static_k", ["options.calibration_steps=10"]),
    ],
)
def test_what_it_prints_spends_the_share(name, words, calibrated, spent):
    ((found, (share, overrides)),) = calibrated(f"calibrate={WANTED}", f"signal={name}", *words).items()
    assert found == name and share == pytest.approx(WANTED, rel=0.1)
    assert overrides[0] == f"controller.signal={name}"
    key = "options.active_frac" if name in (*BLIND, "static_k") else "trigger"
    assert f"controller.{key}" in [word.partition("=")[0] for word in overrides]
    assert spent(*overrides, *words) == pytest.approx(share, abs=ROUNDED)


def test_of_a_run(train, gnmr, tmp_path):
    """With the run's own controller and schedule: what `gnmr train` would be given for it."""
    folder = train(tmp_path / "run", "training.steps=30", "records.evidence=[mse]")
    outcome = gnmr("replay", str(folder), "calibrate=0.05", "signal=mse")
    name, share, *overrides = outcome.out.split()
    head, use = outcome.err.splitlines()
    assert outcome.code == 0 and head.split() == ["signal", "share", "words", "for", "gnmr", "train"]
    assert use == f"use: gnmr train ... {' '.join(overrides)}"
    assert name == "mse" and float(share) == pytest.approx(0.05, rel=0.1)
    again = gnmr("replay", str(folder), *overrides)
    (told,) = (line.split() for line in again.out.splitlines() if line.startswith("unit-steps recovered"))
    assert told[-2] == f"{float(share):.2%}", "of the replay; the run's own stands behind it"


def test_all_signals(file, gnmr, spent):
    """Those whose evidence is there on standard output, the others with their reason on standard error."""
    outcome = gnmr("replay", str(file), f"calibrate={WANTED}", "signal=all")
    assert outcome.code == 0
    lines = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()}
    left_out = dict(line.split(" left out: ") for line in outcome.err.splitlines() if " left out: " in line)
    left_out = {name.strip(): reason for name, reason in left_out.items()}
    assert not lines.keys() & left_out.keys() and lines.keys() | left_out.keys() == set(SIGNALS)
    assert lines.keys() >= {"gnmr_delta", "mse", "recovery_gap", "random", "grad_norm"}
    for name, (share, *_) in lines.items():
        assert float(share) == pytest.approx(WANTED, rel=0.1), name
    for name in left_out.keys() - {"static_k", "always_low", "always_high"}:
        needs = build_signal(name, {}, Context(("a",), torch.device("cpu"))).needs
        lacking = sorted(set(needs) - set(RECORDED), key=needs.index)
        assert f"needs {', '.join(lacking)}, which was not recorded" in left_out[name]
        assert f"train with records.evidence=[{','.join(lacking)}], or give your own file" in left_out[name]
    for name in ("always_low", "always_high"):
        assert f"calibrate={WANTED}: {name} gives" in left_out[name]


def test_a_signal_of_ones_own(calibrated, spent, monkeypatch):
    """By its trigger, for nothing is known of its options."""
    monkeypatch.syspath_prepend(EXAMPLES)
    words = [f"calibrate={WANTED}", "signal=own_signal:MedianRatio"]
    ((name, (share, overrides)),) = calibrated(*words).items()
    assert name == "own_signal:MedianRatio" and share == pytest.approx(WANTED, rel=0.1)
    assert spent("signal=own_signal:MedianRatio", overrides[-1].removeprefix("controller.")) == pytest.approx(
        share, abs=1e-5
    )


def test_several_shares_of_several_signals(file, gnmr, spent):
    """One line each, in that order; a point that cannot be is left out and named."""
    outcome = gnmr("replay", str(file), "calibrate=0.1,0.4,0.9", "signal=recovery_gap,random", "max_o=5")
    assert outcome.code == 0
    lines = [line.split() for line in outcome.out.splitlines()]
    assert [name for name, *_ in lines] == ["recovery_gap", "recovery_gap", "random", "random"]
    for (_, share, *overrides), wanted in zip(lines, (0.1, 0.4, 0.1, 0.4), strict=True):
        assert float(share) == pytest.approx(wanted, rel=0.1)
        assert overrides[-1] == "controller.max_o=5"
        assert spent(*overrides) == pytest.approx(float(share), abs=ROUNDED)
    told = [line.partition(":")[0].split() for line in outcome.err.splitlines() if " left out: " in line]
    assert told == [["recovery_gap", "left", "out"], ["random", "left", "out"]]


def test_several_runs_spend_the_share_together(table, file, gnmr, spent, tmp_path):
    """Another seed's norms are ten times larger: one trigger, the mean of both shares."""
    pq.write_table(pa.table(table | {"norm": 10 * table["norm"]}), tmp_path / "larger.parquet")
    files = [file, tmp_path / "larger.parquet"]
    outcome = gnmr("replay", *map(str, files), "calibrate=0.25", "signal=grad_norm")
    (line,) = outcome.out.splitlines()
    _, share, *overrides = line.split()
    shares = [spent(*overrides, source=source) for source in files]
    assert shares[0] < 0.1 < 0.4 < shares[1] and float(share) == pytest.approx(np.mean(shares), abs=ROUNDED)


def test_the_trigger_of_the_run_does_not_count(train, gnmr, tmp_path):
    """Under a trigger above 2, random would choose nothing; its words do not keep that trigger."""
    runs = [str(train(tmp_path / str(n), f"controller.trigger={n}", "training.steps=40")) for n in (1, 3)]
    outcome = gnmr("replay", *runs, "calibrate=0.1", "signal=random,gnmr_delta")
    assert outcome.code == 0 and "left out" not in outcome.err and len(outcome.out.splitlines()) == 2
    for word in ("trigger=2", "options.active_frac=0.3"):
        line = gnmr("replay", *runs, "calibrate=0.1", "signal=random", word).mistake
        assert line == f"{word}: calibrate finds this value; leave it out"
    spent = gnmr("replay", runs[1], "signal=random", "options.active_frac=0.1").out
    assert "unit-steps recovered" in spent and "0.00%" not in spent.split("unit-steps recovered")[1].split()[0]


def test_runs_of_other_controllers_are_refused(train, gnmr, tmp_path):
    runs = [str(train(tmp_path / str(max_o), f"controller.max_o={max_o}")) for max_o in (1, 2)]
    line = gnmr("replay", *runs, "calibrate=0.1").mistake
    assert line == f"calibrate: {runs[1]}: has other controller settings than {runs[0]}"
    assert gnmr("replay", *runs, "calibrate=0.1", "max_o=2").code == 0


def test_an_arm_a_point_for_a_sweep(file, gnmr, tiny_words, tmp_path, monkeypatch):
    """What `out` leaves is a sweep, each point an arm of its own."""
    monkeypatch.chdir(tmp_path)
    words = ["calibrate=0.1,0.3", "signal=random,mse", "max_o=6", "out=promotion"]
    lines = gnmr("replay", str(file), *words).out.splitlines()
    (written,) = (tmp_path / "promotion" / "sweep").iterdir()
    arms = OmegaConf.load(written).arms
    assert list(arms) == ["random-0.1", "random-0.3", "mse-0.1", "mse-0.3"]
    assert gnmr("replay", str(file), *words).out.splitlines() == lines, "written again"

    swept = ["-m", "--config-dir", "promotion", "sweep=calibrated"]
    assert gnmr("train", *tiny_words, *swept).code == 0
    runs = {path.name.rsplit("-", 2)[0]: path for path in tmp_path.glob("runs/*/*-s0")}
    assert runs.keys() == {f"int4_int8-{name}" for name in ("mse-0.1", "mse-0.3", "random-0.1", "random-0.3")}
    printed = {}
    for line in lines:
        name, share, *overrides = line.split()
        printed[f"int4_int8-{name}-{float(share):.1f}"] = float(overrides[1].partition("=")[2])
    for name, run in runs.items():
        controller = OmegaConf.load(run / "config.yaml").controller
        assert (controller.max_o, name) == (6, f"int4_int8-{controller.signal}-{name[-3:]}")
        assert printed[name] == (controller.trigger if "mse" in name else controller.options.active_frac)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["calibrate=0.6"], "calibrate=0.6: gnmr_delta gives 0.4875 at its nearest"),
        (["calibrate=0.3", "max_o=2", "signal=random"], "calibrate=0.3: random gives 0.24"),
        (["calibrate=0.1", "routing=ranked"], "calibrate: routing=ranked has no threshold"),
        (["calibrate=0.1", "signal=colour"], "signal 'colour' is not known"),
        (["signal=all"], "signal=all: only with calibrate=SHARE"),
        (["calibrate=0.1,2"], "calibrate=2: must be a share"),
        (["calibrate=0.1", "detect=0.1"], "detect"),
        (["detect=0.1,0.2"], "detect=0.1,0.2: must be a share"),
        (["calibrate=0.1", "out=nowhere/here"], "out=nowhere/here: must be a folder in a folder that exists"),
        (["calibrate=0.1", "another.csv"], "another.csv: there is no such file or run folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:active_frac is above")
def test_what_cannot_be_is_one_line(words, line, file, gnmr):
    outcome = gnmr("replay", str(file), *words)
    told = [text for text in outcome.err.splitlines() if "warning" not in text]
    assert outcome.code == 2 and len(told) == 1 and line in told[0], outcome.err
    assert [path.name for path in file.parent.iterdir()] == [file.name]
