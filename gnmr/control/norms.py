"""The norm n[b,t] of a unit: all tensors in one batched call, on the device and without waiting for it.

    parameters   the gradient of the unit's own parameters: those of its operators (section 2, theta_b)
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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor, nn

from gnmr.control.device import flags
from gnmr.control.ranks import Ranks
from gnmr.control.unit import Slice, identity
from gnmr.errors import warn


def gradient_norms(parameters: Sequence[nn.Parameter | Slice]) -> Tensor:
    """Return the 2-norm of each parameter's gradient, (P,) float64; 0 without a gradient.

    Norms accumulate in float32, or in float64 if there are float64 gradients. NaN and Inf pass through. Squares outside
    of float32's range give a norm of Inf (elements above about 1e19) or 0 (below about 1e-23). Does not wait for the
    device.
    """
    return _norms_of([p.grad for p in parameters], parameters[0].device)


def _norms_of(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        return torch.zeros(len(gradients), dtype=torch.float64, device=device)
    kinds = {*map(attrgetter("dtype", "is_sparse"), there)}
    if any(sparse for _, sparse in kinds):  # an embedding's: only some rows are stored, the others are 0
        there = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in there]
    wide = torch.float64 if any(dtype == torch.float64 for dtype, _ in kinds) else torch.float32
    norms = torch.stack(torch._foreach_norm(there, 2, dtype=wide)).double()
    if len(there) == len(gradients):
        return norms
    present = flags([gradient is not None for gradient in gradients], device)
    return torch.zeros(len(gradients), dtype=torch.float64, device=device).masked_scatter_(present, norms)


class Distinct:
    """The distinct groups among groups of parameters, in order; units may share all (the GEMMs of an operator)."""

    def __init__(self, groups: Iterable[Sequence[nn.Parameter | Slice]]) -> None:
        known: dict[tuple[object, ...], int] = {}
        self.groups: list[Sequence[nn.Parameter | Slice]] = []
        self.first: list[int] = []
        """Index of the first occurrence of each distinct group."""
        places: list[int] = []
        for group in groups:
            if (place := known.setdefault(tuple(map(identity, group)), len(known))) == len(self.groups):
                self.groups.append(group)
                self.first.append(len(places))
            places.append(place)
        shared = len(known) < len(places)
        self._places = torch.tensor(places, device=self.groups[0][0].device) if shared else None

    def of_each(self, values: Tensor) -> Tensor:
        """Expand numbers of the distinct groups (G,) to all groups. Does not wait for the device."""
        return values if self._places is None else values[self._places]


class UnitNorms:
    """Norms of units with several parameters each, of one process or, with `ranks`, as parts of a sum."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter | Slice]], ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._distinct = Distinct(groups)
        groups = self._distinct.groups
        self._parameters = [p for group in groups for p in group]
        device = self._parameters[0].device
        self._num_groups = len(groups)
        # Row u holds the indices of unit u's norms, padded with the index of a zero after the last one. Summing rows
        # has a fixed order, unlike adding by index on a GPU, and every rank must choose the same set.
        ends = list(accumulate(len(group) for group in groups))
        widest = max(len(group) for group in groups)
        rows = [
            [*range(end - len(g), end), *[ends[-1]] * (widest - len(g))] for g, end in zip(groups, ends, strict=True)
        ]
        self._places = torch.tensor(rows, device=device)
        self._warned = False
        self._all_observed = torch.ones(self._num_groups, dtype=torch.bool, device=device)
        self._groups = groups
        sharded = ranks is not None and any(ranks.is_sharded(p) for p in self._parameters)
        self._local = ranks.local if ranks is not None and sharded else None
        self._counted: Tensor | None = None

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return (norm (U,) float64, observed (U,) bool); a unit without any gradient is not observed."""
        gradients = self._gradients()
        norms = _norms_of(gradients, self._parameters[0].device)
        if self._num_groups < len(gradients):
            norms = self._of_groups(norms.square()).sqrt()
        return self._distinct.of_each(norms), self._distinct.of_each(self._observed(gradients))

    @property
    def first(self) -> list[int]:
        """Index of the first unit of each norm: the GEMMs of an operator have one in common."""
        return self._distinct.first

    def observed(self) -> Tensor:
        """Return which units have a gradient in this process now, (U,) bool."""
        return self._distinct.of_each(self._observed([p.grad for p in self._parameters]))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's terms of (square (U,), observed (U,), plain ()), float64.

        These are the squared norms of the units, whether they had a gradient, and the square of the unsharded
        gradients, which only the first rank counts.
        """
        ranks, gradients = self._ranks, self._gradients()
        assert ranks is not None, "one process has no parts"
        squares = _norms_of(gradients, self._parameters[0].device).square()
        if self._counted is None:
            self._counted = flags([ranks.counts(p) for p in self._parameters], squares.device)
            self._whole = flags([not ranks.is_sharded(p) for p in self._parameters], squares.device)
        plain = torch.where(self._whole, squares, 0.0).sum()
        squares = torch.where(self._counted, squares, 0.0)
        if self._num_groups < len(gradients):
            squares = self._of_groups(squares)
        return self._distinct.of_each(squares), self._distinct.of_each(self._observed(gradients)).double(), plain

    def _gradients(self) -> list[Tensor | None]:
        if self._local is None:
            return [p.grad for p in self._parameters]
        return [None if p.grad is None else self._local(p.grad) for p in self._parameters]

    def _of_groups(self, squares: Tensor) -> Tensor:
        """Return the sums of the parameters' squares over the distinct groups."""
        return torch.cat([squares, squares.new_zeros(1)])[self._places].sum(dim=1)

    def _observed(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return whether each distinct group has one of the `gradients`, those of all parameters, (U,) bool."""
        if all(gradient is not None for gradient in gradients):
            return self._all_observed
        observed = [any(p.grad is not None for p in group) for group in self._groups]
        if not any(observed) and not self._warned:
            self._warned = True
            warn(
                "no unit has a gradient in this step: call step() after backward() and before zero_grad(), on the "
                "parameters that the model had when the controller was made; where they are sharded or exchanged "
                "afterwards, or the optimizer steps in backward, use observe='input_grad'"
            )
        return flags(observed, self._all_observed.device)


def watched(model: nn.Module, unit: str) -> nn.Module:
    """Return the module at which a unit is monitored. Raises ValueError if the model has no module of this name."""
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

    A parameter below several units counts in each. Raises ValueError if there is none at all: adapters have to be added
    first.
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
        """Hook the modules of these names until `close`. Raises ValueError if one does not exist or never runs."""
        modules = [watched(model, unit) for unit in units]
        for unit, module in zip(units, modules, strict=True):
            if type(module).forward is nn.Module.forward:
                raise ValueError(
                    f"observe='input_grad': unit {unit!r} is a {type(module).__name__}, which has no output of its "
                    "own; choose other units"
                )
        self.enabled = True
        """Whether backward passes belong to this step and count (False in `ConvertedModel.no_side_effects`)."""
        device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        first: dict[nn.Module, int] = {}
        for i, module in enumerate(modules):
            first.setdefault(module, i)
        self.first = list(first.values())
        """Index of the first unit of each norm: the GEMMs of an operator have one in common."""
        place = {module: i for i, module in enumerate(first)}
        shared = len(place) < len(modules)
        self._places = torch.tensor([place[module] for module in modules], device=device) if shared else None
        modules = list(place)
        self._squares = torch.zeros(len(modules), dtype=torch.float64, device=device)
        self._all_observed = torch.ones(len(modules), dtype=torch.bool, device=device)
        self._seen: set[int] = set()
        self._warned = False
        self._handles = [m.register_forward_hook(partial(self._forward, i)) for i, m in enumerate(modules)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return (norm (U,) float64, observed (U,) bool) of the passes since the last call; start a new step.

        A unit that no gradient reached is not observed. Each tensor's norm is accumulated in float32 (float64 for
        float64); NaN and Inf pass through. Does not wait for the device.
        """
        squares, observed = self.parts()
        return squares.sqrt(), observed

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return the same with squared norms (U,): this rank's terms of the sum over all batches."""
        squares = self._squares.clone()
        observed = self._all_observed
        if len(self._seen) < len(squares):
            observed = flags([i in self._seen for i in range(len(squares))], squares.device)
        if not self._seen and not self._warned:
            self._warned = True
            warn(
                "no gradient reached any unit's output in this step: call step() after backward(), and have something "
                "trainable before the units"
            )
        self.reset()
        return (squares, observed) if self._places is None else (squares[self._places], observed[self._places])

    def reset(self) -> None:
        """Forget the passes since the last call, which did not belong to this step."""
        self._squares.zero_()
        self._seen.clear()

    def close(self) -> None:
        """Remove the hooks from the modules."""
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
    """Return the first floating-point tensor in a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts: Sequence[object] = ()
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = output
    return next((found for found in map(_first, parts) if found is not None), None)
