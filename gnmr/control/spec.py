"""The settings of a controller: the choices of Algorithms 1 and 2, checked. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gnmr.control.threshold import Threshold, check_threshold
from gnmr.options import one_of, positive, require, share, share_of, whole_number

if TYPE_CHECKING:
    from gnmr.control.signals import Signal

NO_CAP = 2**31 - 1
"""The max_o without a cap: every unit may be on the recovery path at once."""
OBSERVE = ("parameters", "adapter", "input_grad")
COSTS = ("gemm", "bytes")
_THRESHOLDS = ("alpha", "beta", "delta", "eps")
"""Settings that are options of the signal gnmr_delta."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings that a `ControlSpec` and the config of a run share. Lengths are in optimizer steps."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the signal's constructor besides alpha, beta, delta and eps; missing ones have its defaults."""
    observe: str = "parameters"
    """Source of a unit's norm (gnmr/control/output_norms.py): parameters, adapter or input_grad.

    parameters: those of its operators; adapter: everything trainable below its name; input_grad: the gradient of its
    output.
    """
    routing: str = "thresholded"
    """thresholded (max_o is a cap) or ranked (the max_o largest positive risks are always taken, table 11)."""
    trigger: float = 1.0
    """Factor on all thresholds of the signal: a unit is over its threshold if R > trigger.

    `Controller.calibrate` finds a value.
    """
    delta: int = 5
    """Window of dGNMR, in steps. Only the signal gnmr_delta reads alpha, beta, delta and eps."""
    t_lock: int = 1
    """Steps for which a triggered unit stays a candidate."""
    hold: int = 1
    """Steps for which a chosen set stays in force; the paper uses 1.

    The set is chosen in the first step after the warm-up and every `hold` steps from there, from the risks of that step
    only; locks then count decisions. A unit whose risk is not finite joins the set at once, replacing the least risky
    unit if the set is full.
    """
    nonfinite: str = "find"
    """Action if the loss is not finite: keep or find.

    keep: set and locks stay unchanged if all risks are Inf and they are more than max_o. find: the same, and `gnmr
    train` looks for the units whose low path caused it, puts them on the recovery path and repeats the step once.
    """
    warmup_path: str = "recovery"
    """Path of the units in the warm-up: recovery, or 16bit whatever the recovery path is (E.4)."""


@dataclass(frozen=True, kw_only=True)
class ControlSpec(Rules):
    """Signal, routing and thresholds of a controller.

    Raises:
        ValueError: if a value is invalid.
    """

    signal: str | Signal | Callable[..., Signal] = "gnmr_delta"
    """Source of each unit's risk: the name of a signal (docs/signals.md), package.module:Class, a factory, or a signal.

    A factory is a class or function of (`Context`, **options).
    """
    alpha: Threshold | None = 1.5
    """Threshold of GNMR; None switches it off."""
    beta: Threshold | None = 1.3
    """Threshold of dGNMR; None switches it off."""
    eps: float = 1e-8
    """Guards the two ratios against division by zero (Eqs. 2 and 3)."""
    max_o: int = 4
    """Largest number of units on the recovery path at once, after the warm-up.

    A max_o of at least the number of recoverable units has no effect. A warning says so if thresholds choose among
    several units, unless the value is `NO_CAP`.
    """
    budget: float | None = None
    """Limit on the total cost of the units on the recovery path, a share above 0 and at most 1; None: no budget.

    It is a share of the cost of recovering everything, or for cost=gemm of all GEMMs of the model; "10%" is read as
    0.1. The budget is filled by risk per cost. max_o applies too (`NO_CAP`: the budget alone). Pins count against the
    budget.
    """
    cost: str | Mapping[str, float] = "gemm"
    """Cost that a budget counts: gemm (arithmetic of the GEMMs), bytes (extra bytes, Eq. 5) or a table.

    It applies to an attached model. A table gives a cost, such as a measured time, for each unit name. User-defined
    units have `Unit.cost`.
    """
    warmup_steps: int = 0
    """High-precision warm-up: first steps with every recoverable unit on `warmup_path` and without decisions."""

    def __post_init__(self) -> None:
        for name in ("max_o", "t_lock", "hold", "delta"):
            whole_number(**{name: (value := getattr(self, name))})
            require(value < 2**31, name, value, "must be less than 2^31")
        whole_number(0, warmup_steps=self.warmup_steps)
        positive(trigger=self.trigger, eps=self.eps)
        for name in ("alpha", "beta"):
            check_threshold(getattr(self, name), name, or_null=True)
        one_of(OBSERVE, observe=self.observe)
        one_of(("thresholded", "ranked"), routing=self.routing)
        one_of(("recovery", "16bit"), warmup_path=self.warmup_path)
        one_of(("find", "keep"), nonfinite=self.nonfinite)
        # The dataclass is frozen, and "10%" becomes 0.1 once and for all.
        object.__setattr__(self, "budget", share_of(self.budget))
        if self.budget is not None:
            share(budget=self.budget)
        self._check_cost()
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options={self.options!r}: must map names of the signal's options to values")

    def _check_cost(self) -> None:
        if not isinstance(self.cost, Mapping):
            if self.cost not in COSTS:
                raise ValueError(f"cost={self.cost!r}: must be gemm, bytes or a table {{unit: cost}}")
            return
        for unit, cost in self.cost.items():
            # To Python, True is a whole number.
            number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
            if not (number and 0 <= cost < math.inf):
                raise ValueError(f"cost of {unit}: {cost!r}: must be a number of 0 or more")

    @property
    def ranked(self) -> bool:
        """True if max_o is always filled."""
        return self.routing == "ranked"

    @property
    def signal_name(self) -> str:
        """Name of the signal, for messages."""
        if isinstance(self.signal, str):
            return self.signal
        return getattr(self.signal, "__name__", type(self.signal).__name__)

    def signal_options(self) -> dict[str, Any]:
        """Return the arguments of the signal's constructor, with the thresholds above if it is the paper's signal."""
        return {name: getattr(self, name) for name in self._thresholds_read()} | dict(self.options)

    def unread(self) -> list[str]:
        """Return the thresholds that were set although the signal does not read them."""
        default, read = ControlSpec(), self._thresholds_read()
        # Only a value other than the default shows that somebody set it.
        changed = [name for name in _THRESHOLDS if getattr(self, name) != getattr(default, name)]
        return [name for name in changed if name not in read]

    def _thresholds_read(self) -> list[str]:
        # Imported here, because signals need torch and a spec must not.
        from gnmr.control.signals import SIGNALS, GnmrSignal

        cls = SIGNALS.get(self.signal) if isinstance(self.signal, str) else self.signal
        if not (isinstance(cls, type) and issubclass(cls, GnmrSignal)):
            return []
        return [name for name in _THRESHOLDS if name in cls.options()]
