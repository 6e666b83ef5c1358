"""`gnmr bench price` on the shipped base, few tokens and one low path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from gnmr.errors import UserError
from gnmr.lab.bench import measurable, price, scenes, spend, usual
from gnmr.lab.bench.figures import Figure
from gnmr.lab.bench.rows import read_rows
from gnmr.lab.bench.scenes import SCENES, Scene
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.config.compose import compose
from gnmr.lab.train.fork import Forks
from gnmr.names import GEMMS

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
    kept = {name: found[f"shipped, sim_e2m1: rises in 10% of the GEMMs, {name}"].value for name in price.SCORES}
    assert 0.3 < kept["price"] <= found["shipped, sim_e2m1: rises in 10% of the GEMMs, the truth itself"].value + 0.05


def test_what_a_score_chooses_fills_its_share_by_score_per_cost() -> None:
    costs = {(name, gemm): cost for name, cost in (("a", 4.0), ("b", 1.0), ("c", 3.0)) for gemm in GEMMS}
    assert price._chosen(["a", "b", "c"], np.array([4.0, 2.0, 1.0]), costs) == [1], "a costs 1/6 of all, b 1/24"


def test_scores_by_hand(setting: Setting) -> None:
    forks = Forks("shipped")
    parts = forks.parts(price.forked(forks, "sim_e2m1"))
    found = price.measured(parts, setting, "a test", strides=(16,))
    operator = parts.converted.operators[5]
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
    assert all(operator.weight.grad is None and not operator.recovering for operator in parts.converted.operators)


def test_a_cadence_holds_the_steps_that_it_measures() -> None:
    logs_TU = np.zeros((40, 2))
    logs_TU[30, 0] = 10.0  # step 31: read by one in 10 steps, not by one in 20
    ten, twenty = price._held(logs_TU, 10), price._held(logs_TU, 20)
    assert ten[0] > 0 and twenty[0] == 0 and ten[1] == twenty[1] == 0


def test_shares_are_of_the_pins_that_forks_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "MEASURED", 8)
    found = {figure.name: figure for figure in price.shares(Setting(compose([]), [], 1))}
    lows = {name: scene for name, scene in scenes.LASTING.items() if len(scene.budgets) > 1}
    for name, scene in lows.items():
        shares = [found[f"shipped, {name}: prices in {budget:.1%} of the GEMMs"].value for budget in scene.budgets]
        assert shares[0] > 0 and sorted(shares) == shares and shares[-1] <= 1 + 1e-9
    assert len(found) == sum(len(scene.budgets) for scene in lows.values())
    for name in ("sim_e2m1", "int4"):  # fprop alone, and all GEMMs
        scene = replace(lows[name], pins=("price",))
        told = price.ranked(Forks("shipped"), scene)
        pins = spend._pins(spend.Fork("shipped", name, "price", 0.25, 0), scene, told)
        prices = dict(zip(told.operators, told.scores["price"], strict=True))
        figure = found[f"shipped, {name}: prices in 25.0% of the GEMMs"]
        assert figure.value == pytest.approx(sum(prices[one] for one in pins) / sum(prices.values()))
        spends = sum(told.costs[one, gemm] for one, gemms in pins.items() for gemm in gemms) / sum(told.costs.values())
        assert figure.note == f"spends {spends:.1%}: {', '.join(pins)}" and 0.2 < spends <= 0.25


def test_it_runs_only_where_it_is_named(setting: Setting) -> None:
    assert "price" not in usual()
    assert [part.name for part in measurable(["price"], ["truth"], setting)] == ["truth"]


def test_spend_forks_every_arm_and_goes_on_where_it_stopped(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gnmr = {"GNMR": ("signal=gnmr_delta",)}
    scene = Scene("sim_e2m1", budgets=(0.1,), pins=("price",), guesses=("random",), controllers=gnmr)
    monkeypatch.setattr(spend, "SCENES", {"sim_e2m1": scene})
    monkeypatch.setattr(scenes, "WHOLE", {"dgrad, wgrad": 2 / 3})
    made = forked_in(monkeypatch, spend)
    setting = replace(setting, config=replace(setting.config, runs_dir=str(tmp_path)))
    found = {figure.name: figure for figure in spend.spent(setting, "sim_e2m1")}
    rows = [json.loads(line) for line in (tmp_path / "bench/spend.jsonl").read_text().splitlines()]
    arms = ["never", "always", "dgrad, wgrad", "price", "random", "GNMR, each step"]
    assert [row["fork"]["arm"] for row in rows] == made == arms
    assert all(set(gemms) == {"fprop"} for gemms in rows[3]["pins"].values())
    assert [row["share"] for row in rows[:3]] == pytest.approx([0, 1, 2 / 3])
    assert all(0.08 < row["share"] <= 0.1 for row in rows[3:5])
    assert rows[5]["pins"] == {} and 0.04 < rows[5]["share"] <= 0.05, "it chooses after the first of two steps"
    losses = [row["loss"] for row in rows]
    assert found["sim_e2m1: price at 10.0%"].value == pytest.approx((losses[0] - losses[3]) / (losses[0] - losses[1]))
    (tmp_path / "bench/spend.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]) + '{"fork": {"ba')
    again = spend.spent(setting, "sim_e2m1")
    assert made[6:] == ["GNMR, each step"]
    assert [figure.value for figure in again] == [figure.value for figure in found.values()]
    assert len(list(read_rows(tmp_path / "bench/spend.jsonl"))) == 6, "the line that was cut off is gone"
    foreign = [row | {"checkpoint": "another"} for row in rows]
    (tmp_path / "bench/spend.jsonl").write_text("".join(json.dumps(row) + "\n" for row in foreign))
    here = Forks("shipped").base.found.sha256[:12]
    with pytest.raises(UserError, match=f"its rows of shipped are of checkpoint another, and shipped is {here} here"):
        spend.spent(setting, "sim_e2m1")


@pytest.mark.parametrize("gap", [0.1, 0.0])
def test_no_arm_is_made_where_the_control_is_not_shown(
    gap: float, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noise, made = np.random.default_rng(0), []

    def run(_forks: Forks, cell: spend.Fork, _scene: Scene, _found: Any) -> dict[str, Any]:
        made.append((cell.order, cell.arm))
        return {"loss": 3 - gap * EFFECT[cell.arm] + noise.normal(0, 1e-3), "share": cell.budget}

    monkeypatch.setattr(spend, "_run", run)
    guesses = {"pins": (), "guesses": ("random", "last"), "controllers": {}, "whole": False, "ours": "random"}
    scene = Scene("sim_e2m1", budgets=(0.1,), **guesses)
    monkeypatch.setattr(spend, "SCENES", {"sim_e2m1": scene})
    setting = replace(setting, config=replace(setting.config, runs_dir=str(tmp_path)), repeats=4)
    figures = {figure.name: figure for figure in spend.spent(setting, "sim_e2m1")}
    control = [(order, arm) for order in range(4) for arm in ("never", "always")]
    assert made == control + ([(order, arm) for order in range(4) for arm in ("random", "last")] if gap else [])
    note = figures["sim_e2m1: positive control, p"].note
    assert note == ("shown" if gap else "not shown: no other arm is made")
    assert ("sim_e2m1: random at 10.0%" in figures) == bool(gap)


def test_one_operator_of_a_block_breaks_in_all_of_its_arms() -> None:
    forks, scene = Forks("shipped"), SCENES["broken"]
    found = measured_of(forks, scene)
    names = found.operators
    broken, every = [], []
    for order in range(3):
        cells = [cell for cell in spend.cells("a", "broken", scene, order) if cell.budget in (0, 0.1, 1)]
        configs = [spend._config(forks, cell, scene, found) for cell in cells[:: 1 if order == 0 else 9]]
        assert len({repr(config.faults) for config in configs}) == 1
        (target,) = configs[0].stress.targets
        assert target in names and configs[0].stress.windows == [[21, 20]]
        broken.append(target)
        every += configs
    assert len(set(broken)) > 1
    routed = [config for config in every if config.controller.routing == "ranked"]
    assert len(routed) > len(scene.controllers)
    assert all(config.precision.recovers == ["fprop", "wgrad"] and config.controller.budget == 0.1 for config in routed)


def test_arms_of_scenes_are_configs() -> None:
    """Those of table 11 promote four units, all others fill a share of the arithmetic; held arms hold."""
    forks = Forks("shipped")
    for name in ("table11", "regime_int2_saved"):
        scene = SCENES[name]
        found = measured_of(forks, scene)
        for cell in spend.cells("a", name, scene, 0)[:: 8 if name == "table11" else 3]:
            config = spend._config(forks, cell, scene, found)
            assert config.precision.low == scene.low and config.controller.hold == (
                20 if cell.arm.endswith("held") else 1
            )
            routed, units = config.controller.routing == "ranked", name == "table11" and "8 %" not in cell.arm
            assert routed == (scene.control(cell.arm) is not None) != bool(config.precision.pins or cell.arm == "never")
            if routed:
                assert (config.controller.max_o, config.controller.budget is None) == (
                    (4, True) if units else (None, False)
                )
            assert config.precision.site == ("forward" if name == "table11" else "saved")
            assert config.precision.recovery == ("int8" if name == "table11" else "bf16")


def test_arms_of_several_blocks_are_one_model_with_one_residual() -> None:
    """Losses that are an arm's effect, a block's and noise: gaps, means and p as made by hand."""
    found = drawn(Scene("nvfp4", budgets=(0.1,), pins=("price",), guesses=("random", "last"), controllers={}), {})
    assert found["nvfp4, a: gap, nats"].value == pytest.approx(0.1, abs=0.003)
    for arm in ("price", "random", "last"):
        figure = found[f"nvfp4: {arm} at 10.0%"]
        assert figure.low < EFFECT[arm] + 0.02 and figure.high > EFFECT[arm] - 0.02 and figure.n == 10
    p = {arm: float(found[f"nvfp4: {arm} at 10.0%"].note.split()[-1]) for arm in ("random", "last")}
    assert p["random"] < 1e-12 and p["last"] > 0.005
    assert 0.01 < found["nvfp4: smallest effect at 80 % power"].value < 0.06


def test_arms_of_unequal_spread_are_told_by_their_own_differences() -> None:
    """One arm of thirty times the spread: its interval is wide, the others' stay narrow."""
    scene = Scene("nvfp4", budgets=(0.1,), pins=("price",), guesses=("random", "last"), controllers={})
    found = drawn(scene, {"random": 0.6})
    wide, narrow = (found[f"nvfp4: {arm} at 10.0%"] for arm in ("random", "price"))
    assert wide.high - wide.low > 0.3 and narrow.high - narrow.low < 0.08
    assert narrow.spread == "95 % interval, by Fieller, own spread"
    assert found["nvfp4: smallest effect at 80 % power"].note == "each arm's own spread"


def measured_of(forks: Forks, scene: Scene) -> price.Ranked:
    """Of a scene without its scores, which take a minute: the operators in their order, whoever asks."""
    found = price.ranked(forks, replace(scene, pins=()))
    return replace(found, scores=dict.fromkeys(scene.pins, np.arange(len(found.operators))))


def test_atlas_forks_one_gemm_at_a_time_and_goes_on_where_it_stopped(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the shipped base, with losses that are what the price says, a block's own, and a little noise."""
    noise, made = np.random.default_rng(0), []
    setting = replace(setting, config=replace(setting.config, runs_dir=str(tmp_path)), repeats=2)
    forks = Forks("shipped")
    parts = forks.parts(price.forked(forks, "sim_e2m1"))
    names = [operator.operator_name for operator in parts.converted.operators]
    scores = price.scored(parts)[0]
    assert (scores["wgrad's error"] > 0).all() and (scores["dgrad's error"] > 0).all()
    gains = dict(zip(names, scores["price"], strict=True))

    def loss(_: Forks, config: Config, pins: dict[str, list[str]]) -> float:
        ((name, (gemm,)),) = pins.items() or [("", ("",))]
        made.append((config.fork.order, gemm, name))
        return 3 + config.fork.order - (gains[name] if gemm == "fprop" else 0) + noise.normal(0, 1e-7)

    monkeypatch.setattr(price, "_fork_loss", loss)
    monkeypatch.setattr(price, "scored", lambda _: (scores, {}))
    figures = {figure.name: figure for figure in price.atlas(setting)}
    assert made == [
        (order, gemm, name) for order in (0, 1) for gemm, name in ([("", "")] + [(g, n) for g in GEMMS for n in names])
    ]
    assert figures["shipped, sim_e2m1, fprop: Spearman, price"].value > 0.95
    two, most = (
        figures[f"shipped, sim_e2m1, fprop: {one}"].value
        for one in ("Spearman, two orders", "most that a score can have")
    )
    assert 0.9 < two < most < 1 and most == pytest.approx((2 * two / (1 + two)) ** 0.5)
    assert abs(figures["shipped, sim_e2m1, wgrad: Spearman, wgrad's error"].value) < 0.6
    assert "28 of 28 above" in figures["shipped, sim_e2m1, fprop: Spearman, price"].note
    assert f"add up to {sum(gains.values()):.4f} nats" in figures["shipped, sim_e2m1, fprop: Spearman, price"].note
    file = tmp_path / "bench/price-atlas.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:100]) + '{"fork": {"ba')
    made.clear()
    again = {figure.name: figure for figure in price.atlas(setting)}
    assert len(made) == 2 * 85 - 100
    assert again["shipped, sim_e2m1, fprop: Spearman, price"].value > 0.95


EFFECT = {"never": 0.0, "always": 1.0, **dict.fromkeys(scenes.WHOLE, 0.5), "price": 0.9, "random": 0.3, "last": 0.88}


def drawn(scene: Scene, spread: dict[str, float]) -> dict[str, Figure]:
    """Figures of losses that are `EFFECT`, a block's own and noise, two bases by five orders."""
    noise = np.random.default_rng(0)
    cells = [cell for order in range(5) for base in "ab" for cell in spend.cells(base, scene.low, scene, order)]

    def loss(cell: spend.Fork) -> float:
        closed = EFFECT[cell.arm] + noise.normal(0, spread.get(cell.arm, 0.02))
        return 3 + cell.order / 10 - (0.1 if cell.base == "a" else 0.2) * closed

    known = {cell: {"loss": loss(cell), "share": cell.budget} for cell in cells}
    return {figure.name: figure for figure in spend._figures(scene, cells, known)}


def forked_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """The arms that are forked from now on; of two steps."""
    made, run, forked = [], module._run, module.forked

    def counted(forks: Forks, cell: spend.Fork, *more: object) -> dict[str, object]:
        made.append(cell.arm)
        return run(forks, cell, *more)

    monkeypatch.setattr(module, "_run", counted)
    short = ("training.steps=2", "training.eval_sequences=8")
    monkeypatch.setattr(module, "forked", lambda forks, low, *words: forked(forks, low, *short, *words))
    return made
