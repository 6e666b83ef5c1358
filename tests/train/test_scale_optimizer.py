"""SCALE against updates worked out by hand, torch's AdamW, and the models it is built for."""

from __future__ import annotations

import math

import pytest
import torch
from everything import same_bits
from torch import nn

from gnmr.lab import models
from gnmr.lab.config import ModelConfig, OptimConfig
from gnmr.lab.rivals.scale import SCALE, build_scale
from gnmr.lab.train.optim import skip_where


def near(*numbers: float) -> list:
    return [pytest.approx(n, rel=1e-5, abs=1e-9) for n in numbers]


def matrix(rows: list[list[float]]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(rows))


def test_rows_of_a_linear():
    weight = matrix([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    optimizer = SCALE([weight], lr=0.1, weight_decay=0.5)
    # Row 1: rms sqrt(25 / 3) = 2.8867513, u = [1.0392305, 0, 1.3856406]. Row 2: no gradient, only decay by 0.95.
    weight.grad = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    optimizer.step()
    assert weight.tolist() == [near(0.84607695, 1.9, 2.71143594), near(3.8, 4.75, 5.7)]
    # A spike in row 1 weighs what any gradient weighs; row 2: rms 1, u = [1, -1, 1].
    weight.grad = torch.tensor([[3e6, 0.0, 4e6], [2e-4, -2e-4, 2e-4]])
    optimizer.step()
    assert weight.tolist() == [near(0.69985005, 1.805, 2.43730008), near(3.51, 4.6125, 5.315)]
    assert {key: value.tolist() for key, value in optimizer.state[weight].items()} == {"step": 2.0}


def test_columns_of_an_embedding():
    weight = matrix([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    optimizer = SCALE([{"params": [weight], "output_dim": 1}], lr=0.1)
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0], [4.0, -5.0]])  # rms 2.8867513 and 5 / sqrt 3
    optimizer.step()
    assert weight.tolist() == [near(-0.10392305, 0.0), near(0.0, 0.0), near(-0.13856406, 0.17320508)]


def test_momentum_of_the_head():
    weight = matrix([[0.0, 0.0]])
    optimizer = SCALE([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([[3.0, 4.0]])  # m = [0.3, 0.4], rms 0.35355339
    optimizer.step()
    assert weight.tolist() == [near(-0.084852814, -0.11313709)]
    weight.grad = torch.tensor(
        [[-40.0, 30.0]]
    )  # m = [0.27 - 4, 0.36 + 3], rms sqrt((13.9129 + 11.2896) / 2) = 3.5498239
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == [near(-3.73, 3.36)]
    assert weight.tolist() == [near(-0.084852814 + 0.10507564, -0.11313709 - 0.094652587)]


def test_one_dimension_is_torchs_adamw():
    """To the last bit, under the same skips."""
    torch.manual_seed(0)
    start = torch.randn(7)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    optimizers = [SCALE([ours], **options), torch.optim.AdamW([theirs], **options, fused=True)]
    for step in range(6):
        gradient = torch.randn(7)
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient * (math.nan if step == 2 else 1.0)
            skip_where(optimizer, torch.tensor(step == 2))
            optimizer.step()
        assert same_bits(ours, theirs)
        states = [optimizer.state[p] for p, optimizer in zip((ours, theirs), optimizers, strict=True)]
        assert all(same_bits(states[0][key], states[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def network(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict(
        {"embed_tokens": nn.Embedding(5, 4), "up_proj": nn.Linear(4, 3), "lm_head": nn.Linear(3, 5, bias=False)}
    ).to(dtype)


def optimizer_of(model: nn.Module) -> SCALE:
    return build_scale(model, OptimConfig(lr=0.1, weight_decay=0.1))


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def everything_of(model: nn.Module, optimizer: SCALE) -> list[torch.Tensor]:
    kept = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*model.parameters(), *kept]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [1, 3])
def test_a_skipped_step_leaves_no_trace(dtype, at):
    models_ = network(dtype), network(dtype)
    optimizers = [optimizer_of(model) for model in models_]
    for step in range(1, 6):
        for model, optimizer, meets in zip(models_, optimizers, (True, False), strict=True):
            if step == at and not meets:
                continue
            give_gradients(model, step)
            if step == at:
                for p in model.parameters():
                    p.grad.fill_(math.nan)
            before = [p.detach().clone() for p in model.parameters()]
            skip_where(optimizer, torch.tensor(step == at))
            optimizer.step()
            same = [same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same) if step == at else not any(same)
    ours, theirs = (everything_of(m, o) for m, o in zip(models_, optimizers, strict=True))
    assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def test_bf16_is_rounded_once():
    low, high = network(torch.bfloat16), network()
    with torch.no_grad():
        for p, q in zip(low.parameters(), high.parameters(), strict=True):
            q.copy_(p)
    for model in (low, high):
        give_gradients(model, 1)
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        q.grad.copy_(p.grad)
    for model in (low, high):
        optimizer_of(model).step()
    matrices = [(p, q) for p, q in zip(low.parameters(), high.parameters(), strict=True) if p.ndim == 2]
    assert all(same_bits(p, q.bfloat16()) for p, q in matrices)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_groups_of_a_model(name):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2}
    model = models.build(ModelConfig(name=name, **sizes), 11, 8)
    optimizer = build_scale(model, OptimConfig(weight_decay=0.2))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    told = {n: (group_of[id(p)]["momentum"], group_of[id(p)]["output_dim"]) for n, p in model.named_parameters()}
    special = {n: rule for n, rule in told.items() if rule != (0.0, 0)}
    if name == "llama":
        assert special == {"lm_head.weight": (0.9, 0), "embed_tokens.weight": (0.0, 1)}
    else:  # the head is tied to the tokens' embedding
        assert special == {"embed_tokens.weight": (0.9, 0), "embed_positions.weight": (0.0, 1)}
    for n, p in model.named_parameters():
        assert group_of[id(p)]["weight_decay"] == (0.2 if p.ndim >= 2 else 0.0), n
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(told)
