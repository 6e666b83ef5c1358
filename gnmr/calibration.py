"""`gnmr replay FILE calibrate=SHARE`: the thresholds at which a signal spends a wanted recovery budget.

Recorded evidence is taken as it is: in a real run recovery changes the gradients that follow, so the share that comes
out there differs somewhat and is what a comparison has to state.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.progress import track

from gnmr.config import ControllerConfig, SignalConfig
from gnmr.controller.signals import SIGNALS
from gnmr.errors import UserError
from gnmr.replay import Asked, Norms, replay

_ROUNDS = 30


@dataclass(frozen=True)
class Calibration:
    """What spends the wanted budget."""

    signal: str
    overrides: list[str]
    """For `gnmr train`."""
    share: float
    """The share of unit-steps on the recovery path that it gives on these records."""


def calibrate(norms: Norms, settings: ControllerConfig, wanted: float) -> Calibration:
    """The trigger (of signals that take one, the option share) whose replay has `wanted` of the unit-steps promoted.

    UserError where no value gives it to within a tenth: the cap, or a signal that never or always triggers.
    """
    name = settings.signal.name
    if settings.routing == "ranked":
        raise UserError("calibrate: routing=ranked has no threshold, max_o is its budget; add routing=thresholded")
    by_share = "share" in SIGNALS[name].options() if name in SIGNALS else False

    def promoted(value: float) -> float:
        if by_share:
            options = settings.signal.options | {"share": value}
            changed = replace(settings, signal=SignalConfig(name, options))
        else:
            changed = replace(settings, trigger=value)
        in_force = [decision.in_force for decision in replay(norms, changed)]
        return float(np.mean(in_force))

    low, high = (1e-9, 1.0) if by_share else (1e-9, 1e9)
    with warnings.catch_warnings():  # the search goes to shares that a fixed set cannot give
        warnings.simplefilter("ignore")
        found = _bisect(promoted, low, high, wanted, falling=not by_share)
    value = float(f"{found:.6g}")  # as it is printed
    share = promoted(value)
    if abs(share - wanted) > 0.1 * wanted:
        most = min(settings.max_o / len(norms.units), 1.0)
        raise UserError(
            f"calibrate={wanted:g}: {name} gives {share:.4g} at its nearest (max_o={settings.max_o} of "
            f"{len(norms.units)} units is {most:.4g} at the most)"
        )
    key = "controller.signal.options.share" if by_share else "controller.trigger"
    group = (
        ["controller/signal=own", f"controller.signal.name={name}"] if ":" in name else [f"controller/signal={name}"]
    )
    return Calibration(name, [*group, f"{key}={value:.6g}"], share)


def _bisect(f: Callable[[float], float], low: float, high: float, wanted: float, falling: bool) -> float:
    """The value between `low` and `high` (on a log scale) at which the monotonic `f` is nearest to `wanted`."""
    best, distance = low, math.inf
    for _ in range(_ROUNDS):
        middle = math.sqrt(low * high)
        found = f(middle)
        if abs(found - wanted) < distance:
            best, distance = middle, abs(found - wanted)
        if distance <= 0.005 * wanted:
            break
        if (found > wanted) == falling:
            low = middle
        else:
            high = middle
    return best


def calibrate_and_print(norms: Norms, asked: Asked, wanted: float) -> int:
    """One line a signal; returns the exit code."""
    settings = asked.settings
    own = settings.signal.name
    names = list(SIGNALS) if asked.all_signals else [own]
    changed = [f"controller.{word}" for word in asked.words if not word.startswith("signal.")]
    console = Console(stderr=True)
    hidden = not console.is_terminal
    for name in track(names, "calibrating", console=console, transient=True, disable=hidden):
        signal = settings.signal if name == own else SignalConfig(name)
        plus = "++" if ":" in name else ""  # conf/controller/signal/own.yaml has no options
        options = [
            f"{plus}controller.{word}" for word in asked.words if name == own and word.startswith("signal.options.")
        ]
        try:
            found = calibrate(norms, replace(settings, signal=signal), wanted)
        except UserError as error:
            if not asked.all_signals:
                raise
            print(f"{name:20} left out: {str(error).removeprefix('replay: ')}", file=sys.stderr)
            continue
        print(f"{found.signal:20} {found.share:.5f}  {' '.join([*found.overrides, *options, *changed])}", flush=True)
    return 0
