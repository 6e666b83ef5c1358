"""Where the first number that is not finite appeared in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gnmr.distributed.shards import local
from gnmr.distributed.world import World
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of


def nonfinite_place(model: nn.Module, world: World, micro_batches: Sequence[Tensor | Batch]) -> str:
    """Return the place of a step whose loss is not finite, which left the weights as they were: one name on all ranks,
    of which each has `micro_batches` of its own. Waits for the device."""
    for found in (lambda: nonfinite_weight(model), lambda: nonfinite_output(model, micro_batches)):
        if (name := next((one for one in world.gather(found()) if one is not None), None)) is not None:
            return name
    return "loss"


@torch.no_grad()
def nonfinite_weight(model: nn.Module) -> str | None:
    """The first parameter that is not finite in this process's part of it. Waits for the device."""
    for name, parameter in model.named_parameters():
        if not local(parameter).isfinite().all():
            return f"{name} (weights)"
    return None


@torch.no_grad()
def nonfinite_output(model: nn.Module, micro_batches: Sequence[Tensor | Batch]) -> str | None:
    """The first module whose output is not finite, in a new forward pass.

    Only called after a step with a non-finite loss, which left the weights as they were. Waits for the device.
    """
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
