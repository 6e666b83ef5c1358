"""The trigger, and its calibration from the first steps of the loop: published thresholds fit the published batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gnmr.errors import warn
from gnmr.options import positive, require, share_of, whole_number

NO_TRIGGER = 1e300
"""Trigger during a calibration: it exceeds every finite risk, so that only a non-finite risk promotes."""
_STATE = ("fraction", "first", "steps", "risks")


class Trigger:
    """The value that a risk has to exceed: given, or calibrated in some steps.

    A calibrated trigger is a quantile of the risks in the second half of these steps. In the first half the history is
    short, and risks are not typical of later steps.
    """

    def __init__(self, trigger: float) -> None:
        self.value = self._configured = trigger
        self._calibrated = False
        self._running: tuple[float, int, int] | None = None
        """Fraction, first step and number of steps of a calibration that is not over."""
        self._risks: list[np.ndarray] = []

    def calibrate(self, fraction: float, first: int, steps: int) -> None:
        """Calibrate on the `steps` steps from `first` on; see `Controller.calibrate`."""
        fraction = share_of(fraction)  # type: ignore[assignment]
        positive(fraction=fraction)
        require(fraction < 1, "fraction", fraction, "must lie between 0 and 1")
        whole_number(2, steps=steps)
        self._running, self._risks = (fraction, first, steps), []
        self.value, self._calibrated = NO_TRIGGER, True

    def learn(self, step: int, risk: np.ndarray, observed: np.ndarray) -> None:
        """Add the risks of a step, (U,) both, to a calibration; the trigger will be one of the risks seen."""
        if self._running is None:
            return
        fraction, first, steps = self._running
        # In the first half the history is short.
        if step >= first + steps // 2:
            self._risks.append(risk[observed & np.isfinite(risk)])
        if step < first + steps - 1:
            return
        # "higher" takes one of the risks seen, so that at most the fraction of them exceeds it.
        risks = np.concatenate([np.zeros(0), *self._risks])
        self.value = float(np.quantile(risks, 1 - fraction, method="higher")) if len(risks) else 0.0
        # With a trigger of 0 every unit with any risk would be over it.
        if not self.value > 0:
            self.value, self._calibrated = self._configured, False
            warn(f"calibrate: no unit had a risk above 0; the trigger is {self.value:g}, as before")
        self._running = None

    def progress(self, t: int) -> tuple[int, int] | None:
        """Return (steps that the calibration has seen at step t, steps that it takes); None without a calibration."""
        return None if self._running is None else (max(t - self._running[1] + 1, 0), self._running[2])

    @property
    def found(self) -> float | None:
        """The value that a calibration found; None before it is found, or if there is none."""
        return self.value if self._calibrated and self._running is None else None

    def state_dict(self) -> dict[str, Any]:
        """Return the trigger's part of a controller's state."""
        state: dict[str, Any] = {"trigger": self.value} if self._calibrated else {}
        if self._running is not None:
            risks = torch.from_numpy(np.concatenate([np.zeros(0), *self._risks]))
            state["calibration"] = dict(zip(_STATE, (*self._running, risks), strict=True))
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state's trigger is unknown."""
        # This state was saved during a calibration, so it holds the progress, or this controller has to calibrate anew.
        unknown = state.get("trigger", 1.0) >= NO_TRIGGER and "calibration" not in state
        if unknown and self._running is None:
            raise ValueError("state: was saved while calibrating; call calibrate() before load_state_dict()")

    def load_state_dict(self, state: Mapping[str, Any], next_step: int) -> None:
        """Continue with the state's trigger or calibration; a calibration that starts anew begins at `next_step`."""
        if (value := state.get("trigger", NO_TRIGGER)) < NO_TRIGGER:
            self.value, self._running, self._calibrated = value, None, True
        elif "calibration" in state:
            self._resume(state["calibration"])
        elif self._running is not None:  # the state holds no calibration
            self.calibrate(self._running[0], next_step, self._running[2])

    def _resume(self, state: Any) -> None:
        """Continue a calibration."""
        fraction, first, steps, risks = (state[name] for name in _STATE)
        self.calibrate(fraction, first, steps)
        self._risks = [risks.cpu().double().numpy()]
