"""What a diagnosis measures: a row of every GEMM, the model on two paths, and the intervals of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

DRAWS = 1000
"""Of a bootstrap."""


@dataclass(frozen=True)
class Row:
    """One GEMM of one operator on the low path, the mean over batches."""

    operator: str
    gemm: str
    value: float
    """fprop: nats a token, measured or else the estimate in use. dgrad, wgrad: ||d||^2 / ||g||^2, the relative squared
    error of the gradient."""
    interval: tuple[float, float]
    """95%, by bootstrap over the batches, or of the measurement over sequences."""
    by_token: float | None = None
    """Of fprop the estimate from squares by token, nats."""
    by_sequence: float | None = None
    """From squares of sums over a sequence; None: not all tokens were priced."""
    measured: float | None = None
    """KL with this operator alone on the low path."""
    input: float | None = None
    """Of fprop: the price of the input's cast alone, by token."""
    weight: float | None = None
    """Of fprop: of the weight's."""
    bias: float | None = None
    """Of dgrad and wgrad: `<g, d> / ||g||^2`."""
    rescued: dict[str, float] = field(default_factory=dict)
    """Of fprop the estimate in use on each recipe that a plan may keep it on, nats."""


@dataclass(frozen=True)
class Measured:
    """The model on two paths, on the same batches."""

    batches: int
    kl: float | None
    """KL(high || low), nats a token: the mean over sequences of that a token; None: there were no logits."""
    kl_error: float
    """Standard error of its mean over sequences."""
    sequences: int
    high: float | None
    """Mean loss with every operator on the recovery path, nats a token; None: there were no targets."""
    low: float | None
    """Mean loss on the other path."""
    error: float
    """Standard error of the mean difference of losses, paired by batch; NaN of one batch."""

    @staticmethod
    def of(kls: Sequence[np.ndarray | None], high: Sequence[float], low: Sequence[float]) -> Measured:
        """Of each batch the KL of each sequence (S,), or None, and the losses, NaN where there is none."""
        before, after = np.array(high), np.array(low)
        each = None if kls[0] is None else np.concatenate([kl for kl in kls if kl is not None])
        with np.errstate(invalid="ignore"):  # a low path whose loss is Inf
            error = _standard_error(after - before)
            kl_error = float("nan") if each is None else _standard_error(each)
        known = not np.isnan(before).any()
        return Measured(
            len(before),
            None if each is None else float(each.mean()),
            kl_error,
            0 if each is None else len(each),
            float(before.mean()) if known else None,
            float(after.mean()) if known else None,
            error,
        )

    @property
    def cost(self) -> float | None:
        """By how much the loss rises, nats a token."""
        return None if self.high is None or self.low is None else self.low - self.high

    @property
    def nats(self) -> float:
        """What the low path costs, nats a token: the KL, or where there is none the rise of the loss."""
        return self.kl if self.kl is not None else self.cost or 0.0

    @property
    def noise(self) -> float:
        """Half the width of the 95% interval (t) of `nats`."""
        return self.loss_noise if self.kl is None else _half_width(self.sequences, self.kl_error)

    @property
    def loss_noise(self) -> float:
        """Half the width of the 95% interval (t) of `cost`."""
        return _half_width(self.batches, self.error)

    @property
    def shown(self) -> bool:
        """Whether low precision costs something that these batches can show."""
        return self.nats > self.noise

    @property
    def finite(self) -> bool:
        """Whether the low path computes numbers at all."""
        return bool(np.isfinite(self.nats) and (self.low is None or np.isfinite(self.low)))

    def tree(self) -> dict[str, float | None]:
        """Return all numbers, fit for JSON."""
        return {**vars(self), "cost": self.cost, "noise": self.noise, "loss_noise": self.loss_noise}


def resampled(batches: int, rng: np.random.Generator) -> np.ndarray:
    """(DRAWS, batches): weights of each batch in the mean of a bootstrap draw."""
    return rng.multinomial(batches, [1 / batches] * batches, size=DRAWS) / batches


def intervals(samples: np.ndarray) -> np.ndarray:
    """(2, U): the 95% interval of the mean of (B, U) over batches, by bootstrap."""
    ends: np.ndarray = np.percentile(resampled(len(samples), np.random.default_rng(0)) @ samples, [2.5, 97.5], axis=0)
    return ends


def paired(guess: tuple[list[Any], list[float]], plan: tuple[list[Any], list[float]]) -> tuple[float, float]:
    """(nats that a guess leaves more than the plan, half the width of the 95% interval), of their KLs by batch and
    losses, paired."""
    if guess[0][0] is None:
        apart = np.array(guess[1]) - np.array(plan[1])
    else:
        apart = np.concatenate(guess[0]) - np.concatenate(plan[0])
    with np.errstate(invalid="ignore"):
        return float(apart.mean()), _half_width(len(apart), _standard_error(apart))


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _half_width(number: int, error: float) -> float:
    """Half the width of a mean's 95% interval (t)."""
    return float(special.stdtrit(number - 1, 0.975)) * error if number > 1 else float("nan")


def nats(value: float) -> str:
    """With three digits that count: 0.101, 0.00123.

    >>> nats(0.1012), nats(0.001234), nats(3.2), nats(0.0)
    ('0.101', '0.00123', '3.200', '0')
    """
    if value == 0 or not np.isfinite(value):
        return f"{value:g}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
