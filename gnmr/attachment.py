"""The three-line use: the controller in a training loop that is not ours.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gnmr.controller import Controller, Decision, GnmrSignal, Signal, Threshold, Unit
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

    def apply(self, packet: Tensor) -> Decision:
        """As `Controller.apply`; the step is over, so its compressed copies are let go too."""
        self.plan.shared.forget()
        return super().apply(packet)

    def detach(self) -> None:
        """Gives the model its plain linears back; the controller is of no use afterwards."""
        self.plan.restore()

    def state_dict(self) -> dict[str, Any]:
        """As `Controller.state_dict`, with the generator of stochastic rounding."""
        return {**super().state_dict(), "plan": self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.plan.load_state_dict(state["plan"])


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
    if recovery is None and warmup_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: a high-fidelity warm-up needs a recovery path")
    probe = GnmrSignal(1, alpha, beta, delta)  # refuses senseless thresholds before anything is converted
    plan = convert(model, low, recovery, targets, site, rounding, seed)
    try:
        units = units_of(plan)
        frozen = [u.name for u in units if not any(p.requires_grad for p in u.parameters)]
        if frozen:
            warnings.warn(
                f"{len(frozen)} of {len(units)} units have no trainable parameter, so no gradient norm to watch "
                f"(the first is {frozen[0]}): they stay on the low-cost path",
                stacklevel=2,
            )
        if signal is None:
            device = units[0].parameters[0].device
            signal = GnmrSignal(len(units), probe.alpha, probe.beta, probe.delta, probe.eps, device)
        controller = AttachedController(units, signal, max_o, t_lock, warmup_steps)
    except ValueError:
        plan.restore()
        raise
    controller.plan = plan
    return controller
