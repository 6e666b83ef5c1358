"""Evidence by hand: what micro-batches and weights show of a unit."""

from __future__ import annotations

import pytest
import torch
from contexts import context, step, units
from torch import nn

from gnmr.control import Controller, ControlSpec, GnmrSignal, Unit
from gnmr.control.measurements import MicroNorms, weight_std


def unit(*values: list[float], name: str = "u") -> Unit:
    return Unit(name, tuple(nn.Parameter(torch.tensor(v)) for v in values))


def accumulate(parameter: nn.Parameter, gradient: list[float]) -> None:
    new = torch.tensor(gradient)
    parameter.grad = new if parameter.grad is None else parameter.grad + new


def test_micro_square_is_the_mean_over_the_micro_batches_own_gradients() -> None:
    """Two micro-batches whose mean losses have gradients (3, 4) and (1, 0); each backward adds half of that."""
    a, b = unit([0.0, 0.0], name="a"), unit([0.0], name="b")
    micro = MicroNorms([a, b])
    accumulate(a.parameters[0], [1.5, 2.0])
    micro.add()
    accumulate(a.parameters[0], [0.5, 0.0])
    accumulate(b.parameters[0], [2.0])
    micro.add()
    assert micro.take().tolist() == [(25 + 1) / 2, 16 / 2]
    for u in (a, b):
        u.parameters[0].grad = None
    accumulate(a.parameters[0], [1.0, 0.0])
    micro.add()
    micro.add()  # the second micro-batch left nothing
    assert micro.take().tolist() == [(4 + 0) / 2, 0.0]
    with pytest.raises(ValueError, match=r"needs two or more micro-batches a step, 0 came: call micro_step\(\)"):
        micro.take()


def test_micro_batches_that_are_unequal_shares_of_the_step() -> None:
    """Mean losses with gradients (3, 4) and (1, 0), over three quarters and one quarter of the step's targets."""
    u = unit([0.0, 0.0])
    controller = Controller([u], ControlSpec(signal=GnmrSignal(context(1)), max_o=1), record=["micro_square"])
    for share, gradient in ((0.75, [3.0, 4.0]), (0.0, [9.0, 9.0]), (0.25, [1.0, 0.0])):  # one without targets
        accumulate(u.parameters[0], [share * g for g in gradient])
        controller.micro_step(share)
    assert controller.step().evidence["micro_square"].tolist() == [(25 + 1) / 2]
    for first in (0.5, 0.0):
        controller.discard()
        controller.micro_step(first)
        with pytest.raises(ValueError, match="give all micro-batches of a step their fraction of the loss, or none"):
            controller.micro_step()


def test_gsnr_says_nothing_of_steps_with_one_micro_batch_that_has_targets() -> None:
    u = unit([0.0, 0.0])
    controller = Controller([u], ControlSpec(signal="gsnr", max_o=1))
    for shares in ((0.5, 0.5), (1.0, 0.0), (0.0, 0.0), (0.5, 0.5)):
        u.parameters[0].grad = None
        for i, share in enumerate(shares):
            accumulate(u.parameters[0], [30 * share, 40 * share * i])
            controller.micro_step(share)
        decision = controller.step()
        assert decision.columns["inverse_gsnr"] == pytest.approx([1.0])


def test_weight_std_is_that_of_the_matrices() -> None:
    assert weight_std([unit([100.0], [[1.0, -1.0], [3.0, -3.0]])]).tolist() == pytest.approx([5.0**0.5])


def test_ranked_takes_the_largest_positive_risks_and_trigger_scales_the_thresholds() -> None:
    class Given(GnmrSignal):
        columns = ("x",)

        def thresholds(self, step: int) -> tuple[float | None, ...]:  # type: ignore[override]
            return (2.0,)

        def observe(self, evidence, step):  # type: ignore[no-untyped-def, override]
            return evidence["norm"] / 2, (evidence["norm"],)

    norm = torch.tensor([0.5, 0.0, 3.0, 5.0], dtype=torch.float64)

    def chosen(**options: float | bool) -> tuple[list[str], list[str], int]:
        controller = Controller(units("abcd"), ControlSpec(signal=Given(context(4)), max_o=3, **options))  # type: ignore[arg-type]
        decision = step(controller, norm=norm)
        return controller.active, [event.cause for event in decision.events], decision.over("x")

    assert chosen() == (["c", "d"], ["x", "x"], 2)
    assert chosen(trigger=2.0) == (["d"], ["x"], 1)
    assert chosen(routing="ranked") == (["a", "c", "d"], ["rank", "x", "x"], 2)  # b has no risk at all
