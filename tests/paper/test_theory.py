"""Theorem 1 on models so small that every set can be tried."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from gnmr.lab import models
from gnmr.lab.config.model import ExpertsConfig, ModelConfig
from gnmr.lab.paper import theory
from gnmr.lab.paper.theory import ESTIMATE, NORM
from gnmr.lab.train.loss import loss_of
from gnmr.measure.errors import measure_errors
from gnmr.precision import ConvertedModel, PathSpec, convert

MAX_O = 3


def tiny_model(
    site: str = "saved", low: str = "int2", recovery: str = "int8", **more: str
) -> tuple[nn.Module, ConvertedModel]:
    """One layer, seven units."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "init_std": 0.2}
    model = models.build(ModelConfig(**sizes), 61, 16)
    model.init_weights(torch.Generator().manual_seed(0))
    return model, convert(model, PathSpec.of(low, recovery, site=site, **more))


def measured(model: nn.Module, converted: ConvertedModel) -> theory.Gaps:
    block = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1))
    return theory.measure(model, converted, lambda: loss_of(model, block).backward())


@pytest.fixture(scope="module")
def gaps() -> theory.Gaps:
    return measured(*tiny_model())


def test_the_gap_of_one_token_by_hand():
    linear = nn.Linear(2, 3, bias=False)
    converted = convert(nn.Sequential(linear), PathSpec.of("int2", "bf16", targets=["0"]))
    x = torch.tensor([[0.25, 1.0]])  # int2 keeps -1, 0, 1 times the largest: (0, 1)
    found = theory.measure(linear, converted, lambda: linear(x).sum().backward())
    # Every row of the weight gradient is x; it lacks 0.25 in each of the three. 16 bits lack nothing.
    assert found.gap_U == pytest.approx([3 * 0.25**2])
    assert found.scores[ESTIMATE] == pytest.approx([3 * 0.25**2])
    assert found.scores[NORM] == pytest.approx([math.sqrt(3)])
    assert found.square == pytest.approx(3 * (1 + 0.25**2))
    assert found.error(()) == pytest.approx(3 * 0.25**2) and found.error((0,)) == 0


def test_the_identity_holds_for_every_set_and_the_best_is_the_oracle_set(gaps):
    none = gaps.none
    assert gaps.error(()) == none
    gains = {units: none - gaps.error(units) for n in range(MAX_O + 1) for units in combinations(range(7), n)}
    for units, gain in gains.items():
        assert gain == pytest.approx(gaps.gap_U[list(units)].sum(), rel=1e-9, abs=1e-12 * none)
    assert max(gains, key=gains.get) == tuple(sorted(gaps.best(gaps.gap_U, MAX_O)))


def test_with_site_forward_units_disturb_each_other():
    found = measured(*tiny_model("forward"))
    assert found.none - found.error((0, 1, 2)) != pytest.approx(found.gap_U[:3].sum(), rel=0.01)


def test_only_positive_scores_are_chosen(gaps):
    assert gaps.best(np.array([0.0, 2.0, -1.0, 3.0, -5.0, 0.0, 0.0]), MAX_O) == [3, 1]


def test_measuring_leaves_paths_probe_and_generator_as_they_were():
    model, converted = tiny_model(rounding="stochastic")
    converted.operators[2].switch(True)
    probe, generator = measure_errors(converted, ["mse"]), converted.state_dict()["rounding"].clone()
    measured(model, converted)
    assert [operator.recovering for operator in converted.operators] == [False, False, True] + [False] * 4
    assert converted.shared.probe is probe and float(probe.read()["mse"].sum()) == 0
    assert torch.equal(converted.state_dict()["rounding"], generator)
    assert all(p.grad is None for p in model.parameters())


def test_a_recipe_remembers_nothing_of_the_measured_passes():
    model, converted = tiny_model(low="fp8_delayed", recovery="bf16")
    converted.shared.amax.history[:, :, 1] = 1e-6  # of the step before: what comes now saturates
    measured(model, converted)
    assert not any(counts.any() for counts in converted.saturation().values())
    before = converted.shared.amax.history.clone()
    converted.end_step()
    assert torch.equal(converted.shared.amax.history, before), "no step was taken"
    assert converted.shared.no_side_effects is False


def test_an_expert_without_tokens_has_no_gap():
    experts = ExpertsConfig(number=16, top_k=2)
    model = models.build(
        ModelConfig("moe", hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, experts=experts), 61, 16
    )
    model.init_weights(torch.Generator().manual_seed(0))
    converted = convert(model, PathSpec.of("int2", "int8", targets=["experts.*"], unit="expert"))
    block = torch.tensor([[3, 14, 15]])  # two targets: at most four of the 16 experts read something
    gaps = theory.measure(model, converted, lambda: loss_of(model, block).backward())
    reached = np.flatnonzero(gaps.gap_U)
    assert 2 <= len(reached) <= 4 and gaps.gap_U.shape == (16,)
    assert gaps.none - gaps.error(range(16)) == pytest.approx(gaps.gap_U.sum(), rel=1e-9)
