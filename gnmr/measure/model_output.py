"""Read the output of a function that runs a model: logits, targets, a loss, or some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gnmr.measure.guards import refuse_not_finite, scalar
from gnmr.measure.kl import IGNORED, ROWS, divergence, draw_labels, losses, token_divergence
from gnmr.options import require

_APART = 0.1
"""Share of a gradient that may be left of its sum over a dimension with a softmax: rounding, and other terms."""
_RIGHT = "must be logits (..., V), these and targets (...), an output with logits, or one number, the mean loss"


@dataclass(frozen=True)
class Output:
    """The output of one batch of S sequences with T tokens."""

    logits: Tensor | None
    """(S, T, V) or (S, V); None: there is only a loss."""
    targets: Tensor | None
    """(S, T) or (S,) int64, `IGNORED` at positions that do not count; None: all count."""
    loss: Tensor | None
    """Mean over positions that count, in nats."""
    terms: int = 0
    """Number of terms in this mean: positions that count, or without logits what `with_terms` counts."""
    labeled: bool = True
    """False: the targets only mark the positions that count."""
    sequence_dim: int = 0
    """Dimension of the logits that numbers sequences: 1 for (T, S, V)."""
    source: Tensor | None = None
    """The logits in the shape in which the model gave them, which its loss depends on."""

    @property
    def loss_value(self) -> float:
        """Return the loss, or NaN without one."""
        return math.nan if self.loss is None else float(self.loss.detach())

    def refuse_not_finite(self, where: str, model: nn.Module) -> None:
        """Refuse an output whose loss, or without one whose predictions, are not finite; single logits may be -inf.

        Args:
            where: name of the output in the message.
            model: the model that gave it, whose first non-finite parameter the message names.

        Raises:
            ValueError: they are not finite.
        """
        value, right = self.loss_value, "is not finite; has it any targets?"
        if self.targets is not None:
            right = "is not finite; has a target a logit of -inf?"
        elif self.loss is None:
            assert self.logits is not None
            slices = self.logits.detach().flatten(0, -2).split(ROWS)
            value = float(torch.cat([rows.float().logsumexp(-1) for rows in slices]).mean())
            right = "has logits that are not finite"
        refuse_not_finite(value, where, model, right)

    def with_terms(self, linears: Sequence[tuple[nn.Module, int, GradientEdge]]) -> Output:
        """Return this output with the positions that the loss counts, or without logits the number of its terms.

        They are the rows with a gradient: of the logits, or of the linear that was called last on the way to the loss.
        The calls of this linear count together if they have no more rows than the largest call of all. The output is
        returned as it is if its positions are known, or if it has no graph.

        Args:
            linears: (linear, number of rows, result) of the calls of the model's linears, in their order.
        """
        if self.loss is None or self.targets is not None or not self.loss.requires_grad:
            return self
        if self.logits is None:
            # Without logits, the rows with a gradient in the linear nearest to the loss are its terms.
            most = max((rows for _, rows, _ in linears), default=0)
            for last, _, result in reversed(linears):
                if terms := self._rows_with_gradient(result):
                    calls = [(rows, edge) for linear, rows, edge in linears if linear is last]
                    if sum(rows for rows, _ in calls) <= most:  # the tokens in parts, as of a head in chunks
                        terms = sum(self._rows_with_gradient(edge) for _, edge in calls)
                    return replace(self, terms=terms)
            return self
        # With logits, a position counts if the loss depends on its logits.
        gradient = self._gradient()
        if gradient is None or not (counts := _counted(gradient)).any():
            return self
        return replace(self, targets=torch.where(counts, 0, IGNORED), labeled=False, terms=int(counts.sum()))

    @property
    def without_softmax(self) -> bool:
        """Return True if the loss takes no softmax over the last dimension of the logits.

        It is one of regression or of several labels, or has its classes in another dimension: the gradient of a softmax
        adds up to 0 over its dimension. In float16 small parts of it are lost, so that nothing can be said.
        """
        if (gradient := self._gradient()) is None or gradient.dtype == torch.float16:
            return False
        apart = gradient.sum(dim=-1, dtype=torch.float32).abs().sum()
        return bool(apart > _APART * gradient.abs().sum(dtype=torch.float32))

    def _rows_with_gradient(self, result: GradientEdge) -> int:
        assert self.loss is not None
        (gradient,) = torch.autograd.grad(self.loss, result, retain_graph=True, allow_unused=True)
        return 0 if gradient is None else int(_counted(gradient).sum())

    def _gradient(self) -> Tensor | None:
        """Return the gradient of the loss with respect to the logits; None if it has none."""
        source, loss = self.source, self.loss
        if source is None or loss is None or self.logits is None or not (source.requires_grad and loss.requires_grad):
            return None
        (gradient,) = torch.autograd.grad(loss, source, retain_graph=True, allow_unused=True)
        return None if gradient is None else gradient.reshape(self.logits.shape)

    def detached(self) -> Output:
        """Return this output without its graph."""
        logits, loss = (None if x is None else x.detach() for x in (self.logits, self.loss))
        return replace(self, logits=logits, loss=loss, source=None)

    def objective(self, labels: str, generator: torch.Generator, where: str) -> tuple[Tensor, Tensor | None]:
        """Return the scalar to differentiate, and its part of each sequence.

        Args:
            labels: `model` draws labels from the logits, `data` takes the targets. Without logits, the loss is used.
            generator: draws the labels.
            where: name of the output in messages.

        Returns:
            The mean loss in nats, (), with its graph, and its part of each sequence, (S,); None: unknown.

        Raises:
            ValueError: the loss that is needed is missing, or is no number with a gradient.
        """
        if self.logits is None or labels == "data":
            right = "has no loss to take the data's labels from; use labels='model', or give the targets"
            require(self.loss is not None, where, "logits", right)
            # Targets without labels only say which positions count, so the loss itself is differentiated.
            if self.logits is None or self.targets is None or not self.labeled:
                return scalar(self.loss, where), None
            chosen = self.targets
        else:
            require(self.logits.requires_grad, where, "logits without gradient", "must depend on the model's weights")
            logits, targets, dim = self.logits, self.targets, self.sequence_dim
            if dim:  # sequence by sequence, so that the layout does not change the labels
                logits, targets = logits.transpose(0, dim), None if targets is None else targets.transpose(0, dim)
            chosen = draw_labels(logits, generator, targets).transpose(0, dim)
        by_position = losses(self.logits.flatten(0, -2), chosen.flatten()).view(chosen.shape) / self.terms
        # (S, T) to (S,); positions (S,) are a sequence each.
        by_sequence = by_position
        if by_position.dim() > 1:
            by_sequence = by_position.transpose(0, self.sequence_dim).flatten(1).sum(dim=1)
        return scalar(by_position.sum(), where), by_sequence

    def kl_to(self, low: Output) -> np.ndarray | None:
        """Return the KL of `low`, an output of the same batch, against this one.

        Returns:
            (KL in nats, positions that count) of each sequence that has any, (S, 2) float64, both added up over
            positions; None without logits. The quotient is nats per token (`divergence`).
        """
        if self.logits is None or low.logits is None:
            return None
        if self.targets is None:
            counts = torch.ones(self.logits.shape[:-1], dtype=torch.bool, device="cpu")
        else:
            counts = (self.targets != IGNORED).cpu()
        high_logits, low_logits, targets = self.logits, low.logits, self.targets
        # (T, S, V) to (S, T, V).
        if self.sequence_dim:
            high_logits, low_logits, counts = (x.transpose(0, 1) for x in (high_logits, low_logits, counts))
            targets = None if targets is None else targets.transpose(0, 1)
        number = counts.flatten(1).sum(dim=1) if counts.dim() > 1 else counts.long()
        # A sequence without a position that counts has no KL, and `divergence` leaves it out too.
        number = number[number > 0].double()
        kl = divergence(high_logits, low_logits, targets).cpu()
        nats_and_number: np.ndarray = torch.stack([kl * number, number], dim=1).numpy()
        return nats_and_number

    def tokens_to(self, low: Output) -> np.ndarray | None:
        """Compare single tokens with those of `low`, an output of the same batch.

        Returns:
            (KL in nats, 1 if the top prediction is unchanged) of each position that counts, (N, 2); None without
            logits.
        """
        if self.logits is None or low.logits is None:
            return None
        kl, same_top = token_divergence(self.logits, low.logits, self.targets)
        nats_and_same: np.ndarray = torch.stack([kl, same_top.double()], dim=1).cpu().numpy()
        return nats_and_same

    def apart(self, other: Output) -> float:
        """Return how far another output of the same batch is from this one.

        Returns:
            The KL in nats per token; without logits, the difference of the losses beyond 16 roundings, because sums may
            be in another order on a GPU.
        """
        if (kl := self.kl_to(other)) is not None:
            return float(kl[:, 0].sum() / kl[:, 1].sum())
        assert self.loss is not None
        rounding = 16 * torch.finfo(self.loss.dtype).eps * abs(self.loss_value)
        return max(0.0, abs(self.loss_value - other.loss_value) - rounding)


def output_of(result: Any, where: str, trained: bool = True) -> Output:
    """Return the `Output` in the result of a function.

    Args:
        result: the result.
        where: its name in messages.
        trained: True if it must have a gradient.

    Raises:
        ValueError: the result is of another kind.
    """
    logits, targets, loss, source = None, None, None, None
    if isinstance(result, Tensor) and result.numel() == 1:
        loss = scalar(result, where, trained)
    elif isinstance(result, Tensor):
        logits = result
    elif isinstance(result, tuple) and len(result) == 2:
        logits, targets = result
    else:
        logits, loss = getattr(result, "logits", None), getattr(result, "loss", None)
        require(isinstance(logits, Tensor), where, type(result).__name__, _RIGHT)
        assert logits is not None
        if loss is not None and logits.shape[-1] == 1:  # rewards or values: there is no distribution
            return Output(None, None, scalar(loss, where, trained))
    if logits is not None:
        require(isinstance(logits, Tensor) and logits.dim() >= 2, where, type(logits).__name__, _RIGHT)
        right = "have one number per position, and no probabilities; give a loss, for example by labels"
        require(logits.shape[-1] > 1, where, f"logits {tuple(logits.shape)}", right)
        source = logits
        logits = logits.reshape(len(logits), -1, logits.shape[-1]) if logits.dim() > 3 else logits
        if targets is not None:
            fits = isinstance(targets, Tensor) and targets.numel() == logits.shape[:-1].numel()
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            require(fits, where, f"logits {tuple(logits.shape)}, targets {shape}", "must be of the same positions")
            targets = targets.reshape(logits.shape[:-1])
            integers = not (targets.is_floating_point() or targets.dtype == torch.bool)
            require(integers, where, f"targets {targets.dtype}", "must be whole numbers (int64), or -100")
            targets = targets.long()
            counts = targets != IGNORED
            require(bool(counts.any()), where, "targets", "all are left out (-100); give some")
            in_vocabulary = bool(((targets >= 0) & (targets < logits.shape[-1]))[counts].all())
            right = f"must be below {logits.shape[-1]}, the width of the logits, or -100"
            require(in_vocabulary, where, "targets", right)
            loss = losses(logits.flatten(0, -2), targets.flatten()).sum() / counts.sum()
    terms = 0
    if logits is not None:
        terms = logits.shape[:-1].numel() if targets is None else int((targets != IGNORED).sum())
    return Output(logits, targets, loss, terms, source=source)


def _counted(gradient: Tensor) -> Tensor:
    """Return where a gradient (..., V) is not 0, (...) bool."""
    return (gradient != 0).any(dim=-1)
