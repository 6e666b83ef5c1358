"""What one matrix's compression does to the loss: the first order against measured rises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gnmr.lab.bench import rise
from gnmr.lab.bench.compressed import PIN_ORDER, Fork, config_of
from gnmr.lab.bench.setting import Setting
from gnmr.lab.config import Config
from gnmr.lab.train.fork import Forks


def test_the_first_order_is_the_measured_rise_of_a_small_error() -> None:
    """One weight, Adam with moments of 300 steps; the loss that rises is of other inputs."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weight = nn.Parameter(randn(3, 5))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    x, other, target = randn(5, 7), randn(5, 9), randn(3, 5)

    def loss_on(inputs: Tensor) -> Tensor:
        return (torch.tanh(weight @ inputs) - target @ inputs).square().mean()

    for _ in range(300):
        optimizer.zero_grad()
        loss_on(randn(5, 7)).backward()
        optimizer.step()
    (gradient,) = torch.autograd.grad(loss_on(x), weight)
    u = torch.linalg.svd(gradient).U[:, :1]
    held = gradient - u @ (u.mT @ gradient)
    start = weight.detach().clone()
    moments = {name: one.clone() for name, one in optimizer.state[weight].items()}

    def after(sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, loss and its gradient on the other inputs."""
        with torch.no_grad():
            weight.copy_(start)
        optimizer.state[weight] = {name: one.clone() for name, one in moments.items()}
        weight.grad = sent.clone()
        optimizer.step()
        loss = loss_on(other)
        return weight.detach().clone(), loss.detach(), torch.autograd.grad(loss, weight)[0]

    dense, high, fresh = after(gradient)
    low, loss, _ = after(gradient - held)
    off = rise.lacking(held, gradient - held, moments, optimizer.param_groups[0])
    torch.testing.assert_close(off, low - dense, rtol=0.05, atol=1e-7)
    assert float((fresh * off).sum()) == pytest.approx(float(loss - high), rel=0.05)
    assert abs(float(loss - high)) > 1e-6


@pytest.mark.slow
def test_rises_of_a_base_are_those_of_the_first_order_and_what_is_held_back_comes_back() -> None:
    setting = Setting(replace(Config(), training=replace(Config().training, threads=1)), [], None)
    forks = Forks("shipped")
    config = config_of(forks, Fork("shipped", "never", PIN_ORDER), setting)
    (one,) = rise.tried(forks, config, at=(3,), held_out=8)
    assert len(one.rises) == 28 and one.together > 0
    fresh = one.scores["fresh gradient"]
    assert np.corrcoef(fresh, one.rises)[0, 1] > 0.95 and fresh.sum() == pytest.approx(one.rises.sum(), rel=0.2)
    assert (one.scores["gap"] > 0).all() and (one.scores["Adam's gap"] > 0).all()
    back, lost = one.later["held back"], one.later["lost"]
    assert back[0] == lost[0] == pytest.approx(one.together) and back[1] != lost[1]
    assert abs(back[-1]) < 0.5 * back[0]
    names = [figure.name for figure in rise._figures("shipped", [one])]
    assert len(names) == len(set(names)) == 1 + len(rise.SCORES) + len(rise.IN_NATS) + 2 * len(rise.LATER)
