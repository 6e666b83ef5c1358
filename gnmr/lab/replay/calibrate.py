"""`gnmr replay RUN... calibrate=SHARE`: the thresholds at which a signal spends a wanted recovery budget.

Recorded evidence is taken as it is: in a real run recovery changes the gradients that follow, so the share that comes
out there differs somewhat and is what a comparison has to state.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from gnmr.console import tracked
from gnmr.control.signals import SIGNALS
from gnmr.errors import UserError, writing
from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.engine import replay
from gnmr.lab.replay.request import Request
from gnmr.lab.replay.trace import Norms
from gnmr.records.output import write_text

_ROUNDS = 30


@dataclass(frozen=True)
class Calibration:
    """What spends the wanted budget."""

    signal: str
    overrides: list[str]
    """For `gnmr train`."""
    share: float
    """The share of unit-steps on the recovery path that it gives on these records."""


def calibrate(recorded: Sequence[Norms], settings: ControllerConfig, wanted: float) -> Calibration:
    """The trigger (of signals that take one, the option share) whose replay has `wanted` of the unit-steps promoted.

    Over several records it is the mean of their shares. UserError where no value gives it to within a tenth: the cap,
    or a signal that never or always triggers.
    """
    name = settings.signal
    if settings.routing == "ranked":
        raise UserError("calibrate: routing=ranked has no threshold, max_o is its budget; add routing=thresholded")
    by_share = "share" in SIGNALS[name].options() if name in SIGNALS else False

    def promoted(value: float) -> float:
        if by_share:
            changed = replace(settings, options=settings.options | {"share": value})
        else:
            changed = replace(settings, trigger=value)
        shares = [np.mean([decision.in_force for decision in replay(norms, changed)]) for norms in recorded]
        return float(np.mean(shares))

    low, high = (1e-9, 1.0) if by_share else (1e-9, 1e9)
    with warnings.catch_warnings():  # the search goes to shares that a fixed set cannot give
        warnings.simplefilter("ignore")
        found = _bisect(promoted, low, high, wanted, falling=not by_share)
        value = float(f"{found:.6g}")  # as it is printed
        share = promoted(value)
    if abs(share - wanted) > 0.1 * wanted:
        most = min(settings.cap / len(recorded[0].units), 1.0)
        raise UserError(
            f"calibrate={wanted:g}: {name} gives {share:.4g} at its nearest (max_o={settings.cap} of "
            f"{len(recorded[0].units)} units is {most:.4g} at the most)"
        )
    key = "controller.options.share" if by_share else "controller.trigger"
    return Calibration(name, [f"controller.signal={name}", f"{key}={value:.6g}"], share)


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


def calibrate_each(
    recorded: Sequence[Norms],
    settings: ControllerConfig,
    asked: Request,
    wanted: Sequence[float],
    *,
    found: Callable[[str, float, Calibration], None],
    left_out: Callable[[str, UserError], None],
) -> None:
    """Every signal at every share, told as they are found; alone, a signal that cannot be calibrated is a UserError."""
    own = settings.signal
    names = list(SIGNALS) if asked.signals == ("all",) else list(asked.signals or [own])
    points = [(name, share) for name in names for share in wanted]
    changed = [f"controller.{word}" for word in asked.changes if not word.startswith(("signal=", "options."))]
    for name, share in tracked(points, "calibrating"):
        options = [f"controller.{word}" for word in asked.changes if name == own and word.startswith("options.")]
        signal = replace(settings, signal=name, options=settings.options if name == own else {})
        try:
            one = calibrate(recorded, signal, share)
        except UserError as error:
            if len(points) == 1:
                raise
            left_out(name, error)
            continue
        found(name, share, replace(one, overrides=[*one.overrides, *options, *changed]))


def write_arms(folder: Path, found: Sequence[tuple[Calibration, float]]) -> None:
    """Each with its share as an arm of folder/sweep/calibrated.yaml. UserError where it cannot be written."""
    arms = {}
    for one, wanted in found:
        name = f"{one.signal.rpartition(':')[2]}-{wanted:g}"
        arms[name] = shlex.join([*one.overrides, f"controller.name={name}"])
    text = OmegaConf.to_yaml(
        OmegaConf.create({"arms": arms, "hydra": {"sweeper": {"params": {"arm": "${names:arms}"}}}})
    )
    file = folder / "sweep" / "calibrated.yaml"
    with writing(f"out={folder}"):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, f"# @package _global_\n# Arms of a wanted share of the unit-steps.\n{text}", f"out={folder}")
