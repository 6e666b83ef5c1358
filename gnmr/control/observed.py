"""What a unit's norm n[b,t] is the norm of.

    parameters   the gradient of the unit's own parameters: those of its operators (section 2, theta_b)
    adapter      the gradient of the trainable parameters below the unit's name
    input_grad   the gradient of the loss with respect to the unit's output: what enters it in backward

The paper fine-tunes LoRA matrices on a frozen base (5.3). The operators whose precision is routed are then frozen and
have no weight gradient; what is trained of a decoder layer are the adapters in it, and their gradient is what is left
of theta_b's. So its setting needs `adapter`. The paper does not say what it takes the norm of there.

`input_grad` needs nothing trainable in the unit, only something trainable before it: parts of a model that are
fine-tuned in full while others are frozen, INT8 layers without adapters. It sees the backward signal alone, and
nothing of the unit's own input.

An adapter hangs around a frozen linear: peft calls that linear `base_layer` and puts it below a module of the linear's
former name. A unit `...q_proj.base_layer` is therefore watched at `...q_proj`, whose output is the linear's and the
adapter's sum; the gradient is the same for both terms.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from gnmr.control.norms import flags
from gnmr.errors import users_level


def watched(model: nn.Module, unit: str) -> nn.Module:
    """The module in which or at whose output a unit is watched. ValueError where the model has none of its name."""
    for wrapped in ("", "module."):  # DistributedDataParallel
        for adapted in ("", "base_model.model."):  # what peft's own model puts in front
            with suppress(AttributeError):
                return model.get_submodule(f"{wrapped}{adapted}{unit}".removesuffix(".base_layer"))
    raise ValueError(f"unit {unit!r}: the model has no module of this name to observe")


def adapters(model: nn.Module, unit: str, before: tuple[nn.Parameter, ...] = ()) -> tuple[nn.Parameter, ...]:
    """The trainable parameters below the unit's name, of its operators and of everything else there; where there is
    none now, those of `before`.

    One that stands below several units counts in each. ValueError where there is none at all: adapters
    have to be there before.
    """
    found = tuple(p for p in watched(model, unit).parameters() if p.requires_grad) or before
    if not found:
        raise ValueError(
            f"observe='adapter': unit {unit!r} has no trainable parameter; add its adapters first, leave it out of the "
            "targets, or use observe='input_grad'"
        )
    return found


class OutputGradients:
    """Norms of the gradients that reach the modules' outputs, summed on the device as backward passes them.

    n = sqrt(sum over all backward passes since the last call of ||dL/dy||^2), L as backward started from it: each
    micro-batch's share of the step's loss. Every token of a step has its own element of y, so this is
    the norm of the whole step's gradient, and it takes no mean over micro-batches. Of a module that returns several
    tensors (an attention its weights, a mixture its routing) y is the first floating one, looked for in tuples, lists
    and mappings. A module that runs several times in a step adds up.

    Passes without a graph (evaluation) and forward passes without a backward one leave no trace; under activation
    checkpointing (reentrant or not) each output has one gradient and counts once. A backward pass whose gradients are
    thrown away counts as well: `Controller.discard` takes it back. Changes no gradient, keeps no tensor.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        """Watches the modules of these names until `close`; several units may watch one.

        ValueError for one that is not there or never runs."""
        modules = [watched(model, unit) for unit in units]
        for unit, module in zip(units, modules, strict=True):
            if type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"observe='input_grad': unit {unit!r} is a {type(module).__name__}, which has no output of its "
                    "own; choose other units"
                )
        self.enabled = True
        """While False, backward passes are not this step's (`ConvertedModel.no_side_effects`) and do not count."""
        device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        place = {module: i for i, module in enumerate(dict.fromkeys(modules))}
        shared = len(place) < len(modules)
        self._places = torch.tensor([place[module] for module in modules], device=device) if shared else None
        modules = list(place)
        self._squares = torch.zeros(len(modules), dtype=torch.float64, device=device)
        self._all_observed = torch.ones(len(modules), dtype=torch.bool, device=device)
        self._seen: set[int] = set()
        self._warned = False
        self._handles = [m.register_forward_hook(partial(self._forward, i)) for i, m in enumerate(modules)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """(norm (U,) float64, observed (U,) bool) of the passes since the last call; a new step begins.

        A unit that no gradient reached is not observed. Each tensor's norm is accumulated in float32 (float64 for
        float64); NaN and Inf pass through. Does not wait for the device.
        """
        squares, observed = self.parts()
        return squares.sqrt(), observed

    def parts(self) -> tuple[Tensor, Tensor]:
        """The same with squared norms (U,): what a rank's own batch adds to those of all."""
        squares = self._squares.clone()
        observed = self._all_observed
        if len(self._seen) < len(squares):
            observed = flags([i in self._seen for i in range(len(squares))], squares.device)
        if not self._seen and not self._warned:
            self._warned = True
            warnings.warn(
                "no gradient reached any unit's output in this step: call step() after backward(), and have something "
                "trainable before the units",
                stacklevel=users_level(),
            )
        self.reset()
        return (squares, observed) if self._places is None else (squares[self._places], observed[self._places])

    def reset(self) -> None:
        """Forgets the passes since the last call: they were not this step's."""
        self._squares.zero_()
        self._seen.clear()

    def close(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable
    def _forward(self, index: int, _module: nn.Module, _inputs: object, output: object) -> None:
        y = _first(output)
        if y is not None and y.requires_grad:
            y.register_hook(partial(self._backward, index))

    @torch.no_grad()
    def _backward(self, index: int, grad: Tensor) -> None:
        if self.enabled:
            wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(grad, dtype=wide).to(self._squares)
            self._squares[index].add_(norm.square_())
            self._seen.add(index)


def _first(output: object) -> Tensor | None:
    """The first floating tensor in what a module returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts: Sequence[object] = ()
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = output
    return next((found for found in map(_first, parts) if found is not None), None)
