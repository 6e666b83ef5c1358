"""Find where the first number that is not finite appeared in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gnmr.attachment.ranks.reduce import local
from gnmr.attachment.ranks.world import World
from gnmr.lab.data.batch import Batch
from gnmr.lab.train.loss import loss_of


@torch.no_grad()
def nonfinite_place(model: nn.Module, world: World, micro_batches: Sequence[Batch]) -> str:
    """Return where the first non-finite number appeared in a step whose loss is not finite.

    All ranks return the same name; each passes its own `micro_batches`. Waits for the device.
    """
    # Weights first, because a NaN in them shows up in outputs too.
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


def _output(model: nn.Module, micro_batches: Sequence[Batch]) -> str | None:
    """Return the first module whose output is not finite in a new forward pass."""
    nonfinite: list[str] = []

    def check(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            # Hooks fire in the order of the pass, so the first hit is where the number appeared.
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
