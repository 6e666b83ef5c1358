"""The three-line use on a model that is not ours, and the same decisions as the parts give by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gnmr
from gnmr.control import Context, Signal
from gnmr.control.signals import SIGNALS


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def train(model: nn.Module, steps: int, controller: gnmr.Router) -> list[list[str]]:
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


@pytest.mark.parametrize("signal", ["gnmr_delta", "recovery_gap"])
def test_attach_routes_blocks(signal: str) -> None:
    """Two linears each; the paths' evidence comes by the block too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3)))
    how = {"max_o": 1, "targets": ["?.?"], "unit": "block", "signal": signal}
    how |= {"routing": "ranked"} if signal == "recovery_gap" else {"alpha": 1.2, "beta": 1.2}
    controller = gnmr.attach(model, **how)
    assert controller.names == ["0", "1", "2"]
    sets = train(model, 12, controller)
    assert any(sets) and max(map(len, sets)) == 1
    assert [str(i) for i in range(3) for m in model[i] if m.recovering] == sets[-1] * 2
    with pytest.raises(ValueError, match="unit='expert': no operator is part of an expert"):
        gnmr.attach(net(), targets=["?"], unit="expert")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (3, "state: is not what a controller's state_dict"),
        ({"converted": {}}, "the paths' state belongs to unknown paths"),
    ],
)
def test_a_state_that_is_none_is_refused(state: object, told: str) -> None:
    controller = gnmr.attach(net(), max_o=2, targets=["?"])
    with pytest.raises(ValueError, match=told):
        controller.load_state_dict(state)


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


# ---- other signals ----


def one_step(controller: gnmr.Router, model: nn.Module, scale: float = 1.0) -> gnmr.Decision:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    ((model(x) - x).square().mean() * scale).backward()
    decision = controller.step(grad_scale=scale)
    model.zero_grad(set_to_none=True)
    return decision


@pytest.mark.parametrize("name", ["recovery_gap", "gnmr_delta"])
def test_a_loss_scale_changes_nothing(name: str) -> None:
    """What is made of gradients is taken back to their own scale, squares by its square."""
    first, second = (net(), net())
    decisions = [
        one_step(gnmr.attach(model, max_o=2, targets=["?"], signal=SIGNALS[name]), model, scale)
        for model, scale in ((first, 1.0), (second, 1024.0))
    ]
    for column in decisions[0].columns:
        assert (decisions[0].columns[column] > 0).all()
        np.testing.assert_allclose(decisions[1].columns[column], decisions[0].columns[column], rtol=1e-5)


class Seen(SIGNALS["gsnr"]):  # type: ignore[misc, name-defined]
    """Keeps the evidence."""

    def observe(self, evidence, step):  # type: ignore[no-untyped-def]
        self.micro_square, self.norm = evidence["micro_square"], evidence["norm"]
        return super().observe(evidence, step)


def test_a_signal_that_measures_every_second_step() -> None:
    """The paths are measured for the steps that are read alone, unless the evidence is recorded in each."""
    for record in ((), ("gap_low",)):
        model = net()
        controller = gnmr.attach(
            model,
            max_o=2,
            targets=["?"],
            signal=partial(SIGNALS["recovery_gap"], every=2),
            record=record,
            recovery="bf16",
        )
        decisions = []
        for _ in range(4):
            decisions.append(one_step(controller, model))
            with torch.no_grad():
                model[0].weight.mul_(1.5)
        gaps = [decision.columns["recovery_gap"].tolist() for decision in decisions]
        assert gaps[0] == gaps[1] != gaps[2] == gaps[3] and min(gaps[0]) > 0
        if record:
            low = [decision.evidence["gap_low"].tolist() for decision in decisions]
            assert low[0] == gaps[0] and low[0] != low[1] != low[2] and min(map(min, low)) > 0


def test_micro_batches() -> None:
    """Three of them, each with its own gradient; a loop that does not tell of them is told so."""
    model = net()
    controller = gnmr.attach(model, max_o=2, targets=["?"], signal=Seen, routing="ranked")
    batches = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    own = []
    for x in batches:
        (model(x) - x).square().mean().backward()
        own.append([sum(float(p.grad.square().sum()) for p in layer.parameters()) for layer in model])
        model.zero_grad(set_to_none=True)
    for x in batches:
        ((model(x) - x).square().mean() / 3).backward()
        controller.micro_step()
    assert controller.step().active.sum() == 2
    assert controller.controller.signal.micro_square.tolist() == pytest.approx(np.mean(own, axis=0), rel=1e-4)
    assert (controller.controller.signal.norm**2 < controller.controller.signal.micro_square).all()
    with pytest.raises(ValueError, match=r"needs two or more micro-batches a step, 0 came: call micro_step\(\)"):
        controller.step()


def explode(_context: Context) -> Signal:
    raise RuntimeError("no such file")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"signal": SIGNALS["recovery_gap"], "recovery": None}, ValueError),
        ({"signal": partial(SIGNALS["mse"], level=1.0)}, ValueError),
        ({"signal": explode}, RuntimeError),
        ({"record": ["colour"]}, ValueError),
        ({"low": "int9"}, ValueError),
        ({"targets": ["nothing"]}, ValueError),
        ({"probe_tokens": 0}, ValueError),
    ],
    ids=["no_recovery", "option", "defect", "record", "format", "targets", "tokens"],
)
def test_a_signal_that_cannot_be_leaves_the_model_as_it_was(wrong: dict, error: type[Exception]) -> None:
    model = net()
    with pytest.raises(error):
        gnmr.attach(model, **{"targets": ["?"], "max_o": 2, **wrong})
    assert [type(module) for module in model] == [nn.Linear] * 4


def test_a_mistake_does_not_cost_the_16_bit_weights() -> None:
    """The codes that would take their place are made when nothing can go wrong any more."""
    model = net().requires_grad_(False)
    before = [(module.weight, module.weight.clone()) for module in model]
    how = {"low": "llm_int8", "recovery": "bf16", "weights": "instead", "targets": "?", "observe": "input_grad"}
    with pytest.raises(ValueError, match="max_o=0"):
        gnmr.attach(model, max_o=0, **how)
    for module, (weight, values) in zip(model, before, strict=True):
        assert module.weight is weight and torch.equal(weight, values)
    gnmr.attach(model, max_o=2, **how)
    assert all(module.weight.dtype == torch.int8 for module in model)


def test_units_are_called_alike_in_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

    for observe in ("parameters", "adapter", "input_grad"):
        names = [gnmr.attach(m, targets=["?"], observe=observe).names for m in (net(), Wrapper(), torch.compile(net()))]
        assert names == [["0", "1", "2", "3"]] * 3
