"""What a run does after a step that spikes or is not finite: it says what is to blame, and tries the step again.

The optimizer has left the weights alone then, by a selection on the device, so this is still before its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gnmr.attachment.blame import Level, Verdict, explain, find_nonfinite
from gnmr.attachment.repeat import Again, Seen, Start, repeating
from gnmr.distributed.shards import local
from gnmr.distributed.world import World
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of

if TYPE_CHECKING:
    from gnmr.lab.train.step import Taken, TrainStep


def looks_again(step: TrainStep, taken: Taken, levels: tuple[Level, Level]) -> bool:
    """Return True if something is to blame for, and it can be looked for."""
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
    """Return (the step as it counts, what is to blame): it is tried again with the units to blame on the recovery path,
    or the optimizer takes the step that it was put off in."""
    router, number = step.router, step.router.t
    loss, norm = float(taken.host["loss"]), float(taken.host["grad_norm"])
    again = Again(router.converted, start, lambda: step.mean_loss(micro_batches), lambda: step.seen(micro_batches))
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
    """Leave the set as it is after a loss that is not finite, of several workers, which look for no blame."""
    if not math.isfinite(taken.host["loss"]) and step.router.spec.nonfinite == "find":
        taken.to_host(step.router.choose_again(keep=True))


@torch.no_grad()
def nonfinite_place(model: nn.Module, world: World, micro_batches: Sequence[Tensor | Batch]) -> str:
    """Return where the first number that is not finite appeared in a step whose loss is not finite.

    All ranks return the same name; each has `micro_batches` of its own. Waits for the device.
    """
    for found in (lambda: _weight(model), lambda: _output(model, micro_batches)):
        if (name := next((one for one in world.gather(found()) if one is not None), None)) is not None:
            return name
    return "loss"


def _weight(model: nn.Module) -> str | None:
    """Return the first parameter that is not finite in this process's part of it."""
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
