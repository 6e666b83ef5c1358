"""The decision of a step: which units the controller chose and moved, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Event:
    """A unit was put on the recovery path or taken off it."""

    step: int
    """Step whose norms led to the event, which is in force from the next step on; 0: in force from the start."""
    unit: str
    event: str
    """promote or release."""
    cause: str
    """Cause of the event.

    promote: the name of the signal's column that was highest over its threshold (risk, if none has one), rank (one of
    the largest risks of a ranked signal, below its threshold), nonfinite, retry (`Controller.promote`: in force in this
    step) or warmup.

    release: lock (it expired), max_o (riskier units took the places), budget (they took the rest of the budget) or
    warmup (it ended).
    """
    risk: float | None
    """R of the unit at that step, or None."""


@dataclass(frozen=True)
class Decision:
    """What the controller saw in one step and chose from it; host arrays over the U units, in unit order."""

    step: int
    units: list[str]
    norm: np.ndarray
    """(U,) float64, gradient norm."""
    observed: np.ndarray
    """(U,) bool: whether the unit had a gradient."""
    evidence: dict[str, np.ndarray]
    """(U,) float64 each: the evidence that `Controller(record=...)` asked for."""
    columns: dict[str, np.ndarray]
    """(U,) float64 each: the statistics behind the risk."""
    risk: np.ndarray
    """(U,) float64, R."""
    candidate: np.ndarray
    """(U,) bool, C_t."""
    in_force: np.ndarray
    """(U,) bool, units on the recovery path during this step."""
    active: np.ndarray
    """(U,) bool, A_t: units on the recovery path during the next step."""
    lock: np.ndarray
    """(U,) int64, locks after this step."""
    rank: np.ndarray
    """(U,) int64, rank by risk among the candidates; 0 is the riskiest."""
    thresholds: tuple[float | None, ...]
    """Threshold of each column in this step, `trigger` included."""
    events: list[Event]
    trigger: float = 1.0
    """A unit is over its threshold if its risk exceeds this value; 0 if max_o is always filled."""
    own_norm: np.ndarray | None = None
    """(U,) bool: False for a unit whose norm is also an earlier unit's (GEMMs of one operator); None: all True."""

    @property
    def grad_norm(self) -> float:
        """The norm of all units' gradients together; a gradient that several units have in common counts once."""
        counted = self.observed if self.own_norm is None else self.observed & self.own_norm
        return float(np.sqrt(np.square(self.norm[counted]).sum()))

    def __repr__(self) -> str:
        """Return who is in recovery next and who is riskiest; the complete arrays would fill screens.

        Candidates are called locked if none exceeds its threshold, because one did in an earlier step.
        """
        names = f": {few(self.by_risk(self.active))}" if self.active.any() else ""
        # Units without a risk never are the riskiest.
        risks = np.where(self.observed & ~np.isnan(self.risk), self.risk, -np.inf)
        index = int(risks.argmax())
        riskiest = f", riskiest {self.units[index]} (R = {risks[index]:.3g})" if risks[index] > -np.inf else ""
        # A candidate is over its threshold now, or its lock has not run out.
        over = (self.observed & (self.risk > self.trigger))[self.candidate]
        kind = "candidates" if over.any() or not self.candidate.any() else "locked"
        return (
            f"<Decision of step {self.step}: {count(self.active)} of {len(self.units)} units in recovery next{names}, "
            f"{count(self.candidate)} {kind}{riskiest}>"
        )

    def metrics(self) -> dict[str, float]:
        """Return the step as a few numbers for any logger: `wandb.log(decision.metrics())`.

        Returns:
            Numbers of units in recovery during this step and the next, of candidates, promotions and releases; the
            largest finite risk (NaN without one); the norm of all units' gradients; how many units exceed the threshold
            of each column.
        """
        finite = self.risk[self.observed & np.isfinite(self.risk)]
        metrics = {
            "active": count(self.in_force),
            "active_next": count(self.active),
            "candidates": count(self.candidate),
            "promotions": sum(event.event == "promote" for event in self.events),
            "releases": sum(event.event == "release" for event in self.events),
            "risk_max": float(finite.max()) if len(finite) else math.nan,
            "grad_norm": self.grad_norm,
            **{f"over_{column}": self.over(column) for column in self.columns},
        }
        return {f"gnmr/{name}": float(value) for name, value in metrics.items()}

    def by_risk(self, chosen: np.ndarray) -> list[str]:
        """Return the ids of units, largest risk first.

        Args:
            chosen: (U,) bool, such as `active` or `candidate`.
        """
        indices = np.flatnonzero(chosen)
        return [self.units[i] for i in indices[np.argsort(self.rank[indices], kind="stable")]]

    def over(self, column: str) -> int:
        """Return how many observed units exceed a threshold; NaN counts as over.

        Args:
            column: name of the column, a key of `columns`.
        """
        threshold, values = self.thresholds[list(self.columns).index(column)], self.columns[column].tolist()
        # A finite sum means that all values are finite: the usual case takes no operation on arrays.
        if threshold is None or (math.isfinite(sum(values)) and max(values) <= threshold):
            return 0
        return count(self.observed & ~(self.columns[column] <= threshold))  # NaN is not below it


def count(flags: np.ndarray) -> int:
    """Return how many of the flags (U,) are set."""
    # For some hundred flags a loop of Python is faster (`device.at_hand`).
    return sum(flags.tolist())


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, followed by dots if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
