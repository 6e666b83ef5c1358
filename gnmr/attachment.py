"""The three-line use: the controller in a training loop that is not ours.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gnmr.controller import Controller, GnmrSignal, Signal, Threshold, Unit
from gnmr.paths import Plan, convert


def units_of(plan: Plan) -> list[Unit]:
    """Each converted operator as a unit of its own; monitored only where the plan has no recovery path."""
    return [
        Unit(operator.unit_name, tuple(operator.parameters()), operator.switch if operator.recovery else None)
        for operator in plan.operators
    ]


class AttachedController(Controller):
    """A controller that knows the plan it routes."""

    plan: Plan

    def detach(self) -> None:
        """Gives the model its plain linears back; the controller is of no use afterwards."""
        self.plan.restore()


def attach(
    model: nn.Module,
    low: str = "int4",
    recovery: str | None = "int8",
    max_o: int = 4,
    alpha: Threshold | None = 1.5,
    beta: Threshold | None = 1.3,
    *,
    delta: int = 5,
    t_lock: int = 1,
    warmup_steps: int = 0,
    targets: Sequence[str] = ("*_proj",),
    site: str = "saved",
    rounding: str = "nearest",
    seed: int = 0,
    signal: Signal | None = None,
) -> AttachedController:
    """Gives the model's linears two paths and returns the controller that routes them.

    Args:
        model: any module with `nn.Linear` inside, on its final device and in its final dtype.
        low, recovery, targets, site, rounding, seed: see `gnmr.paths.convert`.
        max_o, t_lock, warmup_steps: see `gnmr.controller.Controller`.
        alpha, beta, delta: thresholds of GNMR and dGNMR (a number, a `TwoStage`, or None: off) and dGNMR's window.
        signal: another risk signal in place of GNMR; alpha, beta and delta are then not used.

    Call `controller.step()` once per optimizer step: after the backward pass of the last micro-batch, before clipping.
    ValueError for senseless values, before the model is touched.
    """
    probe = GnmrSignal(1, alpha, beta, delta)  # refuses senseless thresholds before anything is converted
    plan = convert(model, low, recovery, targets, site, rounding, seed)
    try:
        units = units_of(plan)
        if signal is None:
            device = units[0].parameters[0].device
            signal = GnmrSignal(len(units), probe.alpha, probe.beta, probe.delta, probe.eps, device)
        controller = AttachedController(units, signal, max_o, t_lock, warmup_steps)
    except ValueError:
        plan.restore()
        raise
    controller.plan = plan
    return controller
