"""The plan is solved by every score, chosen on one half of the held-out batches, and measured on the other half."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from plausible import diagnosis
from test_kl import Mixer, batches_of, kls_of

import gnmr
from gnmr.measure.kl import divergence, token_divergence
from gnmr.plan.diagnose import _Measurement
from gnmr.plan.diagnosis import Diagnosis, token_line


def found(**options: object) -> Diagnosis:
    model = Mixer().eval()
    usual = {"recipe": "sim_e2m1", "budget": 0.6, "confirm": 3, "held_out": batches_of(4, seed=2)}
    return gnmr.diagnose(model, model, batches_of(3), **(usual | options))


def test_every_score_has_the_same_sum_and_leaves_the_same_share_on_a_rescue() -> None:
    rough = diagnosis(4)
    prices = rough.score_prices
    assert list(prices) == ["price", "sequence", "gradient norm", "mse"], "plausible numbers have no elements"
    for of_score in prices.values():
        assert sum(nats["nvfp4"] for nats in of_score.values()) == pytest.approx(rough.total)
    row = next(row for row in rough.rows if row.gemm == "fprop" and row.measured is None)
    by_norm = prices["gradient norm"][row.operator, "fprop"]
    assert by_norm["mxfp8"] / by_norm["nvfp4"] == pytest.approx(row.rescued["mxfp8"] / row.value)
    for choice in rough.candidates().values():
        assert choice.extra <= 0.1 and choice.after >= rough.choice().after - 1e-12, "nats are by the price"


def test_the_plan_is_chosen_on_one_half_and_measured_on_the_other() -> None:
    by_price, held_out = found(), batches_of(4, seed=2)
    assert set(by_price.selection) == {*by_price.score_prices, "first_last"} > {"elements", "mse"}
    for name, (cost, more, error) in by_price.selection.items():
        paths = {"pins": by_price.choice(score=name).pins}
        left = torch.cat(kls_of(Mixer().eval(), held_out[:2], **(by_price.plan().paths() | paths))).mean()
        assert cost.kl == pytest.approx(float(left), rel=1e-3) and cost.batches == 2
        assert more >= -error or by_price.selected != "price"
    left = torch.cat(kls_of(Mixer().eval(), held_out[2:], **by_price.plan().paths())).mean()
    plan = by_price.remaining["plan"]
    assert (plan.batches, plan.kl) == (2, pytest.approx(float(left), rel=1e-3))
    low = by_price.held_out
    assert low is not None and low.same_top is not None and low.kl_99 is not None
    assert plan.same_top is not None and plan.kl_99 is not None
    assert (
        low.same_top < plan.same_top
        and low.kl_99 > plan.kl_99 > 0
        and f"{plan.same_top:.1%} of tokens" in token_line(by_price)
    )
    tree = by_price.tree()
    assert (tree["choices"]["plan"]["same_top"], tree["choices"]["plan"]["kl_99"]) == (plan.same_top, plan.kl_99)
    assert tree["selected"] == "price" and set(tree["selection"]) == set(by_price.selection)
    assert set(tree["score_prices"]["elements"]) == set(by_price.operators)


def test_a_score_that_leaves_clearly_less_replaces_a_bad_price(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Diagnosis.__dict__["prices"].func

    def upside_down(self: Diagnosis) -> dict:
        return {item: {name: 1e-9 / (nats + 1e-9) for name, nats in on.items()} for item, on in right(self).items()}

    def cheapest_first(self: Diagnosis) -> dict:
        return {item: on | {"mxfp8": 0.0, "bf16": 0.0} for item, on in upside_down(self).items()}

    monkeypatch.setattr(Diagnosis, "prices", property(cheapest_first))
    other = found()
    assert other.selected in ("token", "elements", "gradient norm")
    assert other.selection[other.selected][0].nats == min(cost.nats for cost, _, _ in other.selection.values())
    assert other.plan().pins == other.choice(score=other.selected).pins != other.choice(score="price").pins
    assert other.remaining["plan"].nats < other.remaining["price"].nats, "the plan by price stays in the table"


def test_a_finite_plan_replaces_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_left = _Measurement._left

    def broken_by_price(self: _Measurement, *arguments: Any, **options: Any) -> Any:
        left = measured_left(self, *arguments, **options)
        for name, (kls, _) in left.by_batch.items():
            for kl in kls if name in ("price", "mse") else ():
                kl[:, 0] = math.nan if name == "price" else math.inf
        return left

    monkeypatch.setattr(_Measurement, "_left", broken_by_price)
    other = found()
    assert other.selection and other.selected not in ("price", "mse")
    assert math.isnan(other.selection["price"][0].nats) and other.selection[other.selected][0].finite


def test_without_a_choice_all_batches_measure_the_plan() -> None:
    one = found(held_out=batches_of(1, seed=2))
    assert not one.selection and one.selected == "price" and one.remaining["plan"].batches == 1
    alike = found(budget=30.0)
    assert len({repr(choice.pins) for choice in alike.candidates().values()}) == 1, "everything fits"
    assert not alike.selection and alike.remaining["plan"].batches == 4


def test_if_everything_is_measured_no_estimate_is_a_score() -> None:
    measured = found(measure="all", rescue="mxfp8", budget=0.2)
    assert list(measured.candidates()) == ["price", "first_last"]


def test_numbers_of_tokens_are_those_of_plain_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    high, low = (torch.randn(3, 50, 11, generator=generator) for _ in range(2))
    targets = torch.randint(0, 11, (3, 50), generator=generator)
    targets[:, 40:] = -100
    log_p, log_q = high.log_softmax(-1), low.log_softmax(-1)
    kl, same = token_divergence(log_p, low, targets)
    by_hand = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :40].flatten()
    assert np.allclose(kl.numpy(), by_hand.numpy(), rtol=1e-4) and kl.shape == (120,)
    assert torch.equal(same, (high.argmax(-1) == low.argmax(-1))[:, :40].flatten())
    assert float(kl.mean()) == pytest.approx(float(divergence(log_p, low, targets).mean()), rel=1e-6)
