"""Every signal against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gnmr.control import Context, build_signal
from gnmr.control.signals import SignalBase
from gnmr.control.signals.history import Cumulative, Ema

CPU = torch.device("cpu")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make(name: str, num_units: int = 1, names: tuple[str, ...] = (), **options):
    names = names or tuple(f"unit{i}" for i in range(num_units))
    where = {key: options.pop(key) for key in ("max_o", "steps", "seed") if key in options}
    signal = build_signal(name, options, Context(names, CPU, **where))
    assert isinstance(signal, SignalBase)
    signal.t = 0
    return signal


def feed(signal, norm: tuple[float, ...] | float = 1.0, **more: tuple[float, ...] | float):
    """(risks, first column) of the next step; scalars are one unit's."""
    signal.t += 1
    rows = {
        key: f64(*(value if isinstance(value, tuple) else (value,))) for key, value in {"norm": norm, **more}.items()
    }
    risk, columns = signal.observe(rows | {"observed": torch.ones(len(rows["norm"]), dtype=torch.bool)}, signal.t)
    return risk.tolist(), (columns[0].tolist() if columns else [])


def fed(signal, *norms: float) -> list[float]:
    """The first column over steps of one unit's norms."""
    return [feed(signal, norm)[1][0] for norm in norms]


@pytest.mark.parametrize(
    ("history", "means"),
    [(Cumulative(1, CPU), [1, 2, 8 / 3, 4]), (Ema(1, CPU, decay=0.5), [1, 2, 3, 5.5])],
    ids=["cumulative", "ema"],  # which is plain for 1 / (1 - 0.5) = 2 values
)
def test_histories_by_hand(history: Cumulative, means: list[float]) -> None:
    found = []
    for value, entered in ((1.0, True), (9.0, False), (3.0, True), (math.nan, True), (4.0, True), (8.0, True)):
        history.update(f64(value), torch.tensor([entered]))
        found.append(history.mean.item())
    assert found == pytest.approx([means[i] for i in (0, 0, 1, 1, 2, 3)]) and history.count.tolist() == [4]


# The paper's signals


def test_delta_gnmr_by_hand() -> None:
    signal = make("gnmr_delta", alpha=None, beta=1.25, delta=2, eps=1e-12)
    rows = [
        signal.observe({"norm": f64(n), "observed": torch.tensor([True])}, t) for t, n in enumerate((2, 4, 3, 6), 1)
    ]
    # GNMR 1, 2, 1, 2; before steps 3 and 4 the window holds (1, 2) and (2, 1)
    assert [columns[1].item() for _, columns in rows] == pytest.approx([1, 1, 1 / 1.5, 2 / 1.5])
    assert [risk.item() for risk, _ in rows] == pytest.approx([0.8, 0.8, 1 / 1.5 / 1.25, 2 / 1.5 / 1.25])
    assert signal.thresholds(1) == (None, 1.25)


def test_gsnr_by_hand() -> None:
    signal = make("gsnr", 2, threshold=2.0, eps=1e-12)
    # GSNR 2^2 / (6 - 2^2) = 2, then 2^2 / (12 - 2^2) = 0.5: a quarter. The other unit's grows fourfold.
    assert feed(signal, (2.0, 2.0), micro_square=(6.0, 12.0))[1] == [1, 1]
    risk, column = feed(signal, (2.0, 2.0), micro_square=(12.0, 6.0))
    assert column == pytest.approx([4, 0.25])
    assert risk == pytest.approx([2, 0.125])
    assert signal.history.mean.tolist() == pytest.approx([1.25, 1.25])


def test_gsnr_of_micro_batches_that_agree_is_finite() -> None:
    signal = make("gsnr", 2)
    for _ in range(2):
        risk, column = feed(signal, (0.1, 0.0), micro_square=(0.1**2 * (1 - 1e-15), 0.0))
    assert column == pytest.approx([1, 1]) and all(0 < r < 1 for r in risk)


NAMES = ("layers.0.attn.q_proj", "layers.0.attn.o_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "head")


def test_jacobian_groups_units_by_their_parent() -> None:
    signal = make("jacobian", names=NAMES, eps=1e-12)
    # attention std(W_o) / std(x) = 2 / 4, MLP 3 * 4 / 2, head 6 / 3
    weight, spread = (9.0, 2.0, 3.0, 4.0, 6.0), (4.0, 8.0, 2.0, 7.0, 3.0)
    assert feed(signal, (1.0,) * 5, weight_std=weight, input_std=spread)[1] == [1] * 5
    assert signal.history.mean.tolist() == pytest.approx([0.5, 0.5, 6, 6, 2])
    # q's input narrows to half; up's doubles while down's weights grow sixfold; the head's own weights triple.
    weight, spread = (1.0, 2.0, 3.0, 24.0, 18.0), (2.0, 1.0, 4.0, 1.0, 3.0)
    risk, column = feed(signal, (1.0,) * 5, weight_std=weight, input_std=spread)
    assert column == pytest.approx([2, 2, 3, 3, 3])
    assert risk == pytest.approx([c / 1.05 for c in column])


@pytest.mark.parametrize(
    ("name", "value", "risk"),
    [
        ("mse", 3e-4, 3.0),
        ("oracle", 7.0, 7.0),
    ],
)
def test_levels_by_hand(name: str, value: float, risk: float) -> None:
    (need,) = make(name).needs
    assert feed(make(name), **{need: value}) == ([pytest.approx(risk)], [value])
    assert feed(make(name, threshold=2 * value), **{need: value})[0] == pytest.approx([0.5])
    assert feed(make(name, threshold=value), **{need: value})[0] == [1.0], "at the threshold is not over it"
    assert 0 < feed(make(name), **{need: 0.0})[0][0] < 1e-300, "a rank, and no trigger whatever the calibration"


def test_price_is_the_geometric_mean_of_what_was_measured() -> None:
    signal = make("price", 3, early=2, every=2, decay=0.5, threshold=2.0)
    assert [signal.reads(step) for step in (1, 2, 3, 4, 5)] == [True, True, True, False, True]
    risks = []
    prices = ((4.0, 1.0, 0.0), (9.0, 9.0, -1.0), (8.0, torch.nan, 0.0), (0.0, 0.0, 5.0))
    for step, price in enumerate(prices, start=1):
        evidence = {"norm": torch.ones(3), "observed": torch.ones(3, dtype=torch.bool), "price": torch.tensor(price)}
        risks.append(signal.observe({k: v if v.dtype == torch.bool else v.double() for k, v in evidence.items()}, step))
    last = 48**0.5 / 2  # of 4, 9 and 8, the newest of which weighs half
    expected = [[2, 0.5], [3, 1.5], [last, torch.inf], [last, 1.5]]
    assert [risk.tolist()[:2] for risk, _ in risks] == [pytest.approx(one) for one in expected]
    assert all(0 < risk[2] < 1e-300 for risk, _ in risks), "0 and less have no logarithm: a rank behind all others"


def test_recovery_gap_is_measured_in_every_kth_step_alone() -> None:
    signal = make("recovery_gap", 2, every=3, threshold=0.5)
    assert [signal.reads(t) for t in (1, 2, 3, 4, 5)] == [True, False, False, True, False]
    risk, column = feed(signal, (1.0, 1.0), gap_low=(10.0, 2.0), gap_recovery=(2.0, 3.0))
    assert column == [8, 0] and risk[0] == 16 and 0 < risk[1] < 1e-300
    assert feed(signal, (3.0, 3.0))[1] == [8, 0], "the gap need not be there"
    feed(signal, (1.0, 1.0))
    assert feed(signal, (1.0, 1.0), gap_low=(math.nan, 4.0), gap_recovery=(0.0, 1.0))[0] == [math.inf, 6]
    assert feed(signal, (1.0, 1.0))[1] == [8, 3]


# Controls


def chosen(signal, steps: int) -> np.ndarray:
    """(steps, units) bool: R > 1."""
    norm = (1.0,) * signal.num_units
    return np.array([feed(signal, norm)[0] for _ in range(steps)]) > 1


def test_random_depends_on_seed_and_step_alone() -> None:
    rows = {"norm": torch.ones(6, dtype=torch.float64), "observed": torch.ones(6, dtype=torch.bool)}
    first = [make("random", 6, seed=3).observe(rows, t)[0].tolist() for t in (1, 2, 3)]
    assert first[2] == make("random", 6, seed=3).observe(rows, 3)[0].tolist()
    assert first[1] != first[2] != make("random", 6, seed=4).observe(rows, 3)[0].tolist()


BLOCKS = tuple(f"layers.{i}.{p}" for i in range(12) for p in ("q_proj", "o_proj"))


@pytest.mark.parametrize("share", [0.01, 0.05, 1 / 6])
@pytest.mark.parametrize("name", ["random", "static_k"])
def test_budgets_of_the_controls_are_met(name: str, share: float) -> None:
    options = {"calibration_steps": 1} if name == "static_k" else {}
    seen = chosen(make(name, names=BLOCKS, max_o=4, steps=1200, active_frac=share, **options), 1200)
    assert seen.sum() == round(share * seen.size)
    on = np.flatnonzero(seen.any(axis=1))
    steps_between = 1 / (share * 24) if name == "random" else 4 / 24 / share
    assert np.diff(on).max() <= math.ceil(steps_between), "spread evenly"


def test_static_k_takes_the_highest_average_and_never_changes() -> None:
    signal = make("static_k", 4, calibration_steps=3, k=2)
    rows = [(1.0, 1.0, 1.0, 1.0), (2.0, 4.0, 1.0, 3.0), (1.5, 2.5, 2.0, 1.0), (9.0, 1.0, 9.0, 1.0)]
    risks, averages = zip(*(feed(signal, row) for row in rows), strict=True)
    # GNMR of step 2: 2, 4, 1, 3; the means are then 1.5, 2.5, 1, 2, and GNMR of step 3: 1, 1, 2, 0.5.
    assert averages[2] == pytest.approx([4 / 3, 2, 4 / 3, 1.5])
    assert risks == ([0] * 4, [0] * 4, [0, 2, 0, 2], [0, 2, 0, 2])
