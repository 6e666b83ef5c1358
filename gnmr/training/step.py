"""One training step as a function of explicit inputs.

    micro-batches -> forward, loss (FP32), backward -> norms of all gradients -> controller's choice for the next step
                  -> clip -> AdamW, selected by "loss and all gradients are finite"

Nothing waits for the device until the one transfer at the end, which brings the loss, the norms and the controller's
choice to the host together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.controller import Controller, Decision
from gnmr.controller.norms import UnitNorms
from gnmr.paths import Plan
from gnmr.training.optim import clip_gradients, skip_where


@dataclass(frozen=True)
class StepResult:
    """What a step left on the host."""

    loss: float
    """Mean cross-entropy over the step's tokens, nats."""
    grad_norm_pre_clip: float
    """Global 2-norm of the gradient before clipping."""
    skipped: bool
    """The optimizer did not step: the loss or a gradient was not finite."""
    nonfinite_unit: str | None
    """Where the first non-finite number was found, see `first_nonfinite`; None in a finite step."""
    saved_bytes: int | None
    """Read from the graph, largest micro-batch; None under activation checkpointing."""
    saved_bytes_predicted: int | None
    decision: Decision


def loss_of(model: nn.Module, block: Tensor) -> Tensor:
    """Mean next-token cross-entropy of `block` (B, T + 1) in FP32, a scalar on the device."""
    logits = model(block[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten())


class TrainStep:
    """The fixed parts of a step: model, plan, controller, optimizer. Calling it takes one step."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        controller: Controller,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        measure_saved: bool = True,
    ) -> None:
        self.model, self.plan, self.controller, self.optimizer = model, plan, controller, optimizer
        self.clip_norm, self.measure_saved = clip_norm, measure_saved
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        in_units = {id(p) for unit in controller.units for p in unit.parameters}
        others = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in in_units]
        # The units first, then every other parameter by itself: all norms of a step in one batched call.
        groups = [unit.parameters for unit in controller.units] + [(p,) for _, p in others]
        names = controller.names + [name.removesuffix(".weight") for name, _ in others]
        self._norms = UnitNorms(groups)
        position = {id(p): i for i, p in enumerate(self.parameters)}
        places = [max(position[id(p)] for p in group) for group in groups]
        # The backward pass runs from the last module to the first.
        self._backward_order = [(i, names[i]) for i in sorted(range(len(names)), key=lambda i: -places[i])]

    def __call__(self, micro_batches: Sequence[Tensor], lr: float) -> StepResult:
        """Takes one step at rate `lr` on `micro_batches`, each (B, T + 1) int64 on the device. Waits for it once."""
        loss, saved, predicted = self._backward(micro_batches)

        norms, observed = self._norms()
        num_units = len(self.controller.units)
        packet = self.controller.observe_norms(norms[:num_units], observed[:num_units])
        grad_norm = norms.square().sum().sqrt()
        nonfinite = ~(loss.isfinite() & grad_norm.isfinite())

        if self.clip_norm is not None:
            clip_gradients(self.parameters, grad_norm, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        skip_where(self.optimizer, nonfinite)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        numbers = torch.stack([loss.double(), grad_norm, nonfinite.double()])
        host = torch.cat([numbers, norms, packet.flatten()]).cpu()
        n = len(norms)
        skipped = bool(host[2])
        where = None
        if skipped:
            where = self._first_nonfinite(float(host[0]), host[3 : 3 + n], micro_batches)
        decision = self.controller.apply(host[3 + n :].view(packet.shape))
        return StepResult(float(host[0]), float(host[1]), skipped, where, saved, predicted, decision)

    def _backward(self, micro_batches: Sequence[Tensor]) -> tuple[Tensor, int | None, int | None]:
        total: Tensor | None = None
        saved = predicted = None
        for block in micro_batches:
            loss = loss_of(self.model, block)
            if self.measure_saved:
                saved = max(saved or 0, self.plan.saved_bytes())
                predicted = max(predicted or 0, self.plan.predicted_bytes())
            (loss / len(micro_batches)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step needs at least one micro-batch"
        self.plan.shared.forget()
        return total / len(micro_batches), saved, predicted

    def _first_nonfinite(self, loss: float, norms: Tensor, micro_batches: Sequence[Tensor]) -> str:
        """Name of the place where the first non-finite number appeared in this step."""
        if not torch.tensor(loss).isfinite():
            found = first_nonfinite_forward(self.model, micro_batches)
            return found or "loss"
        for index, name in self._backward_order:
            if not norms[index].isfinite():
                return name
        return "gradient norm"  # every norm is finite, their sum of squares is not


@torch.no_grad()
def first_nonfinite_forward(model: nn.Module, micro_batches: Sequence[Tensor]) -> str | None:
    """The first parameter that is not finite, else the first module whose output is not, in a new forward pass.

    Only called after a step with a non-finite loss, which left the weights as they were. Waits for the device.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"{name} (weights)"
    found: list[str] = []

    def check(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return modules[name].register_forward_hook(hook)

    modules = {name: module for name, module in model.named_modules() if not any(module.children())}
    handles = [check(name) for name in modules]
    try:
        for block in micro_batches:
            loss_of(model, block)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


@torch.no_grad()
def evaluate(model: nn.Module, plan: Plan, blocks: Tensor, batch_size: int) -> float:
    """Mean cross-entropy over `blocks` (N, T + 1) on the 16-bit path, nats. Waits for the device."""
    was_training = model.training
    model.eval()
    with plan.exact():
        total = torch.zeros((), dtype=torch.float64, device=blocks.device)
        for batch in blocks.split(batch_size):
            total += loss_of(model, batch).double() * len(batch)
    model.train(was_training)
    return float(total) / len(blocks)
