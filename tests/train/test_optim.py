from __future__ import annotations

import pytest
import torch
from everything import same_bits
from torch import nn

from gnmr.lab.config import OptimConfig
from gnmr.lab.train.optim import build_optimizer, clip_gradients, learning_rate


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (1, 0.5),  # two steps of warm-up
        (2, 1.0),
        (3, 0.1 + 0.9 * 0.9619397662556434),  # cos(pi / 8) = 0.9238795
        (6, 0.1 + 0.9 * 0.5),  # half way
        (10, 0.1),
    ],
)
def test_schedule(step, share):
    config = OptimConfig(lr=4e-3, warmup_frac=0.2, min_lr_frac=0.1)
    assert learning_rate(step, 10, config) == pytest.approx(4e-3 * share, rel=1e-12)


def model_of_one_step(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).to(dtype)
    model(torch.randn(3, 6, dtype=dtype)).square().sum().backward()
    return model


def test_a_parameter_that_had_no_gradient_has_its_first_state():
    """A checkpoint wants state of all; what comes of it is what AdamW would have made by itself."""
    model, lazy = model_of_one_step(torch.float32), model_of_one_step(torch.float32)
    optimizers = [build_optimizer(model, OptimConfig(lr=0.1)), build_optimizer(lazy, OptimConfig(lr=0.1))]
    optimizers[1].state.clear()
    for each, optimizer in zip((model, lazy), optimizers, strict=True):
        late = next(each.parameters())
        gradient, late.grad = late.grad, None
        optimizer.step()
        late.grad = gradient
    assert [len(optimizer.state) for optimizer in optimizers] == [4, 3]
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(model.parameters(), lazy.parameters(), strict=True):
        assert same_bits(p, q)
        assert all(same_bits(value, optimizers[1].state[q][name]) for name, value in optimizers[0].state[p].items())


def test_clipping():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    clip_gradients(parameters, torch.tensor(5.0), 10.0)
    assert [p.grad.tolist() for p in parameters[:2]] == [[3.0, 0.0], [4.0]]
    clip_gradients(parameters, torch.tensor(5.0), 1.0)
    assert torch.cat([p.grad for p in parameters[:2]]).tolist() == pytest.approx([0.6, 0.0, 0.8], rel=1e-6)
    assert parameters[2].grad is None
