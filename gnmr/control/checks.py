"""Checks of a controller's arguments, steps and states; each ValueError says in one line how to fix the problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gnmr.control.evidence import missing
from gnmr.control.policy import Budget, may
from gnmr.control.signals.signal import Evidence, Signal
from gnmr.control.spec import NO_CAP, ControlSpec
from gnmr.control.unit import Unit
from gnmr.errors import warn
from gnmr.options import whole_number


def unit_names(units: Sequence[Unit]) -> list[str]:
    """Return the units' ids. Raises ValueError if there are none, or if two are equal."""
    if not units:
        raise ValueError("no units: there is nothing to control")
    names = [unit.name for unit in units]
    if len(set(names)) < len(names):
        raise ValueError(f"unit ids must differ: {sorted({n for n in names if names.count(n) > 1})} appear twice")
    return names


def check_signal(signal: Signal, needs: Sequence[str], record: Sequence[str], foreign_norms: bool) -> None:
    """Raise ValueError if the parts of the signal do not fit together, or if evidence is not available."""
    if len(signal.thresholds(1)) != len(signal.columns):
        raise ValueError(
            f"{type(signal).__name__}: thresholds() gives {len(signal.thresholds(1))}, its columns are "
            f"{', '.join(signal.columns) or 'none'}: one each"
        )
    missing(needs, ())  # refuses unknown names
    if foreign_norms and "micro_square" in needs:
        raise ValueError(
            "micro_square is of the gradients of the units' parameters, and the norms are of others "
            "(observe='input_grad'): use another signal"
        )
    if taken := {"norm", "observed", "risk", "active", "lock", "step", "unit"} & {*signal.columns, *record}:
        raise ValueError(f"{', '.join(sorted(taken))}: recorded in every run; name columns and evidence otherwise")


def warn_of_cap(units: Sequence[Unit], signal: Signal, max_o: int) -> None:
    """Warn if the cap never limits the set."""
    num_recoverable = sum(unit.recoverable for unit in units)
    if signal.columns and 1 < num_recoverable <= max_o < NO_CAP:
        warn(
            f"max_o={max_o} caps nothing: all {num_recoverable} units may be on the recovery path at once (in the "
            "paper a quarter of them)"
        )


def budget_left(units: Sequence[Unit], share: float, whole_cost: float | None, pinned: float) -> Budget:
    """Return the budget of `Controller`. Raises ValueError if a cost is invalid or no unit costs anything."""
    costs = [float(unit.cost) for unit in units]
    if wrong := [unit.name for unit, cost in zip(units, costs, strict=True) if not 0 <= cost < math.inf]:
        raise ValueError(f"budget={share:g}: unit {wrong[0]!r} must cost a number of 0 or more")
    every = sum(costs) if whole_cost is None else whole_cost
    if not every > 0:
        raise ValueError(f"budget={share:g}: no unit costs anything")
    return Budget.of(share - pinned, [cost / every for cost in costs])


def check_budget(units: Sequence[Unit], share: float, budget: Budget, pinned: float) -> None:
    """Raise ValueError if no unit fits the budget."""
    routed = [cost for unit, cost in zip(units, budget.cost.tolist(), strict=True) if unit.recoverable]
    if routed and budget.most < min(routed):
        pins = f" in addition to pins, which take {pinned:.3g}" if pinned else ""
        raise ValueError(f"budget={share:g}: is too small for any unit{pins}; the cheapest takes {min(routed):.3g}")


def judged(signal: Signal, evidence: Evidence, step: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the signal's verdict. Raises ValueError if its shape is wrong."""
    found: Any = signal.observe(evidence, step)
    names, shape = signal.columns, evidence["norm"].shape
    two = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], (tuple, list))
    tensors: list[Tensor] = [found[0], *found[1]] if two else []
    if len(tensors) != 1 + len(names) or any(getattr(one, "shape", None) != shape for one in tensors):
        raise ValueError(
            f"{type(signal).__name__}.observe() must return the risk and a tuple of its columns "
            f"({', '.join(names) or 'none'}), each a tensor of shape ({shape[0]},)"
        )
    risk, *columns = tensors
    return risk, columns


def check_state(state: Any, units: Sequence[Unit], spec: ControlSpec, budget: Budget | None) -> None:
    """Raise ValueError, in one line, if `state` is not a state or belongs to other units, paths or settings."""
    if not isinstance(state, Mapping) or "units" not in state:
        raise ValueError("state: is not what a controller's state_dict() returned")
    if list(state["units"]) != [unit.name for unit in units]:
        raise ValueError("the controller's state belongs to other units than this model has")
    if lacking := [name for name in ("t", "active", "lock", "signal") if name not in state]:
        raise ValueError(f"state: has no {', '.join(lacking)}")
    whole_number(0, **{"state: t": state["t"]})
    for name, least, most in (("active", 0, 1), ("lock", 0, spec.t_lock)):
        values = state[name]
        if not isinstance(values, Tensor) or values.shape != (len(units),) or values.is_floating_point():
            raise ValueError(f"state: {name} must be {len(units)} whole numbers or flags, one a unit")
        if (wrong := values[(values < least) | (values > most)]).numel():
            raise ValueError(f"state: {name} holds {wrong[0].item()}: must lie between {least} and {most} here")
    active = state["active"].cpu().bool().numpy()
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
    if not may(active, spec.max_o, budget):
        raise ValueError("state: the units on the recovery path cost more than the budget allows here")
