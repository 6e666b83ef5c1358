"""The definition of a signal, and base classes for most signals.

A signal turns the evidence of a step into one number per unit, the risk R; a unit is over its threshold if R > 1. The
controller and the policy know only `Signal`. Nearly every signal extends one of the base classes. `SignalBase` handles
state, options and the way from columns to risk. `LevelSignal` compares a value with a fixed level, and `RatioSignal`
compares it with its own past. `BlindSignal` (`blind.py`) is a choice that reads no evidence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gnmr.control.device import all_finite, all_set
from gnmr.control.signals.history import LARGEST, Cumulative, StatefulParts
from gnmr.control.threshold import Threshold, check_threshold, threshold_at
from gnmr.control.unit import Unit
from gnmr.options import positive

Evidence: TypeAlias = Mapping[str, Tensor]
"""Evidence of one step: (U,) float64 each, `observed` (U,) bool, on the units' device.

`norm` and `observed` are always there, the rest if a signal's `needs` names it (see gnmr.control.evidence).
"""

TINY: float = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Context:
    """Facts about the run that a signal receives before it starts."""

    names: tuple[str, ...]
    """Unit ids, in unit order."""
    device: torch.device
    max_o: int = 4
    steps: int | None = None
    """Length of the run, None if unknown."""
    seed: int = 0
    hold: int = 1
    """Steps for which a chosen set stays in force."""
    spend: tuple[float, ...] | None = None
    """Share of the budget that each unit takes; None without a budget."""

    @classmethod
    def of(cls, units: Sequence[Unit], **more: Any) -> Context:
        """Return the context of these units."""
        return cls(tuple(unit.name for unit in units), units[0].parameters[0].device, **more)


class Signal(Protocol):
    """The interface of a signal. All tensors are (U,), float64, on the units' device."""

    columns: tuple[str, ...]
    """Names of the statistics behind the risk, in the order in which `observe` returns them."""
    needs: tuple[str, ...]
    """Names of the evidence that it reads besides norm and observed."""

    def observe(self, evidence: Evidence, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the risk of step `step` (from 1) and the columns behind it; update the history without waiting.

        The risk is 0 or more and never NaN. A non-finite norm must give risk Inf (unless the signal reads no evidence
        at all) and must not enter the history. The risk of an unobserved unit is not read, and its history must stay
        unchanged.
        """

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        """Return the threshold of each column at that step; None for a column that does not trigger."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that later risks depend on."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: if it is another signal's.
        """


class SignalBase(StatefulParts):
    """Base class with state (`StatefulParts.state_names`) and the way from columns to risk.

    A subclass sets `columns`, `needs` and `state_names`, takes `(context, *, option=default, ...)`, sets `threshold`
    (or overrides `thresholds`) and returns `self.verdict(...)` from `observe`.
    """

    columns: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    least = 0.0
    """Lower bound of a unit's risk; above 0 if a column is often exactly 0, so that ranking finds max_o units."""
    threshold: Threshold

    def __init__(self, context: Context) -> None:
        self.context = context
        self.num_units = len(context.names)

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return name and default of each option of the constructor."""
        parameters = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def reads(self, step: int) -> bool:
        """Return True if `observe` reads the evidence in `needs` in that step; otherwise it need not be measured."""
        return True

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        return (threshold_at(self.threshold, step),)

    def verdict(self, evidence: Evidence, step: int, *columns: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result of `observe` from its columns.

        Args:
            evidence: the evidence of the step.
            step: number of the step, from 1.
            columns: (U,) float64 each, the statistics behind the risk.

        Returns:
            (R, columns): R = max of column / threshold, (U,) float64; Inf if the norm or a column is not finite.
        """
        norm = evidence["norm"]
        finite_norms = all_finite(norm)
        if not finite_norms:
            # A norm that is not finite shows in every column, whatever the column made of it.
            columns = tuple(torch.where(norm.isfinite(), column, norm) for column in columns)
        # R = max of column / threshold over the columns that have one
        pairs = zip(columns, self.thresholds(step), strict=True)
        risks = [column / threshold for column, threshold in pairs if threshold is not None]
        risk = reduce(torch.maximum, risks) if risks else torch.full_like(norm, self.least)
        if finite_norms and all_finite(risk, self.least):
            return risk, columns
        # A lower bound above 0 ranks units whose column is 0, and never exceeds a trigger.
        risk = risk.clamp(min=self.least)
        return torch.where(norm.isfinite() & ~risk.isnan(), risk, torch.inf), columns


class LevelSignal(SignalBase):
    """A value against a fixed level: R = value / threshold, with no memory."""

    least = TINY

    def __init__(self, context: Context, threshold: Threshold) -> None:
        super().__init__(context)
        self.threshold = check_threshold(threshold, "threshold")


class RatioSignal(SignalBase):
    """A value against its own past: ratio = value / (mean of the past + eps), 1 without a past."""

    state_names: tuple[str, ...] = ("history",)

    def __init__(self, context: Context, history: Cumulative, eps: float) -> None:
        super().__init__(context)
        positive(eps=eps)
        self.history, self.eps = history, eps


def ratio(value: Tensor, level: Tensor, has_level: Tensor, eps: float) -> Tensor:
    """Return value / (level + eps), (U,): 1 without a level; a non-finite value is returned unchanged."""
    quotient = value / (level + eps)
    if not all_finite(quotient):
        # A ratio of finite numbers may leave float64's range, and Inf is reserved for non-finite values.
        quotient = quotient.clamp(max=LARGEST)
    if not all_set(has_level):
        # A unit without a past is at its own level.
        quotient = torch.where(has_level, quotient, 1.0)
    return quotient if all_finite(value) else torch.where(value.isfinite(), quotient, value)


def seen(evidence: Evidence) -> Tensor:
    """Return which units' evidence of this step may enter a history, (U,) bool."""
    norm, observed = evidence["norm"], evidence["observed"]
    # One non-finite number would stay in a mean forever.
    return observed if all_finite(norm) else observed & norm.isfinite()
