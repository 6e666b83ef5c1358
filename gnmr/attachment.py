"""The three-line use: the controller in a training loop that is not ours.

controller = gnmr.attach(model, low="int4", recovery="int8", max_o=4, alpha=1.5, beta=1.3)
...
loss.backward()
controller.step()          # before clipping and optimizer.step()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.controller import (
    OBSERVE,
    Context,
    Controller,
    Decision,
    GnmrSignal,
    OutputGradients,
    Signal,
    Threshold,
    Unit,
    build_signal,
)
from gnmr.controller.evidence import PATH_EVIDENCE
from gnmr.controller.observed import adapters
from gnmr.paths import Plan, Recipe, convert
from gnmr.paths.groups import Group
from gnmr.paths.plan import nominal_bits


def units_of(plan: Plan, model: nn.Module | None = None, observe: str = "parameters") -> list[Unit]:
    """The plan's units; monitored only where it has no recovery path.

    What a unit costs its operators cost together: Eq. 5's bytes a token, with the bits of the input that wgrad reads.
    1 where recovery adds none.

    Their parameters are the operators' own; with observe="adapter" (`gnmr.controller.observed`) the trainable ones
    below their names in `model`. ValueError for a unit without any.
    """
    more_bits = 0 if plan.recovery is None else nominal_bits(plan.recovery) - nominal_bits(plan.low)

    def parameters(group: Group) -> tuple[nn.Parameter, ...]:
        if observe == "adapter" and model is not None:
            return adapters(model, group.name)
        return tuple(parameter for operator in group.operators for parameter in operator.parameters())

    return [
        Unit(
            group.name,
            parameters(group),
            group.switch if plan.recovery else None,
            cost=sum(o.in_features for o in group.operators) * more_bits / 8 if more_bits > 0 else 1.0,
        )
        for group in plan.groups
    ]


def norms_of(model: nn.Module, units: Sequence[Unit], observe: str) -> OutputGradients | None:
    """What `Controller(norms=...)` takes: hooks on the units' outputs for "input_grad", else None."""
    return OutputGradients(model, [unit.name for unit in units]) if observe == "input_grad" else None


def context_of(units: Sequence[Unit], max_o: int, steps: int | None = None, seed: int = 0, hold: int = 1) -> Context:
    """What a signal is told of these units."""
    names, cost = tuple(unit.name for unit in units), tuple(unit.cost for unit in units)
    return Context(names, cost, units[0].parameters[0].device, max_o, steps, seed, hold)


class AttachedController(Controller):
    """A controller that knows the plan it routes."""

    plan: Plan

    def attach_plan(self, plan: Plan, probe_tokens: int = 1) -> None:
        """Takes the plan and has its operators measure what the signal needs of them."""
        self.plan = plan
        names = [name for name in self.needs if name in PATH_EVIDENCE]
        self._probe = plan.probe(names, probe_tokens) if names else None
        self._look()

    def _look(self) -> None:
        """Has the paths measured in the coming step only if somebody reads it."""
        if self._probe is not None:
            self._probe.enabled = self.reads_next()

    def measure(self, grad_scale: float = 1.0) -> dict[str, Tensor]:
        """As `Controller.measure`, with what the paths measured."""
        found = super().measure(grad_scale)
        if self._probe is not None:
            # Squared gradients carry the loss scale twice.
            scaled = {
                name: value / grad_scale**2 if name.startswith("gap") else value
                for name, value in self._probe.read().items()
            }
            self._probe.reset()
            found |= scaled
        return found

    def apply(self, packet: Tensor) -> Decision:
        """As `Controller.apply`; the step is over for the paths too (`Plan.end_step`)."""
        self.plan.end_step()
        self._look()
        return super().apply(packet)

    def detach(self) -> None:
        """Gives the model its plain linears back; the controller is of no use afterwards."""
        self.plan.restore()
        if isinstance(self.norms, OutputGradients):
            self.norms.close()

    def state_dict(self) -> dict[str, Any]:
        """As `Controller.state_dict`, with the generator of stochastic rounding and delayed scales."""
        return {**super().state_dict(), "plan": self.plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Controller.load_state_dict`; ValueError if it belongs to other paths too."""
        self.plan.check_state(state.get("plan", {}))
        super().load_state_dict(state)
        self.plan.load_state_dict(state["plan"])
        self._look()


def attach(
    model: nn.Module,
    low: str | Recipe = "int4",
    recovery: str | Recipe | None = "int8",
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
    recovers: Sequence[str] = ("fprop", "dgrad", "wgrad"),
    unit: str = "operator",
    backend: str = "auto",
    weights: str = "online",
    outlier_threshold: float | None = None,
    signal: str | Signal | Callable[[Context], Signal] | None = None,
    ranked: bool = False,
    trigger: float = 1.0,
    probe_tokens: int = 1,
    record: Sequence[str] = (),
    hold: int = 1,
    observe: str = "parameters",
) -> AttachedController:
    """Gives the model's linears two paths and returns the controller that routes them.

    Args:
        model: any module with `nn.Linear` inside, on its final device and in its final dtype.
        low, recovery, targets, site, rounding, seed, recovers, unit, backend, weights, outlier_threshold: see
            `gnmr.paths.convert`.
        max_o, t_lock, warmup_steps: see `gnmr.controller.Controller`.
        alpha, beta, delta: thresholds of GNMR and dGNMR (a number, a `TwoStage`, or None: off) and dGNMR's window.
        signal: another risk signal in place of GNMR (docs/signals.md): its name, the class or any function from a
            `Context` to one; alpha, beta and delta are then not used.
        ranked, trigger, record, hold: see `gnmr.controller.Controller`.
        probe_tokens: of this many tokens one is measured, where the signal needs the paths' errors.
        observe: what a unit's norm is taken of: the gradients of its own `parameters`; of the `adapter` in it, where
            the base is frozen (LoRA; they have to be there already); or of its output (`input_grad`). See
            `gnmr.controller.observed`.

    Call `controller.step()` once per optimizer step: after the backward pass of the last micro-batch, before clipping.
    ValueError for senseless values, before the model is touched.
    """
    if recovery is None and warmup_steps:
        raise ValueError(f"warmup_steps={warmup_steps}: a high-fidelity warm-up needs a recovery path")
    if observe not in OBSERVE:
        raise ValueError(f"observe={observe!r}: must be one of {', '.join(OBSERVE)}")
    one = Context(("unit",), (1.0,), torch.device("cpu"))
    GnmrSignal(one, alpha=alpha, beta=beta, delta=delta)  # refuses senseless thresholds before anything is converted
    if probe_tokens < 1:
        raise ValueError(f"probe_tokens={probe_tokens}: must be 1 or more")
    plan = convert(
        model,
        low,
        recovery,
        targets,
        site,
        rounding,
        seed,
        recovers,
        unit,
        backend,
        weights,
        outlier_threshold,
        store=False,
    )
    norms = None
    try:
        units = units_of(plan, model, observe)
        frozen = [u.name for u in units if not any(p.requires_grad for p in u.parameters)]
        if frozen and observe == "parameters":
            warnings.warn(
                f"{len(frozen)} of {len(units)} units have no trainable parameter, so no gradient norm to watch "
                f"(the first is {frozen[0]}): they stay on the low-cost path; use observe='adapter' where adapters are "
                "trained in them, else observe='input_grad'",
                stacklevel=2,
            )
        norms = norms_of(model, units, observe)
        context = context_of(units, max_o, seed=seed, hold=hold)
        made: Signal
        if signal is None:
            made = GnmrSignal(context, alpha=alpha, beta=beta, delta=delta)
        elif isinstance(signal, str):
            made = build_signal(signal, {}, context)
        else:
            made = signal(context) if callable(signal) else signal
        controller = AttachedController(units, made, max_o, t_lock, warmup_steps, ranked, trigger, record, hold, norms)
        controller.attach_plan(plan, probe_tokens)
        plan.store(weights)  # last: it cannot be undone to the bit
    except BaseException:
        plan.restore()
        if norms is not None:
            norms.close()
        raise
    return controller
