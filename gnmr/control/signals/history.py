"""The memory of a signal: the mean of one value's past, for each unit.

    Cumulative   every value since the start has the same weight (the paper's A)
    Ema          the newest has weight 1 - decay, and older weights fade by decay per step; the mean of the first
                 1 / (1 - decay) values is the plain one, so that an empty start needs no correction
    Window       the newest `length` values have the same weight, older ones none

All tensors are (U,) or (length, U), float64, on the units' device; no call waits for the device. A value enters only
for the units in `entered`, and only if it is finite. It is selected, not multiplied, because 0 * NaN is NaN. Updates
bind new tensors, so that a state that was returned never changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gnmr.control.device import all_finite, all_set
from gnmr.options import require

LARGEST: float = torch.finfo(torch.float64).max


class StatefulParts:
    """An object whose state is the tensors and the `StatefulParts` that `state_names` names."""

    state_names: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state by name (`part.name` in parts). The tensors are shared with this object, never written."""
        state: dict[str, Tensor] = {}
        for name in self.state_names:
            value = getattr(self, name)
            if isinstance(value, StatefulParts):
                state |= {f"{name}.{key}": tensor for key, tensor in value.state_dict().items()}
            else:
                state[name] = value
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError if names, shapes or kinds of numbers are not this object's."""
        current = self.state_dict()
        if state.keys() != current.keys():
            raise ValueError(
                f"signal state holds {', '.join(sorted(state)) or 'nothing'}; "
                f"this signal needs {', '.join(sorted(current)) or 'nothing'}"
            )
        for name, tensor in current.items():
            loaded, kind = state[name], f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if loaded.shape != tensor.shape or loaded.is_floating_point() != tensor.is_floating_point():
                loaded_kind = f"{loaded.dtype} of shape {tuple(loaded.shape)}"
                raise ValueError(f"signal state {name!r} is {loaded_kind}, this signal needs {kind}")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state.

        Raises:
            ValueError: before anything changes; see `check_state`.
        """
        self.check_state(state)
        for name in self.state_names:
            value = getattr(self, name)
            if isinstance(value, StatefulParts):
                value.load_state_dict(_state_of(name, state))
            else:
                # A copy, because the state may be loaded into several objects.
                setattr(self, name, state[name].to(device=value.device, dtype=value.dtype).clone())


def _state_of(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


class Cumulative(StatefulParts):
    """Mean of all values so far, `m += (v - m) / n`."""

    state_names = ("mean", "count")
    longest = math.inf
    """Limit on the n above."""

    def __init__(self, num_units: int, device: torch.device) -> None:
        # float64: there are only U numbers, and a running mean over 100,000 steps keeps its digits.
        self.mean = torch.zeros(num_units, dtype=torch.float64, device=device)
        self.count = torch.zeros(num_units, dtype=torch.int64, device=device)

    def update(self, value: Tensor, entered: Tensor) -> None:
        """Add one step's `value` (U,) of the units in `entered` (U,) bool; values that are not finite never enter."""
        if not all_finite(value):
            entered = entered & value.isfinite()
        self.count = self.count + entered
        # m += (v - m) / n, with n limited to 1 / (1 - decay) for an exponential mean
        n = self.count if self.longest == math.inf else self.count.double().clamp(max=self.longest)
        mean = self.mean + (value - self.mean) / n  # n is 0 only for units outside of `entered`
        self.mean = mean if all_set(entered) else torch.where(entered, mean, self.mean)


class Ema(Cumulative):
    """A `Cumulative` mean until n reaches 1 / (1 - decay), an exponential moving mean from there on."""

    def __init__(self, num_units: int, device: torch.device, decay: float) -> None:
        require(isinstance(decay, float) and 0 < decay < 1, "decay", repr(decay), "must lie between 0 and 1")
        super().__init__(num_units, device)
        self.longest = 1 / (1 - decay)


class Window(StatefulParts):
    """Mean of the newest `length` values."""

    state_names = ("values", "count")

    def __init__(self, num_units: int, device: torch.device, length: int) -> None:
        self.values = torch.zeros(length, num_units, dtype=torch.float64, device=device)  # newest last, 0 where empty
        self.count = torch.zeros(num_units, dtype=torch.int64, device=device)

    def update(self, value: Tensor, entered: Tensor) -> None:
        """Add one step's values as `Cumulative.update` does, and drop the oldest value of the units that entered."""
        if not all_finite(value):
            entered = entered & value.isfinite()
        self.count = self.count + entered
        # Newest last; units that did not enter keep their values.
        values = torch.cat([self.values[1:], value[None]])
        self.values = values if all_set(entered) else torch.where(entered, values, self.values)
