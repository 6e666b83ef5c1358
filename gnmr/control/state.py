"""Checks of a controller's state before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnmr.control.policy import Budget, may
from gnmr.control.spec import ControlSpec
from gnmr.control.units import Unit
from gnmr.errors import whole


def check_state(state: Any, units: Sequence[Unit], spec: ControlSpec, budget: Budget | None) -> None:
    """Raises ValueError, one line, for an object that is no state, and for one of other units, paths or settings."""
    if not isinstance(state, Mapping) or "units" not in state:
        raise ValueError("state: is not what a controller's state_dict() returned")
    if list(state["units"]) != [unit.name for unit in units]:
        raise ValueError("the controller's state belongs to other units than this model has")
    if lacking := [name for name in ("t", "active", "lock", "signal") if name not in state]:
        raise ValueError(f"state: has no {', '.join(lacking)}")
    whole(0, **{"state: t": state["t"]})
    for name, least, most in (("active", 0, 1), ("lock", 0, spec.t_lock)):
        values = state[name]
        if not isinstance(values, Tensor) or values.shape != (len(units),) or values.is_floating_point():
            raise ValueError(f"state: {name} must be {len(units)} whole numbers or flags, one a unit")
        if (wrong := values[(values < least) | (values > most)]).numel():
            raise ValueError(f"state: {name} holds {wrong[0].item()}: must lie between {least} and {most} here")
    active = state["active"].cpu().bool()
    if foreign := [unit.name for unit, on in zip(units, active, strict=True) if on and not unit.recoverable]:
        raise ValueError(f"state: {foreign[0]} is on the recovery path, and has none here")
    if not isinstance(state["signal"], Mapping):
        raise ValueError("state: signal must map names to tensors")
    if state["t"] < spec.warmup_steps:
        return
    if (number := int(active.sum())) > spec.max_o:
        raise ValueError(
            f"state: {number} units are on the recovery path, max_o={spec.max_o} allows {spec.max_o}: load it into "
            f"a controller with max_o={number} or more"
        )
    if not bool(may(active.to(torch.device("cpu") if budget is None else budget.cost.device), spec.max_o, budget)):
        raise ValueError("state: the units on the recovery path cost more than the budget allows here")
