"""Mixtures of experts under the controller: what a step records, experts without tokens, the loss that is told."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import evaluate

MOE = ["model.name=moe", "model.experts.number=4"]
EIGHT = ["model.name=moe", "model.experts.number=8"]
LR = 1e-2


def busy_experts(result) -> set[str]:
    """Experts whose linears were observed, and they alone had a gradient."""
    decision = result.decision
    assert ((decision.norm > 0) == decision.observed).all()
    return {
        unit.rpartition(".")[0]
        for unit, observed in zip(decision.units, decision.observed, strict=True)
        if observed and ".experts." in unit
    }


def test_a_step_tells_where_its_tokens_went(assembled, blocks_of, step_of):
    parts = assembled(*MOE, "model.num_layers=2")
    blocks = blocks_of(parts, 4).split(2)
    told = []
    for block in blocks:
        parts.model(block.tokens)
        told.append({name: float(value) for name, value in parts.model.statistics().items()})
    result = step_of(parts)(list(blocks), LR)
    assert result.statistics == {name: pytest.approx((value + told[1][name]) / 2) for name, value in told[0].items()}
    assert set(result.statistics) == {
        f"layers.{i}.mlp.{name}" for i in range(2) for name in ("max_share", "min_share", "entropy", "balance_loss")
    }
    assert result.saved_bytes == result.saved_bytes_predicted


def test_the_loss_that_is_told_is_the_cross_entropy_alone(assembled, blocks_of, step_of):
    """The balancing loss is in the gradient, not in the loss, nor in the evaluation."""
    gradients = []
    for coef in (0.0, 100.0):
        parts = assembled(*MOE, "training.dtype=float32")
        parts.model.balance_coef = coef
        block = blocks_of(parts, 2)
        with torch.no_grad():
            expected = F.cross_entropy(parts.model(block.tokens).flatten(0, 1), block.targets.flatten()).item()
        assert evaluate(parts.model, parts.converted, block, 2) == pytest.approx(expected, rel=1e-6)
        result = step_of(parts)([block], LR)
        assert result.loss == pytest.approx(expected, rel=1e-6)
        gradients.append(result.grad_norm_pre_clip)
    assert gradients[1] > 1.1 * gradients[0]


def test_an_expert_without_tokens_is_unobserved_and_keeps_its_history(assembled, step_of):
    """Without positions and at a rate of 0, steps of one token alone reach the experts of that token alone."""
    parts = assembled(*EIGHT, "controller.max_o=9")
    torch.nn.init.zeros_(parts.model.embed_positions.weight)
    step = step_of(parts)
    here, there = (Batch.of_sequences(torch.full((2, 17), token)) for token in (5, 7))
    first, second, third = (step([block], 0.0) for block in (here, here, there))
    ours, theirs = busy_experts(first), busy_experts(third)
    assert len(ours) == len(theirs) == 2 and busy_experts(second) == ours != theirs
    gnmr = dict(zip(third.decision.units, third.decision.columns["gnmr"], strict=True))
    for unit, observed in zip(third.decision.units, third.decision.observed, strict=True):
        expert = unit.rpartition(".")[0]
        if observed and ".experts." in unit:
            assert (gnmr[unit] == 1) == (expert not in ours)  # its first norm: nothing to compare with
    chosen = {unit for unit, active in zip(third.decision.units, third.decision.active, strict=True) if active}
    assert not any(unit.rpartition(".")[0] in ours - theirs for unit in chosen)
    assert third.saved_bytes == third.saved_bytes_predicted
    idle = set(parts.model.layers[0].mlp.experts) - {parts.model.get_submodule(name) for name in ours | theirs}
    assert len(idle) >= 4
    for expert in idle:
        assert all((parts.optimizer.state[p]["step"] == 0).all() for p in expert.parameters())
