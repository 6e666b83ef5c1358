"""Risk signals, one file each.

A signal turns what a step shows of every unit into one number per unit, its risk R; a unit is over threshold where
R > 1. `Signal` is all that the controller and the policy know of one.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gnmr.controller.signals.gnmr import GnmrSignal


class Signal(Protocol):
    """What a controller asks of a signal. All tensors are (U,), float64, on the units' device."""

    columns: tuple[str, ...]
    """Names of the statistics behind the risk, in the order in which `observe` returns them."""

    def observe(self, norm: Tensor, observed: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Risk of step `step` and the statistics behind it; updates the history. Must not wait for the device.

        A non-finite norm must give risk Inf and must not enter the history; the risk of an unobserved unit is not
        read, and its history must stay as it is.
        """
        ...

    def thresholds(self, step: int) -> tuple[float | None, ...]:
        """Threshold of each column at that step; None where the column does not trigger."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


__all__ = ["GnmrSignal", "Signal"]
