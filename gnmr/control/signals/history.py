"""What a signal remembers of each unit: the mean and the spread of one value's past.

    cumulative   every value since the start weighs the same (the paper's A)
    ema          the newest weighs 1 - decay, those before it fade by decay a step; the mean of the first
                 1 / (1 - decay) values is the plain one, so that nothing has to be corrected for an empty start
    window       the newest `window` values weigh the same, older ones nothing

A cumulative mean is the steadiest, and the slowest to follow a level that moves: while gradient norms grow it lags, and
ratios to it stay above 1 for hundreds of steps. The other two follow after about 1 / (1 - decay) or `window` values; in
return they get used to a fault that lasts as long.

All tensors are (U,) or (window, U), float64, on the units' device; no call waits for the device. A value enters for the
units of `entered` alone, and never where it is not finite: selected, not multiplied, for 0 * NaN is NaN. Updates bind
new tensors, so that a state that was handed out stays what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gnmr.control.norms import waits_for_nothing

LARGEST: float = torch.finfo(torch.float64).max


def all_finite(x: Tensor) -> bool:
    """Whether every number (float64) is known to be finite, where looking waits for nothing. It saves the selections
    that few steps need."""
    here = x.dtype == torch.float64 and waits_for_nothing(x)
    return here and bool(np.isfinite(x.detach().numpy()).all())


class Stateful:
    """An object whose state is the tensors and the `Stateful` parts that `kept` names."""

    kept: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, `part.name` for a part's; tensors are shared with this object, which never writes them."""
        state: dict[str, Tensor] = {}
        for name in self.kept:
            own = getattr(self, name)
            if isinstance(own, Stateful):
                state |= {f"{name}.{key}": value for key, value in own.state_dict().items()}
            else:
                state[name] = own
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """ValueError where names, shapes, kinds of numbers or what they can be are not this object's."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(
                f"signal state holds {', '.join(sorted(state)) or 'nothing'}; "
                f"this signal needs {', '.join(sorted(own)) or 'nothing'}"
            )
        for name, value in own.items():
            theirs = state[name]
            if not isinstance(theirs, Tensor):
                raise ValueError(f"signal state {name!r} is a {type(theirs).__name__}, this signal needs a tensor")
            if theirs.shape != value.shape:
                raise ValueError(
                    f"signal state {name!r} has shape {tuple(theirs.shape)}, this signal needs {tuple(value.shape)}"
                )
            if theirs.is_floating_point() != value.is_floating_point():
                raise ValueError(f"signal state {name!r} is of {theirs.dtype}, this signal needs {value.dtype}")
        for name in self.kept:
            if isinstance(part := getattr(self, name), Stateful):
                part.check_state(_of_part(name, state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state over. ValueError, before anything changes: see `check_state`."""
        self.check_state(state)
        for name in self.kept:
            part = getattr(self, name)
            if isinstance(part, Stateful):
                part.load_state_dict(_of_part(name, state))
            else:
                setattr(self, name, state[name].to(device=part.device, dtype=part.dtype).clone())


def _of_part(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


class _Remembered(Stateful):
    """A mean and a spread: of finite numbers, over a count of them."""

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        for name, value in state.items():
            if not bool(value.isfinite().all()) or (name in ("var", "count") and bool((value < 0).any())):
                raise ValueError(f"signal state: a history's {name} must be finite, and var and count not negative")


class Cumulative(_Remembered):
    """Mean and variance of all values so far, `m += (v - m) / n`; the variance is that of the population."""

    kept = ("mean", "var", "count")
    longest = math.inf
    """The n above does not grow beyond this."""

    def __init__(self, num_units: int, device: torch.device) -> None:
        # float64: U numbers, and a running mean over 100,000 steps keeps its digits.
        self.mean = torch.zeros(num_units, dtype=torch.float64, device=device)
        self.var = torch.zeros(num_units, dtype=torch.float64, device=device)
        self.count = torch.zeros(num_units, dtype=torch.int64, device=device)

    @property
    def std(self) -> Tensor:
        return self.var.sqrt()

    def update(self, value: Tensor, entered: Tensor, finite: bool | None = None) -> None:
        """One step's `value` (U,) float64 of the units in `entered` (U,) bool; what is not finite never enters.

        `finite`: `all_finite` of the values, where it was asked before."""
        if not (all_finite(value) if finite is None else finite):
            entered = entered & value.isfinite()
        self.count = self.count + entered
        n = self.count.double().clamp(1.0, self.longest)
        off = value - self.mean
        mean = self.mean + off / n
        var = self.var + ((off * (value - mean)).clamp(max=LARGEST) - self.var) / n
        self.mean, self.var = torch.where(entered, mean, self.mean), torch.where(entered, var, self.var)


class Ema(Cumulative):
    """As `Cumulative` until n reaches 1 / (1 - decay), an exponential moving mean and variance from there on."""

    def __init__(self, num_units: int, device: torch.device, decay: float) -> None:
        super().__init__(num_units, device)
        self.longest = 1 / (1 - decay)


class Window(_Remembered):
    """Mean and variance (of the population) of the newest `length` values."""

    kept = ("values", "count")

    def __init__(self, num_units: int, device: torch.device, length: int) -> None:
        self.values = torch.zeros(length, num_units, dtype=torch.float64, device=device)  # newest last, 0 where empty
        self.count = torch.zeros(num_units, dtype=torch.int64, device=device)

    @property
    def mean(self) -> Tensor:
        return self.values.sum(dim=0) / self._filled

    @property
    def std(self) -> Tensor:
        age = torch.arange(len(self.values), 0, -1, device=self.values.device)
        from_mean = torch.where(age[:, None] <= self.count, self.values - self.mean, 0.0)
        return (from_mean.square().sum(dim=0) / self._filled).sqrt()

    @property
    def _filled(self) -> Tensor:
        return self.count.clamp(1, len(self.values))

    def update(self, value: Tensor, entered: Tensor, finite: bool | None = None) -> None:
        """As `Cumulative.update`; of the units that entered the oldest value goes."""
        if not (all_finite(value) if finite is None else finite):
            entered = entered & value.isfinite()
        self.count = self.count + entered
        self.values = torch.where(entered, torch.cat([self.values[1:], value[None]]), self.values)


History: TypeAlias = Cumulative | Window


def make_history(kind: str, num_units: int, device: torch.device, decay: float, window: int) -> History:
    """The history of that name. ValueError that names the option without sense."""
    if not (isinstance(decay, float) and 0 < decay < 1):
        raise ValueError(f"decay={decay!r}: must lie between 0 and 1")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window={window!r}: must be a positive whole number of steps")
    if kind == "cumulative":
        return Cumulative(num_units, device)
    if kind == "ema":
        return Ema(num_units, device, decay)
    if kind == "window":
        return Window(num_units, device, window)
    raise ValueError(f"history={kind!r}: must be cumulative, ema or window")
