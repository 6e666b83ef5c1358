"""The trigger, and its calibration from the first steps of the loop itself: published thresholds belong to the
published batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.errors import positive, require, users_level, whole

NO_TRIGGER = 1e300
"""Above every finite risk: until the trigger is found, only a risk that is not finite promotes."""


class Calibration:
    """Finds the trigger that a share of the unit-steps exceeds, from their risks in some steps.

    It reads the second half of these steps: in the first half the history is short, and risks are those of no later
    step.
    """

    def __init__(self, fraction: float, first: int, steps: int) -> None:
        """`fraction` is a share of the unit-steps, `first` the number of the first step. Raises ValueError if one is
        invalid."""
        positive(fraction=fraction)
        require(fraction < 1, "fraction", fraction, "must lie between 0 and 1")
        whole(2, steps=steps)
        self.fraction, self.steps = fraction, steps
        self.first, self.keep_from, self.last = first, first + steps // 2, first + steps - 1
        self._risks: list[np.ndarray] = []

    def again(self, first: int) -> Calibration:
        """Return the same calibration from that step on."""
        return Calibration(self.fraction, first, self.steps)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, for `of`."""
        risks = torch.from_numpy(np.concatenate([np.zeros(0), *self._risks]))
        return {"fraction": self.fraction, "first": self.first, "steps": self.steps, "risks": risks}

    @classmethod
    def of(cls, state: Any) -> Calibration:
        """Continue where `state` was taken. Raises ValueError for anything else."""
        known = state if isinstance(state, Mapping) else {}
        if lacking := [name for name in ("fraction", "first", "steps", "risks") if name not in known]:
            raise ValueError(f"state: calibration has no {', '.join(lacking)}")
        risks = state["risks"]
        if not isinstance(risks, Tensor) or risks.ndim != 1 or not risks.is_floating_point():
            raise ValueError("state: calibration's risks must be a row of numbers")
        whole(**{"state: first": state["first"]})
        found = cls(state["fraction"], state["first"], state["steps"])
        found._risks = [risks.cpu().double().numpy()]
        return found

    def add(self, step: int, risk: np.ndarray, observed: np.ndarray) -> float | None:
        """Take the risks of a step, (U,) both. Return the trigger in the last step, else None.

        The trigger is a risk that was seen; NaN if no finite risk above 0 was.
        """
        if step >= self.keep_from:
            self._risks.append(risk[observed & np.isfinite(risk)])
        if step < self.last:
            return None
        risks = np.concatenate(self._risks) if self._risks else np.zeros(0)
        found = float(np.quantile(risks, 1 - self.fraction, method="higher")) if len(risks) else 0.0
        return found if found > 0 else float("nan")


class Trigger:
    """The value that a risk has to exceed: given, or calibrated."""

    def __init__(self, given: float) -> None:
        self.value = self._given = given
        self._calibration: Calibration | None = None
        self._calibrated = False

    def calibrate(self, fraction: float, first: int, steps: int) -> None:
        """Find the value in the `steps` steps from `first` on. See `Controller.calibrate`."""
        self._calibration = Calibration(fraction, first, steps)
        self.value, self._calibrated = NO_TRIGGER, True

    def learn(self, step: int, risk: np.ndarray, observed: np.ndarray) -> None:
        """Take the risks of a step, if it is being calibrated."""
        if self._calibration is None or (found := self._calibration.add(step, risk, observed)) is None:
            return
        if math.isnan(found):
            found, self._calibrated = self._given, False
            text = f"calibrate: no unit had a risk above 0; the trigger is {found:g}, as before"
            warnings.warn(text, stacklevel=users_level())
        self.value, self._calibration = found, None

    def progress(self, t: int) -> tuple[int, int] | None:
        """Return (steps that the calibration has seen at step t, steps that it takes); None if there is none now."""
        one = self._calibration
        return None if one is None else (max(t - one.first + 1, 0), one.steps)

    @property
    def found(self) -> float | None:
        """The value that a calibration found; None before, and if it found none or there is none."""
        return self.value if self._calibrated and self._calibration is None else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a controller's state holds of it."""
        state: dict[str, Any] = {"trigger": self.value} if self._calibrated else {}
        return state if self._calibration is None else state | {"calibration": self._calibration.state()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state's trigger is damaged, or unknown."""
        positive(**{"state: trigger": state.get("trigger", 1.0)})
        if state.get("trigger", 1.0) >= NO_TRIGGER:
            if "calibration" in state:
                Calibration.of(state["calibration"])
            elif self._calibration is None:
                raise ValueError("state: was saved while calibrating; call calibrate() before load_state_dict()")

    def load_state_dict(self, state: Mapping[str, Any], next_step: int) -> None:
        """Go on with the state's trigger or calibration; one of this loop's own begins at `next_step`."""
        if (value := state.get("trigger", NO_TRIGGER)) < NO_TRIGGER:
            self.value, self._calibration, self._calibrated = value, None, True
        elif "calibration" in state:
            self.value, self._calibration, self._calibrated = NO_TRIGGER, Calibration.of(state["calibration"]), True
        elif self._calibration is not None:  # nothing was calibrated there
            self._calibration = self._calibration.again(next_step)
