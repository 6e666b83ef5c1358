"""A recoverable unit: what the controller watches and switches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit b of the paper's section 1: an operator, a block or a layer.

    Its norm is taken over the gradients of all `parameters` together. `switch(True)` puts it on the recovery path,
    `switch(False)` on the low-cost path; None means that the unit is monitored and never routed.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    switch: Callable[[bool], None] | None = None
    cost: float = 1.0
    """What its recovery costs, in any unit that is the same for all (Eq. 5: extra bytes a token)."""

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"unit {self.name!r} has no parameters: there is no gradient to watch")

    @property
    def recoverable(self) -> bool:
        """Whether it can be routed; one without a switch is watched only."""
        return self.switch is not None
