"""controller.*: signal, routing and thresholds. Lengths are fractions of the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from gnmr.control.spec import NO_CAP, ControlSpec, Rules
from gnmr.control.threshold import Threshold, TwoStage, check_threshold
from gnmr.errors import as_user_error, printable
from gnmr.options import require, share_of, within

INIT_FRAC = 0.025
"""Length of the first of two stages, as a fraction of training.steps (5.2)."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig(Rules):
    """The controller of Algorithms 1 and 2 (gnmr/control). `Rules` documents the inherited keys."""

    name: str | None = None
    """Part of the arm's name. If null, it is the signal (gnmr for gnmr_delta), with -ranked for ranked routing."""
    signal: str = "gnmr_delta"
    """The risk signal: one of docs/signals.md, or package.module:Class for a custom signal."""
    alpha: float | None = 1.5
    """Threshold of GNMR. Null switches it off."""
    beta: float | None = 1.3
    """Threshold of dGNMR. Null switches it off."""
    alpha_init: float | None = None
    """Threshold of GNMR during the first `INIT_FRAC` of the steps (section 3, two stages). If null, alpha applies."""
    warmup_frac: float = 0.0
    """High-fidelity warm-up: fraction of training.steps with every unit on warmup_path before control starts."""
    max_o: int | None = 4
    """Largest number of units on the recovery path after the warm-up. If null, only the budget limits it."""
    budget: Any = None
    """Limit on the GEMM FLOPs of the units on the recovery path, as a fraction of the model's: in (0, 1], or 10%.
    Units are selected by risk per cost, and max_o applies too unless it is null. Null switches the budget off."""

    @as_user_error("controller.")
    def __post_init__(self) -> None:
        module, colon, cls = self.signal.partition(":")
        sound = self.signal != "" and self.signal.isprintable()
        if colon:
            sound = all(word.isidentifier() for word in (*module.split("."), cls))
        require(sound, "signal", printable(self.signal), "give the name, or package.module:Class")
        if self.name is None:
            signal = "gnmr" if self.signal == "gnmr_delta" else cls or module
            object.__setattr__(self, "name", signal + ("-ranked" if self.routing == "ranked" else ""))
        # These have keys of their own; only a custom signal may have options of the same names.
        for key in ("alpha", "beta", "delta"):
            right = key not in self.options or colon != ""
            require(right, f"options.{key}", self.options.get(key), f"is controller.{key}")
        if self.max_o is None:
            require(self.budget is not None, "max_o", None, "null needs controller.budget, which then is the only cap")
        check_threshold(self.alpha_init, "alpha_init", or_null=True)
        sound = self.alpha_init is None or self.alpha is not None
        require(sound, "alpha_init", self.alpha_init, "needs controller.alpha too")
        within(0, 1, warmup_frac=self.warmup_frac)
        object.__setattr__(self, "budget", share_of(self.budget))
        self.spec(1)  # this checks the other keys

    @property
    def cap(self) -> int:
        """max_o as a number."""
        return NO_CAP if self.max_o is None else self.max_o

    def warmup_steps(self, steps: int) -> int:
        """Return the length of the warm-up in a run of `steps` steps."""
        return round(self.warmup_frac * steps)

    def spec(self, steps: int) -> ControlSpec:
        """Return the spec for a run of `steps` steps, in which fractions of the run become steps."""
        alpha: Threshold | None = self.alpha
        if self.alpha is not None and self.alpha_init is not None:
            alpha = TwoStage(self.alpha_init, self.alpha, round(INIT_FRAC * steps))
        return ControlSpec(
            **{field.name: getattr(self, field.name) for field in fields(Rules)},
            signal=self.signal,
            alpha=alpha,
            beta=self.beta,
            warmup_steps=self.warmup_steps(steps),
            max_o=self.cap,
            budget=self.budget,
        )

    def unread(self) -> dict[str, str]:
        """Return the keys that have no effect with the other settings, each with the setting that disables it."""
        unread: dict[str, str] = {}
        if self.signal != "gnmr_delta":
            keys = ("alpha", "alpha_init", "beta", "delta")
            unread = dict.fromkeys(keys, f"signal={self.signal}")
        if self.warmup_frac == 0 and self.warmup_path != "recovery":
            unread["warmup_path"] = "warmup_frac=0"
        if self.routing == "ranked":
            unread["trigger"] = "routing=ranked"
            if self.options.get("active_frac") is None:  # with it, most risks are 0 and locked units fill up the set
                unread["t_lock"] = "routing=ranked"
        return unread
