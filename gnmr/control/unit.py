"""A recoverable unit: what the controller watches and switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit b of the paper's section 1: an operator, a block or a layer.

    Its norm is taken over the gradients of all `parameters` together: a module's, one parameter, or several in any
    iterable, kept as a tuple, each once. `switch(True)` puts it on the recovery path, `switch(False)` on the low-cost
    path; None means that the unit is monitored and never routed. ValueError for anything else.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    switch: Callable[[bool], None] | None = None
    cost: float = 1.0
    """What its recovery costs, in any unit that is the same for all: what a budget counts."""
    extra_bytes: float | None = None
    """Extra bytes a token on the recovery path (Eq. 5), which signals may read; None: its cost."""

    def __post_init__(self) -> None:
        given: object = self.parameters
        if isinstance(given, nn.Module):
            given = given.parameters()
        elif isinstance(given, nn.Parameter):
            given = (given,)
        found = tuple(dict.fromkeys(given)) if isinstance(given, Iterable) else (given,)
        if wrong := [type(one).__name__ for one in found if not isinstance(one, nn.Parameter)]:
            raise ValueError(f"unit {self.name!r}: parameters must be nn.Parameters, not {wrong[0]}")
        if not found:
            raise ValueError(f"unit {self.name!r} has no parameters: there is no gradient to watch")
        if self.switch is not None and not callable(self.switch):
            raise ValueError(f"unit {self.name!r}: switch={self.switch!r} must be a function of one bool, or None")
        object.__setattr__(self, "parameters", found)

    @property
    def recoverable(self) -> bool:
        """Whether it can be routed; one without a switch is watched only."""
        return self.switch is not None
