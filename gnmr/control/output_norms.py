"""Where the norm of a unit is taken if it is not that of its operators' own parameters.

    parameters   the gradient of the unit's own parameters: those of its operators (`gnmr.control.norms`)
    adapter      the gradient of the trainable parameters below the unit's name
    input_grad   the gradient of the loss with respect to the unit's output: the input of its backward pass

The paper fine-tunes LoRA matrices on a frozen base (5.3) and does not say which norm it takes there. The routed
operators then have no weight gradient. The trained parameters of a layer are its adapters, so this setting needs
`adapter`. `input_grad` needs nothing trainable in the unit, only something trainable before it. Examples are models
that are partly frozen and partly fine-tuned in full, and INT8 layers without adapters. It sees only the backward
signal, not the unit's own input.

An adapter wraps a frozen linear: peft calls that linear `base_layer` and puts it below a module with the linear's
former name. A unit `...q_proj.base_layer` is therefore monitored at `...q_proj`, whose output is the sum of the linear
and the adapter. The gradient is the same for both terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from gnmr.compiler import between_graphs, compiler_loaded
from gnmr.control.device import flags
from gnmr.control.unit import Slice
from gnmr.errors import warn


def watched(model: nn.Module, unit: str) -> nn.Module:
    """Return the module at which a unit is monitored.

    Raises:
        ValueError: if the model has no module of this name.
    """
    for wrapped in ("", "module."):  # DistributedDataParallel
        for adapted in ("", "base_model.model."):  # prefix of peft's model
            with suppress(AttributeError):
                return model.get_submodule(f"{wrapped}{adapted}{unit}".removesuffix(".base_layer"))
    raise ValueError(
        f"unit {unit!r}: the model has no module of this name to observe; use a kind of unit that is a module: "
        "operator, layer or block"
    )


def adapters(
    model: nn.Module, unit: str, before: tuple[nn.Parameter | Slice, ...] = ()
) -> tuple[nn.Parameter | Slice, ...]:
    """Return the trainable parameters below the unit's name, those of its operators included, or else `before`.

    A parameter below several units counts in each.

    Raises:
        ValueError: if there is none at all: adapters have to be added first.
    """
    trained = tuple(p for p in watched(model, unit).parameters() if p.requires_grad) or before
    if not trained:
        raise ValueError(
            f"observe='adapter': unit {unit!r} has no trainable parameter; add its adapters first, leave it out of the "
            "targets, or use observe='input_grad'"
        )
    return trained


class OutputGradients:
    """Norms of the gradients that reach the modules' outputs, summed on the device as backward passes them.

    n = sqrt(sum over all backward passes since the last call of ||dL/dy||^2), where L is the loss from which backward
    started: each micro-batch's share of the step's loss. Every token of a step has its own element of y. This is
    therefore the norm of the whole step's gradient, and no mean over micro-batches is taken.

    If a module returns several tensors (an attention its weights, a mixture its routing), y is the first floating-point
    tensor in tuples, lists and mappings. A module that runs several times in a step adds up.

    Passes without a graph (evaluation) and forward passes without a backward pass leave no trace. Under activation
    checkpointing (reentrant or not) each output has one gradient and counts once. A backward pass whose gradients are
    discarded counts too, until `Controller.discard` removes it. No gradient is changed and no tensor is kept.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        """Hook the modules of these names until `close`.

        Raises:
            ValueError: if one does not exist or never runs.
        """
        modules = [watched(model, unit) for unit in units]
        for unit, module in zip(units, modules, strict=True):
            # A container such as ModuleList is never called, so its hook would never fire.
            if type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"observe='input_grad': unit {unit!r} is a {type(module).__name__}, which has no output of its "
                    "own; choose other units"
                )
        self.enabled = True
        """Whether backward passes belong to this step and count (False in `ConvertedModel.no_side_effects`)."""
        device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        index_of: dict[nn.Module, int] = {}
        for module in modules:
            # Units that are GEMMs of one operator share a module, which gets one hook.
            index_of.setdefault(module, len(index_of))
        self.first = [modules.index(module) for module in index_of]
        """Index of the first unit of each norm: the GEMMs of an operator have one in common."""
        indices = [index_of[module] for module in modules]
        self._indices = torch.tensor(indices, device=device) if len(index_of) < len(modules) else None
        self._squares = torch.zeros(len(index_of), dtype=torch.float64, device=device)
        self._all_observed = torch.ones(len(index_of), dtype=torch.bool, device=device)
        self._reached: set[int] = set()
        """Modules whose outputs a gradient reached in this step."""
        self._warned = False
        self._handles = [module.register_forward_hook(partial(self._forward, i)) for module, i in index_of.items()]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return (norm (U,) float64, observed (U,) bool) of the passes since the last call; start a new step.

        A unit that no gradient reached is not observed. Each tensor's norm is accumulated in float32 (float64 for
        float64); NaN and Inf pass through. Does not wait for the device.
        """
        squares, observed = self.parts()
        return squares.sqrt(), observed

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return the same with squared norms (U,): this rank's terms of the sum over all batches."""
        # `reset` zeroes the buffer in place.
        squares = self._squares.clone()
        observed = self._all_observed
        if len(self._reached) < len(squares):
            observed = flags([i in self._reached for i in range(len(squares))], squares.device)
        if not self._reached and not self._warned:
            self._warned = True
            warn(
                "no gradient reached any unit's output in this step: call step() after backward(), and have something "
                "trainable before the units"
            )
        self.reset()
        return (squares, observed) if self._indices is None else (squares[self._indices], observed[self._indices])

    def reset(self) -> None:
        """Forget the passes since the last call, which did not belong to this step."""
        self._squares.zero_()
        self._reached.clear()

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def _forward(self, index: int, _module: nn.Module, _inputs: object, output: object) -> None:
        (self._watch_between_graphs if compiler_loaded() else self._watch)(index, output)

    def _watch(self, index: int, output: object) -> None:
        # A hook on the tensor, not on the module: it fires once even if the forward pass is recomputed.
        y = _first(output)
        if y is not None and y.requires_grad:
            y.register_hook(partial(self._backward, index))

    _watch_between_graphs = between_graphs(_watch)

    @torch.no_grad()
    def _backward(self, index: int, grad: Tensor) -> None:
        if self.enabled:
            dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
            norm = torch.linalg.vector_norm(grad, dtype=dtype).to(self._squares)
            # Squared and summed in float64: passes add up without losing the small ones.
            self._squares[index].add_(norm.square_())
            # The host knows this when the hook runs, without waiting for the device.
            self._reached.add(index)


def _first(output: object) -> Tensor | None:
    """Return the first floating-point tensor in a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    elements: Sequence[object] = ()
    if isinstance(output, Mapping):
        elements = list(output.values())
    elif isinstance(output, (tuple, list)):
        elements = output
    return next((tensor for tensor in map(_first, elements) if tensor is not None), None)
