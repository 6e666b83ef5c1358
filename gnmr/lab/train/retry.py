"""What a run does after a spike or a non-finite step: find the cause and retry the step.

The optimizer has not changed the weights at this point, because the step was masked on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gnmr.attachment.blame import Level, Verdict, explain, find_nonfinite
from gnmr.attachment.ranks.reduce import local
from gnmr.attachment.ranks.world import World
from gnmr.attachment.repeat import PassNumbers, Start, StepRepeater, repeating
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of

if TYPE_CHECKING:
    from gnmr.lab.train.step import Attempt, TrainStep


def looks_again(step: TrainStep, attempt: Attempt, levels: tuple[Level, Level]) -> bool:
    """Return True if the step needs a verdict and its cause can be determined."""
    converted, host = step.router.converted, attempt.packet.host
    if converted.shared.high_precision:
        return False
    if not math.isfinite(host["loss"]):
        finds = step.router.spec.nonfinite == "find" and converted.recovery is not None
        return finds or step.levels is not None
    spikes = levels[0].spike(float(host["loss"])) or levels[1].spike(float(host["grad_norm"]))
    return step.levels is not None and spikes


def look_again(
    step: TrainStep,
    attempt: Attempt,
    micro_batches: Sequence[Tensor | Batch],
    lr: float,
    levels: tuple[Level, Level],
    start: Start,
) -> tuple[Attempt, Verdict, bool]:
    """Find the cause of a spike or a non-finite loss.

    A non-finite step is retried with the blamed units on the recovery path. After a spike, the optimizer takes the
    update that was postponed.

    Returns:
        (the attempt that counts, the verdict, whether set and locks stay unchanged).
    """
    router, number, host = step.router, step.router.t, attempt.packet.host
    loss, norm = float(host["loss"]), float(host["grad_norm"])
    repeater = StepRepeater(
        router.converted,
        start,
        lambda: step.mean_loss(micro_batches),
        lambda: step.seen(micro_batches),
        step.model.buffers(),
    )
    # A loss that is not finite has a place; a spike is explained by comparing paths.
    with router.unmeasured(), repeating(router.converted, step.model, start.device):
        if math.isfinite(loss):
            verdict = explain(repeater, PassNumbers(loss, norm), levels, number)
        else:
            verdict = find_nonfinite(repeater, number)
    # The update of a spike was only postponed, whatever the cause.
    if math.isfinite(loss):
        step.make_up(attempt)
        return attempt, verdict, False
    if router.spec.nonfinite != "find":
        return attempt, verdict, False
    # Take the step again with the blamed units in recovery; else nobody is to blame, and the set stays.
    if router.retry(verdict.units, start):
        return step.attempt(micro_batches, lr, levels), verdict, False
    return attempt, verdict, verdict.cause != "precision"


@torch.no_grad()
def nonfinite_place(model: nn.Module, world: World, micro_batches: Sequence[Tensor | Batch]) -> str:
    """Return where the first non-finite number appeared in a step whose loss is not finite.

    All ranks return the same name; each passes its own `micro_batches`. Waits for the device.
    """
    for search in (lambda: _weight(model), lambda: _output(model, micro_batches)):
        if (name := next((name for name in world.gather(search()) if name is not None), None)) is not None:
            return name
    return "loss"


def _weight(model: nn.Module) -> str | None:
    """Return the first parameter whose part in this process is not finite."""
    for name, parameter in model.named_parameters():
        if not local(parameter).isfinite().all():
            return f"{name} (weights)"
    return None


def _output(model: nn.Module, micro_batches: Sequence[Tensor | Batch]) -> str | None:
    """Return the first module whose output is not finite in a new forward pass."""
    nonfinite: list[str] = []

    def check(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if not nonfinite and isinstance(output, Tensor) and not output.isfinite().all():
                nonfinite.append(name)

        return modules[name].register_forward_hook(hook)

    modules = {name: module for name, module in model.named_modules() if not any(module.children())}
    handles = [check(name) for name in modules]
    try:
        for block in micro_batches:
            loss_of(model, block)
    finally:
        for handle in handles:
            handle.remove()
    return nonfinite[0] if nonfinite else None
