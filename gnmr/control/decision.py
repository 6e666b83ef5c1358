"""The decision of a step: which units the controller chose and moved, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from gnmr.control.spec import ControlSpec
from gnmr.control.unit import Unit


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
        next_ones = f": {few(self.by_risk(self.active))}" if self.active.any() else ""
        told = f"step {self.step}: {count(self.active)} of {len(self.units)} units in recovery next{next_ones}"
        known = np.where(self.observed & ~np.isnan(self.risk), self.risk, -np.inf)
        place = int(known.argmax())
        riskiest = f", riskiest {self.units[place]} (R = {known[place]:.3g})" if known[place] > -np.inf else ""
        over = (self.observed & (self.risk > self.trigger))[self.candidate]
        kind = "candidates" if over.any() or not self.candidate.any() else "locked"
        return f"<Decision of {told}, {count(self.candidate)} {kind}{riskiest}>"

    def metrics(self) -> dict[str, float]:
        """Return the step as a few numbers for any logger: `wandb.log(decision.metrics())`.

        The numbers are the units in recovery during this step and the next, candidates, promotions, releases, the
        largest finite risk (NaN without one), the norm of all units' gradients, and how many units exceed each column's
        threshold.
        """
        known = self.risk[self.observed & np.isfinite(self.risk)]
        found = {
            "active": count(self.in_force),
            "active_next": count(self.active),
            "candidates": count(self.candidate),
            "promotions": sum(event.event == "promote" for event in self.events),
            "releases": sum(event.event == "release" for event in self.events),
            "risk_max": float(known.max()) if len(known) else math.nan,
            "grad_norm": self.grad_norm,
            **{f"over_{column}": self.over(column) for column in self.columns},
        }
        return {f"gnmr/{name}": float(value) for name, value in found.items()}

    def by_risk(self, chosen: np.ndarray) -> list[str]:
        """Return the ids of the `chosen` units ((U,) bool), largest risk first."""
        places = np.flatnonzero(chosen)
        return [self.units[i] for i in places[np.argsort(self.rank[places], kind="stable")]]

    def over(self, column: str) -> int:
        """Return how many observed units exceed this column's threshold; NaN counts as over."""
        threshold, here = self.thresholds[list(self.columns).index(column)], self.columns[column].tolist()
        if threshold is None or (math.isfinite(sum(here)) and max(here) <= threshold):
            return 0
        return count(self.observed & ~(self.columns[column] <= threshold))  # NaN is not below it


def count(flags: np.ndarray) -> int:
    """Return how many of the flags (U,) are set."""
    return sum(flags.tolist())


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, followed by dots if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


class Switches:
    """The units' switches, and which of them are on the recovery path."""

    def __init__(self, units: Sequence[Unit], spec: ControlSpec) -> None:
        # Keep only the switches of the units: their parameters may be exchanged and are then released.
        self._names, self._switches = [unit.name for unit in units], [unit.switch for unit in units]
        self._spec = spec
        self.active = np.zeros(len(units), dtype=bool)
        """(U,) bool: units on the recovery path now. Never modified in place: decisions hold the previous array."""

    def move(self, active: np.ndarray, step: int, decision: Decision | None, events: list[Event]) -> None:
        """Move the units that change, leaving units first, and add the events in unit order.

        `decision` is the decision behind it; None: a warm-up or a retry, whose causes the caller knows. If a switch
        raises, the error propagates, and `active` and `events` reflect the completed moves.
        """
        if (coming := active.tolist()) == (now := self.active.tolist()):
            return
        changed = [i for i, (on, was) in enumerate(zip(coming, now, strict=True)) if on != was]
        self.active = self.active.copy()
        moved: dict[int, Event] = {}
        try:
            for index in sorted(changed, key=lambda i: bool(active[i])):
                switch, promoted = self._switches[index], bool(active[index])
                assert switch is not None
                switch(promoted)
                self.active[index] = promoted
                cause = self._cause(index, promoted, step, decision)
                risk = float(decision.risk[index]) if decision is not None and decision.observed[index] else None
                moved[index] = Event(step, self._names[index], "promote" if promoted else "release", cause, risk)
        finally:
            events.extend(moved[index] for index in sorted(moved))

    def put(self, active: np.ndarray) -> None:
        """Put every unit on the path of a checkpoint; if a switch raises, the units keep their paths."""
        switched = []
        try:
            for switch, on, was in zip(self._switches, active, self.active, strict=True):
                if switch is not None:
                    switched.append((switch, bool(was)))
                    switch(bool(on))
        except BaseException:
            for switch, was in switched:
                with suppress(Exception):
                    switch(was)
            raise
        self.active = active

    def full(self, active: np.ndarray) -> str:
        """Return the cause of a release whose place another unit took."""
        return "max_o" if self._spec.budget is None or int(active.sum()) >= self._spec.max_o else "budget"

    def _cause(self, index: int, promoted: bool, step: int, decision: Decision | None) -> str:
        if step < self._spec.warmup_steps or decision is None:
            return "warmup"
        if not promoted:
            if step == self._spec.warmup_steps:
                return "warmup"
            return self.full(decision.active) if decision.candidate[index] else "lock"
        if not np.isfinite(decision.norm[index]):
            return "nonfinite"
        ratios = {
            name: values[index] / threshold
            for (name, values), threshold in zip(decision.columns.items(), decision.thresholds, strict=True)
            if threshold is not None
        }
        highest = max(ratios, key=lambda name: ratios[name], default="risk")
        over = ratios and ratios[highest] > 1
        return "rank" if self._spec.ranked and not over else highest
