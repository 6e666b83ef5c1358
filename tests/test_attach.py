"""The three-line use on a model that is not ours, and the same decisions as the parts give by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnmr
from gnmr.paths import PathLinear


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def train(model: nn.Module, steps: int, controller: gnmr.AttachedController) -> list[list[str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    sets = []
    for step in range(steps):
        x = torch.randn(8, 16, generator=generator) * (10 if step % 5 == 4 else 1)
        (model(x) - x).square().mean().backward()
        before = controller.active
        decision = controller.step()
        assert [name for name, on in zip(decision.units, decision.in_force, strict=True) if on] == before
        sets.append(controller.active)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return sets


def test_attach_routes_operators() -> None:
    model = net()
    controller = gnmr.attach(model, low="int4", recovery="int8", max_o=2, alpha=1.2, beta=1.2, targets=["?"])
    sets = train(model, 12, controller)
    assert any(sets) and max(map(len, sets)) <= 2
    on = [m.unit_name for m in model if isinstance(m, PathLinear) and m.recovering]
    assert on == sets[-1] == controller.active


def test_state_dict_carries_on() -> None:
    kwargs = {"max_o": 2, "alpha": 1.2, "beta": 1.2, "targets": ["?"]}
    model = net()
    controller = gnmr.attach(model, **kwargs)
    train(model, 10, controller)
    other = gnmr.attach(net(), **kwargs)
    other.load_state_dict(controller.state_dict())
    assert other.active == controller.active and other.t == 10


def test_detach_gives_the_model_back() -> None:
    model = net()
    gnmr.attach(model, targets=["?"]).detach()
    assert [type(module) for module in model] == [nn.Linear] * 4


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1.0}, {"max_o": 0}, {"low": "int9"}, {"targets": ["nothing"]}, {"delta": 0}]
)
def test_a_mistake_leaves_the_model_as_it_was(wrong: dict) -> None:
    model = net()
    with pytest.raises(ValueError):
        gnmr.attach(model, **{"targets": ["?"], **wrong})
    assert [type(module) for module in model] == [nn.Linear] * 4


def test_monitoring_alone() -> None:
    model = net()
    controller = gnmr.attach(model, low="int4", recovery=None, targets=["?"])
    assert not any(train(model, 8, controller))
    assert (controller.signal.history.count == 8).all()


def test_state_dict_holds_the_generator_of_stochastic_rounding() -> None:
    kwargs = {"rounding": "stochastic", "targets": ["?"]}
    controller = gnmr.attach(net(), seed=1, **kwargs)
    other = gnmr.attach(net(), seed=2, **kwargs)
    other.load_state_dict(controller.state_dict())
    states = [c.plan.shared.generator.get_state() for c in (controller, other)]
    assert torch.equal(*states)


def test_what_has_no_effect_warns() -> None:
    controller = gnmr.attach(net(), targets=["?"])
    with pytest.warns(UserWarning, match="no unit has a gradient"):
        controller.step()
    frozen = net()
    frozen[1].requires_grad_(False)
    with pytest.warns(UserWarning, match="1 of 4 units have no trainable parameter"):
        gnmr.attach(frozen, targets=["?"])
    with pytest.raises(ValueError, match="warmup_steps=3"):
        gnmr.attach(net(), recovery=None, warmup_steps=3, targets=["?"])
