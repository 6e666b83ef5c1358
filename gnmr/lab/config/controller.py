"""controller.*: signal, routing and thresholds."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnmr.errors import fields, one_of, positive, require, share_of, told_as, within
from gnmr.lab.config.texts import folder_name, place, storable
from gnmr.records.untrusted import opened

if TYPE_CHECKING:
    from gnmr.control import ControlSpec, Threshold

COSTS = ("gemm", "bytes")
_LONGEST_TABLE = 1 << 24
THRESHOLDS = {"gnmr_delta": ("alpha", "beta"), "gnmr": ("alpha",), "delta_gnmr": ("beta",)}
"""The paper's signals, whose thresholds have keys of their own."""


@dataclass(frozen=True)
class ControllerConfig:
    """Algorithms 1 and 2 (gnmr/control)."""

    name: str | None = None
    """Part of the arm's name; null: the signal, gnmr for gnmr_delta, and -ranked."""
    signal: str = "gnmr_delta"
    """The risk signal: one of docs/signals.md, or package.module:Class for one of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the signal, as its constructor takes them; its own defaults where nothing is said."""
    observe: str = "parameters"
    """What a unit's norm is taken of (gnmr/control/observed.py): parameters (its operators'), adapter (everything
    trainable below its name) or input_grad (the gradient of its output)."""
    routing: str = "thresholded"
    """thresholded (max_o is a cap) or ranked (the max_o largest risks are always taken)."""
    trigger: float = 1.0
    """Multiplies all thresholds of the signal: over where R > trigger. `gnmr replay RUN calibrate=...` finds it."""
    alpha: float | None = 1.5
    """Threshold of GNMR; null switches this signal off. alpha, beta, delta and eps belong to the signals gnmr_delta,
    gnmr and delta_gnmr; the others do not read them."""
    beta: float | None = 1.3
    """Threshold of dGNMR; null switches this signal off."""
    alpha_init: float | None = None
    """Threshold of GNMR during the first init_frac of the steps; null: alpha throughout (section 3, two stages)."""
    beta_init: float | None = None
    """Threshold of dGNMR during the first init_frac of the steps; null: beta throughout."""
    init_frac: float = 0.025
    """Length of the first stage as a share of training.steps; without effect unless an *_init is set."""
    warmup_frac: float = 0.0
    """High-fidelity warm-up: share of training.steps with every unit on warmup_path before control starts."""
    warmup_path: str = "recovery"
    """What units are on in the warm-up: the recovery path, or 16bit, whatever the recovery path is (E.4)."""
    delta: int = 5
    """Window of dGNMR, steps."""
    max_o: int | None = 4
    """Most units on the recovery path at once, once control has started."""
    budget: Any = None
    """Share of what recovery of everything costs that the units on the recovery path may cost together, above 0 and at
    most 1, or 10%; null: no budget. Filled by risk per cost; max_o holds too (null: the budget alone)."""
    cost: str = "gemm"
    """What the budget counts: gemm (arithmetic), bytes (extra bytes, Eq. 5), or a CSV file with the columns unit and
    cost (measured times)."""
    t_lock: int = 1
    """Steps for which a triggered unit stays a candidate."""
    hold: int = 1
    """Steps for which a chosen set stays in force; 1: a new choice in every step (section 3)."""
    nonfinite: str = "find"
    """Where the loss is not finite: find (the operators whose low path did it go on the recovery path, and the step is
    tried again once), keep (the set stays as it is) or order (the paper's bare rule: equal risks go by unit order)."""
    eps: float = 1e-8
    """Guards the two ratios against division by zero (Eqs. 2 and 3)."""

    @told_as("controller.")
    def __post_init__(self) -> None:
        self._check_signal()
        if self.name is None:
            signal = "gnmr" if self.signal == "gnmr_delta" else self.signal.rpartition(":")[2]
            object.__setattr__(self, "name", signal + ("-ranked" if self.routing == "ranked" else ""))
        positive(or_null=True, **fields(self, "alpha", "beta", "alpha_init", "beta_init"))
        one_of(("parameters", "adapter", "input_grad"), observe=self.observe)
        one_of(("thresholded", "ranked"), routing=self.routing)
        one_of(("recovery", "16bit"), warmup_path=self.warmup_path)
        one_of(("find", "keep", "order"), nonfinite=self.nonfinite)
        if self.max_o is None:
            require(self.budget is not None, "max_o", None, "null needs controller.budget, which then is the only cap")
        numbers = fields(self, "delta", "t_lock", "hold", "eps", "trigger")
        for key, value in (numbers | {"max_o": self.cap}).items():
            positive(**{key: value})
            require(value < 2**31, key, value, "must be less than 2^31")
        for init, main in ((self.alpha_init, "alpha"), (self.beta_init, "beta")):
            sound = init is None or getattr(self, main) is not None
            require(sound, f"{main}_init", init, f"needs controller.{main} too")
        within(0, 1, **fields(self, "init_frac", "warmup_frac"))
        if self.budget is not None:
            object.__setattr__(self, "budget", share_of(self.budget))
            number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
            require(number and 0 < self.budget <= 1, "budget", self.budget, "must be above 0 and at most 1, or as 10%")
        place("cost", self.cost)

    def _check_signal(self) -> None:
        module, colon, cls = self.signal.partition(":")
        sound = bool(self.signal) and (not colon or all(part.isidentifier() for part in (*module.split("."), cls)))
        storable("signal", self.signal)  # before the name of the controller is made of it
        require(sound, "signal", self.signal, "give the name, or package.module:Class")
        folder_name("signal", cls or module)
        for key in ("alpha", "beta", "delta"):
            right = key not in self.options or colon != ""
            require(right, f"options.{key}", self.options.get(key), f"is controller.{key}")

    @property
    def cap(self) -> int:
        """max_o as a number."""
        return 2**31 - 1 if self.max_o is None else self.max_o

    def warmup_steps(self, steps: int) -> int:
        """Length of the warm-up of a run of `steps` steps."""
        return round(self.warmup_frac * steps)

    def spec(self, steps: int) -> ControlSpec:
        """What this is for a run of `steps` steps: fractions of the run become steps."""
        from gnmr.control import ControlSpec, TwoStage

        def threshold(name: str) -> Threshold | None:
            main, init = getattr(self, name), getattr(self, f"{name}_init")
            return main if main is None or init is None else TwoStage(init, main, round(self.init_frac * steps))

        same = ("signal", "options", "observe", "routing", "trigger", "delta", "eps", "t_lock", "hold", "budget")
        measured = self.budget is not None and self.cost not in COSTS
        return ControlSpec(
            **{name: getattr(self, name) for name in (*same, "warmup_path", "nonfinite")},
            alpha=threshold("alpha"),
            beta=threshold("beta"),
            warmup_steps=self.warmup_steps(steps),
            max_o=self.cap,
            cost=_table(Path(self.cost)) if measured else self.cost if self.cost in COSTS else "gemm",
        )

    def unread(self) -> dict[str, str]:
        """Keys that choose nothing as the others stand, and the setting that makes it so."""
        signal = f"signal={self.signal}"
        read = THRESHOLDS.get(self.signal, ())
        found = {key: signal for one in ("alpha", "beta") if one not in read for key in (one, f"{one}_init")}
        if not read:
            found |= {"delta": signal, "eps": signal}
        if self.warmup_frac == 0 and self.warmup_path != "recovery":
            found["warmup_path"] = "warmup_frac=0"
        if self.budget is None and self.cost != "gemm":
            found["cost"] = "budget=null"
        if self.routing == "ranked":
            found["trigger"] = "routing=ranked"
            if self.options.get("share") is None:  # with a share most risks are 0, and locked units fill up
                found["t_lock"] = "routing=ranked"
        return found


def _table(path: Path) -> dict[str, float]:
    """{unit: cost} of a CSV file. ValueError, one line, for what is no such file."""
    what = f"cost={path}: must be gemm, bytes or a CSV file with the columns unit and cost"
    try:
        with opened(Path(os.path.realpath(path))) as file:
            lines = TextIOWrapper(file, "utf-8").read(_LONGEST_TABLE).splitlines()
        rows = list(csv.DictReader(lines))
        return {row["unit"]: float(row["cost"]) for row in rows}
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise ValueError(f"{what} ({error})".partition("\n")[0]) from error
