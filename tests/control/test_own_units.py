"""Units that are not ours: what people hand to `Unit` and `Controller` in a loop of their own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnmr.control import Context, Controller, ControlSpec, GnmrSignal, Unit
from gnmr.control.signals import SignalBase


def ignore(_recovering: bool) -> None:
    """A switch that does nothing."""


def layers(number: int = 3) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(number)]


def units(number: int = 3, switch: Callable[[bool], None] = ignore) -> list[Unit]:
    return [Unit(f"u{i}", layer, switch) for i, layer in enumerate(layers(number))]


def backward(of: list[Unit], factor: float = 1.0) -> None:
    """Adds `factor` to every element of every gradient."""
    (factor * torch.stack([p.sum() for unit in of for p in unit.parameters]).sum()).backward()


def zero_grad(of: list[Unit]) -> None:
    for unit in of:
        for parameter in unit.parameters:
            parameter.grad = None


# ---- units ----


@pytest.mark.parametrize("given", [lambda m: m, lambda m: m.parameters(), lambda m: list(m.parameters())])
def test_a_unit_takes_a_module_or_any_iterable_of_parameters(given: Callable[[nn.Module], Any]) -> None:
    layer = layers(1)[0]
    assert [id(p) for p in Unit("a", given(layer)).parameters] == [id(layer.weight), id(layer.bias)]
    assert Unit("a", layer.weight).parameters == (layer.weight,)


def test_a_parameter_that_stands_twice_counts_once() -> None:
    layer = layers(1)[0]
    unit = Unit("a", (layer.weight, layer.weight), ignore)
    controller = Controller([unit], ControlSpec(max_o=1))
    backward([unit])
    assert controller.step().norm.tolist() == [4.0]  # 16 ones


def test_sparse_gradients_have_norms() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    controller = Controller([Unit("table", table, ignore)], ControlSpec(max_o=1))
    table(torch.tensor([3, 3, 7])).sum().backward()
    assert controller.step().norm.item() == pytest.approx((2 * 2**2 + 2 * 1**2) ** 0.5)


@pytest.mark.parametrize(
    ("parameters", "switch", "message"),
    [
        (nn.ReLU(), ignore, "unit 'a' has no parameters"),
        ([torch.ones(2)], ignore, "unit 'a': parameters must be nn.Parameters, not Tensor"),
        (layers(1)[0], True, "unit 'a': switch=True must be a function"),
    ],
)
def test_what_makes_no_unit_is_refused(parameters: Any, switch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Unit("a", parameters, switch)


# ---- the controller's arguments ----


def test_a_class_a_function_and_a_signal_that_is_made() -> None:
    made, of = units(), Context(("a", "b", "c"), torch.device("cpu"))
    for signal in (GnmrSignal, lambda context: GnmrSignal(context, alpha=2.0), GnmrSignal(of, alpha=2.0)):
        controller = Controller(made, ControlSpec(signal=signal, max_o=2))
        backward(made)
        assert controller.step().risk.shape == (3,)
    with pytest.raises(ValueError, match="made for 2 units, these are 3"):
        Controller(made, ControlSpec(signal=GnmrSignal(Context(("a", "b"), torch.device("cpu"))), max_o=2))
    with pytest.raises(ValueError, match="options alpha: GnmrSignal is made already"):
        Controller(made, ControlSpec(signal=GnmrSignal(of), max_o=2, options={"alpha": 2.0}))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"signal": 3}, "signal int: is not a signal: int has no observe"),
        ({"signal": "static_k"}, "the run's length is not known: give steps"),
        ({"routing": "no"}, "routing=no: must be one of thresholded, ranked"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_arguments_without_sense_are_named(wrong: dict[str, Any], message: str) -> None:
    own = {name: value for name, value in wrong.items() if name in ("record", "steps")}
    with pytest.raises(ValueError, match=message):
        Controller(units(), ControlSpec(max_o=2, **{n: v for n, v in wrong.items() if n not in own}), **own)


# ---- step ----


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"grad_scale": 0}, "grad_scale=0: must be a positive number"),
        ({"grad_scale": object()}, "of a GradScaler it is scaler.get_scale()"),
        ({"evidence": {"true_gap": torch.ones(1)}}, r"evidence true_gap: has shape \(1,\), not \(3,\)"),
        ({"evidence": {"true_gap": [1.0, 1.0, 1.0]}}, r"evidence true_gap: must be a tensor \(3,\), not a list"),
        ({"evidence": {"colour": torch.ones(3)}}, "evidence 'colour' is not known"),
    ],
)
def test_a_step_refuses_what_it_cannot_read(how: dict[str, Any], message: str) -> None:
    controller = Controller(made := units(), ControlSpec(max_o=2))
    backward(made)
    with pytest.raises(ValueError, match=message):
        controller.step(**how)
    assert controller.t == 0
    assert controller.step().step == 1


class Own(SignalBase):
    """Returns what a test tells it to."""

    columns = ("x",)
    threshold = 1.0
    result: Callable[[Tensor], Any]

    def observe(self, evidence, step):  # type: ignore[no-untyped-def]
        return type(self).result(evidence["norm"])


@pytest.mark.parametrize(
    "result",
    [lambda n: n, lambda n: (n, n), lambda n: (n, (n, n)), lambda n: (n[:1], (n,))],
    ids=["risk_alone", "column_as_a_tensor", "two", "shape"],
)
def test_a_signal_that_returns_something_else_is_named(result: Callable[[Tensor], Any], monkeypatch) -> None:
    monkeypatch.setattr(Own, "result", staticmethod(result), raising=False)
    controller = Controller(made := units(), ControlSpec(signal=Own, max_o=2))
    backward(made)
    with pytest.raises(ValueError, match=r"Own.observe\(\) must return the risk and a tuple of its columns \(x\)"):
        controller.step()
    assert controller.t == 0


def test_a_controller_needs_units_of_different_ids() -> None:
    layer = layers(1)[0]
    for units in ([], [Unit("a", layer), Unit("a", layer)]):
        with pytest.raises(ValueError, match=r"no units|must differ"):
            Controller(units)


def test_a_risk_that_is_no_number_is_the_largest(monkeypatch) -> None:
    nan_at_2 = lambda n: (torch.tensor([0.5, 0.5, torch.nan], dtype=torch.float64), (n,))
    monkeypatch.setattr(Own, "result", staticmethod(nan_at_2), raising=False)
    controller = Controller(made := units(), ControlSpec(signal=Own, max_o=2))
    backward(made)
    assert controller.step().risk.tolist() == [0.5, 0.5, float("inf")]
    assert controller.active == ["u2"]


# ---- steps that do not count ----


def test_right_after_the_warm_up_the_cap_comes_first() -> None:
    made = units(5)
    controller = Controller(made, ControlSpec(max_o=2, warmup_steps=1))
    assert len(controller.active) == 5
    backward(made, float("inf"))
    controller.step()
    assert controller.active == ["u0", "u1"]


def test_discarded_micro_batches_leave_no_trace() -> None:
    """With and without a broken micro-batch in between, 1/GSNR is the same to the bit."""

    def run(discard: bool) -> list[float]:
        made = units()
        controller = Controller(made, ControlSpec(signal="gsnr", max_o=2))
        if discard:
            backward(made, float("nan"))
            controller.micro_step()
            zero_grad(made)
            controller.discard()
        for factor in (1.0, 3.0):
            backward(made, factor)
            controller.micro_step()
        return controller.step().columns["inverse_gsnr"].tolist()

    assert run(True) == run(False)
    assert all(value == value for value in run(False))


def test_the_example_switches_its_operators(monkeypatch, capsys) -> None:
    """The first layer reads the features; in the step after they were far out it is on its careful path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    module = importlib.import_module("own_unit")
    careful: list[list[bool]] = []
    forward = module.MyLinear.forward

    def noted(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        careful.append([self.weight.shape[1] == 32, self.careful])
        return forward(self, x)

    monkeypatch.setattr(module.MyLinear, "forward", noted)
    module.main(["--steps", "22"])
    first = [on for is_first, on in careful if is_first]
    assert first[18:22] == [False, False, True, True]
    assert "step  20" in (out := capsys.readouterr().out) and "0 promote (gnmr)" in out


def test_the_examples_signal_sees_the_layer_that_goes_wrong(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    importlib.import_module("own_signal").main(["--steps", "12"])
    recovering = re.findall(r"next in recovery \[(.*)\]", capsys.readouterr().out)
    assert len(recovering) == 12
    assert "'4'" not in recovering[8] and "'4'" in recovering[9], "in step 10"
