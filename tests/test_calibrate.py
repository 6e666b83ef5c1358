"""`gnmr replay FILE calibrate=SHARE`: what it prints spends that share again, and what it cannot do is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnmr.controller.signals import SIGNALS

STEPS, UNITS, WANTED = 40, 8, 0.1
EXAMPLES = Path(__file__).parents[1] / "examples"
RECORDED = ("mse", "gap_low", "gap_recovery", "gap_exact")
BLIND = ("random", "first_last", "round_robin")


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
        return float(dict(line.rsplit(maxsplit=1) for line in outcome.out.splitlines())["promotion_frac"])

    return run


def for_replay(overrides: list[str]) -> list[str]:
    """Words of `gnmr train` as those of `gnmr replay`: controller.trigger=2 -> trigger=2."""
    words = [word.lstrip("+").removeprefix("controller/").removeprefix("controller.") for word in overrides]
    return [word.replace("signal.name=", "signal=") for word in words if word != "signal=own"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gnmr_delta", []),
        ("delta_gnmr", ["delta=3", "t_lock=2"]),
        ("grad_norm", ["max_o=2"]),
        ("mse", []),
        ("gap", ["max_o=8"]),
        ("gap_exact", ["t_lock=3"]),
        ("random", []),
        ("random", ["max_o=1", "t_lock=3"]),
        ("round_robin", []),
        ("first_last", ["max_o=3"]),
        ("static_k", ["signal.options.calibration_steps=10"]),
    ],
)
def test_what_it_prints_spends_the_share(name, words, calibrated, spent):
    ((found, (share, overrides)),) = calibrated(f"calibrate={WANTED}", f"signal={name}", *words).items()
    assert found == name and share == pytest.approx(WANTED, rel=0.1)
    assert overrides[0] == f"controller/signal={name}"
    key = "signal.options.share" if name in (*BLIND, "static_k") else "trigger"
    assert f"controller.{key}" in [word.partition("=")[0] for word in overrides]
    assert spent(*for_replay(overrides), *words) == pytest.approx(share, abs=1e-5)


def test_the_share_falls_as_the_trigger_rises(calibrated, spent):
    shares = [0.02, 0.1, 0.3]
    triggers = []
    for share in shares:
        ((found, overrides),) = calibrated(f"calibrate={share}", "signal=grad_norm").values()
        assert found == pytest.approx(share, rel=0.1)
        triggers.append(float(overrides[1].partition("=")[2]))
    assert triggers[0] > triggers[1] > triggers[2] > 0


def test_of_a_run(train, gnmr, tmp_path):
    """With the run's own controller and schedule: what `gnmr train` would be given for it."""
    folder = train(tmp_path / "run", "training.steps=30", "records.evidence=[mse]")
    outcome = gnmr("replay", str(folder), "calibrate=0.05", "signal=mse")
    assert (outcome.code, outcome.err) == (0, "")
    name, share, *overrides = outcome.out.split()
    assert name == "mse" and float(share) == pytest.approx(0.05, rel=0.1)
    again = gnmr("replay", str(folder), *for_replay(overrides))
    assert f"promotion_frac                   {float(share):.4f}" in again.out


def test_all_signals(file, gnmr, spent):
    """Those whose evidence is there on standard output, the others with their reason on standard error."""
    outcome = gnmr("replay", str(file), f"calibrate={WANTED}", "signal=all")
    assert outcome.code == 0
    lines = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()}
    left_out = dict(line.split(" left out: ") for line in outcome.err.splitlines())
    left_out = {name.strip(): reason for name, reason in left_out.items()}
    assert not lines.keys() & left_out.keys() and lines.keys() | left_out.keys() == set(SIGNALS)
    assert lines.keys() >= {"gnmr_delta", "gnmr", "zscore", "mse", "gap", "gap_exact", "random", "grad_to_noise"}
    for name, (share, *_) in lines.items():
        assert float(share) == pytest.approx(WANTED, rel=0.1), name
    for name in left_out.keys() - {"static_k", "always_low", "always_high"}:
        lacking = sorted(set(SIGNALS[name].needs) - set(RECORDED), key=SIGNALS[name].needs.index)
        assert f"needs {', '.join(lacking)}, which was not recorded" in left_out[name]
        assert left_out[name].endswith(f"train with records.evidence=[{','.join(lacking)}]")
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


def test_the_overrides_of_a_signal_of_ones_own_are_for_train(calibrated, monkeypatch):
    from gnmr.launch import compose

    monkeypatch.syspath_prepend(EXAMPLES)
    ((_, overrides),) = calibrated(f"calibrate={WANTED}", "signal=own_signal:MedianRatio").values()
    controller = compose(overrides).controller
    assert controller.signal.name == "own_signal:MedianRatio" and controller.trigger != 1.0


def test_the_overrides_hold_what_was_given(calibrated):
    words = ["signal=gap", "signal.options.variant=relative", "t_lock=2"]
    ((_, overrides),) = calibrated(f"calibrate={WANTED}", *words).values()
    plain = {word.lstrip("+") for word in overrides}
    assert {"controller.signal.options.variant=relative", "controller.t_lock=2"} < plain


def test_values_that_differ_in_their_fifth_digit(table, gnmr, spent, tmp_path):
    """The share that is printed is that of the number that is printed."""
    close = {name: table[name] for name in ("step", "unit")} | {"norm": 1000 + 5 * (table["norm"] % 1)}
    pq.write_table(pa.table(close), tmp_path / "close.parquet")
    outcome = gnmr("replay", str(tmp_path / "close.parquet"), f"calibrate={WANTED}", "signal=grad_norm")
    _, share, *overrides = outcome.out.split()
    assert spent(*for_replay(overrides), source=tmp_path / "close.parquet") == pytest.approx(float(share), abs=1e-5)


def test_a_share_close_to_the_most_there_is_without_a_warning(file, gnmr):
    outcome = gnmr("replay", str(file), "calibrate=0.24", "signal=random", "max_o=2")
    assert (outcome.code, outcome.err) == (0, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["calibrate=0.6"],
            "calibrate=0.6: gnmr_delta gives 0.4875 at its nearest (max_o=4 of 8 units is 0.5 at the most)",
        ),
        (["calibrate=0.1", "signal=always_low"], "calibrate=0.1: always_low gives 0 at its nearest"),
        (["calibrate=0.3", "max_o=2", "signal=random"], "calibrate=0.3: random gives 0.24"),
        (["calibrate=0.1", "routing=ranked"], "calibrate: routing=ranked has no threshold, max_o is its budget"),
        (["calibrate=0.1", "signal=gsnr"], "signal gsnr needs micro_square, which was not recorded"),
        (["calibrate=0.1", "signal=jacobian"], "train with records.evidence=[weight_std,input_std]"),
        (["signal=oracle"], "signal oracle needs true_gap, which was not recorded"),
        (["calibrate=0.1", "signal=colour"], "signal 'colour' is not known: use one of gnmr_delta, gnmr, delta_gnmr"),
        (["signal=colour"], "signal 'colour' is not known"),
        (["signal=nowhere:Signal"], "No module named 'nowhere' (is its folder on PYTHONPATH?)"),
        (["signal=mse", "signal.options.level=2"], "signal mse has no option 'level': it has threshold"),
        (["signal=all"], "signal=all: only with calibrate=SHARE"),
        (["calibrate=0"], "calibrate=0: must be a share"),
        (["calibrate=2"], "calibrate=2: must be a share"),
        (["calibrate=nan"], "calibrate=nan: must be a share"),
        (["calibrate=a_tenth"], "calibrate=a_tenth: must be a share"),
        (["calibrate=0.1", "out=decisions.jsonl"], "out"),
    ],
)
@pytest.mark.filterwarnings("ignore:share is above")
def test_what_cannot_be_is_one_line(words, line, file, gnmr):
    outcome = gnmr("replay", str(file), *words)
    told = [text for text in outcome.err.splitlines() if "warning" not in text]
    assert outcome.code == 2 and len(told) == 1 and line in told[0], outcome.err
    assert [path.name for path in file.parent.iterdir()] == [file.name]
