"""The controller equals a slow scalar reading of the two algorithms on random norms, and the cap holds always; of steps
in which all is broken, where it has a rule of its own, nothing is left behind."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from contexts import context, step
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar import ScalarController
from torch import nn

from gnmr.control import Controller, ControlSpec, Decision, GnmrSignal, Unit

NORMS = st.one_of(
    st.floats(1e-3, 1e3),
    st.sampled_from([0.0, 1.0, 1.0, 2.0, 4.0, 1e-30, 1e18]),  # equal values make ties
    st.sampled_from([math.nan, math.inf, None, None]),  # None: not observed
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict, list[list[float | None]]]:
    num_units = draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(NORMS, min_size=num_units, max_size=num_units), min_size=1, max_size=25))
    thresholds = st.one_of(st.none(), st.sampled_from([0.4, 0.9, 1.1, 1.5, 3.0]))
    kwargs = {
        "alpha": draw(thresholds),
        "beta": draw(thresholds),
        "delta": draw(st.integers(1, 6)),
        "max_o": draw(st.integers(1, num_units)),
        "t_lock": draw(st.integers(1, 3)),
    }
    return kwargs, rows


class Fed:
    """A controller that is given norms, and the paths that its units are on."""

    def __init__(self, num_units: int, alpha, beta, delta, max_o, t_lock) -> None:
        self.on = [False] * num_units
        units = [
            Unit(f"u{i}", (nn.Parameter(torch.zeros(1)),), lambda on, i=i: self.on.__setitem__(i, on))
            for i in range(num_units)
        ]
        signal = GnmrSignal(context(num_units), alpha=alpha, beta=beta, delta=delta)
        self.controller = Controller(units, ControlSpec(signal=signal, max_o=max_o, t_lock=t_lock))
        self.max_o = max_o

    def step(self, row: list[float | None]) -> Decision:
        """Asserts that never more than max_o units recover, and those of the decision."""
        norm = torch.tensor([0.0 if n is None else n for n in row], dtype=torch.float64)
        observed = torch.tensor([n is not None for n in row])
        decision = step(self.controller, norm=norm, observed=observed)
        assert sum(self.on) <= self.max_o and self.on == decision.active.tolist()
        return decision


def decided_by_rounding(risks: list[float | None]) -> bool:
    """Two risks, or a risk and the threshold, so near that the order of additions decides: not for this test."""
    finite = sorted([r for r in risks if r is not None and math.isfinite(r)] + [1.0])
    return any(a != b and abs(a - b) <= 1e-9 * abs(b) for a, b in itertools.pairwise(finite))


def blames_nobody(row: list[float | None], max_o: int) -> bool:
    """No observed norm is finite, and they are more than max_o: then nothing changes, which is no rule of the paper."""
    told = [norm for norm in row if norm is not None and norm != 0]
    return len(told) > max_o and not any(map(math.isfinite, told))


def equals(slow: ScalarController, decision: Decision, row: list[float | None]) -> bool:
    """Asserts that a step of both is the same; False where rounding decides, from where on they may differ."""
    candidates, active, risks = slow.step(row)
    if decided_by_rounding(risks):
        return False
    for b, risk in enumerate(risks):
        if risk is not None:
            np.testing.assert_allclose(decision.risk[b], risk, rtol=1e-9)
    assert np.flatnonzero(decision.candidate).tolist() == candidates
    assert decision.by_risk(decision.active) == [f"u{b}" for b in active]
    assert decision.lock.tolist() == [unit.lock for unit in slow.units]
    return True


@settings(max_examples=120)
@given(histories())
def test_equals_the_scalar_reading_and_the_cap_holds(history) -> None:
    kwargs, rows = history
    num_units = len(rows[0])
    slow, fast, compared = ScalarController(num_units, **kwargs), Fed(num_units, **kwargs), True
    for row in rows:
        if compared and blames_nobody(row, kwargs["max_o"]):
            continue
        decision = fast.step(row)
        compared = compared and equals(slow, decision, row)


@settings(max_examples=60)
@given(histories(), st.randoms(use_true_random=False))
def test_a_step_that_blames_nobody_changes_nothing(history, draw) -> None:
    """Our own rule: with such steps in between, all others are as the paper has them without."""
    kwargs, rows = history
    num_units = len(rows[0])
    kwargs["max_o"] = min(kwargs["max_o"], max(1, num_units - 1))
    slow, fast = ScalarController(num_units, **kwargs), Fed(num_units, **kwargs)
    before, lock = [False] * num_units, [0] * num_units
    for row in rows:
        if num_units > kwargs["max_o"]:
            decision = fast.step([draw.choice([math.nan, math.inf]) for _ in range(num_units)])
            assert decision.active.tolist() == before and decision.lock.tolist() == lock and not decision.events
            assert decision.candidate.all() and np.isinf(decision.risk).all()
        if blames_nobody(row, kwargs["max_o"]):
            continue
        decision = fast.step(row)
        if not equals(slow, decision, row):
            return
        before, lock = decision.active.tolist(), decision.lock.tolist()
