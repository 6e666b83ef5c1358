"""Share figures for another library's log, checks of options, and checkpoint errors between the integrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any

import numpy as np

from gnmr.attachment import specs_of
from gnmr.control import Decision
from gnmr.errors import UserError


@dataclass
class Tally:
    """Counts over the steps since the last entry of the log."""

    steps: int = 0
    promotions: int = 0
    unit_steps: int = 0
    """Unit-steps on the recovery path."""
    hits: int = 0
    """Steps with max_o units on the recovery path."""
    max_risk: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    """Number of verdicts by cause."""

    def add(self, decision: Decision, max_o: int) -> None:
        """Count a step."""
        in_force = int(np.count_nonzero(decision.in_force))
        self.steps += 1
        self.promotions += sum(event.event == "promote" for event in decision.events)
        self.unit_steps += in_force
        self.hits += in_force >= max_o
        finite = decision.risk[decision.observed & np.isfinite(decision.risk)]
        self.max_risk = max(self.max_risk, float(finite.max(initial=0.0)))

    def figures(self, num_units: int) -> dict[str, float]:
        """Return the figures by their names in the log.

        `gnmr/promotions`: units put on the recovery path. `gnmr/promotion_frac`: share of the unit-steps on it.
        `gnmr/hit_max_o_frac`: share of the steps with max_o units on it. `gnmr/max_risk`: largest finite risk.
        `gnmr/verdict_CAUSE`: number of verdicts with this cause.
        """
        return {
            "gnmr/promotions": float(self.promotions),
            "gnmr/promotion_frac": self.unit_steps / (self.steps * num_units),
            "gnmr/hit_max_o_frac": self.hits / self.steps,
            "gnmr/max_risk": self.max_risk,
            **{f"gnmr/verdict_{cause}": float(number) for cause, number in self.verdicts.items()},
        }


_WITHOUT_SPEC = ("plan", "steps", "seed", "record", "share")
"""Options of `gnmr.attach` that are in none of the specs."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError if an option of `gnmr.attach` is unknown, and ValueError if a value is invalid."""
    of_specs = {name: value for name, value in options.items() if name not in _WITHOUT_SPEC}
    specs_of(of_specs.pop("paths", None), of_specs.pop("control", None), of_specs)


@contextmanager
def resuming(source: object) -> Iterator[None]:
    """Raise UserError if the block cannot load a controller's state from `source`."""
    try:
        yield
    except UserError:  # raised by the records
        raise
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, UnpicklingError) as error:
        # A damaged file and a foreign one raise many things; the first line says enough.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{source} cannot be resumed here ({reason}): use the model and paths it was saved with"
        ) from error
