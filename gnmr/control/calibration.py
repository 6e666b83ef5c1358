"""The trigger from the first steps of the loop itself: published thresholds belong to the published batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnmr.control.signals.base import fraction_of, whole

NO_TRIGGER = 1e300
"""Above every finite risk: until the trigger is found a risk that is not finite alone promotes."""


class Calibration:
    """Finds the trigger over which a share of the unit-steps is, from their risks in some steps.

    Of the second half of these steps: in the first half the history is short, and risks are those of no later step.
    """

    def __init__(self, fraction: float, first: int, steps: int) -> None:
        """fraction: of the unit-steps. first: number of the first step. ValueError for senseless values."""
        fraction_of(fraction, "fraction")
        if fraction in (0, 1):
            raise ValueError(f"fraction={fraction}: must lie between 0 and 1")
        self.fraction, self.steps = fraction, whole(steps, "steps", 2)
        self.first, self.keep_from, self.last = first, first + steps // 2, first + steps - 1
        self._risks: list[np.ndarray] = []

    def again(self, first: int) -> Calibration:
        """The same from that step on."""
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
        found = cls(state["fraction"], whole(state["first"], "state: first"), state["steps"])
        found._risks = [risks.cpu().double().numpy()]
        return found

    def add(self, step: int, risk: np.ndarray, observed: np.ndarray) -> float | None:
        """Takes the risks of a step, (U,) both; the trigger in the last one, else None.

        The trigger is a risk that was seen. NaN in the last step where no finite risk above 0 was.
        """
        if step >= self.keep_from:
            self._risks.append(risk[observed & np.isfinite(risk)])
        if step < self.last:
            return None
        risks = np.concatenate(self._risks) if self._risks else np.zeros(0)
        found = float(np.quantile(risks, 1 - self.fraction, method="higher")) if len(risks) else 0.0
        return found if found > 0 else float("nan")
