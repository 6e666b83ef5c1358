"""Algorithms 1 and 2 read slowly: one unit at a time, Python numbers, no tensors.

Written from the paper's text alone (paper.md sections 2 and 3 with the marked choices), to be compared with the tensor
implementation. `None` as a norm is a unit that was not observed, and so is 0, of which the paper says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class ScalarUnit:
    a: float = 0.0
    seen: int = 0
    queue: list[float] = field(default_factory=list)
    lock: int = 0


@dataclass
class ScalarController:
    num_units: int
    alpha: float | None
    beta: float | None
    delta: int
    max_o: int
    t_lock: int
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self.units = [ScalarUnit() for _ in range(self.num_units)]

    def step(self, norms: list[float | None]) -> tuple[list[int], list[int], list[float | None]]:
        """(candidates in unit order, active set largest risk first, risks)."""
        risks = [self._risk(unit, norm) for unit, norm in zip(self.units, norms, strict=True)]
        over = [risk is not None and risk > 1 for risk in risks]
        candidates = [b for b in range(self.num_units) if over[b] or self.units[b].lock > 0]
        # Unobserved units rank below every observed one; Python's sort is stable, so ties stay in unit order.
        ranked = sorted(candidates, key=lambda b: (0, -risks[b]) if risks[b] is not None else (1, 0.0))
        active = ranked[: self.max_o]
        for b, unit in enumerate(self.units):
            if b not in active:
                unit.lock = 0
            elif over[b]:
                unit.lock = self.t_lock
            else:
                unit.lock = max(unit.lock - 1, 0)
        return candidates, active, risks

    def _risk(self, unit: ScalarUnit, norm: float | None) -> float | None:
        if norm is None or norm == 0:
            return None
        if not math.isfinite(norm):
            return math.inf
        gnmr = 1.0 if unit.a == 0 else norm / (unit.a + self.eps)
        full = len(unit.queue) == self.delta
        delta_gnmr = gnmr / (sum(unit.queue) / self.delta + self.eps) if full else 1.0
        unit.seen += 1
        unit.a += (norm - unit.a) / unit.seen
        unit.queue = [*unit.queue, gnmr][-self.delta :]
        ratios = [gnmr / self.alpha] if self.alpha is not None else []
        ratios += [delta_gnmr / self.beta] if self.beta is not None else []
        return max(ratios, default=0.0)
