"""The measurements of a diagnosis: a row per GEMM, the model on two paths, and the statistics of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import special

_DRAWS = 1000
"""Number of bootstrap draws."""


@dataclass(frozen=True)
class GemmCost:
    """One GEMM of one operator on the low path, averaged over the tokens of all batches."""

    operator: str
    gemm: str
    value: float
    """fprop: nats per token, measured or else the estimate in use.

    dgrad, wgrad: ||d||^2 / ||g||^2, the relative squared error of the gradient.
    """
    interval: tuple[float, float]
    """95% interval, by bootstrap over the batches, or of the measurement over sequences."""
    by_token: float | None = None
    """For fprop, the estimate in nats from squares by token."""
    by_sequence: float | None = None
    """Estimate from squares of sums over a sequence; None: sequences are unknown."""
    measured: float | None = None
    """KL with this operator alone on the low path."""
    input: float | None = None
    """For fprop, the price by token of the input's cast alone."""
    weight: float | None = None
    """For fprop, the price by token of the weight's cast alone."""
    bias: float | None = None
    """For dgrad and wgrad: `<g, d> / ||g||^2`."""
    rescued: dict[str, float] = field(default_factory=dict)
    """For fprop, the nats by the estimate in use on each recipe that a plan may keep it on."""

    @staticmethod
    def of_fprop(
        name: str,
        value: float,
        interval: tuple[float, float],
        by_token: float | None,
        by_sequence: float | None,
        kls: Sequence[np.ndarray] | None,
    ) -> GemmCost:
        """Return the row of an fprop; its value is its measured KL, if there are `kls`.

        Args:
            name: the operator.
            value: the estimate in use, in nats per token.
            interval: its 95% interval. A measured KL replaces both, and is Inf if this fprop alone makes the
                predictions NaN or Inf.
            by_token: the estimate by token; None: there is none.
            by_sequence: the estimate by sequence; None: there is none.
            kls: `Output.kl_to` of each batch, (S, 2), with this operator alone in low precision; None: not measured.
        """
        measured = None
        if kls:
            single = PathCost.of(kls, [np.nan], [np.nan], [1])
            assert single.kl is not None
            measured = value = single.kl if np.isfinite(single.kl) else np.inf
            half = single.noise if np.isfinite(value) else 0.0
            interval = max(0.0, value - half), value + half
        return GemmCost(name, "fprop", value, interval, by_token=by_token, by_sequence=by_sequence, measured=measured)


@dataclass(frozen=True)
class PathCost:
    """The model on two paths, measured on the same batches."""

    batches: int
    kl: float | None
    """KL(high || low), nats per token: the mean over all tokens that count; None: there were no logits."""
    kl_error: float
    """Standard error over sequences, of a ratio: nats over tokens."""
    sequences: int
    high: float | None
    """Mean loss with every operator on the recovery path, nats per token; None: there were no targets."""
    low: float | None
    """Mean loss on the other path."""
    error: float
    """Standard error of the mean difference of losses, paired by batch; NaN for one batch."""
    same_top: float | None = None
    """Share of the tokens whose most likely prediction is the same on both paths; None: not measured."""
    kl_99: float | None = None
    """99th percentile of the KL of single tokens, in nats; None: not measured."""

    def with_tokens(self, tokens: Sequence[np.ndarray | None]) -> PathCost:
        """Return this cost with `same_top` and `kl_99`, the numbers of single tokens.

        Args:
            tokens: `Output.tokens_to` of each batch, (N, 2), or None; if all are None, the cost is returned as it is.
        """
        arrays = [batch for batch in tokens if batch is not None]
        if not arrays:
            return self
        kl, same_top = np.concatenate(arrays).T
        return replace(self, same_top=float(same_top.mean()), kl_99=float(np.percentile(kl, 99)))

    @staticmethod
    def of(
        kls: Sequence[np.ndarray | None],
        high: Sequence[float],
        low: Sequence[float],
        terms: Sequence[float] | np.ndarray,
    ) -> PathCost:
        """Return the means over all tokens of the batches.

        Args:
            kls: for each batch (nats, tokens) of each sequence, (S, 2), as `Output.kl_to` returns them, or None.
            high: losses on the recovery path; NaN if there is none.
            low: losses on the low path.
            terms: numbers of terms in the losses.
        """
        high_losses, low_losses = np.array(high), np.array(low)
        with np.errstate(invalid="ignore"):  # the low path's loss may be Inf
            _, error = _ratio(low_losses - high_losses, np.array(terms))
            kl, kl_error, sequences = None, float("nan"), 0
            if kls[0] is not None:
                by_sequence = np.concatenate([kl for kl in kls if kl is not None])  # nats and tokens, (all S, 2)
                kl, kl_error = _ratio(by_sequence[:, 0] / by_sequence[:, 1], by_sequence[:, 1])
                sequences = len(by_sequence)
            has_losses = not np.isnan(high_losses).any()
            return PathCost(
                len(high_losses),
                kl,
                kl_error,
                sequences,
                float(weighted_mean(high_losses, terms)) if has_losses else None,
                float(weighted_mean(low_losses, terms)) if has_losses else None,
                error,
            )

    @property
    def cost(self) -> float | None:
        """Return the loss increase in nats per token; None without losses."""
        return None if self.high is None or self.low is None else self.low - self.high

    @property
    def nats(self) -> float:
        """Return the cost of the low path in nats per token: the KL, or the loss increase if there is no KL."""
        return self.kl if self.kl is not None else self.cost or 0.0

    @property
    def noise(self) -> float:
        """Return half the width of the 95% interval (t) of `nats`."""
        return self.loss_noise if self.kl is None else _half_width(self.sequences, self.kl_error)

    @property
    def loss_noise(self) -> float:
        """Return half the width of the 95% interval (t) of `cost`."""
        return _half_width(self.batches, self.error)

    @property
    def above_noise(self) -> bool:
        """Return True if the cost of low precision exceeds the noise of these batches."""
        return self.nats > self.noise

    @property
    def finite(self) -> bool:
        """Return True if the low path gives finite numbers."""
        return bool(np.isfinite(self.nats) and (self.low is None or np.isfinite(self.low)))

    def tree(self) -> dict[str, float | None]:
        """Return all numbers as a tree for JSON."""
        return {**vars(self), "cost": self.cost, "noise": self.noise, "loss_noise": self.loss_noise}


def weighted_mean(values: Any, weights: Any, axis: int = 0) -> Any:
    """Return the weighted mean of values: nats per token of batches or sequences by their tokens.

    Args:
        values: an array of any shape.
        weights: (n,) for an axis of length n, or the shape of the values; at least one is above 0.
        axis: the axis over which the mean is taken, which the result lacks.
    """
    return np.average(values, axis=axis, weights=weights)


def bootstrap_weights(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the weight of each batch in the mean of each bootstrap draw, (draws, B); `weights` (B,) are tokens."""
    batches = len(weights)
    drawn = rng.multinomial(batches, [1 / batches] * batches, size=_DRAWS) * (weights / np.mean(weights))
    return drawn / drawn.sum(axis=1, keepdims=True)


def bootstrap_intervals(samples: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the bootstrap 95% interval of the weighted mean over batches. All calls draw the same batches.

    Args:
        samples: (B, U), for example the nats of U operators in B batches.
        weights: (B,), tokens of each batch.

    Returns:
        The lower and the upper ends, (2, U).
    """
    means = bootstrap_weights(weights, np.random.default_rng(0)) @ samples
    ends: np.ndarray = np.percentile(means, [2.5, 97.5], axis=0)
    return ends


def paired_difference(
    guess: tuple[list[Any], list[float]], plan: tuple[list[Any], list[float]], terms: Sequence[float]
) -> tuple[float, float]:
    """Compare a guess with the plan on the same batches; the arguments are those of `paired_mean`.

    Returns:
        The extra nats per token that the guess leaves, and half the width of their 95% interval (t), NaN for one pair.
    """
    mean, error, number = paired_mean(guess, plan, terms)
    return mean, _half_width(number, error)


def paired_mean(
    guess: tuple[list[Any], list[float]], plan: tuple[list[Any], list[float]], terms: Sequence[float]
) -> tuple[float, float, int]:
    """Return the extra nats that a guess leaves compared with the plan, their standard error, and the number of pairs.

    Pairs are sequences, or batches if there is no KL.

    Args:
        guess: (KLs by batch, losses by batch), as `PathCost.of` takes them.
        plan: those of the plan.
        terms: numbers of terms in the losses.
    """
    if guess[0][0] is None:
        difference, weights = np.array(guess[1]) - np.array(plan[1]), np.array(terms)
    else:
        kl_guess, kl_plan = np.concatenate(guess[0]), np.concatenate(plan[0])
        weights = kl_plan[:, 1]
        difference = (kl_guess[:, 0] - kl_plan[:, 0]) / weights
    with np.errstate(invalid="ignore"):
        mean, error = _ratio(difference, weights)
        return mean, error, len(difference)


def _ratio(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the weighted mean and its standard error, of a ratio of two sums (linearized, as in survey sampling).

    The weights are those of sequences or batches that were drawn, and vary with them: the error of the ratio is that of
    the mean of `weights * (values - mean)`.
    """
    mean = float(weighted_mean(values, weights))
    if len(values) < 2:
        return mean, float("nan")
    deviations = weights / np.mean(weights) * (values - mean)
    return mean, float(deviations.std(ddof=1) / len(values) ** 0.5)


def _half_width(number: int, error: float) -> float:
    """Return half the width of a mean's 95% interval (t)."""
    return float(special.stdtrit(number - 1, 0.975)) * error if number > 1 else float("nan")


def format_nats(value: float) -> str:
    """Format a number with three significant digits: 0.101, 0.00123.

    >>> format_nats(0.1012), format_nats(0.001234), format_nats(3.2), format_nats(0.0)
    ('0.101', '0.00123', '3.200', '0')

    Args:
        value: any number; NaN and infinities are written as nan and inf.
    """
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
