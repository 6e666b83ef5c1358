"""The interface of a gradient transform, and what the transforms share.

A transform runs between backward and the optimizer: it may change the gradients and skip the update. It switches no
path; the controller reads the gradients before it.

Of a model whose parameters are sharded (FSDP2) each rank changes its own parts, by numbers of the whole: `tensor_norms`
sums over ranks, and whoever goes through elements takes `local` ones.

Two rules hold for all of them. Nothing waits for the device: decisions are tensors. And a step whose loss or gradient
is not finite changes no state: new state is *selected* (`Transform.remember`), never multiplied by a flag, because
0 * NaN = NaN. What such a step leaves in `.grad` does not matter: the caller skips the update.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnmr.control.device import flags
from gnmr.distributed.reduce import Ranks
from gnmr.distributed.shards import counts, is_sharded, local
from gnmr.errors import UserError


@dataclass(frozen=True)
class StepContext:
    """A step, besides its gradients. Tensors are scalars on the parameters' device."""

    step: int
    """Number of the step, from 1. Skipped steps count."""
    loss: Tensor
    """Mean loss of the step, nats."""
    grad_norm: Tensor
    """Global 2-norm of the gradients before any transform, float64."""
    nonfinite: Tensor
    """bool: the loss or a gradient is not finite, the update will be skipped."""
    optimizer: torch.optim.Optimizer


class Transform(ABC):
    """A change of the gradients before the optimizer reads them; keyword arguments of a subclass are its options.

    `state` holds tensors of fixed names and shapes: everything that the next step depends on besides the options.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """UserError where no parameter is trainable. A parameter under several names (tied) counts once."""
        self.parameters = list({id(p): p for _, p in named_parameters if p.requires_grad}.values())
        if not self.parameters:
            raise UserError("a gradient transform needs at least one trainable parameter")
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def __call__(self, context: StepContext) -> Tensor | None:
        """Change the gradients in place; return a bool scalar "skip this update", or None for never.

        Parameters without a gradient are skipped. Does not wait for the device.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """ValueError where `state` is not of a transform of this kind for a model of this shape."""
        shapes = lambda tensors: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes(state) != shapes(self.state):
            raise ValueError(f"{type(self).__name__} has the state {shapes(self.state)}, not {shapes(state)}")
        self.state = {name: state[name].to(old.device, old.dtype, copy=True) for name, old in self.state.items()}

    def remember(self, where: Tensor, **new: Tensor) -> None:
        """Replaces the state by `new` where `where` (bool, broadcastable) is true."""
        for name, value in new.items():
            self.state[name] = torch.where(where, value, self.state[name])


def tensor_norms(parameters: Sequence[nn.Parameter], order: float = 2.0) -> Tensor:
    """Norm of each parameter's gradient, (P,) float64, accumulated in float32; 0 where there is none. NaN passes.

    `order` is 2 or Inf. Where parameters are sharded: of the whole ones, the same on every rank, by one collective.
    """
    return norms_of([p.grad for p in parameters], parameters, order)


def norms_of(tensors: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], order: float = 2.0) -> Tensor:
    """`tensor_norms` of these, each of its parameter's shape and in the same shards."""
    there = [None if one is None or local(one).numel() == 0 else local(one) for one in tensors]
    norms = iter(
        torch._foreach_norm([one for one in there if one is not None], order, dtype=torch.float32)
        if any(one is not None for one in there)
        else ()
    )
    zero = torch.zeros((), device=parameters[0].device)
    found = torch.stack([next(norms) if one is not None else zero for one in there]).double()
    if not any(is_sharded(p) for p in parameters):
        return found
    if order == torch.inf:
        Ranks().take_largest(found)
        return found
    counted = flags([counts(p) for p in parameters], found.device)
    return Ranks().sum({"squares": torch.where(counted, found.square(), 0.0)})["squares"].sqrt()


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """gradient <- factor * gradient, rounded once: the product of a bf16 gradient is formed in float32. Of one that is
    sharded this rank's part, by one factor or one for each of its rows."""
    own = local(gradient)
    own.copy_(own.float().mul_(factor))


def scale_gradients(parameters: Sequence[nn.Parameter], factors: Tensor) -> None:
    """Scale each parameter's gradient in place by its factor of `factors`, (P,)."""
    for parameter, factor in zip(parameters, factors.float().unbind(), strict=True):
        if parameter.grad is not None:
            scale_gradient(parameter.grad, factor)


def check_options(make: Callable[..., object], name: str, options: Mapping[str, Any]) -> None:
    """ValueError for an option that is no keyword-only argument of `make`, the constructor of what is called `name`."""
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(f"{option}: {name} has no such option, it has {', '.join(known)}")
