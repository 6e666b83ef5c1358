"""What is told of the steps since the last entry in another library's log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gnmr.control import Decision


@dataclass
class Tally:
    """Of the steps since the last entry of the log."""

    steps: int = 0
    promotions: int = 0
    unit_steps: int = 0
    """On the recovery path."""
    hits: int = 0
    """Steps with max_o units there."""
    max_risk: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    """By cause."""

    def add(self, decision: Decision, max_o: int) -> None:
        in_force = int(np.count_nonzero(decision.in_force))
        self.steps += 1
        self.promotions += sum(event.event == "promote" for event in decision.events)
        self.unit_steps += in_force
        self.hits += in_force >= max_o
        finite = decision.risk[decision.observed & np.isfinite(decision.risk)]
        self.max_risk = max(self.max_risk, float(finite.max(initial=0.0)))

    def figures(self, num_units: int) -> dict[str, float]:
        """`gnmr/promotions` (units put on the recovery path), `gnmr/promotion_frac` (share of the unit-steps on it),
        `gnmr/hit_max_o_frac` (share of the steps in which max_o units were on it), `gnmr/max_risk` (largest finite
        risk), and where steps had a verdict how many: `gnmr/verdict_data`, `_precision`, `_not_reproducible`."""
        return {
            "gnmr/promotions": float(self.promotions),
            "gnmr/promotion_frac": self.unit_steps / (self.steps * num_units),
            "gnmr/hit_max_o_frac": self.hits / self.steps,
            "gnmr/max_risk": self.max_risk,
            **{f"gnmr/verdict_{cause}": float(number) for cause, number in self.verdicts.items()},
        }
