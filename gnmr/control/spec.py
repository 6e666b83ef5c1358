"""What a controller is asked for: the choices of Algorithms 1 and 2, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gnmr.control.observed import OBSERVE
from gnmr.control.signals import SIGNALS, GnmrSignal, Signal
from gnmr.control.signals.base import fraction_of, positive, whole
from gnmr.control.thresholds import Threshold, check

NO_CAP = 2**31 - 1
"""A max_o that says so: every unit may be on the recovery path at once."""


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """Signal, routing and thresholds of a controller. ValueError, naming the field, for a senseless value.

    Lengths are in optimizer steps; a config, whose lengths are fractions of the run, makes one of these for its steps.
    """

    signal: str | Signal | Callable[..., Signal] = "gnmr_delta"
    """Gives each unit's risk: the name of a signal (docs/signals.md), package.module:Class, a class or function of
    (`Context`, **options) that makes one, or a signal."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a signal that is made here, besides alpha, beta, delta and eps; its own defaults where there is none.
    """
    observe: str = "parameters"
    """What a unit's norm is taken of where a model is attached (gnmr/control/observed.py): parameters, adapter or
    input_grad."""
    routing: str = "thresholded"
    """thresholded (max_o is a cap) or ranked (the max_o largest positive risks are always taken, table 11)."""
    trigger: float = 1.0
    """Multiplies all thresholds: a unit is over where R > trigger."""
    alpha: Threshold | None = 1.5
    """Threshold of GNMR; None switches it off. alpha, beta, delta and eps are the paper's signals' alone."""
    beta: Threshold | None = 1.3
    """Threshold of dGNMR; None switches it off."""
    delta: int = 5
    """Window of dGNMR, steps."""
    eps: float = 1e-8
    """Guards the two ratios against division by zero (Eqs. 2 and 3)."""
    max_o: int = 4
    """Most units on the recovery path at once, once control has started. From the number of recoverable units on it
    caps nothing, and a warning says so: where thresholds choose among several, and unless it is `NO_CAP`."""
    budget: float | None = None
    """What the units on the recovery path may cost together, a share above 0 and at most 1 of what recovery of
    everything costs; None: no budget. Filled by risk per cost; max_o holds too (`NO_CAP`: the budget alone). Pins count
    against it."""
    cost: str | Mapping[str, float] = "gemm"
    """What a budget counts where a model is attached: gemm (arithmetic of the GEMMs), bytes (extra bytes, Eq. 5), or a
    cost of each unit by its name, measured times for instance. Own units have `Unit.cost`."""
    t_lock: int = 1
    """Steps for which a triggered unit stays a candidate."""
    hold: int = 1
    """Steps for which a chosen set stays in force; 1 is the paper's. The set is chosen in the first step after the
    warm-up and every `hold` steps from there, from that step's risks alone; locks then count decisions. A unit whose
    risk is not finite does not wait: it joins the set at once, in the place of the least risky unit where it is full.
    """
    nonfinite: str = "find"
    """What happens where the loss is not finite: keep (set and locks stay as they are, where all risks are Inf and they
    are more than max_o), find (the same; `gnmr train` also looks for the units whose low path did it, puts them on the
    recovery path and tries the step again once) or order (the paper's bare rule: equal risks go by unit order)."""
    warmup_steps: int = 0
    """High-fidelity warm-up: in these first steps every recoverable unit is on `warmup_path`, the history builds up
    and nothing is decided."""
    warmup_path: str = "recovery"
    """What units are on in the warm-up where a model is attached: the recovery path, or 16bit, whatever that is (E.4).
    """

    def __post_init__(self) -> None:
        for name, least in (("max_o", 1), ("t_lock", 1), ("hold", 1), ("delta", 1), ("warmup_steps", 0)):
            whole(getattr(self, name), name, least)
        for name in ("trigger", "eps"):
            positive(getattr(self, name), name)
        for name in ("alpha", "beta"):
            check(getattr(self, name), name)
        for name, choices in (
            ("observe", OBSERVE),
            ("routing", ("thresholded", "ranked")),
            ("warmup_path", ("recovery", "16bit")),
            ("nonfinite", ("find", "keep", "order")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
        if self.budget is not None:
            fraction_of(self.budget, "budget")
        self._check_cost()
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options={self.options!r}: must map names of the signal's options to values")

    def _check_cost(self) -> None:
        if not isinstance(self.cost, Mapping):
            if self.cost not in ("gemm", "bytes"):
                raise ValueError(f"cost={self.cost!r}: must be gemm, bytes or a table {{unit: cost}}")
            return
        for unit, cost in self.cost.items():
            number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
            if not (number and 0 <= cost < math.inf):
                raise ValueError(f"cost of {unit}: {cost!r}: must be a number of 0 or more")

    @property
    def ranked(self) -> bool:
        """Whether max_o is always filled."""
        return self.routing == "ranked"

    @property
    def signal_name(self) -> str:
        """For messages."""
        return (
            self.signal
            if isinstance(self.signal, str)
            else getattr(self.signal, "__name__", type(self.signal).__name__)
        )

    def signal_options(self) -> dict[str, Any]:
        """What the signal is made with: of the paper's signals the thresholds above too."""
        return {name: getattr(self, name) for name in self._read()} | dict(self.options)

    def unread(self) -> list[str]:
        """Thresholds that were set and that the signal does not read."""
        usual = GnmrSignal.options()
        return [n for n in ("alpha", "beta", "delta", "eps") if n not in self._read() and getattr(self, n) != usual[n]]

    def _read(self) -> list[str]:
        cls = SIGNALS.get(self.signal) if isinstance(self.signal, str) else self.signal
        if not (isinstance(cls, type) and issubclass(cls, GnmrSignal)):
            return []
        return [name for name in ("alpha", "beta", "delta", "eps") if name in cls.options()]
