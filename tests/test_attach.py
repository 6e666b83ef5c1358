"""The three-line use on a model that is not ours, and the same decisions as the parts give by hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_attach_advice import net
from torch import nn
from torch.optim.swa_utils import AveragedModel

import gnmr
from gnmr.attachment.callback_tally import check_options
from gnmr.control.signals import SIGNALS


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
    "how",
    [
        {"low": "nvfp4", "signal": "gnmr_delta"},
        {"low": "fp8_delayed", "signal": "price", "routing": "ranked"},
        {"low": "int4", "rounding": "stochastic", "signal": "recovery_gap"},
        {"low": "llm_int8", "signal": "mse"},
    ],
    ids=lambda how: how["low"],
)
def test_the_default_device_changes_nothing(how: dict[str, Any]) -> None:
    """A loop on a GPU may set it to "cuda"; here "meta" shows tensors that name no device."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "meta"):
        model = net()
        torch.set_default_device(device)
        try:
            controller = gnmr.attach(model, recovery="bf16", targets=["?"], max_o=1, **how)
            for _ in range(3):
                (loss := (model(x) - x).square().mean()).backward()
                verdict = controller.explain(
                    lambda model=model: (model(x) - x).square().mean(), loss=loss.item(), usual=(1e-3, 1e-3)
                )
                controller.step()
                model.zero_grad()
            controller.load_state_dict(controller.state_dict())
        finally:
            torch.set_default_device(None)
        results.append((loss.item(), verdict, controller.active))
    assert results[0] == results[1]


# ---- other signals ----


def one_step(controller: gnmr.Router, model: nn.Module) -> gnmr.Decision:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    (model(x) - x).square().mean().backward()
    decision = controller.step()
    model.zero_grad(set_to_none=True)
    return decision


@pytest.mark.parametrize(
    "how",
    [
        {"signal": "recovery_gap"},
        {"signal": "price", "price_tokens": 1},
        {"signal": "gsnr"},
        {"signal": "grad_norm", "observe": "input_grad"},
        {"signal": "gnmr_delta"},
    ],
)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_loss_scale_changes_nothing(how: dict[str, Any], unscaled: bool) -> None:
    """`GradScaler.unscale_` divides gradients, but not what was measured in the backward passes."""
    measured = []
    for scale in (1.0, 1024.0):
        model, draw = net(), torch.Generator().manual_seed(0)
        controller = gnmr.attach(model, max_o=2, targets=["?"], **how)
        for _ in range(2):
            x = torch.randn(8, 16, generator=draw)
            ((model(x) - x).square().mean() / 2 * scale).backward()
            controller.micro_step()
        for parameter in model.parameters() if unscaled else ():
            parameter.grad /= scale
        decision = controller.step(**{"loss_scale" if unscaled else "grad_scale": scale})
        measured.append(np.stack([decision.norm, *decision.columns.values()]))
    assert (measured[0] > 0).all()
    np.testing.assert_allclose(measured[1], measured[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"^loss_scale=0: must be a positive number"):
        controller.step(loss_scale=0)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel])
@pytest.mark.parametrize("low", ["sim_e2m1", "fp8_delayed"])
def test_a_copy_of_the_model_is_switched_with_it(copied: Callable[[nn.Module], nn.Module], low: str) -> None:
    x, model = torch.randn(8, 16), net()
    exact = model(x)
    controller = gnmr.attach(model, low=low, recovery="bf16", targets=["?"])
    average, pair = copied(model), copy.deepcopy((model, controller))
    assert not torch.equal(average(x), exact)
    with controller.converted.high_precision():
        assert torch.equal(model(x), exact) and torch.equal(average(x), exact)
        assert not torch.equal(pair[0](x), exact), "a copy of both is on its own"
    assert not torch.equal(average(x), exact)
    controller.detach()
    assert torch.equal(model(x), exact) and torch.equal(average(x), exact)
    assert not torch.equal(pair[0](x), exact) and pair[1].active == []
    assert "detached" in str(controller) and "detached" not in str(pair[1])


def test_units_are_called_alike_in_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

    for observe in ("parameters", "adapter", "input_grad"):
        names = [gnmr.attach(m, targets=["?"], observe=observe).names for m in (net(), Wrapper(), torch.compile(net()))]
        assert names == [["0", "1", "2", "3"]] * 3


def test_callbacks_take_every_option_of_attach() -> None:
    parameters = inspect.signature(gnmr.attach).parameters.values()
    check_options({one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY})
    with pytest.raises(TypeError, match="attach has no option 'shares'"):
        check_options({"shares": 1.0})
