"""Theorem 1 and corollary 1 (the paper's section 7) on models so small that every set can be tried.

Routing changes one term of a step's bound, the squared error of the gradient. Let g be the 16-bit gradient and A the
set of units on the recovery path:

    error(A) = sum_b ||g_b(A) - g_b||^2         gap_b = ||g_low,b - g_b||^2 - ||g_high,b - g_b||^2
    error(none) - error(A) = sum of gap_b over b in A

So the best set of at most max_o units has the max_o largest positive gaps. This is exact if a unit's error depends only
on its own path: with `site=saved`, whose forward pass and input gradients are exact. With `site=forward`, units affect
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnmr.conversion import ConvertedModel, PathSpec, convert
from gnmr.lab import models
from gnmr.lab.config.model import ExpertsConfig, ModelConfig
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of
from gnmr.measure.operand_errors import measure_errors

MAX_O = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2}


class Gaps(NamedTuple):
    gap_U: np.ndarray
    estimate_U: np.ndarray
    """gap_low - gap_recovery of the probe."""
    error: Callable[[Collection[int]], float]
    """error(A), measured in another forward and backward pass. A holds indices of units."""


def measured(model: nn.Module, converted: ConvertedModel, backward: Callable[[], None]) -> Gaps:
    def gradients(recovering: Collection[int]) -> list[Tensor]:
        """One vector per unit. A parameter without a gradient (of an expert that no token reached) has gradient 0."""
        model.zero_grad(set_to_none=True)
        for index, group in enumerate(converted.units):
            group.switch(index in recovering)
        backward()
        own = [[p for operator in group.operators for p in operator.parameters()] for group in converted.units]
        grads = [[torch.zeros_like(p) if p.grad is None else p.grad for p in of] for of in own]
        return [torch.cat([grad.flatten().double() for grad in of]) for of in grads]

    def squares(found: list[Tensor]) -> np.ndarray:
        return np.array([float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)])

    with converted.high_precision():
        exact = gradients(())
    high_U = squares(gradients(range(len(converted.units))))
    probe = measure_errors(converted, ("gap_low", "gap_recovery"))
    gap_U = squares(gradients(())) - high_U
    read = {name: values.cpu().numpy() for name, values in probe.read().items()}
    estimate_U = read["gap_low"] - read["gap_recovery"]
    return Gaps(gap_U, estimate_U, lambda recovering: float(squares(gradients(recovering)).sum()))


def of_tiny_model(site: str) -> Gaps:
    """One layer, seven units."""
    model = models.build(ModelConfig(**SIZES), 61, 16)
    model.init_std = 0.2
    model.init_weights(torch.Generator().manual_seed(0))
    block = Batch.of_sequences(torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(1)))
    converted = convert(model, PathSpec.of("int2", "int8", site=site))
    return measured(model, converted, lambda: loss_of(model, block).backward())


def test_the_gap_of_one_token_by_hand():
    linear = nn.Linear(2, 3, bias=False)
    converted = convert(nn.Sequential(linear), PathSpec.of("int2", "bf16", targets=["0"]))
    x = torch.tensor([[0.25, 1.0]])  # int2 keeps -1, 0, 1 times the largest: (0, 1)
    found = measured(linear, converted, lambda: linear(x).sum().backward())
    # Every row of the weight gradient is x; it lacks 0.25 in each of the three. 16 bits lack nothing.
    assert found.gap_U == pytest.approx([3 * 0.25**2]) and found.estimate_U == pytest.approx([3 * 0.25**2])
    assert found.error(()) == pytest.approx(3 * 0.25**2) and found.error((0,)) == 0


def test_the_identity_holds_for_every_set_and_the_best_is_the_oracle_set():
    gaps = of_tiny_model("saved")
    none = gaps.error(())
    gains = {units: none - gaps.error(units) for n in range(MAX_O + 1) for units in combinations(range(7), n)}
    for units, gain in gains.items():
        assert gain == pytest.approx(gaps.gap_U[list(units)].sum(), rel=1e-9, abs=1e-12 * none)
    largest = [unit for unit in np.argsort(-gaps.gap_U)[:MAX_O] if gaps.gap_U[unit] > 0]
    assert max(gains, key=gains.get) == tuple(sorted(largest))


def test_with_site_forward_units_disturb_each_other():
    found = of_tiny_model("forward")
    assert found.error(()) - found.error((0, 1, 2)) != pytest.approx(found.gap_U[:3].sum(), rel=0.01)


def test_an_expert_without_tokens_has_no_gap():
    model = models.build(ModelConfig("moe", **SIZES, experts=ExpertsConfig(number=16, top_k=2)), 61, 16)
    model.init_weights(torch.Generator().manual_seed(0))
    converted = convert(model, PathSpec.of("int2", "int8", targets=["experts.*"], unit="expert"))
    block = Batch.of_sequences(torch.tensor([[3, 14, 15]]))  # two targets: they reach at most four of the 16 experts
    gaps = measured(model, converted, lambda: loss_of(model, block).backward())
    reached = np.flatnonzero(gaps.gap_U)
    assert 2 <= len(reached) <= 4 and gaps.gap_U.shape == (16,)
    assert gaps.error(()) - gaps.error(range(16)) == pytest.approx(gaps.gap_U.sum(), rel=1e-9)
