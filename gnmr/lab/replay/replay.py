"""The controller on recorded evidence, step by step, with settings from the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from gnmr.control import Controller, Decision, Unit
from gnmr.control.evidence import missing
from gnmr.errors import UserError, as_user_error, nearest
from gnmr.lab.config import ControllerConfig, from_words, load, one_line
from gnmr.lab.replay.trace import Norms


def settings_of(path: Path, own: ControllerConfig, words: Sequence[str], trust: bool) -> ControllerConfig:
    """Return the settings `own` of the run or file `path`, with key=value words replacing its values.

    Raises UserError for an invalid word. It is also raised for a signal to import that the folder names, unless the
    user trusts it.
    """
    settings = with_words(own, words)
    given = any(word.startswith("signal=") for word in words)
    if ":" in settings.signal and not (given or trust):
        raise UserError(
            f"{path / 'config.yaml'}: its signal {settings.signal} would be imported, code of its maker's choice; "
            "add --trust if you trust it, or name a signal of your own with signal=NAME"
        )
    return settings


def with_words(own: ControllerConfig, words: Sequence[str]) -> ControllerConfig:
    """Return `own` updated by the words, which are checked as strictly as in `gnmr train`."""
    known = sorted({field.name for field in fields(ControllerConfig)} - {"name"})
    for word in words:
        key, _, value = word.partition("=")
        if key.partition(".")[0] not in known:
            raise UserError(f"replay: unknown key {word!r}{nearest(word, known)} (gnmr replay --help)")
        if not value:
            raise UserError(f"replay: {word!r} has no value")
    try:
        values = from_words(words)
        if values.get("signal", own.signal) != own.signal:
            own = replace(own, options={}, trigger=1.0)  # they belong to their signal
        tree = load(OmegaConf.create({"controller": OmegaConf.merge(asdict(own), values)}))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"replay: {one_line(error)}") from error
    return replace(tree.controller, name=own.name)


def replay(norms: Norms, settings: ControllerConfig) -> Iterator[Decision]:
    """Yield the decision of every step, in order.

    With `nonfinite="find"`, the effects of a run's verdicts on its sets are repeated. Units are promoted in a step that
    was retried, and the set stays unchanged if no unit was to blame. If a user's own loop calibrated its trigger, and
    `settings` have its signal and trigger, its earlier triggers are repeated too.
    """

    def ignore(_recovering: bool) -> None:
        """Do nothing, because no operator exists."""

    extra = norms.cost or (1.0,) * len(norms.units)
    spend = norms.spend or (1.0,) * len(norms.units)
    nothing = (nn.Parameter(torch.empty(0)),)
    units = [
        Unit(name, nothing, None if name in norms.pinned else ignore, cost, more)
        for name, cost, more in zip(norms.units, spend, extra, strict=True)
    ]
    with as_user_error("replay: "):
        spec = replace(settings, cost="gemm").spec(norms.steps)  # the records contain the cost of units
        whole = 1.0 if norms.spend else None
        pinned = norms.spend_pinned
        controller = Controller(units, spec, steps=norms.steps, seed=norms.seed, whole_cost=whole, pinned=pinned)
    if lacking := missing(controller.needs, ("norm", "observed", *norms.more)):
        raise UserError(
            f"replay: signal {settings.signal} needs {', '.join(lacking)}, which was not recorded: train with "
            f"records.evidence=[{','.join(lacking)}], or give your own file {'columns' if lacking[1:] else 'a column'} "
            "of that name"
        )
    columns = {"norm": norms.norm, "observed": norms.observed} | norms.more
    tensors = {
        name: torch.from_numpy(values)
        for name, values in columns.items()
        if name in ("norm", "observed", *controller.needs)
    }
    finds = settings.nonfinite == "find"
    own = (settings.signal, settings.trigger) == (norms.settings.signal, norms.settings.trigger)
    for step in range(1, len(norms.norm) + 1):
        if finds and step in norms.retried:
            controller.promote(norms.retried[step])
        if own and step in norms.triggers:
            controller._trigger.value = norms.triggers[step]
        evidence = {name: values[step - 1] for name, values in tensors.items()}
        packet = controller.observe(evidence, keep=finds and step in norms.blameless)
        yield controller.apply(packet.to_host())


class Totals:
    """Totals of a replay."""

    def __init__(self, norms: Norms, settings: ControllerConfig) -> None:
        self.num_units, self.max_o = len(norms.units), settings.cap
        self.steps = self.promoted = self.full = 0
        self.over: Counter[str] = Counter()
        self._spend = np.array(norms.spend) if norms.spend is not None and norms.gemms else None
        self._pinned, self._spent = norms.spend_pinned, 0.0

    def add(self, decision: Decision) -> None:
        """Count one step's decision."""
        self.steps += 1
        self.promoted += int(decision.in_force.sum())
        self.full += int(decision.in_force.sum()) >= self.max_o
        self.over.update({column: decision.over(column) for column in decision.columns})
        if self._spend is not None:
            self._spent += self._pinned + float(self._spend[decision.in_force].sum())

    def summary(self) -> dict[str, Any]:
        """Return the figures by their names in summary.json. The GEMM fraction is None if costs were not recorded."""
        unit_steps = self.steps * self.num_units
        return {
            "steps": self.steps,
            "promotion_frac": self.promoted / unit_steps,
            "spent_gemm_frac": None if self._spend is None else self._spent / self.steps,
            "hit_max_o_frac": self.full / self.steps,
            "over_frac": {column: number / unit_steps for column, number in self.over.items()},
        }
