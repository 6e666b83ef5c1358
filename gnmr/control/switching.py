"""Moves units between the two paths, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from gnmr.control.decision import Decision, Event
from gnmr.control.spec import ControlSpec
from gnmr.control.units import Unit


class Switches:
    """The units' switches, and which of them are on the recovery path."""

    def __init__(self, units: Sequence[Unit], spec: ControlSpec) -> None:
        # Of the units their switches alone: parameters may be exchanged, and are then let go.
        self._names, self._switches = [unit.name for unit in units], [unit.switch for unit in units]
        self._spec = spec
        self.active = np.zeros(len(units), dtype=bool)
        """(U,) bool: units on the recovery path now. Never written: decisions hold the one before."""

    def move(self, active: np.ndarray, step: int, decision: Decision | None, events: list[Event]) -> None:
        """Move the units that change, those first that leave, and add the events, in unit order.

        `decision`: what led to it; None: a warm-up, or a retry, whose causes the caller knows. What a switch raises
        comes through; `active` and `events` then are what was done.
        """
        changed: list[int] = np.flatnonzero(active != self.active).tolist()
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
        """Put every unit on the path of a checkpoint; they are as they were if a switch raises."""
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
        """Return the cause of a release into whose place another unit came."""
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
