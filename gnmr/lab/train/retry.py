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
from gnmr.attachment.repeat import Again, Seen, Start, repeating
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of

if TYPE_CHECKING:
    from gnmr.lab.train.step import Taken, TrainStep


def looks_again(step: TrainStep, taken: Taken, levels: tuple[Level, Level]) -> bool:
    """Return True if the step needs a verdict and its cause can be determined."""
    converted, host = step.router.converted, taken.host
    if converted.shared.high_precision:
        return False
    if not math.isfinite(host["loss"]):
        finds = step.router.spec.nonfinite == "find" and converted.recovery is not None
        return finds or step.levels is not None
    spikes = levels[0].spike(float(host["loss"])) or levels[1].spike(float(host["grad_norm"]))
    return step.levels is not None and spikes


def look_again(
    step: TrainStep,
    taken: Taken,
    micro_batches: Sequence[Tensor | Batch],
    lr: float,
    levels: tuple[Level, Level],
    start: Start,
) -> tuple[Taken, Verdict]:
    """Find the cause of a spike or a non-finite loss, and return the final step and the verdict.

    A non-finite step is retried with the blamed units on the recovery path. After a spike, the optimizer takes the
    update that was postponed.
    """
    router, number = step.router, step.router.t
    loss, norm = float(taken.host["loss"]), float(taken.host["grad_norm"])
    again = Again(
        router.converted,
        start,
        lambda: step.mean_loss(micro_batches),
        lambda: step.seen(micro_batches),
        step.model.buffers(),
    )
    with router.unmeasured(), repeating(router.converted, step.model, start.device):
        if not math.isfinite(loss):
            verdict = find_nonfinite(again, number)
        else:
            verdict = explain(again, Seen(loss, norm), levels, number)
    if math.isfinite(loss):
        step.make_up(taken)
    elif router.spec.nonfinite == "find":
        if router.retry(verdict.units, start):
            retried = step.passes(micro_batches)
            packet = router.decide(evidence=retried.evidence, norms=retried.of_units, sums=retried.sums)
            step.update(retried, packet, lr, levels)
            return retried, verdict
        taken.to_host(router.choose_again(keep=verdict.cause != "precision"))
    return taken, verdict


def keep_set(step: TrainStep, taken: Taken) -> None:
    """Keep the active set after a non-finite loss if several workers train, because they do not search for a cause."""
    if not math.isfinite(taken.host["loss"]) and step.router.spec.nonfinite == "find":
        taken.to_host(step.router.choose_again(keep=True))


@torch.no_grad()
def nonfinite_place(model: nn.Module, world: World, micro_batches: Sequence[Tensor | Batch]) -> str:
    """Return where the first non-finite number appeared in a step whose loss is not finite.

    All ranks return the same name; each passes its own `micro_batches`. Waits for the device.
    """
    for found in (lambda: _weight(model), lambda: _output(model, micro_batches)):
        if (name := next((one for one in world.gather(found()) if one is not None), None)) is not None:
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
