"""Passes of a converted model besides those of its step: under either path, or the step again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gnmr.attachment.blame import NO_LEVEL, Level, Verdict, explain, find_nonfinite
from gnmr.attachment.replay import Again, Seen, Start, replaying
from gnmr.control import Unit
from gnmr.control.evidence import of_shards, part_of, summed
from gnmr.control.norms import Distinct, UnitNorms, gradient_norms
from gnmr.control.ranks import Ranks
from gnmr.errors import positive
from gnmr.precision import ConvertedModel


def true_gap(
    converted: ConvertedModel,
    model: nn.Module,
    units: Sequence[Unit],
    ranks: Ranks | None,
    backward: Callable[[], object],
) -> Tensor:
    """See `Router.true_gap`; `ranks`: those that may hold parts of the parameters."""
    gradients: list[list[list[Tensor]]] = []
    distinct = Distinct(unit.parameters for unit in units)
    ranks, device = of_shards(distinct.groups, ranks), units[0].parameters[0].device
    for recovering in (False, True):
        # Dropout draws in each of them what the step will draw.
        with converted.no_side_effects(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for operator in converted.operators:
                operator.switch(recovering)
            backward()
        # If one path leaves a parameter without gradient (an expert without tokens), the other's is the gap.
        gradients.append(
            [
                [part_of(torch.zeros_like(p) if p.grad is None else p.grad, p, ranks).float() for p in group]
                for group in distinct.groups
            ]
        )
        model.zero_grad(set_to_none=True)
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    gaps = torch.stack(
        [
            sum(((a - b).square().sum(dtype=torch.float64) for a, b in zip(low, high, strict=True)), nothing)
            for low, high in zip(*gradients, strict=True)
        ]
    )
    return distinct.of_each(summed(gaps, ranks))


def explain_step(
    converted: ConvertedModel,
    model: nn.Module,
    units: Sequence[Unit],
    loss_of_batch: Callable[[], Tensor | Iterable[Tensor]],
    step: int,
    loss: float | None,
    usual: tuple[float, float] | None,
    grad_scale: float,
) -> Verdict:
    """See `Router.explain`; the verdict bears the number `step`."""
    if not callable(loss_of_batch):
        kind = type(loss_of_batch).__name__
        raise ValueError(f"loss_of_batch: must be a function that runs the step's forward passes again, not a {kind}")
    if loss is not None and (isinstance(loss, bool) or not isinstance(loss, int | float)):
        raise ValueError(f"loss: must be a number (loss.item()), not a {type(loss).__name__}")
    positive(grad_scale=grad_scale)
    device = units[0].parameters[0].device
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in parameters]
    norm = float(gradient_norms(parameters).square().sum().sqrt()) / grad_scale
    of_units = UnitNorms([unit.parameters for unit in units])

    def run(backward: bool) -> Tensor:
        total: Tensor | None = None
        for part in _parts(loss_of_batch(), backward):
            if backward:
                part.backward()
            total = part.detach() if total is None else total + part.detach()
        if total is None:
            raise ValueError("loss_of_batch: gave no loss")
        return total

    def both() -> Seen:
        value = float(run(True))
        if all(parameter.grad is None for parameter in parameters):
            raise ValueError("loss_of_batch: its backward pass reaches no parameter of the attached model")
        found = Seen(value, float(gradient_norms(parameters).square().sum().sqrt()), of_units()[0].cpu().numpy())
        for parameter in parameters:
            parameter.grad = None
        return found

    again = Again(converted, Start.of(converted, device), lambda: run(False), both)
    for parameter in parameters:
        parameter.grad = None
    try:
        with replaying(converted, model, device):
            seen = Seen(again.loss() if loss is None else loss, norm)
            if not math.isfinite(seen.loss):
                return find_nonfinite(again, step)
            if all(gradient is None for gradient in kept):
                raise ValueError("no gradients: call explain between the step's last backward pass and step()")
            return explain(again, seen, _levels(seen, usual), step, same=0.25)
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _parts(given: object, backward: bool) -> Iterator[Tensor]:
    """The losses that `loss_of_batch` gave. ValueError for what is none, or has no graph for `backward`."""
    if not isinstance(given, Iterable):
        raise ValueError(f"loss_of_batch: gave a {type(given).__name__}, not the loss that backward started from")
    for part in [given] if isinstance(given, Tensor) else given:
        if not isinstance(part, Tensor) or part.numel() != 1:
            what = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise ValueError(f"loss_of_batch: gave {what}, not the scalar loss that backward started from")
        if backward and not part.requires_grad:
            raise ValueError("loss_of_batch: its loss has no graph (detached, or made under no_grad)")
        yield part


def _levels(seen: Seen, usual: tuple[float, float] | None) -> tuple[Level, Level]:
    """From a fifth above what is `usual` on it is a spike; where neither is that far, the loss is one."""
    if usual is None:
        if math.isfinite(seen.norm):
            raise ValueError("usual: give loss and gradient norm of ordinary steps, or nothing says what a spike is")
        return NO_LEVEL, NO_LEVEL
    sound = isinstance(usual, Sequence) and len(usual) == 2 and all(isinstance(one, int | float) for one in usual)
    if not (sound and math.isfinite(usual[0]) and usual[1] > 0):
        raise ValueError(f"usual={usual!r}: must be two numbers, loss and gradient norm of ordinary steps")
    loss, norm = (Level(value, value + abs(value) / 5) for value in usual)
    return (loss, norm) if loss.spike(seen.loss) or norm.spike(seen.norm) else (Level(usual[0], usual[0]), norm)
