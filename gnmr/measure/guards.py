"""Guard a diagnosis or an audit: restore the model afterwards, and refuse an unusable loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gnmr.conversion.linear import transformed
from gnmr.measure.absent_weights import device_of_passes, gathered, parameter_values, put_away, refuse_unreadable
from gnmr.measure.in_force import values_of
from gnmr.options import require

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode with gradients, and restore the model and PyTorch's random numbers afterwards.

    PyTorch's fast path around the linears of a `nn.TransformerEncoder` is disabled inside.

    Args:
        model: the model. Restored are the modes of its modules, `requires_grad` and `grad` of its parameters, and the
            shards of FSDP2; a gradient is None inside.
    """
    # The fast path multiplies without calling the linears, so no hook would see them.
    fast = torch.backends.mha.get_fastpath_enabled()
    modes = [(module, module.training) for module in model.modules()]
    put_away(model)
    # By module and name, because offloading puts another parameter in the place of one after each pass.
    trained = [
        (module, key, parameter.requires_grad, parameter.grad)
        for module in model.modules()
        for key, parameter in module.named_parameters(recurse=False)
    ]
    places = [*(parameter.device for parameter in model.parameters()), device_of_passes(model)]
    devices = sorted({device.index or 0 for device in places if device is not None and device.type == "cuda"})
    try:
        model.eval()
        for parameter in model.parameters():
            parameter.grad = None  # a custom autograd function may add to it
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.random.fork_rng(devices), torch.enable_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes:
            module.training = mode
        put_away(model)
        for module, key, wanted, grad in trained:
            parameter = getattr(module, key)
            parameter.requires_grad_(wanted)
            parameter.grad = grad


def refuse_without_gradients(model: nn.Module) -> None:
    """Refuse a model without gradients.

    Raises:
        ValueError: nothing brings the model's weights, or they were made in inference mode, or this mode is on.
    """
    name, parameters = type(model).__name__, [*model.parameters()]
    refuse_unreadable(model)
    require(not torch.is_inference_mode_enabled(), "model", name, "has no gradients in inference mode; leave the mode")
    inference = any(parameter.is_inference() for parameter in parameters)
    right = "was made or loaded in torch.inference_mode() and has no gradients; use copy.deepcopy(model) outside of it"
    require(not inference, "model", name, right)


def refuse_transformed(name: str) -> None:
    """Refuse a linear within a transform of torch.func, whose passes cannot be measured.

    Raises:
        ValueError: such a transform is running; the message names the linear.
    """
    right = "runs in a transform of torch.func (vmap, jvp, grad, ...), which has no casts; call it outside of them"
    require(not transformed(), "model", name, right)


def scalar(loss: object, where: str, trained: bool = True) -> Tensor:
    """Return the loss as a tensor ().

    Raises:
        ValueError: the loss is not a tensor of one element, or has no gradient although it is `trained`.
    """
    right = "must be one number with a gradient; does the batch have targets, and is no checkpointing reentrant?"
    if not isinstance(loss, Tensor):
        raise ValueError(f"{where}={type(loss).__name__}: {right}")
    require(loss.numel() == 1, where, f"a tensor {tuple(loss.shape)}", right)
    require(loss.requires_grad or not trained, where, "a tensor without gradient", right)
    return loss.reshape(())


def refuse_reentrant(loss: Tensor) -> None:
    """Refuse a model whose activation checkpointing is reentrant, which hides passes from autograd.

    Raises:
        ValueError: the graph of the loss has a node of such a checkpoint.
    """
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in _graph(loss)):
        raise ValueError("model: its activation checkpointing is reentrant; use use_reentrant=False, or none")


def refuse_hidden(loss: Tensor, without_graph: set[str]) -> None:
    """Raise ValueError if a custom autograd function of the model hides the gradients of linears.

    Args:
        loss: the loss, with its graph.
        without_graph: names of linears that ran and have no graph.
    """
    kinds = [type(node) for node in _graph(loss)] if without_graph else []
    # Private, until a node of a custom function names its class.
    functions = [kind._forward_cls for kind in kinds if issubclass(kind, BackwardCFunction)]  # type: ignore[attr-defined]
    if any(not function.__module__.startswith("gnmr.") for function in functions):
        name = min(without_graph)
        right = f"{name} runs inside a custom autograd function, which hides its gradient (reversible layers)"
        require(False, "run", "...", f"{right}; use layers that are plain modules, or gnmr.attach alone")


def _graph(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of the autograd graph of `loss`."""
    # A reentrant checkpoint is one node of autograd, behind which the passes of its linears cannot be seen.
    seen, ahead = set[Any](), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]


def leaves_of(result: Tensor) -> list[Tensor]:
    """Return the leaves that a tensor depends on and that require a gradient."""
    return [node.variable for node in _graph(result) if hasattr(node, "variable")]


def not_finite(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Look for parameters with NaN or Inf, one after the other.

    Args:
        model: the model. Parameters of a tensor subclass, or of fewer than 16 bits, are passed over.

    Yields:
        (name, number of elements that are not finite, number of all elements) of each parameter that has any.
    """
    for name, parameter in parameter_values(model):
        plain = type(parameter) in (nn.Parameter, Tensor) and parameter.dtype in _DTYPES
        if plain and (number := int((~parameter.isfinite()).sum())):
            yield name, number, parameter.numel()


def refuse_not_finite(
    value: float, where: str, model: nn.Module, right: str = "is not finite; has it any targets?"
) -> None:
    """Refuse a loss that is not finite.

    Raises:
        ValueError: `value` is NaN or Inf; the message names the first parameter of `model` that is not finite, or says
            `right`.
    """
    if math.isfinite(value):
        return
    if wrong := next(not_finite(model), None):
        right = f"{wrong[1]} of the {wrong[2]} elements of {wrong[0]} are not finite; take weights that are"
    raise ValueError(f"{where}={value}: {right}")


@torch.no_grad()
def reach_of(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Return how far a change of each weight by its own norm, or by 1 if that is more, moves the loss.

    Args:
        weights: the weights, whole or sharded; one whose class does not give its values counts with norm 1.
        gradients: their gradients; weights with None are left out.

    Returns:
        ||g|| max(1, ||W||) of the n weights with a gradient, (n,) float32.
    """
    pairs = zip(gradients, weights, strict=True)
    reached = [(g.coalesce().values() if g.is_sparse else gathered(g), values_of(w)) for g, w in pairs if g is not None]
    norms = [g.float().norm() * (1 if w is None else w.float().norm().clamp(min=1)) for g, w in reached]
    return torch.stack(norms) if norms else torch.empty(0)


def refuse_constant(loss: Tensor, reach: Tensor, where: str, of: str) -> None:
    """Raise ValueError if no weight changes the loss: gradients are zeros or rounding errors.

    Args:
        loss: the loss.
        reach: how far the weights move it, see `reach_of`.
        where: name of the loss in the message.
        of: which weights these are.
    """
    if not len(reach):
        return
    # Below the loss's last digit a change moves nothing.
    value, constant = float(loss.detach()), torch.finfo(torch.float32).eps
    zero = f"every gradient that reaches {of} is 0, so the loss is constant"
    right = f"{zero}; does the batch have targets, and is every later layer nonzero?"
    require(not float(reach.max()) <= constant * abs(value), where, value, right)
