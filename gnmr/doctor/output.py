"""Read the output of a function that runs a model: logits, targets, a loss, or some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnmr.doctor.guards import refuse_not_finite, scalar
from gnmr.errors import require
from gnmr.measure.kl import IGNORED, divergence, draw_labels

_RIGHT = "must be logits (..., V), these and targets (...), an output with logits, or one number, the mean loss"


@dataclass(frozen=True)
class Output:
    """The output of one batch of S sequences with T tokens."""

    logits: Tensor | None
    """(S, T, V) or (S, V); None: there is only a loss."""
    targets: Tensor | None
    """(S, T) or (S,) int64, `IGNORED` at positions that do not count."""
    loss: Tensor | None
    """Mean over positions that count, in nats."""

    @property
    def loss_value(self) -> float:
        """Return the loss, or NaN without one."""
        return math.nan if self.loss is None else float(self.loss.detach())

    def refuse_not_finite(self, where: str, model: nn.Module) -> None:
        """Raise ValueError if the loss is not finite, or without one the predictions; single logits may be -inf."""
        value, right = self.loss_value, "is not finite; has it any targets?"
        if self.targets is not None:
            right = "is not finite; has a target a logit of -inf?"
        elif self.loss is None:
            assert self.logits is not None
            value, right = float(self.logits.detach().float().logsumexp(-1).mean()), "has logits that are not finite"
        refuse_not_finite(value, where, model, right)

    def objective(self, labels: str, generator: torch.Generator, where: str) -> tuple[Tensor, int | None]:
        """Return the scalar to differentiate and the number of terms in its mean (None: only the caller knows).

        With labels="model", labels are drawn from the logits; without logits, the loss is used.
        """
        if self.logits is None or labels == "data":
            right = "has no loss to take the data's labels from; use labels='model', or give the targets"
            require(self.loss is not None, where, "logits", right)
            terms = None if self.targets is None else int((self.targets != IGNORED).sum())
            return scalar(self.loss, where), terms
        drawn = draw_labels(self.logits, generator, self.targets).flatten()
        require(self.logits.requires_grad, where, "logits without gradient", "must depend on the model's weights")
        return F.cross_entropy(self.logits.flatten(0, -2).float(), drawn), int((drawn != IGNORED).sum())

    def kl_to(self, low: Output) -> np.ndarray | None:
        """Return the KL of each sequence against the same batch's `low` output, (S,) float64; None without logits.

        If sequences have different numbers of positions that count, their mean is still the KL per token of the batch,
        and their spread is that of this ratio over sequences (linearized, so single numbers may be negative).
        """
        if self.logits is None or low.logits is None:
            return None
        found: np.ndarray = divergence(self._log_p, low.logits, self.targets).cpu().numpy()
        if self.targets is not None:
            counts = (self.targets != IGNORED).view(len(self.targets), -1).sum(dim=1).cpu().numpy()
            counts = counts[counts > 0]
            if (counts != counts[0]).any():
                mean = np.average(found, weights=counts)
                with np.errstate(invalid="ignore"):  # predictions may not be finite
                    found = mean + counts / counts.mean() * (found - mean)
        return found

    def apart(self, other: Output) -> float:
        """Return the KL per token to another output of the same batch; without logits, the difference of the losses.

        Differences of losses within 16 roundings are 0, because sums may be in another order on a GPU.
        """
        if (kl := self.kl_to(other)) is not None:
            return float(kl.mean())
        assert self.loss is not None
        rounding = 16 * torch.finfo(self.loss.dtype).eps * abs(self.loss_value)
        return max(0.0, abs(self.loss_value - other.loss_value) - rounding)

    @cached_property
    def _log_p(self) -> Tensor:
        """Return log-probabilities (S, T, V) in float32, computed once for all comparisons."""
        assert self.logits is not None
        return F.log_softmax(self.logits.detach().float(), dim=-1)


def output_of(found: Any, where: str, trained: bool = True) -> Output:
    """Return the `Output` in the result of a function.

    Args:
        found: the result.
        where: its name in messages.
        trained: True if it must have a gradient.

    Raises ValueError if the result is of another kind.
    """
    logits, targets, loss = None, None, None
    if isinstance(found, Tensor) and found.numel() == 1:
        loss = scalar(found, where, trained)
    elif isinstance(found, Tensor):
        logits = found
    elif isinstance(found, tuple) and len(found) == 2:
        logits, targets = found
    else:
        logits, loss = getattr(found, "logits", None), getattr(found, "loss", None)
        require(isinstance(logits, Tensor), where, type(found).__name__, _RIGHT)
        assert logits is not None
        if loss is not None and logits.shape[-1] == 1:  # rewards or values: there is no distribution
            return Output(None, None, scalar(loss, where, trained))
    if logits is not None:
        require(isinstance(logits, Tensor) and logits.dim() >= 2, where, type(logits).__name__, _RIGHT)
        right = "have one number per position, and no probabilities; give a loss, for example by labels"
        require(logits.shape[-1] > 1, where, f"logits {tuple(logits.shape)}", right)
        logits = logits.reshape(len(logits), -1, logits.shape[-1]) if logits.dim() > 3 else logits
        if targets is not None:
            fits = isinstance(targets, Tensor) and targets.numel() == logits.shape[:-1].numel()
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            require(fits, where, f"logits {tuple(logits.shape)}, targets {shape}", "must be of the same positions")
            targets = targets.reshape(logits.shape[:-1])
            whole = not (targets.is_floating_point() or targets.dtype == torch.bool)
            require(whole, where, f"targets {targets.dtype}", "must be whole numbers (int64), or -100")
            targets = targets.long()
            counts = targets != IGNORED
            require(bool(counts.any()), where, "targets", "all are left out (-100); give some")
            known = bool(((targets >= 0) & (targets < logits.shape[-1]))[counts].all())
            require(known, where, "targets", f"must be below {logits.shape[-1]}, the width of the logits, or -100")
            loss = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    return Output(logits, targets, loss)
