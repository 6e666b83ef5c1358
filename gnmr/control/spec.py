"""What a controller is asked for: the choices of Algorithms 1 and 2, checked. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from gnmr.errors import one_of, positive, require, share, whole

if TYPE_CHECKING:
    from gnmr.control.signals import Signal

NO_CAP = 2**31 - 1
"""The max_o without a cap: every unit may be on the recovery path at once."""
OBSERVE = ("parameters", "adapter", "input_grad")
COSTS = ("gemm", "bytes")


@dataclass(frozen=True)
class TwoStage:
    """`init` during the first `init_steps` steps, `main` afterwards.

    The history is short at first and the false-trigger bound of theorem 2 loose, hence a higher threshold there.
    """

    init: float
    main: float
    init_steps: int

    def __post_init__(self) -> None:
        positive(threshold=self.init)
        positive(threshold=self.main)
        require(self.init_steps >= 0, "init_steps", self.init_steps, "must be 0 or more")


Threshold = float | TwoStage
_T = TypeVar("_T", bound=Threshold | None)


def check(threshold: _T, name: str, or_null: bool = False) -> _T:
    """Return the threshold. Raises ValueError naming `name` unless it is a positive number or a `TwoStage`."""
    if not isinstance(threshold, TwoStage):
        positive(or_null=or_null, **{name: threshold})
    return threshold


def at(threshold: Threshold, step: int) -> float:
    """Return alpha_t or beta_t of step t (from 1)."""
    if isinstance(threshold, TwoStage):
        return threshold.init if step <= threshold.init_steps else threshold.main
    return float(threshold)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The choices that a `ControlSpec` and the config of a run have in common. Lengths are in optimizer steps."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the signal, as its constructor takes them, besides alpha, beta, delta and eps; its own defaults if
    nothing is said."""
    observe: str = "parameters"
    """What a unit's norm is taken of (gnmr/control/norms.py): parameters (its operators'), adapter (everything
    trainable below its name) or input_grad (the gradient of its output)."""
    routing: str = "thresholded"
    """thresholded (max_o is a cap) or ranked (the max_o largest positive risks are always taken, table 11)."""
    trigger: float = 1.0
    """Multiplies all thresholds of the signal: a unit is over if R > trigger. `gnmr replay RUN calibrate=...` and
    `Controller.calibrate` find it."""
    delta: int = 5
    """Window of dGNMR, steps. alpha, beta, delta and eps belong to the signal gnmr_delta; no other reads them."""
    eps: float = 1e-8
    """Guards the two ratios against division by zero (Eqs. 2 and 3)."""
    t_lock: int = 1
    """Steps for which a triggered unit stays a candidate."""
    hold: int = 1
    """Steps for which a chosen set stays in force; 1 is the paper's. The set is chosen in the first step after the
    warm-up and every `hold` steps from there, from that step's risks alone; locks then count decisions. A unit whose
    risk is not finite does not wait: it joins the set at once, in the place of the least risky unit if it is full."""
    nonfinite: str = "find"
    """What happens if the loss is not finite: keep (set and locks stay as they are, if all risks are Inf and they are
    more than max_o) or find (the same; `gnmr train` also looks for the units whose low path did it, puts them on the
    recovery path and tries the step again once)."""
    warmup_path: str = "recovery"
    """What units are on in the warm-up: the recovery path, or 16bit, whatever the recovery path is (E.4)."""


@dataclass(frozen=True, kw_only=True)
class ControlSpec(Rules):
    """Signal, routing and thresholds of a controller. Raises ValueError, naming the field, if a value is invalid."""

    signal: str | Signal | Callable[..., Signal] = "gnmr_delta"
    """Gives each unit's risk: the name of a signal (docs/signals.md), package.module:Class, a class or function of
    (`Context`, **options) that makes one, or a signal."""
    alpha: Threshold | None = 1.5
    """Threshold of GNMR; None switches it off."""
    beta: Threshold | None = 1.3
    """Threshold of dGNMR; None switches it off."""
    max_o: int = 4
    """Most units on the recovery path at once, once control has started. From the number of recoverable units on it
    caps nothing, and a warning says so: if thresholds choose among several, and unless it is `NO_CAP`."""
    budget: float | None = None
    """What the units on the recovery path may cost together, a share above 0 and at most 1 of what recovery of
    everything costs, or for cost=gemm of all GEMMs of the model; None: no budget. Filled by risk per cost; max_o holds
    too (`NO_CAP`: the budget alone). Pins count against it."""
    cost: str | Mapping[str, float] = "gemm"
    """What a budget counts if a model is attached: gemm (arithmetic of the GEMMs), bytes (extra bytes, Eq. 5), or a
    cost of each unit by its name, measured times for instance. Own units have `Unit.cost`."""
    warmup_steps: int = 0
    """High-fidelity warm-up: in these first steps every recoverable unit is on `warmup_path`, the history builds up
    and nothing is decided."""

    def __post_init__(self) -> None:
        for name in ("max_o", "t_lock", "hold", "delta"):
            whole(**{name: (value := getattr(self, name))})
            require(value < 2**31, name, value, "must be less than 2^31")
        whole(0, warmup_steps=self.warmup_steps)
        positive(trigger=self.trigger, eps=self.eps)
        for name in ("alpha", "beta"):
            check(getattr(self, name), name, or_null=True)
        one_of(OBSERVE, observe=self.observe)
        one_of(("thresholded", "ranked"), routing=self.routing)
        one_of(("recovery", "16bit"), warmup_path=self.warmup_path)
        one_of(("find", "keep"), nonfinite=self.nonfinite)
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
        """Return what the signal is made with: the thresholds above too, if it is the paper's."""
        return {name: getattr(self, name) for name in self._read()} | dict(self.options)

    def unread(self) -> list[str]:
        """Return the thresholds that were set and that the signal does not read."""
        usual, read = ControlSpec(), self._read()
        names = ("alpha", "beta", "delta", "eps")
        return [name for name in names if name not in read and getattr(self, name) != getattr(usual, name)]

    def _read(self) -> list[str]:
        from gnmr.control.signals import SIGNALS, GnmrSignal

        cls = SIGNALS.get(self.signal) if isinstance(self.signal, str) else self.signal
        if not (isinstance(cls, type) and issubclass(cls, GnmrSignal)):
            return []
        return [name for name in ("alpha", "beta", "delta", "eps") if name in cls.options()]
