"""Compute the KL divergence between two predictions of a model, labels drawn from the model, and losses.

    KL(p || q) = sum_v p_v (log p_v - log q_v) = sum_v p_v (exp(d_v) - 1 - d_v)        d = log q - log p

The second form holds because p and q both add up to 1. All its terms are at least 0 and of second order in d. Rounding
of float32 logits, about 1e-6, therefore adds about 1e-12 nats, and a KL of 1e-6 can be read. Rounding inside the model
matters more: in BF16 it alone makes a KL of about 1e-3 (`gnmr diagnose` measures it).

A vocabulary may have 200,000 tokens. So everything here is computed for a few positions at a time. The only tensors of
all positions times the vocabulary are the logits and, in a backward pass, their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
"""A target without loss, as in `F.cross_entropy`; its position is in no KL either."""
ROWS = 128
"""Number of positions that are computed together."""
_FAR = 20.0
"""Difference d above which p (exp(d) - 1 - d) is p exp(d) = q in float32, also where p is 0."""


@torch.no_grad()
def divergence(high: Tensor, low: Tensor, targets: Tensor | None = None) -> Tensor:
    """Return KL(p || q) per token of each sequence, (S,) float64, in nats, with p = softmax(high), q = softmax(low).

    Args:
        high: logits or log-probabilities (S, T, V), or (S, V) of sequences of one token each.
        low: those of the other prediction, of the same shape.
        targets: (S, T) or (S,) int64; positions with `IGNORED` do not count.

    Sequences without a position that counts are left out. The KL is NaN or Inf if logits are not finite. A logit
    of -Inf in both is a token that neither predicts, and adds nothing.
    """
    by_position = _by_position(high, low).view(len(high), -1)
    if targets is None:
        return by_position.mean(dim=1)
    counts = (targets != IGNORED).view(len(high), -1)
    number = counts.sum(dim=1)
    return (torch.where(counts, by_position, 0.0).sum(dim=1) / number)[number > 0]


@torch.no_grad()
def token_divergence(high: Tensor, low: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the KL of each position that counts, (N,) float64, and whether both predict the same token, (N,) bool.

    The arguments are those of `divergence`. Two logits of one size count as the first of them.
    """
    kl, same = _by_position(high, low), (high.argmax(dim=-1) == low.argmax(dim=-1)).flatten()
    if targets is None:
        return kl, same
    counts = (targets != IGNORED).flatten()
    return kl[counts], same[counts]


def _by_position(high: Tensor, low: Tensor) -> Tensor:
    """Return the KL of each position, (..., V) -> (N,) float64, for a few positions at a time."""
    slices = zip(high.flatten(0, -2).split(ROWS), low.flatten(0, -2).split(ROWS), strict=True)
    return torch.cat([_of_positions(p.float(), q.float()) for p, q in slices])


def _of_positions(high: Tensor, low: Tensor) -> Tensor:
    """Return the KL of each position, (N, V) -> (N,) float64. Waits for the device."""
    log_p, log_q = F.log_softmax(high, dim=1), F.log_softmax(low, dim=1)
    apart = log_q - log_p
    near = float(apart.amax()) <= _FAR  # NaN is not
    if not near:
        apart.masked_fill_(log_q == log_p, 0.0)  # -Inf in both is a NaN before
    p = log_p.exp()
    terms = torch.expm1(apart).sub_(apart).mul_(p)
    terms.masked_fill_((p == 0) & apart.isneginf(), 0.0)  # p underflows where q is 0: 0 * Inf
    if not near:
        terms = torch.where(apart > _FAR, log_q.exp_(), terms)  # exp(d) overflows above d = 88, and p may be 0
    return terms.sum(dim=1).double()


@torch.no_grad()
def draw_labels(logits: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:
    """Return a label of each position, drawn from softmax(logits): (..., V) -> (...) int64.

    Labels are `IGNORED` where `targets` (...) int64 are, so that the loss has the same terms as on the data. No label
    is drawn for these positions, so that padding does not change the labels of other sequences.
    """
    width = logits.shape[-1]
    drawn, rows_of_logits = [], logits.detach().reshape(-1, width)
    counts = None if targets is None else (targets != IGNORED).flatten()
    for rows in (rows_of_logits if counts is None else rows_of_logits[counts]).split(ROWS):
        below = rows.double().softmax(dim=1).cumsum(dim=1)
        uniform = torch.rand(len(rows), 1, dtype=torch.float64, device=rows.device, generator=generator)
        drawn.append(torch.searchsorted(below, uniform * below[:, -1:]).clamp_(max=width - 1)[:, 0])
    labels = torch.cat(drawn)
    if counts is not None:
        labels = torch.full_like(counts, IGNORED, dtype=torch.int64).masked_scatter_(counts, labels)
    return labels.view(logits.shape[:-1])


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each position in nats, (N,) float32, as `F.cross_entropy` without a reduction.

    Args:
        logits: (N, V).
        targets: (N,) int64; positions with `IGNORED` have a loss of 0.
    """
    of_positions: Tensor = _Losses.apply(logits, targets)
    return of_positions


class _Losses(torch.autograd.Function):
    """Cross-entropies that keep nothing but the logits for their backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        slices = zip(logits.split(ROWS), targets.split(ROWS), strict=True)
        return torch.cat([F.cross_entropy(rows.float(), labels, reduction="none") for rows, labels in slices])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        # dloss/dlogits = softmax(logits) - 1 at the label, times the gradient of the position's loss.
        grad = torch.where(targets == IGNORED, 0.0, grad)[:, None]
        labels = targets.clamp(min=0)[:, None]
        for at in range(0, len(logits), ROWS):
            rows = slice(at, at + ROWS)
            of_rows = F.log_softmax(logits[rows].float(), dim=1).exp_().mul_(grad[rows])
            gradient[rows] = of_rows.scatter_add_(1, labels[rows], -grad[rows])
        return gradient, None
