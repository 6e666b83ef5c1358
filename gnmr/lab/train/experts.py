"""Experts without a token, where FSDP2 wraps a mixture: it gives them gradients of zeros, which AdamW takes for some.

All ranks reduce the same parameters, whichever experts their tokens went to, or they would wait for each other. What
no rank gave a token has no gradient in one process: its weights and moments stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnmr.lab.models import Decoder


class Experts:
    """Which experts of a model had tokens in a step, in this process and, by a sum, in any."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._parameters = [list(expert.parameters()) for expert in model.experts()]
        self._reached: list[Tensor] = []

    def add(self) -> None:
        """After each training forward pass of this process."""
        self._reached.append(self._model.reached())

    def take(self) -> Tensor:
        """(E,) float64: in how many passes of the step each had a token here; the next step begins."""
        reached, self._reached = self._reached, []
        return torch.stack(reached).sum(dim=0).double()

    def drop(self, reached: Tensor) -> None:
        """Takes the gradients of those that had none in any process: `reached` is the sum of `take` over them. Waits
        for the device."""
        for passes, parameters in zip(reached.tolist(), self._parameters, strict=True):
            if not passes:
                for parameter in parameters:
                    parameter.grad = None
