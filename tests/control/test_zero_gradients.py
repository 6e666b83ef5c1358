"""A gradient of exact zeros is no observation: zeros and None give the same risks, sets and state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from contexts import step as take
from contexts import units
from torch import Tensor, nn

import gnmr
from gnmr.control import Controller, ControlSpec, Decision
from gnmr.control.signals import SIGNALS

OPTIONS = {
    "static_k": [{"calibration_steps": 8}],
    "pin_excess": [{"evidence": name} for name in ("price", "weight_std")],
}
NAMES = ("layers.0.q_proj", "layers.0.o_proj", "layers.0.up_proj", "layers.1.down_proj")
CASES = [(name, how) for name in SIGNALS for how in OPTIONS.get(name, [{}])]


def equal(one: Any, other: Any) -> bool:
    """Of states and decisions, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return bool(one == other)


def same(one: Decision, other: Decision) -> None:
    for field in fields(one):
        assert equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("spec", [{}, {"routing": "ranked", "t_lock": 3}, {"warmup_steps": 4, "hold": 2}])
@pytest.mark.parametrize(("signal", "options"), CASES)
@pytest.mark.filterwarnings("ignore:active_frac is above")
def test_every_signal(signal: str, options: dict[str, Any], spec: dict[str, Any]) -> None:
    """Whatever was measured in passing of a unit whose gradient is 0."""
    spec = {"max_o": 2} | spec
    both = []
    for _ in range(2):
        both.append(Controller(units(NAMES, 2), ControlSpec(signal=signal, options=options, **spec), steps=30))
    draw, there = torch.Generator().manual_seed(0), torch.ones(4, dtype=torch.bool)
    for step in range(24):
        measured = {n: torch.rand(4, generator=draw, dtype=torch.float64) * 3 for n in ("norm", *both[0].needs)}
        idle = (torch.rand(4, generator=draw) < 0.4) if step % 3 else ~there
        if step == 17:
            idle = there  # a step whose labels are all masked
        norm = measured.pop("norm").masked_fill(idle, 0)
        zeros = measured | {"norm": norm, "observed": there}
        nothing = {n: x if n == "weight_std" else x.masked_fill(idle, 0) for n, x in measured.items()}
        nothing |= {"norm": norm, "observed": ~idle}
        with_zeros, without = take(both[0], **zeros), take(both[1], **nothing)
        same(with_zeros, without)
        assert with_zeros.observed.tolist() == (~idle).tolist()
    assert equal(both[0].state_dict(), both[1].state_dict())


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu())


def trained(zeros: str | None, **how: Any) -> tuple[list[Decision], dict[str, Any]]:
    """A loop in which the second of two experts is idle in some steps: not run, or run in a way that leaves zeros."""
    torch.manual_seed(0)
    experts = [Expert(), Expert()]
    model = nn.ModuleDict({"first_proj": nn.Linear(16, 16), "experts": nn.ModuleList(experts)})
    controller = gnmr.attach(model, targets=["*_proj"], **{"max_o": 2, "alpha": 1.05, "beta": 1.02} | how)
    draw, decisions = torch.Generator().manual_seed(1), []
    for step in range(9):
        idle = step in (3, 4, 7)
        for _ in range(2):
            x = model["first_proj"](torch.randn(8, 16, generator=draw))
            loss = x.square().mean()
            for i, expert in enumerate(experts):
                if idle and i == 1 and zeros in (None, "kept"):
                    continue
                rows, weight = (x[:0] if zeros == "no rows" else x, 0.0) if idle and i == 1 else (x, 1.0)
                loss = loss + weight * expert(rows).square().sum() / 128
            (loss / 2).backward()
            controller.micro_step()
        decisions.append(controller.step())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
        model.zero_grad(set_to_none=zeros != "kept")
    state = controller.state_dict()
    controller.detach()
    return decisions, state


@pytest.mark.parametrize(
    "how",
    [
        {"low": "sim_int4", "recovery": "bf16"},
        {"low": "sim_int4", "recovery": "bf16", "unit": "expert", "observe": "input_grad"},
        {"low": "fp8_hybrid", "recovery": "bf16", "unit": "gemm", "signal": "price", "routing": "ranked"},
        {"low": "int4", "recovery": "int8", "signal": "recovery_gap", "routing": "ranked"},
        pytest.param(
            {"low": "sim_int4", "recovery": "bf16", "signal": "jacobian", "routing": "ranked"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"low": "sim_int4", "recovery": "bf16", "signal": "gsnr", "unit": "expert"}, marks=pytest.mark.slow
        ),
    ],
    ids=["operators", "experts by input_grad", "gemms", "gap", "jacobian", "gsnr"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_loop(how: dict[str, Any]) -> None:
    none, state = trained(None, **how)
    for zeros in ("masked", "no rows", "kept"):
        decisions, found = trained(zeros, **how)
        for one, other in zip(decisions, none, strict=True):
            same(one, other)
        assert equal(found, state), zeros
    assert any(decision.events for decision in none)
