"""`gnmr bench price` on the shipped base, few tokens and one low path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from gnmr.bench import measurable, price, spend, usual
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


def test_spend_forks_every_arm_and_goes_on_where_it_stopped(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spend, "LOW", ("sim_e2m1",))
    monkeypatch.setattr(spend, "BUDGETS", (0.1,))
    monkeypatch.setattr(spend, "SCORES", ("price",))
    monkeypatch.setattr(spend, "GUESSES", ("random",))
    monkeypatch.setattr(price, "HELD_OUT", 16)
    made = forked_in(monkeypatch, spend)
    setting = replace(setting, config=replace(setting.config, runs_dir=str(tmp_path)))
    found = {figure.name: figure for figure in spend.spend(setting)}
    rows = [json.loads(line) for line in (tmp_path / "bench/spend.jsonl").read_text().splitlines()]
    assert [row["fork"]["arm"] for row in rows] == ["never", "always", "price", "random"] == made
    assert all(set(gemms) == {"fprop"} for gemms in rows[2]["pins"].values())
    assert 0.08 < rows[2]["share"] <= 0.1 and rows[1]["share"] == 1
    losses = [row["validation"]["low"]["high"] for row in rows]
    assert found["shipped, sim_e2m1: price at 10.0%"].value == pytest.approx(
        (losses[0] - losses[2]) / (losses[0] - losses[1])
    )
    (tmp_path / "bench/spend.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]) + '{"fork": {"ba')
    again = spend.spend(setting)
    assert made[4:] == ["random"] and [figure.value for figure in again] == [figure.value for figure in found.values()]
    assert len(list(spend._rows(tmp_path / "bench/spend.jsonl"))) == 4, "the line that was cut off is gone"


def forked_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """The arms that are forked from now on; of two steps."""
    made, run, forked = [], module._run, module.forked

    def counted(forks: Forks, cell: spend.Fork, *more: object) -> dict[str, object]:
        made.append(cell.arm)
        return run(forks, cell, *more)

    monkeypatch.setattr(module, "_run", counted)
    short = ("training.steps=2", "training.eval_blocks=8")
    monkeypatch.setattr(module, "forked", lambda forks, low, *words: forked(forks, low, *short, *words))
    return made
