"""What a loop is told of how it calls `step`: each once, and nothing in loops that do it right."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gnmr

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
LEFT = "was still there when the next backward pass began"
TWICE = "no backward pass came since the last step()"
IDLE = "units had no gradient in the first 3 steps"
GONE = "d_proj: has no gradient in step 5, but had one before"


class Loop:
    """A model of four linears in a row, its optimizer and its controller."""

    def __init__(self, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({f"{name}_proj": nn.Linear(16, 16) for name in "abcd"})
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.controller = gnmr.attach(self.model, **{"low": "int4", "recovery": "bf16", "max_o": 1} | how)

    def loss(self, names: str = "abcd") -> torch.Tensor:
        y = X
        for name in names:
            y = self.model[f"{name}_proj"](y)
        return y.square().mean()

    def end(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def take(self, loss: torch.Tensor, set_to_none: bool = True) -> None:
        loss.backward()
        self.controller.step()
        self.end(set_to_none)


def zeroed_before_step(it: Loop, step: int) -> None:
    it.loss().backward()
    it.optimizer.step()
    it.optimizer.zero_grad(set_to_none=False)
    it.controller.step()


def never_zeroed(it: Loop, step: int) -> None:
    it.loss().backward()
    it.controller.step()
    nn.utils.clip_grad_norm_(it.model.parameters(), 0.1)
    it.optimizer.step()


def noisy_loss(it: Loop, step: int) -> torch.Tensor:
    y = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
    for linear in it.model.values():
        y = torch.tanh(linear(y))
    return y.square().mean()


def clipped_before(it: Loop, step: int) -> None:
    noisy_loss(it, step).backward()
    nn.utils.clip_grad_norm_(it.model.parameters(), 0.01)
    it.controller.step()
    it.end()


def clipped_after(it: Loop, step: int) -> None:
    noisy_loss(it, step).backward()
    it.controller.step()
    nn.utils.clip_grad_norm_(it.model.parameters(), 0.01)
    it.end()


def hardly_ever_clipped_before(it: Loop, step: int) -> None:
    noisy_loss(it, step).backward()
    nn.utils.clip_grad_norm_(it.model.parameters(), 100.0)
    it.controller.step()
    it.end()


def the_same_batch(it: Loop, step: int) -> None:
    it.loss().backward()
    it.controller.step()
    it.model.zero_grad()


def a_step_a_micro_batch(it: Loop, step: int) -> None:
    it.loss().backward()
    it.controller.step()
    if step % 2:
        it.end()


def twice(it: Loop, step: int) -> None:
    it.loss().backward()
    it.controller.step()
    nn.utils.clip_grad_norm_(it.model.parameters(), 0.1)
    it.controller.step()
    it.end()


def half(it: Loop, step: int) -> None:
    it.take(it.loss("ab"))


def half_of_zeros(it: Loop, step: int) -> None:
    it.take(it.loss("ab") + 0 * it.loss("cd"), set_to_none=False)


def some_steps(it: Loop, step: int) -> None:
    it.take(it.loss("abc" if step % 5 == 4 else "abcd"))


def right(it: Loop, step: int) -> None:
    it.take(it.loss())


def right_in_place(it: Loop, step: int) -> None:
    it.take(it.loss(), set_to_none=False)


def zeroed_before_backward(it: Loop, step: int) -> None:
    loss = it.loss()
    it.optimizer.zero_grad()
    loss.backward()
    it.controller.step()
    it.optimizer.step()


def accumulated(it: Loop, step: int) -> None:
    for _ in range(3):
        (it.loss() / 3).backward()
        it.controller.micro_step()
    it.controller.step()
    it.end()


def grad_in_between(it: Loop, step: int) -> None:
    it.loss().backward()
    it.controller.step()
    torch.autograd.grad(it.loss(), list(it.model.parameters()))
    it.end()


def discarded(it: Loop, step: int) -> None:
    it.loss().backward()
    it.optimizer.zero_grad()
    it.controller.discard()
    right(it, step)


def masked(it: Loop, step: int) -> None:
    it.take(it.loss() * (step not in (4, 7)))


def by_hand(it: Loop, step: int) -> None:
    parameters = list(it.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(it.loss(), parameters), strict=True):
        parameter.grad = gradient
    it.controller.step()
    it.end()


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_tests_ends_here() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


def told(body: Callable[[Loop, int], None], steps: int = 14, **how: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        it = Loop(**how)
        for step in range(steps):
            body(it, step)
        it.controller.detach()
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (zeroed_before_step, "every gradient norm is 0 in this step: call step() before zero_grad()"),
        (never_zeroed, LEFT),
        (a_step_a_micro_batch, LEFT),
        (twice, TWICE),
        (half, f"2 of 4 {IDLE} (the first is c_proj)"),
        (half_of_zeros, f"2 of 4 {IDLE} (the first is c_proj)"),
        (some_steps, GONE),
        (clipped_before, "the norm of all gradients was 0.01 in each of the first 5 steps: they seem to be clipped"),
    ],
)
def test_one_hint(body: Callable[[Loop, int], None], line: str) -> None:
    (hint,) = told(body)
    assert line in hint


@pytest.mark.parametrize(
    "body",
    [
        *(right, right_in_place, zeroed_before_backward, accumulated, grad_in_between, discarded, masked, by_hand),
        *(clipped_after, hardly_ever_clipped_before, the_same_batch),
    ],
)
@pytest.mark.parametrize("how", [{}, {"observe": "input_grad"}], ids=["parameters", "input_grad"])
def test_no_false_alarm(body: Callable[[Loop, int], None], how: dict[str, Any]) -> None:
    assert told(body, **how) == []


def test_hooks_are_gone_after_some_steps() -> None:
    it = Loop()
    assert it.model["a_proj"].weight._backward_hooks
    for step in range(14):
        right(it, step)
    assert not any(parameter._backward_hooks for parameter in it.model.parameters())
    assert not it.controller.hints._handles


def test_an_optimizer_in_backward_is_no_loop_without_zero_grad() -> None:
    it = Loop(observe="input_grad")
    for parameter in it.model.parameters():
        one = torch.optim.SGD([parameter], 1e-3)

        def update(_: torch.Tensor, one: torch.optim.Optimizer = one) -> None:
            one.step()
            one.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            it.loss().backward()
            it.controller.step()


def test_idle_experts_and_frozen_parts_are_not_told() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"in_proj": nn.Linear(16, 16), "experts": nn.ModuleList()})
    model["experts"].extend(nn.ModuleDict({"up_proj": nn.Linear(16, 16)}) for _ in range(6))
    model["out_proj"] = nn.Linear(16, 16).requires_grad_(False)
    with pytest.warns(UserWarning, match="1 of 8 units have no trainable parameter"):
        controller = gnmr.attach(model, low="sim_int4", recovery="bf16", max_o=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(12):
            y = model["experts"][step % 6]["up_proj"](model["in_proj"](X))
            model["out_proj"](y).square().mean().backward()
            controller.step()
            model.zero_grad()


def never(it: Loop, step: int) -> None:
    it.loss().backward()
    it.end()


def calibrated(it: Loop, step: int) -> None:
    if step == 0:
        it.controller.calibrate(steps=100)
    right(it, step)


def evaluated(it: Loop, step: int) -> None:
    with torch.no_grad():
        it.loss()


def refused_by_step(it: Loop, step: int) -> None:
    """As with a used folder for records."""
    it.loss().backward()
    with pytest.raises(ValueError, match="evidence"):
        it.controller.step(evidence={"colour": torch.ones(2)})
    it.optimizer.zero_grad()


def test_what_is_told_at_the_end() -> None:
    (hint,) = told(never)
    assert hint.startswith("step() was never called: the model was trained on its low path (int4)")
    assert not told(refused_by_step)
    (hint,) = told(calibrated)
    assert hint.startswith("still calibrating after 14 of 100 steps: nothing was ever routed")
    assert told(never, recovery=None) == [] == told(never, signal="always_low"), "there is nothing to route"
    assert told(evaluated) == []


SCRIPT = """
import torch, gnmr; from torch import nn
def main():
    m = nn.ModuleDict({k: nn.Linear(16, 16) for k in ("a_proj", "b_proj")})
    KEPT
    for i in range(3):
        m["b_proj"](m["a_proj"](torch.randn(8, 16))).square().mean().backward()
        STEP
        m.zero_grad()
    return m
model = main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "step", "line"),
    [
        ("gnmr.attach(m, low='sim_int4', recovery='bf16', max_o=1)", "", "step() was never called"),
        ("c = gnmr.attach(m, low='sim_int4', recovery='bf16', max_o=1)", "c.step()", ""),
    ],
    ids=["never", "right"],
)
def test_at_the_end_of_the_process(kept: str, step: str, line: str) -> None:
    text = SCRIPT.replace("KEPT", kept).replace("STEP", step or "pass")
    outcome = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert line in outcome.stderr and bool(line) == bool(outcome.stderr), outcome.stderr
