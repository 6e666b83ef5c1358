"""The controller over recorded evidence, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gnmr.control import Controller, Decision, Unit
from gnmr.control.evidence import missing
from gnmr.errors import UserError, told_as
from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.trace import Norms


def replay(norms: Norms, settings: ControllerConfig) -> Iterator[Decision]:
    """The decision of every step, in order.

    What a run's verdicts did to its sets is done again, where `settings` have them do it (`nonfinite="find"`): units
    are promoted in a step that was tried again, and the set stays where no unit was to blame.
    """

    def ignore(_recovering: bool) -> None:
        """There is no operator to switch."""

    extra = norms.cost or (1.0,) * len(norms.units)
    spend = norms.spend or (1.0,) * len(norms.units)
    nothing = (nn.Parameter(torch.empty(0)),)
    units = [
        Unit(name, nothing, None if name in norms.pinned else ignore, cost, more)
        for name, cost, more in zip(norms.units, spend, extra, strict=True)
    ]
    controller = build(settings, units, norms)
    columns = {"norm": norms.norm, "observed": norms.observed} | {
        name: values for name, values in norms.more.items() if name in controller.needs
    }
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    finds = settings.nonfinite == "find"
    for step in range(len(norms.norm)):
        if finds and step + 1 in norms.retried:
            controller.promote(norms.retried[step + 1])
        evidence = {name: values[step] for name, values in tensors.items()}
        packet = controller.observe(evidence, keep=finds and step + 1 in norms.blameless)
        yield controller.apply(packet.to_host())


def build(settings: ControllerConfig, units: list[Unit], norms: Norms) -> Controller:
    """The controller, UserError where the signal needs what was not recorded."""
    with told_as("replay: "):
        spec = replace(settings, cost="gemm").spec(norms.steps)  # what units cost was recorded
        whole = 1.0 if norms.spend else None
        pinned = norms.spend_pinned
        controller = Controller(units, spec, steps=norms.steps, seed=norms.seed, whole_cost=whole, pinned=pinned)
    if lacking := missing(controller.needs, tuple(norms.evidence)):
        raise UserError(
            f"replay: signal {settings.signal} needs {', '.join(lacking)}, which was not recorded: train with "
            f"records.evidence=[{','.join(lacking)}], or give your own file {'columns' if lacking[1:] else 'a column'} "
            "of that name"
        )
    return controller


def risks(norms: Norms, settings: ControllerConfig) -> np.ndarray:
    """(T, U) float64: what a signal makes of recorded evidence, whatever is routed."""
    return np.array([decision.risk for decision in replay(norms, settings)])


class Totals:
    """What a replay amounts to."""

    def __init__(self, norms: Norms, settings: ControllerConfig) -> None:
        self.num_units, self.max_o = len(norms.units), settings.cap
        self.steps = self.promoted = self.full = 0
        self.over: Counter[str] = Counter()
        self.ever = np.zeros(self.num_units, dtype=bool)
        known = norms.spend is not None and norms.settings.cost == "gemm"
        self._spend = np.array(norms.spend) if known else None
        self._pinned, self._spent = norms.spend_pinned, 0.0

    def add(self, decision: Decision) -> None:
        """Counts one step's decision."""
        self.steps += 1
        self.promoted += int(decision.in_force.sum())
        self.full += int(decision.in_force.sum()) >= self.max_o
        self.over.update({column: decision.over(column) for column in decision.columns})
        self.ever |= decision.in_force
        if self._spend is not None:
            self._spent += self._pinned + float(self._spend[decision.in_force].sum())

    def summary(self) -> dict[str, Any]:
        """Figures by their names in summary.json; of the GEMMs None where their costs were not recorded."""
        unit_steps = self.steps * self.num_units
        return {
            "steps": self.steps,
            "promotion_frac": self.promoted / unit_steps,
            "spent_gemm_frac": None if self._spend is None else self._spent / self.steps,
            "hit_max_o_frac": self.full / self.steps,
            "over_frac": {column: number / unit_steps for column, number in self.over.items()},
        }
