"""`gnmr bench price` on the shipped base, few tokens and one low path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from gnmr.bench import measurable, price, usual
from gnmr.bench.setting import Setting
from gnmr.config.compose import compose
from gnmr.training.fork import Forks

pytestmark = pytest.mark.slow


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(price, "LOW", {"sim_e2m1": {}})
    monkeypatch.setattr(price, "MEASURED", 8)
    monkeypatch.setattr(price, "HELD_OUT", 16)
    return Setting(compose([]), [], 1)


def test_prices_rank_operators_as_the_loss_does(setting: Setting) -> None:
    found = {figure.name: figure for figure in price.truth(setting)}
    assert set(found) >= {f"shipped, sim_e2m1: Spearman, {name}" for name in price.SCORES}
    assert found["shipped, sim_e2m1: Pearson, price"].value > 0.5
    assert "of 28 operators rise" in found["shipped, sim_e2m1: Spearman, price"].note


def test_scores_by_hand(setting: Setting) -> None:
    forks = Forks("shipped")
    parts = forks.parts(price.forked(forks, "sim_e2m1"))
    found = price.measured(parts, setting, "a test", strides=(16,))
    operator = parts.plan.operators[5]
    state, group = parts.optimizer.state[operator.weight], parts.optimizer.param_groups[0]
    before = operator.weight.detach().double().clone()
    beta1, beta2 = group["betas"]
    first = state["exp_avg"].double() / (1 - beta1 ** float(state["step"]))
    second = state["exp_avg_sq"].double() / (1 - beta2 ** float(state["step"]))
    assert found.scores["update norm"][5] == pytest.approx(float((first / (second.sqrt() + 1e-8)).norm()))
    assert torch.equal(operator.weight.detach().double(), before)
    assert spearmanr(found.sampled[16], found.scores["price"])[0] > 0.5
    elements, modelopt = found.scores["price, by elements"], found.scores["ModelOpt's score"]
    assert spearmanr(elements, modelopt)[0] > 0.8, (
        "both sum squares of elements, of the input's and of the output's space"
    )
    assert np.isfinite(found.rises).all() and found.together > 0
    assert all(operator.weight.grad is None and not operator.recovering for operator in parts.plan.operators)


def test_it_runs_only_where_it_is_named(setting: Setting) -> None:
    assert "price" not in usual()
    assert [part.name for part in measurable(["price"], ["truth"], setting)] == ["truth"]
