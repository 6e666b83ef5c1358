"""The gain of recovering a unit in one step: theorem 1 and corollary 1 (the paper's section 7), measured.

Routing changes one term of a step's bound, the squared error of the gradient. Let g be the 16-bit gradient and A the
set of units on the recovery path:

    error(A) = sum_b ||g_b(A) - g_b||^2         gap_b = ||g_low,b - g_b||^2 - ||g_high,b - g_b||^2
    error(none) - error(A) = sum of gap_b over b in A

So the best set of at most max_o units has the max_o largest positive gaps. This is exact if a unit's error depends only
on its own path: with `site=saved`, whose forward pass and input gradients are exact. With `site=forward`, and under
recipes, which also cast in the forward pass, units affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gnmr.measure.errors import measure_errors
from gnmr.precision import ConvertedModel

ESTIMATE, NORM, ORACLE = "gap estimate", "gradient norm", "oracle signal"
"""gap_low - gap_recovery of the probe; the norm on the low path; ||g_low - g_high||^2."""


@dataclass(frozen=True)
class Gaps:
    """Measurements of U units on one batch, which was run on every path."""

    names: list[str]
    gap_U: np.ndarray
    """gap_b of the module docstring, float64."""
    scores: dict[str, np.ndarray]
    """Other scores that could rank the units, (U,) float64 each."""
    none: float
    """error(A) of the empty set."""
    square: float
    """Squared norm of the 16-bit gradient of all units."""
    error: Callable[[Collection[int]], float]
    """error(A), measured in another forward and backward pass. A holds indices of units."""

    def best(self, score_U: np.ndarray, max_o: int) -> list[int]:
        """Return the max_o units with the largest positive scores, in descending order."""
        return [int(unit) for unit in np.argsort(-score_U, kind="stable")[:max_o] if score_U[unit] > 0]


def measure(model: nn.Module, converted: ConvertedModel, backward: Callable[[], None]) -> Gaps:
    """Run `backward` (forward and backward pass of one batch) in 16 bits, on the low path and on the recovery path.

    Paths, probe, the generator of stochastic rounding and the state of casts are restored, and gradients are cleared. A
    parameter without a gradient (of an expert that no token reached) has gradient 0.
    """

    def gradients(recovering: Collection[int]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with converted.no_side_effects():
            for index, group in enumerate(converted.units):
                group.switch(index in recovering)
            backward()
        grads = [
            [
                torch.zeros_like(p) if p.grad is None else p.grad
                for operator in group.operators
                for p in operator.parameters()
                if p.requires_grad
            ]
            for group in converted.units
        ]
        model.zero_grad(set_to_none=True)
        return [torch.cat([grad.flatten().double() for grad in own]) for own in grads]

    def squares(ones: list[Tensor], others: list[Tensor]) -> np.ndarray:
        return np.array([float((a - b).square().sum()) for a, b in zip(ones, others, strict=True)])

    everything = range(len(converted.units))
    earlier = converted.shared.probe
    converted.shared.probe = None
    with converted.high_precision():
        exact = gradients(())
    high = gradients(everything)
    probe = measure_errors(converted, ("gap_low", "gap_recovery"))
    low = gradients(())
    measured = {name: values.cpu().numpy() for name, values in probe.read().items()}
    converted.shared.probe = earlier

    nothing = [torch.zeros_like(grad) for grad in exact]
    return Gaps(
        [group.name for group in converted.units],
        squares(low, exact) - squares(high, exact),
        {
            ESTIMATE: measured["gap_low"] - measured["gap_recovery"],
            ORACLE: squares(low, high),
            NORM: np.sqrt(squares(low, nothing)),
        },
        float(squares(low, exact).sum()),
        float(squares(exact, nothing).sum()),
        lambda recovering: float(squares(gradients(recovering), exact).sum()),
    )
