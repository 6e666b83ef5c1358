"""`gnmr replay RUN... calibrate=SHARE`: the thresholds at which a signal spends a given recovery budget.

Recorded evidence is used unchanged. In a real run, recovery changes the subsequent gradients, so the resulting share
differs somewhat. A comparison has to state that share.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from gnmr.control.signals import SIGNALS
from gnmr.errors import UserError, writing
from gnmr.lab.config import ControllerConfig
from gnmr.lab.replay.replay import replay
from gnmr.lab.replay.trace import Norms
from gnmr.records.output import write_text

_ROUNDS = 30


@dataclass(frozen=True)
class Calibration:
    """The settings that spend the wanted budget."""

    signal: str
    overrides: list[str]
    """Overrides for `gnmr train`."""
    share: float
    """Fraction of unit-steps on the recovery path with these settings on the records."""


def calibrate(recorded: Sequence[Norms], settings: ControllerConfig, wanted: float) -> Calibration:
    """Find the trigger, or the option active_frac of signals that have it, that promotes `wanted` of the unit-steps.

    The share is the mean over the records. It rises with the option and falls with the trigger, so bisection on a log
    scale finds it. Raises UserError if no value gives the share to within a tenth. The cause is the cap, or a signal
    that never or always triggers.
    """
    name = settings.signal
    if settings.routing == "ranked":
        raise UserError("calibrate: routing=ranked has no threshold, max_o is its budget; add routing=thresholded")
    by_share = name in SIGNALS and "active_frac" in SIGNALS[name].options()

    def promoted(value: float) -> float:
        if by_share:
            changed = replace(settings, options=settings.options | {"active_frac": value})
        else:
            changed = replace(settings, trigger=value)
        shares = [np.mean([decision.in_force for decision in replay(norms, changed)]) for norms in recorded]
        return float(np.mean(shares))

    low, high = (1e-9, 1.0) if by_share else (1e-9, 1e9)
    best, distance = low, math.inf
    with warnings.catch_warnings():  # the search visits shares that a fixed set cannot reach
        warnings.simplefilter("ignore")
        for _ in range(_ROUNDS):
            middle = math.sqrt(low * high)
            found = promoted(middle)
            if abs(found - wanted) < distance:
                best, distance = middle, abs(found - wanted)
            if distance <= 0.005 * wanted:
                break
            if (found > wanted) == by_share:
                high = middle
            else:
                low = middle
        value = float(f"{best:.6g}")  # the value as it is printed
        share = promoted(value)
    if abs(share - wanted) > 0.1 * wanted:
        most = min(settings.cap / len(recorded[0].units), 1.0)
        raise UserError(
            f"calibrate={wanted:g}: {name} gives {share:.4g} at its nearest (max_o={settings.cap} of "
            f"{len(recorded[0].units)} units is {most:.4g} at most)"
        )
    key = "controller.options.active_frac" if by_share else "controller.trigger"
    return Calibration(name, [f"controller.signal={name}", f"{key}={value:.6g}"], share)


def write_arms(folder: Path, found: Sequence[tuple[Calibration, float]]) -> None:
    """Write each calibration as an arm of folder/sweep/calibrated.yaml, named after its signal and share."""
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
